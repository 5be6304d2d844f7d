"""The preference loss of the DPO pipeline. Rows are interleaved: row 2i is chosen, row 2i+1 rejected."""

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roll.algorithms.aggregation import Count, at_least_one
from roll.algorithms.preference_loss import (
    SMOOTHED_LOSSES,
    completion_mask,
    pair_accuracy,
    preference_loss,
    sequence_log_probs,
    split_pairs,
)
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.base_worker import ActorWorker as BaseActorWorker
from roll.pipeline.base_worker import ModelOutput
from roll.pipeline.loss_io import Metrics, optional_column, report
from roll.utils.columns import column
from roll.utils.metrics.reduction import append_to_dict

REFERENCE_SUMS = (
    "reference_sums"  # a column: log-probability of each row's completion under the reference
)


def get_logps(
    per_token_logps: Tensor, attention_mask: Tensor, prompt_id_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), each (P,): summed log-probabilities of the completions.

    Args:
        per_token_logps: (2P, S-1); attention_mask: (2P, S); prompt_id_lens: (2P,), attended tokens of the prompt.
    """
    return split_pairs(sequence_log_probs(per_token_logps, attention_mask, prompt_id_lens)[0])


def loss_fn(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_chosen_logps: Tensor,
    reference_rejected_logps: Tensor,
    ipo: bool = False,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, chosen_rewards, rejected_rewards): the mean over these pairs, and the rewards of each, (P,).

    `ipo` is IPO on summed log-probabilities; `preference_loss` has the other variants.
    """
    result = preference_loss(
        policy_chosen_P=policy_chosen_logps,
        policy_rejected_P=policy_rejected_logps,
        reference_chosen_P=reference_chosen_logps,
        reference_rejected_P=reference_rejected_logps,
        loss_type="ipo_sum" if ipo else "sigmoid",
        beta=beta,
        label_smoothing=label_smoothing,
    )
    return result.loss, result.chosen_rewards_P, result.rejected_rewards_P


@dataclass(frozen=True)
class PreferenceSettings:
    """Options of the loss, from the pipeline's configuration; `meta_info` of a batch may override each of them."""

    beta: float
    label_smoothing: float
    loss_type: str
    reference_free: bool
    discopop_tau: float

    @classmethod
    def of(cls, pipeline_config: Any, meta_info: dict[str, Any]) -> "PreferenceSettings":
        def option(name: str, *default: Any) -> Any:
            return (
                meta_info[name] if name in meta_info else getattr(pipeline_config, name, *default)
            )

        # ROLL's configurations have the first three only; the defaults of the others are ROLL's behaviour.
        beta, label_smoothing, ipo = option("beta"), option("label_smoothing"), option("ipo")
        loss_type = option("loss_type", "sigmoid")
        if ipo and loss_type not in ("sigmoid", "ipo_sum"):
            raise ValueError(
                f"ipo=True and loss_type={loss_type!r} ask for two different losses; set one of them"
            )
        loss_type = "ipo_sum" if ipo else loss_type
        if label_smoothing and loss_type not in SMOOTHED_LOSSES:
            warnings.warn(
                f"label_smoothing={label_smoothing} has no effect on loss type {loss_type!r}",
                stacklevel=2,
            )
        return cls(
            beta,
            label_smoothing,
            loss_type,
            option("reference_free", False),
            option("discopop_tau", 0.05),
        )


class ActorWorker(BaseActorWorker):
    """A policy trained on preference pairs, and the reference that it is compared with."""

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """Log-probability of every token given those before it: `log_probs`, (2P, S-1), prompt tokens included.

        Args:
            data: `input_ids`, `attention_mask` (2P, S), rows interleaved chosen, rejected. With
                `meta_info["completion_only"]` the tokens of the prompt, by `prompt_id_lens` (2P,), are 0: the loss does
                not read them, and scoring a token takes as much work as a layer or two.
        """
        # Sizes of this pipeline count pairs.
        defaults = {"micro_batch_size": 2 * self.worker_config.infer_batch_size}
        data.meta_info = {**defaults, **data.meta_info}
        return super().compute_log_probs(data)

    def forward_func_log_probs(
        self, data: DataProto, output_tensor: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_RS = data["attention_mask"]
        if data.meta_info.get("completion_only", False):
            mask_RT = completion_mask(mask_RS, data["prompt_id_lens"])
        else:
            mask_RT = mask_RS[:, 1:].bool()
        log_probs_RT, _ = self.score(data, output_tensor, mask_RT)
        return log_probs_RT, {"log_probs": log_probs_RT}

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimizer step on all pairs. Returns no rows, only `meta_info["metrics"]`."""
        metrics: dict[str, Any] = {}
        with self.timed("train_step", metrics):
            data = self.strategy.get_data_input(data)
            data.meta_info = {**data.meta_info, "rows_per_unit": 2, "loss_mask_keys": []}
            append_to_dict(metrics, self.strategy.train_step(data, self.loss_func))
        return DataProto(meta_info={"metrics": self.step_metrics("actor", metrics, 1)})

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """Sum of the pairs' losses over the pairs of the whole optimizer step. Returns (loss, metrics).

        Args:
            data: `input_ids`, `attention_mask` (2P, S); `prompt_id_lens` (2P,); unless `reference_free` also
                `reference_log_probs` (2P, S-1), or their sums over the completions, `reference_sums` (2P,).
            output_tensor: the model's logits (2P, S, V), or hidden states with the head as `LinearLogits`.
        """
        settings = PreferenceSettings.of(self.pipeline_config, data.meta_info)
        mask_RS, prompt_lens_R = data["attention_mask"], data["prompt_id_lens"]
        # Only completion tokens are scored: the loss needs no others.
        log_probs_RT, _ = self.score(data, output_tensor, completion_mask(mask_RS, prompt_lens_R))
        log_probs_R, lens_R = sequence_log_probs(log_probs_RT, mask_RS, prompt_lens_R)
        chosen_P, rejected_P = split_pairs(log_probs_R)
        chosen_lens_P, rejected_lens_P = split_pairs(lens_R)
        reference_chosen_P = reference_rejected_P = None
        if not settings.reference_free:
            reference_R = optional_column(data, REFERENCE_SUMS)
            if reference_R is None:
                reference_RT = column(data, "reference_log_probs", "a loss with a reference")
                reference_R, _ = sequence_log_probs(reference_RT, mask_RS, prompt_lens_R)
            reference_chosen_P, reference_rejected_P = split_pairs(reference_R)
        num_pairs = _num_pairs(data)
        result = preference_loss(
            policy_chosen_P=chosen_P,
            policy_rejected_P=rejected_P,
            reference_chosen_P=reference_chosen_P,
            reference_rejected_P=reference_rejected_P,
            chosen_lens_P=chosen_lens_P,
            rejected_lens_P=rejected_lens_P,
            loss_type=settings.loss_type,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            discopop_tau=settings.discopop_tau,
            num_pairs=num_pairs,
        )
        margins_P = result.chosen_rewards_P - result.rejected_rewards_P
        per_pair = {
            "acc": pair_accuracy(margins_P),
            "margin": margins_P,
            "chosen_reward": result.chosen_rewards_P,
            "reject_reward": result.rejected_rewards_P,
            "chosen_logps": chosen_P,
            "reject_logps": rejected_P,
        }
        metrics = {
            f"actor/{name}@sum": values_P.sum() / num_pairs for name, values_P in per_pair.items()
        }
        return result.loss, report({"actor/loss@sum": result.loss, **metrics}, lens_R)


def _num_pairs(data: DataProto) -> Count:
    """Pairs of the whole optimizer step where a strategy counted its rows, else of this batch."""
    counts = data.meta_info.get("global_valid_samples")
    return at_least_one((len(data) if counts is None else counts["default"]) / 2)
