"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    tensors = {key: value.detach().double() for key, value in scalars.items() if isinstance(value, Tensor)}
    floats = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)) if tensors else {}
    return {key: floats[key] if key in floats else float(value) for key, value in scalars.items()}
