"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    tensors = {key: value for key, value in scalars.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        floats = dict(zip(tensors, _read(list(tensors.values())), strict=True))
    return {key: floats[key] if key in floats else float(value) for key, value in scalars.items()}


def _read(tensors: list[Tensor]) -> list[float]:
    if len({(tensor.dtype, tensor.untyped_storage().data_ptr()) for tensor in tensors}) == 1:
        # Entries of one vector, as kernels leave them: it is read as it lies there.
        offsets = [tensor.storage_offset() for tensor in tensors]
        first = min(offsets)
        vector = tensors[0].as_strided((max(offsets) - first + 1,), (1,), first).tolist()
        return [float(vector[offset - first]) for offset in offsets]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    # Stacked first and converted then: a conversion of each would be a launch of each.
    stacks = [torch.stack([tensors[i] for i in group]).double() for group in by_dtype.values()]
    values = torch.cat(stacks).tolist() if stacks else []
    order = [i for group in by_dtype.values() for i in group]
    return [value for _, value in sorted(zip(order, values, strict=True))]
