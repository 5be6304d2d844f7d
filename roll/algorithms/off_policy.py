"""The gap between the trainer's and the inference engine's log-probabilities of the same tokens:
weights and filters.

The engine that sampled the tokens and the model that is trained compute slightly (after a delay:
very) different probabilities. The ratio of the two is a weight that corrects for it, and a reason
to leave tokens out where it is extreme. All tensors are (B, T); masked entries may hold anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, aggregate_loss
from roll.algorithms.kl import MAX_LOG_RATIO
from roll.algorithms.masking import check_mask, masked_mean, masked_sum, segment_masked_mean, select

# token: each by itself. segment: mean over a contiguous run of the mask. geometric: mean over the
# row. sequence: sum over the row. Segment, geometric and sequence values are the same for all
# tokens of a run or a row.
LEVELS = ("token", "segment", "geometric", "sequence")


@dataclass(frozen=True)
class TrainInferGap:
    """For every level: the ratio exp(log p_old - log p_infer) and the difference p_old - p_infer, 0
    where masked.

    Means and sums are taken of the log-ratio and of the token difference; the ratio is the exp of
    the result.
    """

    ratio: Mapping[str, Tensor]
    diff: Mapping[str, Tensor]
    mask_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class RangeFilter:
    """Keep tokens whose ratio, and whose difference, at `level` lie in the (inclusive) ranges;
    None: any value."""

    level: str = "token"
    ratio_range: tuple[float, float] | None = None
    diff_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_level(self.level, "filter")
        for name, bounds in (("ratio", self.ratio_range), ("diff", self.diff_range)):
            if bounds is not None and not bounds[0] <= bounds[1]:
                raise ValueError(
                    f"the {name} range of a filter must satisfy low <= high, got {bounds}"
                )


def check_level(level: str, what: str) -> None:
    """Raise ValueError unless `level` is one of LEVELS."""
    if level not in LEVELS:
        raise ValueError(f"unknown {what} level {level!r}; known: {', '.join(LEVELS)}")


def train_infer_gap(
    *, old_log_probs_BT: Tensor, infer_log_probs_BT: Tensor, mask_BT: Tensor
) -> TrainInferGap:
    """Measure the gap at all four levels. Exponents saturate at +-20, so every ratio is finite.

    Example: log-ratios [0.2, 0.4, x, 0.9] under mask [1, 1, 0, 1] -> segment ratios [e^0.3, e^0.3,
    0, e^0.9], geometric e^0.5 and sequence e^1.5 on the three valid tokens.
    """
    check_mask(old_log_probs_BT, mask_BT, "old_log_probs")
    check_mask(infer_log_probs_BT, mask_BT, "infer_logprobs")
    old_BT, infer_BT = select(old_log_probs_BT, mask_BT), select(infer_log_probs_BT, mask_BT)
    log_ratio = _by_level(old_BT - infer_BT, mask_BT)
    diff = _by_level(_bounded_exp(old_BT) - _bounded_exp(infer_BT), mask_BT)
    return TrainInferGap(
        ratio={
            level: select(_bounded_exp(value_BT), mask_BT) for level, value_BT in log_ratio.items()
        },
        diff={level: select(value_BT, mask_BT) for level, value_BT in diff.items()},
        mask_BT=mask_BT.bool(),
    )


def importance_weight(
    gap: TrainInferGap, *, level: str, upper_bound: float | None
) -> tuple[Tensor, Tensor]:
    """(weight_BT, clipped_BT): the ratio at `level`, at most `upper_bound`, 1 where masked; where
    the bound held."""
    check_level(level, "importance weight")
    if upper_bound is not None and not upper_bound > 0:
        raise ValueError(
            f"the upper bound of importance weights must be positive, got {upper_bound}"
        )
    ratio_BT = gap.ratio[level]
    if upper_bound is None:
        return select(ratio_BT, gap.mask_BT, fill=1.0), torch.zeros_like(gap.mask_BT)
    return select(ratio_BT.clamp(max=upper_bound), gap.mask_BT, fill=1.0), ratio_BT > upper_bound


def in_range(values_BT: Tensor, bounds: tuple[float, float], mask_BT: Tensor) -> Tensor:
    """True where low <= value <= high, and where masked."""
    return ((values_BT >= bounds[0]) & (values_BT <= bounds[1])) | ~mask_BT.bool()


def apply_filters(
    gap: TrainInferGap, filters: Sequence[RangeFilter]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(keep_BT, passed): tokens that pass all filters, and for each `<level>_<ratio|diff>` those
    that pass its tests.

    Both are True where masked: a filter says nothing about tokens that are not there.
    """
    passed: dict[str, Tensor] = {}
    for item in filters:
        for kind, bounds in (("ratio", item.ratio_range), ("diff", item.diff_range)):
            if bounds is None:
                continue
            values_BT = gap.ratio[item.level] if kind == "ratio" else gap.diff[item.level]
            ok_BT = in_range(values_BT, bounds, gap.mask_BT)
            name = f"{item.level}_{kind}"
            passed[name] = passed[name] & ok_BT if name in passed else ok_BT
    keep_BT = torch.ones_like(gap.mask_BT)
    for ok_BT in passed.values():
        keep_BT = keep_BT & ok_BT
    return keep_BT, passed


def gap_statistics(gap: TrainInferGap, *, num_sequences: Count | None = None) -> dict[str, Tensor]:
    """`ratio_<level>_mean` and `diff_<level>_mean`: mean over the rows of the step of the mean over
    a row's tokens."""
    return {
        f"{kind}_{level}_mean": aggregate_loss(
            values[level], gap.mask_BT, "seq-mean-token-mean", num_sequences=num_sequences
        )
        for kind, values in (("ratio", gap.ratio), ("diff", gap.diff))
        for level in LEVELS
    }


def _by_level(values_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    return {
        "token": values_BT,
        "segment": segment_masked_mean(values_BT, mask_BT),
        "geometric": masked_mean(values_BT, mask_BT, dim=-1).unsqueeze(-1).expand_as(values_BT),
        "sequence": masked_sum(values_BT, mask_BT, dim=-1).unsqueeze(-1).expand_as(values_BT),
    }


def _bounded_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
