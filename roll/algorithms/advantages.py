"""Token-level rewards to returns and advantages.

All recurrences run over the valid tokens of a row: t' is the next token whose mask is set, and what
lies between, observation or padding, neither discounts nor contributes. Results are 0 where masked
and carry no gradient. Tensors are (B, T).
"""

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.estimators import get_estimator
from roll.algorithms.masking import check_mask, masked_whiten, select
from roll.algorithms.rewards import check_clip, clip_symmetric
from roll.ops.scans import advantage_scan, reverse_scan, reverse_scan_runs


@dataclass(frozen=True)
class Advantages:
    """All tensors (B, T), 0 where masked."""

    advantages: Tensor
    returns: Tensor
    raw_advantages: Tensor
    """Before whitening and clipping."""
    rewards: Tensor
    """The token-level rewards that were used: masked, and whitened if asked for."""
    clip_frac: float
    """Share of the valid tokens whose advantage was clipped."""


def compute_advantages(
    *,
    rewards: Tensor,
    mask: Tensor,
    estimator: str,
    gamma: float,
    lam: float,
    values: Tensor | None = None,
    whiten_rewards: bool = False,
    whiten_advantages: bool = False,
    clip: float | None = None,
) -> Advantages:
    """Advantages and returns by the estimator of that name; `values` if it needs them.

    Whitening is over all valid tokens of the batch and is skipped for fewer than two. Whitening
    rewards also centres them, so that tokens without a reward get a negative one: with a single
    reward at the end, long responses lose.
    """
    rule = get_estimator(estimator)
    check_clip(clip, "advantage_clip")
    if rule.needs_values and values is None:
        raise ValueError(f"adv_estimator {estimator!r} needs values")
    rewards = masked_whiten(rewards, mask) if whiten_rewards else select(rewards, mask)
    raw, returns = rule.advantages(rewards, mask, values, gamma, lam)
    if whiten_advantages or rule.whiten_advantages:
        advantages = masked_whiten(raw, mask)
    else:
        advantages = raw.clone()
    advantages, clip_frac = clip_symmetric(advantages, clip, mask)
    return Advantages(advantages, returns, raw, rewards, clip_frac)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R[t] = r[t] + gamma * R[t'].

    Example: rewards [[1, 2, 9, 4]], mask [[1, 1, 0, 1]], gamma 0.5 -> [[3, 4, 0, 4]].
    """
    check_mask(rewards, mask, "rewards")
    _check_discount(gamma, "gamma")
    return reverse_scan(rewards, mask.bool(), float(gamma))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438): (advantages, returns).

        delta[t] = r[t] + gamma * V[t'] - V[t]
        A[t] = delta[t] + gamma * lam * A[t'],  R[t] = A[t] + V[t]

    V and A are 0 after the last valid token. Example: rewards [[0, 0, 1]], values 0,
    gamma = lam = 1 -> A [[1, 1, 1]].
    """
    check_mask(rewards, mask, "rewards")
    check_mask(values, mask, "values")
    _check_discount(gamma, "gamma")
    _check_discount(lam, "lambd")
    return advantage_scan(rewards, values, mask.bool(), float(gamma), float(lam))


def turn_discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discount per turn: every token of turn k gets rho[k] + gamma * R[k + 1].

    A turn is a contiguous run of the mask and its reward rho the sum over its tokens, so per-token
    penalties count wherever in the turn they fall. Example: rewards [[1, 2, 9, 4]],
    mask [[1, 1, 0, 1]], gamma 0.5 -> [[5, 5, 0, 4]].
    """
    check_mask(rewards, mask, "rewards")
    _check_discount(gamma, "gamma")
    return reverse_scan_runs(rewards, mask.bool(), float(gamma))


def _check_discount(value: float, name: str) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} must lie in [0, 1]")
