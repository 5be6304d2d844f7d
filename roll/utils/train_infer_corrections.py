"""Train/infer correction of a batch: importance weights, token filters and metrics as the
configuration asks for them.

The mathematics is in `roll.algorithms.off_policy`. Metrics keep ROLL's names; all of them are parts
of the whole optimizer step (`@sum`), `train_infer_final_mask_mean` included, which ROLL averages
over micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, aggregate_loss
from roll.algorithms.off_policy import (
    RangeFilter,
    apply_filters,
    gap_statistics,
    importance_weight,
    train_infer_gap,
)
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.columns import with_columns
from roll.utils.metrics.reduction import bring_to_host

if TYPE_CHECKING:
    from roll.configs.ppo_config import TrainInferCorrectionConfig

IS_WEIGHT = "train_infer_is_weight"
FILTER_MASK = "train_infer_filter_mask"


@dataclass(frozen=True)
class TrainInferCorrection:
    """weight_BT multiplies the loss (1 where masked, and everywhere when weights are off); keep_BT,
    bool, is False on tokens that a filter drops and True everywhere else, masked positions
    included; metrics are 0-d tensors."""

    weight_BT: Tensor
    keep_BT: Tensor
    metrics: dict[str, Tensor]


def correction_enabled(cfg: "TrainInferCorrectionConfig") -> bool:
    """Whether the configuration asks for anything that needs the engine's log-probabilities."""
    return cfg.is_weight.enabled or any(item.enabled for item in cfg.filters)


def train_infer_correction(
    cfg: "TrainInferCorrectionConfig",
    *,
    mask_BT: Tensor,
    old_log_probs_BT: Tensor,
    infer_log_probs_BT: Tensor,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> TrainInferCorrection:
    """Weights and filters from the log-probabilities of the trainer (old) and of the engine
    (infer). The counts are those of the optimizer step, by default those of `mask_BT`."""
    gap = train_infer_gap(
        old_log_probs_BT=old_log_probs_BT, infer_log_probs_BT=infer_log_probs_BT, mask_BT=mask_BT
    )
    statistics = gap_statistics(gap, num_sequences=num_sequences)
    metrics = {f"actor/train_infer_{name}@sum": value for name, value in statistics.items()}

    def token_mean(share_BT: Tensor) -> Tensor:
        return aggregate_loss(share_BT.float(), mask_BT, "token-mean", num_tokens=num_tokens)

    weight_BT = gap.ratio["token"].new_ones(gap.mask_BT.shape)
    if cfg.is_weight.enabled:
        level, bound = cfg.is_weight.weight_type, cfg.is_weight.upper_bound
        weight_BT, clipped_BT = importance_weight(gap, level=level, upper_bound=bound)
        weight_BT = weight_BT.detach() if cfg.is_weight.detach else weight_BT
        if bound is not None:
            metrics["actor/is_weight_clipfrac@sum"] = token_mean(clipped_BT)

    filters = [
        RangeFilter(
            level=item.agg_type,
            ratio_range=(item.ratio_low, item.ratio_high) if item.ratio_enabled else None,
            diff_range=(item.diff_low, item.diff_high) if item.diff_enabled else None,
        )
        for item in cfg.filters
        if item.enabled
    ]
    keep_BT, passed = apply_filters(gap, filters)
    metrics |= {
        f"actor/train_infer_{name}_mask_mean@sum": token_mean(ok_BT)
        for name, ok_BT in passed.items()
    }
    if cfg.filters:
        metrics["actor/train_infer_final_mask_mean@sum"] = token_mean(keep_BT)
    return TrainInferCorrection(weight_BT, keep_BT, metrics)


def compute_train_infer_correction(
    cfg: "TrainInferCorrectionConfig",
    response_mask: Tensor,
    old_log_probs: Tensor,
    infer_log_probs: Tensor,
    global_valid_samples: Count | None = None,
    global_valid_tokens: Count | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(is_weight, filter_mask, metrics) for tensors of shape (B, T); see `TrainInferCorrection`."""
    result = train_infer_correction(
        cfg,
        mask_BT=response_mask,
        old_log_probs_BT=old_log_probs,
        infer_log_probs_BT=infer_log_probs,
        num_tokens=global_valid_tokens,
        num_sequences=global_valid_samples,
    )
    return result.weight_BT, result.keep_BT, bring_to_host([result.metrics])[0]


def apply_train_infer_correction_to_batch(
    pipeline_config: Any,
    batch: DataProto,
    stat_mask_key: str = "response_mask",
    update_mask_keys: Sequence[str] | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Correction of a whole batch on the driver, from its columns `old_log_probs` and
    `infer_logprobs`.

    Returns (a batch with the new columns `train_infer_is_weight` and `train_infer_filter_mask`,
    both (B, T); metrics). The losses read both. The masks stay as they are, so that filtered tokens
    leave the numerator of the loss but not its counts, and a dropped token does not split a turn in
    two; this differs from ROLL, which edits `stat_mask_key`. Masks named in `update_mask_keys` are
    filtered as well: (B, T) masks directly, (B, S) masks on columns 1 and up.

    Without `infer_logprobs` or `old_log_probs` there is nothing to correct: the weights are 1 and
    there are no metrics. That is a KeyError when `pipeline_config.train_infer_correction` enables
    weights or filters.
    """
    cfg = pipeline_config.train_infer_correction
    width = batch["response_mask"].shape[1] - 1
    mask_BT = batch[stat_mask_key][:, -width:]
    # Integers are a placeholder for log-probabilities that nobody computed.
    missing = [
        key
        for key in ("old_log_probs", "infer_logprobs")
        if key not in batch or not batch[key].is_floating_point()
    ]
    if missing:
        if correction_enabled(cfg):
            raise KeyError(
                f"train_infer_correction is enabled but the batch has no {' and no '.join(missing)}"
            )
        ones_BT = torch.ones_like(mask_BT, dtype=torch.float32)
        return with_columns(batch, **{IS_WEIGHT: ones_BT, FILTER_MASK: ones_BT.bool()}), {}
    weight_BT, keep_BT, metrics = compute_train_infer_correction(
        cfg, mask_BT, batch["old_log_probs"], batch["infer_logprobs"]
    )
    masks = {key: batch[key].clone() for key in update_mask_keys or ()}
    for mask in masks.values():
        mask[:, -width:].masked_fill_(~keep_BT, 0)
    return with_columns(batch, **{IS_WEIGHT: weight_BT, FILTER_MASK: keep_BT}, **masks), metrics
