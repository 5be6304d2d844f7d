"""Per-token estimators of KL(policy || base) from log-probabilities (see
http://joschu.net/blog/kl-approx.html)."""

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
    """Estimate KL(policy || base) for every token, exactly 0 where `mask` is 0. With d = log_probs
    - base_log_probs:

                                    as a reward                      as a loss: gradient by log_probs
    kl, k1           d              unbiased; negative at times      1, whatever the base: no pull, only noise
    abs              |d|            biased                           the sign of d
    mse, k2          d^2 / 2        biased                           d: that of KL(policy || base)
    k3, low_var_kl   e^-d + d - 1   unbiased, never negative         1 - e^-d: that of KL(base || policy)
    k3+              as k3          as k3                            as k2
    full             sum_v e^lp_v (lp_v - base_v), from normalised log-probabilities of shape (B, T, V)

    The last column is about the mean over tokens that the policy sampled. The d of `k3` saturates
    at +-20 and its value at 10, with gradient 0; that of `k3+` at +-20. All but `full` take the
    log-probabilities of the sampled tokens, (B, T). Returns (B, T).
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_KINDS)}")
    kind = KL_KINDS[kind]
    if log_probs.shape != base_log_probs.shape:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)} but base_log_probs has {tuple(base_log_probs.shape)}"
        )
    if kind == "full":
        return _full_kl(log_probs, base_log_probs, mask)
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


def _full_kl(log_probs: Tensor, base_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    if log_probs.ndim != 3:
        raise ValueError(
            f"KL estimator 'full' needs the log-probabilities of the whole vocabulary, (B, T, V), "
            f"but got shape {tuple(log_probs.shape)}; use 'k3' for log-probabilities of sampled tokens"
        )
    if mask is not None:
        check_mask(log_probs[..., 0], mask, "log_probs[..., 0]")
    # A token of probability zero contributes nothing: 0 * log 0 = 0.
    counts = log_probs != -torch.inf
    if mask is not None:
        counts = counts & mask.bool().unsqueeze(-1)
    log_probs, base_log_probs = select(log_probs, counts), select(base_log_probs, counts)
    return select(log_probs.exp() * (log_probs - base_log_probs), counts).sum(-1)
