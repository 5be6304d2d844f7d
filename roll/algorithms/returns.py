"""Returns and advantages from token-level rewards.

All recurrences run over the valid tokens of a row: t' is the next token whose mask is set, and what lies between,
observation or padding, neither discounts nor contributes. Results are 0 where masked and carry no gradient.
"""

from torch import Tensor

from roll.algorithms.masking import check_mask
from roll.ops.reverse_scan import advantage_scan, reverse_scan, reverse_scan_runs


def check_discount(value: float, name: str) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} must lie in [0, 1]")


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R[t] = r[t] + gamma * R[t']. All tensors (B, T).

    Example: rewards [[1, 2, 9, 4]], mask [[1, 1, 0, 1]], gamma 0.5 -> [[3, 4, 0, 4]].
    """
    check_mask(rewards, mask, "rewards")
    check_discount(gamma, "gamma")
    return reverse_scan(rewards, mask.bool(), float(gamma))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438). All tensors (B, T); returns (advantages, returns).

        delta[t] = r[t] + gamma * V[t'] - V[t],  A[t] = delta[t] + gamma * lam * A[t'],  R[t] = A[t] + V[t]

    V and A are 0 after the last valid token. Example: rewards [[0, 0, 1]], values 0, gamma = lam = 1 -> A [[1, 1, 1]].
    """
    check_mask(rewards, mask, "rewards")
    check_mask(values, mask, "values")
    check_discount(gamma, "gamma")
    check_discount(lam, "lambd")
    return advantage_scan(rewards, values, mask.bool(), float(gamma), float(lam))


def turn_discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discount per turn: every token of turn k gets rho[k] + gamma * R[k + 1]. All tensors (B, T).

    A turn is a contiguous run of the mask and its reward rho the sum over its tokens, so per-token penalties count
    wherever in the turn they fall. Example: rewards [[1, 2, 9, 4]], mask [[1, 1, 0, 1]], gamma 0.5 -> [[5, 5, 0, 4]].
    """
    check_mask(rewards, mask, "rewards")
    check_discount(gamma, "gamma")
    return reverse_scan_runs(rewards, mask.bool(), float(gamma))
