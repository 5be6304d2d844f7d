"""What a worker's loss reads from a batch besides its columns, and the metrics that it reports."""

from collections.abc import Mapping, MutableMapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, count_sequences, count_tokens
from roll.algorithms.masking import select
from roll.algorithms.policy_loss import (
    CISPO,
    STATISTICS,
    TOPR,
    KimiK15,
    PolicyLoss,
    PPOClip,
    Reinforce,
    Surrogate,
    TruncatedIS,
    policy_statistics,
)
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.scalars import NamedScalars, Scalar
from roll.utils.metrics.deferred import DeferredMetrics
from roll.utils.metrics.reduction import reduce_metrics

Metrics = MutableMapping[str, float]

# Names that configurations use, where they differ from those of `roll.algorithms.policy_loss`.
RATIO_TYPES = {"seq": "sequence", "seq_token": "sequence_token"}
LOG_RATIO_LIMIT = 20.0  # beyond which a ratio is as good as infinite
# ROLL's names of the parts of a policy loss and of its statistics, with how micro-batches are reduced.
_TAGS = {"ratio_max": "@max", "ratio_min": "@min"}
_PARTS = {"pg": "pg_loss", "kl": "kl_loss", "total": "total_loss", "entropy": "entropy"}
POLICY_METRICS = {name: f"actor/{name}{_TAGS.get(name, '@sum')}" for name in STATISTICS} | {
    name: f"actor/{metric}@sum" for name, metric in _PARTS.items()
}


class LossCounts(TypedDict):
    """The denominators of a loss, under the names of `aggregate_loss`'s arguments."""

    num_tokens: Count
    num_sequences: Count
    norm_factor: Count | None


def optional_column(data: DataProto, key: str) -> Any:
    """The column `key`, or None."""
    return data[key] if key in data else None  # noqa: SIM401, a DataProto is not a dict


def loss_counts(data: DataProto, mask_key: str, mask_BT: Tensor, config: Any) -> LossCounts:
    """The denominators of a loss over `mask_key`, whose (B, T) form is `mask_BT`; the constant of
    `seq-mean-token-sum-norm` is `config.loss_norm_factor`, else the padded width of the step.

    A strategy puts those of the whole optimizer step into `meta_info`. A batch without them is the whole step: it is
    counted as it is.
    """
    meta = data.meta_info
    tokens, sequences = meta.get("batch_num_tokens"), meta.get("global_valid_samples")
    if tokens is None and sequences is None:
        tokens, sequences = {mask_key: count_tokens(mask_BT)}, {mask_key: count_sequences(mask_BT)}
    for name, counts in (("batch_num_tokens", tokens), ("global_valid_samples", sequences)):
        if counts is None or mask_key not in counts:
            raise KeyError(
                f"meta_info[{name!r}] has no count for {mask_key!r} (it has {sorted(counts or ())}); "
                f"add {mask_key!r} to meta_info['loss_mask_keys'] before the training step"
            )
    assert tokens is not None and sequences is not None
    # Not a field of ROLL's configurations, so one written for them does not have it.
    norm_factor = getattr(config, "loss_norm_factor", None)
    if norm_factor is None:
        norm_factor = meta.get(
            "loss_norm_width"
        )  # that of the whole step; micro-batches are trimmed to their own
    return {
        "num_tokens": tokens[mask_key],
        "num_sequences": sequences[mask_key],
        "norm_factor": norm_factor,
    }


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high) of the ratio clip: `pg_clip_low`, `pg_clip_high` if `use_pg_clip_range`, else `pg_clip` for both."""
    if config.use_pg_clip_range:
        return config.pg_clip_low, config.pg_clip_high
    if config.pg_clip is None:
        raise ValueError(
            "pg_clip is None; set it, or set use_pg_clip_range with pg_clip_low and pg_clip_high"
        )
    return config.pg_clip, config.pg_clip


def dual_clip_constant(config: Any) -> float | None:
    """c of the dual clip, None when it is off: `dual_clip_c` where the configuration sets it, else ROLL's
    1 + 2 pg_clip (1 + 2 pg_clip_high for a clip range without `pg_clip`)."""
    if not config.dual_clip_loss:
        return None
    # Not a field of ROLL's configurations, so one written for them does not have it.
    constant = getattr(config, "dual_clip_c", None)
    if constant is not None:
        return constant
    return 1 + 2 * (clip_range(config)[1] if config.pg_clip is None else config.pg_clip)


def surrogate_of(pipeline_config: Any, worker_config: Any) -> Surrogate:
    """The surrogate that `worker_config.pg_variant` names: PPO where it is None or not a field."""
    variant = getattr(worker_config, "pg_variant", None) or "ppo"
    if variant == "ppo":
        low, high = clip_range(pipeline_config)
        return PPOClip(clip_low=low, clip_high=high, dual_clip=dual_clip_constant(pipeline_config))
    if variant == "vanilla":
        return Reinforce()
    if variant == "topr":
        names = {
            "positive_weight": "topr_positive_weight",
            "negative_weight": "topr_negative_weight",
        }
        return TOPR(**_given(worker_config, names))
    if variant == "tis":
        return TruncatedIS(
            **_given(worker_config, {"low": "tis_lower_bound", "high": "tis_upper_bound"})
        )
    if variant == "cispo":
        names = {"clip_low": "cispo_epsilon_low", "clip_high": "cispo_epsilon_high"}
        return CISPO(**_given(worker_config, {**names, "drop_clipped": "cispo_use_unified_mask"}))
    if variant == "kimi15":
        return KimiK15(**_given(worker_config, {"tau": "kimi15_tau"}))
    raise ValueError(
        f"unknown pg_variant {variant!r}; known: ppo, vanilla, tis, topr, cispo, kimi15"
    )


def _given(config: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Arguments from those fields that the configuration has; ROLL reads these as options without declaring them."""
    return {
        argument: getattr(config, name)
        for argument, name in fields.items()
        if hasattr(config, name)
    }


def policy_metrics(loss: PolicyLoss, *, agg_mode: str, counts: LossCounts) -> NamedScalars:
    """ROLL's metrics of a policy update. Without a reference the KL is reported as 0."""
    found = loss.parts
    if loss.details is not None:
        found = found | policy_statistics(loss, agg_mode=agg_mode, **counts)
    metrics = found.renamed(POLICY_METRICS)
    if "kl" not in found:
        metrics["actor/kl_loss@sum"] = 0.0
    return metrics


def sampling_metrics(
    log_probs_BT: Tensor, infer_log_probs_BT: Tensor, mask_BT: Tensor, num_tokens: Count
) -> dict[str, Tensor]:
    """How far the policy in training is from the distribution that the tokens were drawn from.

    `gap` is |log p - log q| and `ratio_error` |p / q - 1|, means over tokens; both also at their largest. On-policy all
    are 0 up to rounding, whatever the advantages.
    """
    gap_BT = select(log_probs_BT.detach() - infer_log_probs_BT, mask_BT)
    error_BT = torch.expm1(gap_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).abs()
    return {
        "actor/sampling_gap@sum": gap_BT.abs().sum() / num_tokens,
        "actor/sampling_gap_max@max": gap_BT.abs().max(),
        "actor/sampling_ratio_error@sum": error_BT.sum() / num_tokens,
        "actor/sampling_ratio_error_max@max": error_BT.max(),
    }


def first_update_report(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The gap between sampling and training at the first update, under the names of the run's log.

    `rollout/logprob_gap/mean` and `/max` are |log p_train - log p_sampling| over response tokens, and
    `actor/first_ratio_error` is the mean of |p_train / p_sampling - 1|. {} where the engine gave no log-probabilities.
    """
    reduced = reduce_metrics(
        {key: value for key, value in metrics.items() if key.startswith("actor/first_")}
    )
    if "actor/first_gap@sum" not in reduced:
        return {}
    return {
        "rollout/logprob_gap/mean": reduced["actor/first_gap@sum"],
        "rollout/logprob_gap/max": reduced.get("actor/first_gap_max@max", 0.0),
    }


def report(metrics: Mapping[str, Scalar], valid: Tensor) -> Metrics:
    """The metrics of a loss as floats: a dict, or from a GPU what reads like one, see `DeferredMetrics`.

    `valid` is the mask that they are about, or the number of its ones: extremes and means of nothing do not exist, and
    such metrics are left out.
    """
    deferred = DeferredMetrics(metrics, valid)
    return deferred if valid.is_cuda else deferred.read()
