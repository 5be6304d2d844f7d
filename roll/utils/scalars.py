"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

MAX_VECTOR = 256  # entries that cost no more to bring than one


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    tensors = {key: value for key, value in scalars.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        floats = dict(zip(tensors, _read(list(tensors.values())), strict=True))
    return {key: floats[key] if key in floats else float(value) for key, value in scalars.items()}


def _read(tensors: list[Tensor]) -> list[float]:
    if (vector := _common_vector(tensors)) is not None:
        first, values = vector.storage_offset(), vector.tolist()
        return [float(values[tensor.storage_offset() - first]) for tensor in tensors]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    # Stacked first and converted then: a conversion of each would be a launch of each.
    stacks = [torch.stack([tensors[i] for i in group]).double() for group in by_dtype.values()]
    values = torch.cat(stacks).tolist() if stacks else []
    order = [i for group in by_dtype.values() for i in group]
    return [value for _, value in sorted(zip(order, values, strict=True))]


def _common_vector(tensors: list[Tensor]) -> Tensor | None:
    """The vector whose entries these are, as kernels leave them: it can be read as it lies there."""
    vector = tensors[0]._base if tensors else None
    if vector is None or vector.ndim != 1 or not vector.is_contiguous() or len(vector) > MAX_VECTOR:
        return None
    return vector if all(tensor._base is vector and tensor.dtype == vector.dtype for tensor in tensors) else None
