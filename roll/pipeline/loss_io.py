"""What a worker's loss reads from a batch besides its columns, and the metrics that it reports."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, count_sequences, count_tokens
from roll.algorithms.kl import MAX_LOG_RATIO
from roll.algorithms.masking import select
from roll.algorithms.policy_loss import PolicyLoss
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.metrics.reduction import NUM_VALID, Scalar, bring_to_host, reduce_metrics

Metrics = dict[str, Any]

# Names that configurations use, where they differ from those of `roll.algorithms.policy_loss`.
RATIO_TYPES = {"seq": "sequence", "seq_token": "sequence_token"}


class LossCounts(TypedDict):
    """The denominators of a loss, under the names of `aggregate_loss`'s arguments."""

    num_tokens: Count
    num_sequences: Count
    norm_factor: Count | None


def optional_column(data: DataProto, key: str) -> Any:
    """The column `key`, or None."""
    return data[key] if key in data else None  # noqa: SIM401, a DataProto is not a dict


def loss_counts(data: DataProto, mask_key: str, mask_BT: Tensor, config: Any) -> LossCounts:
    """The denominators of a loss over `mask_key`, whose (B, T) form is `mask_BT`. The constant of
    `seq-mean-token-sum-norm` is `config.loss_norm_factor`, else the padded width of the step.

    A strategy puts those of the whole optimizer step into `meta_info`. A batch without them is the
    whole step: it is counted as it is.
    """
    meta = data.meta_info
    tokens, sequences = meta.get("batch_num_tokens"), meta.get("global_valid_samples")
    if tokens is None and sequences is None:
        tokens, sequences = {mask_key: count_tokens(mask_BT)}, {mask_key: count_sequences(mask_BT)}
    for name, counts in (("batch_num_tokens", tokens), ("global_valid_samples", sequences)):
        if counts is None or mask_key not in counts:
            raise KeyError(
                f"meta_info[{name!r}] has no count for {mask_key!r} (it has "
                f"{sorted(counts or ())}); add {mask_key!r} to meta_info['loss_mask_keys'] before "
                "the training step"
            )
    assert tokens is not None and sequences is not None
    # Not a field of ROLL's configurations, so one written for them does not have it.
    norm_factor = getattr(config, "loss_norm_factor", None)
    if norm_factor is None:
        # That of the whole step: micro-batches are trimmed to their own.
        norm_factor = meta.get("loss_norm_width")
    return {
        "num_tokens": tokens[mask_key],
        "num_sequences": sequences[mask_key],
        "norm_factor": norm_factor,
    }


def policy_metrics(loss: PolicyLoss) -> dict[str, Scalar]:
    """ROLL's metrics of a policy update. Without a reference the KL is reported as 0."""
    metrics: dict[str, Scalar] = {
        "actor/total_loss@sum": loss.total,
        "actor/pg_loss@sum": loss.pg,
        "actor/kl_loss@sum": 0.0 if loss.kl is None else loss.kl,
    }
    if loss.entropy is not None:
        metrics["actor/entropy@sum"] = loss.entropy
    found = loss.statistics
    return metrics | {
        "actor/ppo_ratio_high_clipfrac@sum": found["ppo_ratio_high_clipfrac"],
        "actor/ppo_ratio_low_clipfrac@sum": found["ppo_ratio_low_clipfrac"],
        "actor/ppo_ratio_clipfrac@sum": found["ppo_ratio_clipfrac"],
        "actor/clipfrac@sum": found["clipfrac"],
        "actor/ratio_mean@sum": found["ratio_mean"],
        "actor/ratio_max@max": found["ratio_max"],
        "actor/ratio_min@min": found["ratio_min"],
        "actor/approxkl@sum": found["approxkl"],
        "actor/policykl@sum": found["policykl"],
    }


def sampling_metrics(
    log_probs_BT: Tensor, infer_log_probs_BT: Tensor, mask_BT: Tensor, num_tokens: Count
) -> dict[str, Scalar]:
    """How far the policy in training is from the distribution that the tokens were drawn from.

    `gap` is |log p - log q| and `ratio_error` |p / q - 1|, means over tokens; both also at their
    largest. On-policy all are 0 up to rounding, whatever the advantages.
    """
    gap_BT = select(log_probs_BT.detach() - infer_log_probs_BT, mask_BT)
    error_BT = torch.expm1(gap_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).abs()
    return {
        "actor/sampling_gap@sum": gap_BT.abs().sum() / num_tokens,
        "actor/sampling_gap_max@max": gap_BT.abs().max(),
        "actor/sampling_ratio_error@sum": error_BT.sum() / num_tokens,
        "actor/sampling_ratio_error_max@max": error_BT.max(),
    }


def first_update_report(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The gap between sampling and training at the first update, under the names of the run's log.

    `rollout/logprob_gap/mean` and `/max` are |log p_train - log p_sampling| over response tokens.
    {} where the engine gave no log-probabilities.
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
    """The metrics of a loss: floats, or on a GPU tensors, which the strategy brings to the host at
    the end of the step, those of all micro-batches in one transfer (`bring_to_host`).

    `valid` is the mask that they are about: extremes and means of nothing are left out.
    """
    found: Metrics = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in metrics.items()
    }
    found[NUM_VALID] = valid.sum()
    return found if valid.is_cuda else bring_to_host([found])[0]
