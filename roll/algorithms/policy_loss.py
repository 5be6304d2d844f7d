"""The policy-gradient loss on the log-probabilities of sampled tokens.

It is put together from three independent choices: how the importance ratio is formed
(`ratio_type`), what is done with it (`surrogate`, see surrogates), and how tokens are reduced to a
number (`agg_mode`, see aggregation). Everything is (B, T); column t speaks of token t+1. Masked
entries may hold anything, NaN included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, aggregate_loss, count_sequences, count_tokens
from roll.algorithms.kl import MAX_LOG_RATIO, approx_kl
from roll.algorithms.masking import check_mask, masked_mean, segment_masked_mean, select
from roll.algorithms.surrogates import Surrogate, TokenTerms

RATIO_TYPES = ("token", "segment", "sequence", "segment_token", "sequence_token")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss and its parts. All scalars belong to this batch, over the counts of the whole
    step."""

    total: Tensor  # the only one with a graph
    pg: Tensor  # without the row weights
    weighted_pg: Tensor
    kl: Tensor | None  # None: no reference was given
    entropy: Tensor | None  # None: no entropy was given
    mask_BT: Tensor  # bool: tokens that took part, mask and keep
    ratio_BT: Tensor  # without gradient, 1 where masked
    clipped_BT: Tensor  # bool: a bound of the surrogate decided the loss
    statistics: dict[str, Tensor]
    """ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac: share of tokens whose
    ratio left the range of the surrogate, whatever the sign of the advantage. clipfrac: tokens
    whose loss a bound decided, aggregated as the loss is. ratio_mean: mean over rows of the mean
    over tokens. ratio_max, ratio_min: over valid tokens, -inf and inf if there are none. approxkl,
    policykl: (log r)^2 / 2 and log r against the old policy, aggregated as the loss is."""


def importance_ratio(
    log_ratio_BT: Tensor, mask_BT: Tensor, *, ratio_type: str, keep_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log r, r) of each token, from log p - log p_old. r is 1 where masked.

    token            every token its own ratio
    segment          exp of the mean over the contiguous run of `mask_BT` that holds the token: one
                     ratio for each turn
    sequence         exp of the mean over the row: GSPO (arXiv:2507.18071)
    segment_token,   the same value s, with the gradient of sg[s] p / sg[p]: what the paper calls
    sequence_token   GSPO-token, for turns and for rows

    Tokens that are not in `keep_BT` leave the means, but do not split a segment. The log-ratio
    saturates at +-20, with gradient 0. The gradients of `segment` and `sequence` go through the
    means: a token gets 1/n of the gradient of its segment or row, which is that of the mean
    advantage. Those of the `_token` kinds go to each token with its own advantage; where the tokens
    of a segment or row have one advantage, the two are the same.
    """
    if ratio_type not in RATIO_TYPES:
        raise ValueError(f"unknown ratio type {ratio_type!r}; known: {', '.join(RATIO_TYPES)}")
    kept_BT = mask_BT.bool() if keep_BT is None else mask_BT.bool() & keep_BT.bool()
    scope, own_BT = ratio_type.removesuffix("_token"), log_ratio_BT
    log_ratio_BT = own_BT if scope == ratio_type else own_BT.detach()
    if scope == "segment":
        log_ratio_BT = segment_masked_mean(log_ratio_BT, mask_BT, keep_BT)
    elif scope == "sequence":
        mean_B = masked_mean(log_ratio_BT, kept_BT, dim=-1)
        log_ratio_BT = mean_B.unsqueeze(-1).expand_as(log_ratio_BT)
    mean_BT = select(log_ratio_BT, kept_BT)
    log_ratio_BT = mean_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if scope != ratio_type:
        # Adds 0 with the gradient of the token's own log-ratio, except where the clamp holds.
        is_free_BT = kept_BT & (mean_BT == log_ratio_BT)
        log_ratio_BT = log_ratio_BT + select(own_BT - own_BT.detach(), is_free_BT)
    return log_ratio_BT, log_ratio_BT.exp()


def policy_loss(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    surrogate: Surrogate,
    ratio_type: str = "token",
    agg_mode: str = "seq-mean-token-mean",
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    norm_factor: Count | None = None,
    keep_BT: Tensor | None = None,
    is_weight_BT: Tensor | None = None,
    sample_weights_B: Tensor | None = None,
    pg_coef: float = 1.0,
    ref_log_probs_BT: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    entropy_BT: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """total = pg_coef (weighted_pg + kl_coef kl) - entropy_coef entropy, each over the same tokens.

    `keep_BT` filters tokens: they leave every numerator, but the counts (when not given: those of
    `mask_BT`) and the borders of segments are those before the filter, so that dropping a token
    does not inflate the others. `is_weight_BT` multiplies the loss of a token, `sample_weights_B`
    that of a row.
    """
    for name, tensor in (
        ("log_probs", log_probs_BT),
        ("old_log_probs", old_log_probs_BT),
        ("advantages", advantages_BT),
        ("ref_log_probs", ref_log_probs_BT),
        ("entropy", entropy_BT),
        ("keep", keep_BT),
        ("train_infer_is_weight", is_weight_BT),
    ):
        if tensor is not None:
            check_mask(tensor, mask_BT, name)
    mask_BT = mask_BT.bool()
    kept_BT = mask_BT if keep_BT is None else mask_BT & keep_BT.bool()
    counts = {
        "num_tokens": count_tokens(mask_BT) if num_tokens is None else num_tokens,
        "num_sequences": count_sequences(mask_BT) if num_sequences is None else num_sequences,
        "norm_factor": max(mask_BT.shape[-1], 1) if norm_factor is None else norm_factor,
    }

    def aggregate(values_BT: Tensor, mode: str = agg_mode, weights: Tensor | None = None) -> Tensor:
        return aggregate_loss(values_BT, kept_BT, mode, weights_B=weights, **counts)

    log_probs_BT, advantages_BT = select(log_probs_BT, kept_BT), select(advantages_BT, kept_BT)
    log_ratio_BT = log_probs_BT - select(old_log_probs_BT, kept_BT)
    _, ratio_BT = importance_ratio(log_ratio_BT, mask_BT, ratio_type=ratio_type, keep_BT=keep_BT)
    bounded_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_BT, clipped_BT = surrogate(TokenTerms(log_probs_BT, bounded_BT, ratio_BT, advantages_BT))
    if is_weight_BT is not None:
        loss_BT = loss_BT * select(is_weight_BT, kept_BT, fill=1.0)
    pg = weighted_pg = aggregate(loss_BT)
    if sample_weights_B is not None:
        weighted_pg = aggregate(loss_BT, weights=sample_weights_B)

    total, kl, entropy = weighted_pg, None, None
    if ref_log_probs_BT is not None:
        # Without a coefficient the KL is only reported: no graph is kept for it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and kl_coef != 0):
            kl = aggregate(approx_kl(log_probs_BT, ref_log_probs_BT, kind=kl_kind, mask=kept_BT))
        total = total + kl_coef * kl if kl_coef != 0 else total
    total = pg_coef * total
    if entropy_BT is not None:
        entropy = aggregate(entropy_BT)
        total = total - entropy_coef * entropy if entropy_coef != 0 else total

    with torch.no_grad():
        nowhere_BT = torch.zeros_like(kept_BT)
        clipped_BT = nowhere_BT if clipped_BT is None else clipped_BT
        high_BT = nowhere_BT if surrogate.high is None else ratio_BT > surrogate.high
        low_BT = nowhere_BT if surrogate.low is None else ratio_BT < surrogate.low
        # One entry of fill, so that a batch without rows or tokens has extremes too.
        fill = ratio_BT.new_full((1,), torch.inf)
        statistics = {
            "ppo_ratio_high_clipfrac": aggregate(high_BT.float(), "token-mean"),
            "ppo_ratio_low_clipfrac": aggregate(low_BT.float(), "token-mean"),
            "ppo_ratio_clipfrac": aggregate((high_BT | low_BT).float(), "token-mean"),
            "clipfrac": aggregate(clipped_BT.float()),
            "ratio_mean": aggregate(ratio_BT, "seq-mean-token-mean"),
            "ratio_max": torch.cat([select(ratio_BT, kept_BT, -torch.inf).flatten(), -fill]).max(),
            "ratio_min": torch.cat([select(ratio_BT, kept_BT, torch.inf).flatten(), fill]).min(),
            "approxkl": aggregate(0.5 * log_ratio_BT.square()),
            "policykl": aggregate(log_ratio_BT),
        }
    return PolicyLoss(
        total=total,
        pg=pg.detach(),
        weighted_pg=weighted_pg.detach(),
        kl=None if kl is None else kl.detach(),
        entropy=None if entropy is None else entropy.detach(),
        mask_BT=kept_BT,
        ratio_BT=ratio_BT.detach(),
        clipped_BT=clipped_BT,
        statistics=statistics,
    )
