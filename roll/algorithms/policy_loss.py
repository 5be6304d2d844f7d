"""Policy-gradient losses on the log-probabilities of sampled tokens.

A loss is put together from three independent choices: how the importance ratio is formed (`ratio_type`), what is done
with it (`surrogate`), and how tokens are reduced to a number (`agg_mode`, see aggregation). Everything is (B, T);
column t speaks of token t+1. Masked entries may hold anything, NaN included. On a GPU one kernel does all of it
(`roll.ops.token_loss`); what is written here is what it computes.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from roll.algorithms.aggregation import (
    AGGREGATION_MODES,
    Count,
    aggregate_loss,
    count_sequences,
    count_tokens,
)
from roll.algorithms.kl import KL_KINDS, MAX_LOG_RATIO, approx_kl
from roll.algorithms.masking import check_mask, masked_mean, segment_masked_mean, select
from roll.ops.scalars import NamedScalars, Scalar
from roll.ops.token_loss import RESULTS, TokenLossInputs, TokenLossKind, can_fuse, token_loss

RATIO_TYPES = ("token", "segment", "sequence", "segment_token", "sequence_token")
NO_KERNEL = ("none", 0.0, 0.0, 0.0)  # of surrogates that the GPU kernel does not know
STATISTICS = (
    *("ppo_ratio_high_clipfrac", "ppo_ratio_low_clipfrac", "ppo_ratio_clipfrac", "clipfrac"),
    *("ratio_mean", "ratio_max", "ratio_min", "approxkl", "policykl"),
)


class TokenTerms(NamedTuple):
    """What a surrogate is made of, each (B, T) and 0 (the ratio: 1) where masked."""

    log_probs_BT: Tensor
    log_ratio_BT: Tensor  # log p - log p_old of each token alone, within +-20
    ratio_BT: Tensor  # as `ratio_type` forms it
    advantages_BT: Tensor


class Surrogate(Protocol):
    """What to do with the importance ratio: a loss per token, and where the ratio was cut off.

    Those of this module have a property `kernel` too: the name and the three numbers by which the GPU kernel knows
    them. A surrogate without it is computed by its `__call__` everywhere.
    """

    # The ratio counts as out of range below `low` and above `high`; None: no such bound.
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        """Returns (loss_BT, clipped_BT): the loss to minimise, and True where a bound decided its value."""
        ...


@dataclass(frozen=True, kw_only=True)
class _AroundOne:
    """Bounds at a distance from a ratio of 1."""

    clip_low: float
    clip_high: float

    @property
    def low(self) -> float:
        return 1 - self.clip_low

    @property
    def high(self) -> float:
        return 1 + self.clip_high


@dataclass(frozen=True, kw_only=True)
class PPOClip(_AroundOne):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  (arXiv:1707.06347; unequal bounds: arXiv:2503.14476).

    For A < 0 that has no upper bound; `dual_clip` = c > 1 limits it to -c A (arXiv:1912.09729). As in ROLL, the dual
    clip does not count as clipped.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip_range(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"the dual clip constant must be greater than 1, got {self.dual_clip}")

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return (
            "ppo" if self.dual_clip is None else "ppo_dual",
            self.low,
            self.high,
            self.dual_clip or 0.0,
        )

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        ratio_BT, advantages_BT = terms.ratio_BT, terms.advantages_BT
        free_BT = ratio_BT * advantages_BT
        bounded_BT = ratio_BT.clamp(self.low, self.high) * advantages_BT
        clipped_BT = bounded_BT < free_BT
        loss_BT = -torch.where(clipped_BT, bounded_BT, free_BT)
        if self.dual_clip is not None:
            # The bound is a constant of the policy: where it holds, the gradient is 0.
            limit_BT = -self.dual_clip * advantages_BT
            loss_BT = torch.where((advantages_BT < 0) & (loss_BT > limit_BT), limit_BT, loss_BT)
        return loss_BT, clipped_BT


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """-A log p: no ratio at all."""

    low: None = None
    high: None = None

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return ("reinforce", 0.0, 0.0, 0.0)

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        return -terms.advantages_BT * terms.log_probs_BT, torch.zeros_like(
            terms.ratio_BT, dtype=torch.bool
        )


@dataclass(frozen=True, kw_only=True)
class TruncatedIS:
    """TIS: -sg[clip(r, low, high)] A log p. The truncated ratio is a weight, no gradient goes through it."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"TIS bounds must satisfy 0 <= low <= high, got low={self.low}, high={self.high}"
            )

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return ("tis", self.low, self.high, 0.0)

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        weight_BT = terms.ratio_BT.detach().clamp(self.low, self.high)
        return -weight_BT * terms.advantages_BT * terms.log_probs_BT, weight_BT != terms.ratio_BT


@dataclass(frozen=True, kw_only=True)
class CISPO(_AroundOne):
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p (arXiv:2506.13585): clipped tokens keep a gradient.

    With `drop_clipped` the tokens that PPO would clip (A > 0 above the range, A < 0 below it) are left out.
    """

    clip_low: float = 0.1
    clip_high: float = 0.1
    drop_clipped: bool = False

    def __post_init__(self) -> None:
        # clip_low = 1 means no lower bound, the setting of the paper.
        _check_clip_range(self.clip_low, self.clip_high, allow_no_lower_bound=True)

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return ("cispo_drop" if self.drop_clipped else "cispo", self.low, self.high, 0.0)

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        ratio_BT, advantages_BT = terms.ratio_BT.detach(), terms.advantages_BT
        weight_BT = ratio_BT.clamp(self.low, self.high)
        clipped_BT = weight_BT != ratio_BT
        if self.drop_clipped:
            past_BT = ((advantages_BT > 0) & (ratio_BT > self.high)) | (
                (advantages_BT < 0) & (ratio_BT < self.low)
            )
            weight_BT = weight_BT.masked_fill(past_BT, 0.0)
        return -weight_BT * advantages_BT * terms.log_probs_BT, clipped_BT


@dataclass(frozen=True, kw_only=True)
class TOPR:
    """Tapered off-policy REINFORCE (arXiv:2503.14286): -A log p where A > 0, -sg[min(r, 1)] A log p elsewhere.

    Good behaviour is imitated however unlikely it has become; bad behaviour is pushed away only while it is likely.
    The sign of A, the reward after the baseline, separates the two, as in the paper (ROLL: the sign of the raw score).
    """

    positive_weight: float = 1.0
    negative_weight: float = 1.0
    low: None = None
    high: float = 1.0

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return ("topr", self.positive_weight, self.negative_weight, self.high)

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        positive_BT = terms.advantages_BT > 0
        taper_BT = terms.ratio_BT.detach().clamp(max=self.high)
        weight_BT = torch.where(positive_BT, self.positive_weight, self.negative_weight * taper_BT)
        return -weight_BT * terms.advantages_BT * terms.log_probs_BT, ~positive_BT & (
            terms.ratio_BT > self.high
        )


@dataclass(frozen=True, kw_only=True)
class KimiK15:
    """-A log p + tau/2 (log p - log p_old)^2 (arXiv:2501.12599, eq. 3): stays near the old policy by a square.

    As in ROLL, the square is that of each token, whatever the ratio type: a mean over tokens would let opposite moves
    cancel, and the policy could go anywhere at no cost.
    """

    tau: float = 0.1
    low: None = None
    high: None = None

    @property
    def kernel(self) -> tuple[str, float, float, float]:
        return ("kimi15", self.tau, 0.0, 0.0)

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor]:
        loss_BT = (
            -terms.advantages_BT * terms.log_probs_BT + 0.5 * self.tau * terms.log_ratio_BT.square()
        )
        return loss_BT, torch.zeros_like(loss_BT, dtype=torch.bool)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and its parts without graphs: each a scalar of this batch over the counts of the whole step."""

    total: Tensor
    parts: NamedScalars  # "total", "pg", ...; from the kernel the statistics of `policy_statistics` too
    mask_BT: Tensor  # bool: tokens that took part, mask and keep
    details: "TokenDetails | None"  # what statistics are made from; None: the kernel found them

    @property
    def pg(self) -> Tensor:
        """Without the row weights."""
        return self._part("pg")

    @property
    def weighted_pg(self) -> Tensor:
        return self._part("weighted_pg")

    @property
    def kl(self) -> Tensor | None:
        """None: no reference was given."""
        return self._part("kl") if "kl" in self.parts else None

    @property
    def entropy(self) -> Tensor | None:
        """None: no entropy was given."""
        return self._part("entropy") if "entropy" in self.parts else None

    @property
    def num_valid(self) -> Tensor:
        """How many tokens took part."""
        return self._part("num_valid")

    def _part(self, name: str) -> Tensor:
        value = self.parts[name]
        assert isinstance(value, Tensor)
        return value


@dataclass(frozen=True)
class TokenDetails:
    """What the loss came from, (B, T), without gradient."""

    log_ratio_BT: Tensor  # log p - log p_old, before any averaging and clamping; 0 where masked
    ratio_BT: Tensor  # 1 where masked
    clipped_BT: Tensor  # bool: a bound of the surrogate decided the loss
    low: float | None  # range of the surrogate
    high: float | None


def importance_ratio(
    log_ratio_BT: Tensor, mask_BT: Tensor, *, ratio_type: str, keep_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log r, r) of each token, from log p - log p_old. r is 1 where masked.

    token            every token its own ratio
    segment          exp of the mean over the contiguous run of `mask_BT` that holds the token: one ratio for each turn
    sequence         exp of the mean over the row: GSPO (arXiv:2507.18071)
    segment_token,   the same value s, with the gradient of sg[s] p / sg[p]: what the paper calls GSPO-token, for turns
    sequence_token   and for rows

    Tokens that are not in `keep_BT` leave the means, but do not split a segment. The log-ratio saturates at +-20, with
    gradient 0. The gradients of `segment` and `sequence` go through the means: a token gets 1/n of the gradient of its
    segment or row, which is that of the mean advantage. Those of the `_token` kinds go to each token with its own
    advantage; where the tokens of a segment or row have one advantage, the two are the same.
    """
    if ratio_type not in RATIO_TYPES:
        raise ValueError(f"unknown ratio type {ratio_type!r}; known: {', '.join(RATIO_TYPES)}")
    kept_BT = mask_BT.bool() if keep_BT is None else mask_BT.bool() & keep_BT.bool()
    scope, own_BT = ratio_type.removesuffix("_token"), log_ratio_BT
    log_ratio_BT = own_BT if scope == ratio_type else own_BT.detach()
    if scope == "segment":
        log_ratio_BT = segment_masked_mean(log_ratio_BT, mask_BT, keep_BT)
    elif scope == "sequence":
        log_ratio_BT = (
            masked_mean(log_ratio_BT, kept_BT, dim=-1).unsqueeze(-1).expand_as(log_ratio_BT)
        )
    mean_BT = select(log_ratio_BT, kept_BT)
    log_ratio_BT = mean_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if scope != ratio_type:
        log_ratio_BT = log_ratio_BT + select(
            own_BT - own_BT.detach(), kept_BT & (mean_BT == log_ratio_BT)
        )
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
    """total = pg_coef (weighted_pg + kl_coef kl) - entropy_coef entropy, each aggregated over the same tokens.

    `keep_BT` filters tokens: they leave every numerator, but the counts (when not given: those of `mask_BT`) and the
    borders of segments are those before the filter, so that dropping a token does not inflate the others.
    `is_weight_BT` multiplies the loss of a token, `sample_weights_B` that of a row.
    """
    tensors = {
        "log_probs": log_probs_BT,
        "old_log_probs": old_log_probs_BT,
        "advantages": advantages_BT,
    }
    tensors |= {"ref_log_probs": ref_log_probs_BT, "entropy": entropy_BT}
    tensors |= {"keep": keep_BT, "train_infer_is_weight": is_weight_BT}
    for name, tensor in tensors.items():
        if tensor is not None:
            check_mask(tensor, mask_BT, name)
    mask_BT, keep_BT = mask_BT.bool(), None if keep_BT is None else keep_BT.bool()
    kept_BT = mask_BT if keep_BT is None else mask_BT & keep_BT
    inputs = TokenLossInputs(
        old_log_probs_BT=old_log_probs_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        keep_BT=keep_BT,
        is_weight_BT=is_weight_BT,
        ref_log_probs_BT=ref_log_probs_BT,
        sample_weights_B=sample_weights_B,
        num_tokens=count_tokens(mask_BT) if num_tokens is None else num_tokens,
        num_sequences=count_sequences(mask_BT) if num_sequences is None else num_sequences,
        norm_factor=max(mask_BT.shape[-1], 1) if norm_factor is None else norm_factor,
    )
    kind = TokenLossKind(
        surrogate=getattr(surrogate, "kernel", NO_KERNEL),
        low=surrogate.low,
        high=surrogate.high,
        ratio_type=ratio_type,
        agg_mode=agg_mode,
        kl_kind=KL_KINDS.get(kl_kind, kl_kind),
        pg_coef=pg_coef,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
    if can_fuse(log_probs_BT, entropy_BT, inputs) and _is_known(kind, inputs):
        return _fused_policy_loss(log_probs_BT, entropy_BT, inputs, kind, kept_BT)
    return _plain_policy_loss(log_probs_BT, entropy_BT, inputs, kind, kept_BT, surrogate)


def _plain_policy_loss(
    log_probs_BT: Tensor,
    entropy_BT: Tensor | None,
    inputs: TokenLossInputs,
    kind: TokenLossKind,
    kept_BT: Tensor,
    surrogate: Surrogate,
) -> PolicyLoss:
    """The definition of the loss. `kept_BT` are the tokens of `inputs` that take part."""

    def aggregate(values_BT: Tensor, weights_B: Tensor | None = None) -> Tensor:
        counts = {
            name: getattr(inputs, name) for name in ("num_tokens", "num_sequences", "norm_factor")
        }
        return aggregate_loss(values_BT, kept_BT, kind.agg_mode, weights_B=weights_B, **counts)

    log_probs_BT, advantages_BT = (
        select(log_probs_BT, kept_BT),
        select(inputs.advantages_BT, kept_BT),
    )
    token_log_ratio_BT = log_probs_BT - select(inputs.old_log_probs_BT, kept_BT)
    _, ratio_BT = importance_ratio(
        token_log_ratio_BT, inputs.mask_BT, ratio_type=kind.ratio_type, keep_BT=inputs.keep_BT
    )
    bounded_BT = token_log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_BT, clipped_BT = surrogate(TokenTerms(log_probs_BT, bounded_BT, ratio_BT, advantages_BT))
    if inputs.is_weight_BT is not None:
        loss_BT = loss_BT * select(inputs.is_weight_BT, kept_BT, fill=1.0)
    pg = weighted_pg = aggregate(loss_BT)
    if inputs.sample_weights_B is not None:
        weighted_pg = aggregate(loss_BT, inputs.sample_weights_B)

    total, kl, entropy = weighted_pg, None, None
    if inputs.ref_log_probs_BT is not None:
        # Without a coefficient the KL is only reported: no graph is kept for it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and kind.kl_coef != 0):
            kl = aggregate(
                approx_kl(log_probs_BT, inputs.ref_log_probs_BT, kind=kind.kl_kind, mask=kept_BT)
            )
        total = total + kind.kl_coef * kl if kind.kl_coef != 0 else total
    total = kind.pg_coef * total
    if entropy_BT is not None:
        entropy = aggregate(entropy_BT)
        total = total - kind.entropy_coef * entropy if kind.entropy_coef != 0 else total
    parts = {"total": total, "pg": pg, "weighted_pg": weighted_pg, "kl": kl, "entropy": entropy}
    given = {name: value.detach() for name, value in parts.items() if value is not None}
    return PolicyLoss(
        total=total,
        parts=NamedScalars(given | {"num_valid": kept_BT.sum()}),
        mask_BT=kept_BT,
        details=TokenDetails(
            log_ratio_BT=token_log_ratio_BT.detach(),
            ratio_BT=ratio_BT.detach(),
            clipped_BT=clipped_BT,
            low=kind.low,
            high=kind.high,
        ),
    )


def _is_known(kind: TokenLossKind, inputs: TokenLossInputs) -> bool:
    """Whether the kernel has such a loss, and nothing is wrong with it; the plain version finds the words for that."""
    weights_B, norm_factor = inputs.sample_weights_B, inputs.norm_factor
    return (
        kind.surrogate != NO_KERNEL
        and kind.ratio_type in RATIO_TYPES
        and kind.agg_mode in AGGREGATION_MODES
        and (inputs.ref_log_probs_BT is None or kind.kl_kind in ("kl", "abs", "mse", "k3", "k3+"))
        and (isinstance(norm_factor, Tensor) or norm_factor > 0)
        and (weights_B is None or weights_B.shape == inputs.mask_BT.shape[:1])
    )


def _fused_policy_loss(
    log_probs_BT: Tensor,
    entropy_BT: Tensor | None,
    inputs: TokenLossInputs,
    kind: TokenLossKind,
    kept_BT: Tensor,
) -> PolicyLoss:
    total, results = token_loss(log_probs_BT, entropy_BT, inputs, kind)
    places = _places(inputs.ref_log_probs_BT is not None, entropy_BT is not None)
    return PolicyLoss(
        total=total, parts=NamedScalars.of_vector(results, places), mask_BT=kept_BT, details=None
    )


@functools.cache
def _places(has_kl: bool, has_entropy: bool) -> Mapping[str, int]:
    """Where among the results of the kernel the parts of a loss are."""
    is_given = {"kl": has_kl, "entropy": has_entropy}
    return {name: place for place, name in enumerate(RESULTS) if is_given.get(name, True)}


def policy_statistics(
    loss: PolicyLoss,
    *,
    agg_mode: str,
    num_tokens: Count,
    num_sequences: Count,
    norm_factor: Count | None = None,
) -> Mapping[str, Scalar]:
    """Scalars that describe an update. All but the extremes are parts of the whole step: micro-batches add up. The
    arguments are those that the loss was computed with.

    ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac   share of tokens whose ratio left the range of
                            the surrogate, whatever the sign of the advantage
    clipfrac                tokens whose loss a bound decided, aggregated as the loss is
    ratio_mean              mean over rows of the mean over tokens
    ratio_max, ratio_min    over valid tokens; -inf and inf if there are none
    approxkl, policykl      (log r)^2 / 2 and log r against the old policy, aggregated as the loss is
    """
    details = loss.details
    if details is None:
        return loss.parts.renamed({name: name for name in STATISTICS})
    mask_BT, ratio_BT = loss.mask_BT, details.ratio_BT
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences, "norm_factor": norm_factor}
    nowhere_BT = torch.zeros_like(mask_BT)
    high_BT = nowhere_BT if details.high is None else ratio_BT > details.high
    low_BT = nowhere_BT if details.low is None else ratio_BT < details.low
    out_of_range = {"high_": high_BT, "low_": low_BT, "": high_BT | low_BT}
    # One column of fill so that a batch without rows or tokens has extremes too.
    fill = ratio_BT.new_full((1,), torch.inf)
    return {
        **{
            f"ppo_ratio_{side}clipfrac": aggregate_loss(
                share_BT.float(), mask_BT, "token-mean", num_tokens=num_tokens
            )
            for side, share_BT in out_of_range.items()
        },
        "clipfrac": aggregate_loss(details.clipped_BT.float(), mask_BT, agg_mode, **counts),
        "ratio_mean": aggregate_loss(
            ratio_BT, mask_BT, "seq-mean-token-mean", num_sequences=num_sequences
        ),
        "ratio_max": torch.cat([select(ratio_BT, mask_BT, -torch.inf).flatten(), -fill]).max(),
        "ratio_min": torch.cat([select(ratio_BT, mask_BT, torch.inf).flatten(), fill]).min(),
        "approxkl": aggregate_loss(
            0.5 * details.log_ratio_BT.square(), mask_BT, agg_mode, **counts
        ),
        "policykl": aggregate_loss(details.log_ratio_BT, mask_BT, agg_mode, **counts),
    }


def _check_clip_range(low: float, high: float, *, allow_no_lower_bound: bool = False) -> None:
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip bounds must not be negative, got low={low}, high={high}")
    if low > 1 or (low == 1 and not allow_no_lower_bound):
        raise ValueError(
            f"the lower clip bound must be below 1 (the ratio is clipped to 1 - low), got {low}"
        )
