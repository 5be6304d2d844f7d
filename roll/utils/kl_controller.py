"""The coefficient of the KL penalty in the reward: constant, or steered towards a target divergence."""

import math
from collections.abc import Mapping
from typing import Protocol


class KLController(Protocol):
    """Holds the coefficient (`value`) and hears the divergence that was measured with it."""

    value: float

    def update(self, current: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class AdaptiveKLController:
    """Raises the coefficient while the divergence is above `target` and lowers it below (arXiv:1909.08593).

    `horizon` is the number of samples over which the coefficient may change by about a fifth.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        if not init_kl_coef >= 0:
            raise ValueError(f"init_kl_coef={init_kl_coef} must not be negative")
        if not target > 0:
            raise ValueError(
                f"target_kl={target} must be positive; None keeps the coefficient fixed"
            )
        if not horizon > 0:
            raise ValueError(f"kl_horizon={horizon} must be positive")
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Take in the mean divergence `current` of `n_steps` samples."""
        if not math.isfinite(current):
            raise ValueError(
                f"the measured KL divergence is {current}; the coefficient stays at {self.value}"
            )
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        # Not below 0: a batch of more than five horizons would otherwise turn the penalty into a reward.
        self.value *= max(0.0, 1.0 + error * n_steps / self.horizon)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


class FixedKLController:
    """Keeps the coefficient."""

    def __init__(self, kl_coef: float) -> None:
        if not kl_coef >= 0:
            raise ValueError(f"kl_coef={kl_coef} must not be negative")
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing to do: the coefficient does not follow the divergence."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float | None = None
) -> AdaptiveKLController | FixedKLController:
    """An adaptive controller if there is a target, a fixed one otherwise."""
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    if kl_horizon is None:
        raise ValueError(
            f"target_kl={target_kl} needs a kl_horizon: the number of samples over which to react"
        )
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)
