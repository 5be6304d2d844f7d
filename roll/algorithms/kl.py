"""The KL divergence of the policy from a base: estimators for each token, and the coefficient of
its penalty.

The estimators: http://joschu.net/blog/kl-approx.html
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.masking import check_mask, select

# Every accepted name and the estimator that it stands for.
KL_KINDS = {
    "kl": "kl",
    "k1": "kl",
    "abs": "abs",
    "mse": "mse",
    "k2": "mse",
    "k3": "k3",
    "low_var_kl": "k3",
    "k3+": "k3+",
    "full": "full",
}
# exp() of a difference of log-probabilities stays finite, and so does its gradient.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def approx_kl(
    log_probs: Tensor, base_log_probs: Tensor, *, kind: str = "kl", mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || base) for every token, exactly 0 where `mask` is 0.

    With d = log_probs - base_log_probs, as a reward and, as a loss, its gradient by log_probs:

    kl, k1          d             unbiased; negative at times  1, whatever the base: only noise
    abs             |d|           biased                       the sign of d
    mse, k2         d^2 / 2       biased                       d: that of KL(policy || base)
    k3, low_var_kl  e^-d + d - 1  unbiased, never negative     1 - e^-d: that of KL(base || policy)
    k3+             as k3         as k3                        as k2
    full            sum_v e^lp_v (lp_v - base_v), from log-probabilities of shape (B, T, V)

    The last column is about the mean over tokens that the policy sampled. The d of `k3` saturates
    at +-20 and its value at 10, with gradient 0; that of `k3+` at +-20. All but `full` take the
    log-probabilities of the sampled tokens, (B, T). Returns (B, T).
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_KINDS)}")
    kind = KL_KINDS[kind]
    if log_probs.shape != base_log_probs.shape:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)} but base_log_probs has "
            f"{tuple(base_log_probs.shape)}"
        )
    if kind == "full":
        if log_probs.ndim != 3:
            raise ValueError(
                "KL estimator 'full' needs the log-probabilities of the whole vocabulary, "
                f"(B, T, V), but got shape {tuple(log_probs.shape)}; use 'k3' for "
                "log-probabilities of sampled tokens"
            )
        # A token of probability zero contributes nothing: 0 * log 0 = 0.
        counts = log_probs != -torch.inf
        if mask is not None:
            check_mask(log_probs[..., 0], mask, "log_probs[..., 0]")
            counts = counts & mask.bool().unsqueeze(-1)
        log_probs, base_log_probs = select(log_probs, counts), select(base_log_probs, counts)
        return select(log_probs.exp() * (log_probs - base_log_probs), counts).sum(-1)
    if mask is None:
        mask = torch.ones_like(log_probs, dtype=torch.bool)
    check_mask(log_probs, mask, "log_probs")
    delta = select(log_probs, mask) - select(base_log_probs, mask)
    if kind == "kl":
        return delta
    if kind == "abs":
        return delta.abs()
    if kind == "mse":
        return 0.5 * delta.square()
    # expm1 keeps the value accurate, and non-negative, where the two policies nearly agree.
    log_ratio = (-delta).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (torch.expm1(log_ratio) - log_ratio).clamp(0.0, MAX_K3)
    if kind == "k3":
        return k3
    k2 = 0.5 * log_ratio.square()
    return k3.detach() + (k2 - k2.detach())


class KLController(Protocol):
    """Holds the coefficient of the KL penalty in the reward, and hears the divergence measured with
    it."""

    value: float

    def update(self, current: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


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


class AdaptiveKLController(FixedKLController):
    """Raises the coefficient while the divergence is above `target`, lowers it below
    (arXiv:1909.08593).

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
        super().__init__(init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Take in the mean divergence `current` of `n_steps` samples."""
        if not math.isfinite(current):
            raise ValueError(
                f"the measured KL divergence is {current}; the coefficient stays at {self.value}"
            )
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        # Not below 0: a batch of more than five horizons would otherwise turn the penalty into a
        # reward.
        self.value *= max(0.0, 1.0 + error * n_steps / self.horizon)


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float | None = None
) -> FixedKLController:
    """An adaptive controller if there is a target, a fixed one otherwise."""
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    if kl_horizon is None:
        raise ValueError(
            f"target_kl={target_kl} needs a kl_horizon: the number of samples over which to react"
        )
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)
