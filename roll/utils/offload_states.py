"""What a strategy can move between its device and host memory, and how."""

from collections.abc import Collection
from enum import StrEnum

import torch

from roll.exceptions import ConfigError


class OffloadStateType(StrEnum):
    """The parts of a strategy's state that can be moved on their own."""

    model_params = "model_params"
    optimizer_states = "optimizer_states"
    other_params = "other_params"  # gradient buffers, caches of a generation engine


def includes(include: Collection[str] | None, part: OffloadStateType) -> bool:
    """Whether `include` names `part`; None names everything."""
    unknown = set(include or ()) - {str(kind) for kind in OffloadStateType}
    if unknown:
        known = ", ".join(OffloadStateType)
        raise ConfigError(f"include: found {', '.join(sorted(unknown))}, expected some of {known}")
    return include is None or part in include


def move_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, non_blocking: bool = False
) -> None:
    """Move the optimizer's state tensors. Step counts stay where they are: torch keeps them on the CPU."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = value.to(device, non_blocking=non_blocking)
