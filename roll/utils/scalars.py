"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
    for key, value in scalars.items():
        if isinstance(value, Tensor):
            by_dtype.setdefault(value.dtype, {})[key] = value.detach()
    # Stacked first and converted then: a conversion of each would be a launch of each.
    stacks = [torch.stack(list(tensors.values())).double() for tensors in by_dtype.values()]
    values = torch.cat(stacks).tolist() if stacks else []
    floats = dict(zip((key for tensors in by_dtype.values() for key in tensors), values, strict=True))
    return {key: floats[key] if key in floats else float(value) for key, value in scalars.items()}
