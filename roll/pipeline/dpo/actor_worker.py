"""The preference loss of the DPO pipeline. Rows alternate: row 2i is chosen, 2i+1 rejected."""

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roll.algorithms.aggregation import Count, at_least_one
from roll.algorithms.preference_loss import (
    SMOOTHED_LOSSES,
    PreferenceLoss,
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

# A column: log-probability of each row's completion under the reference.
REFERENCE_SUMS = "reference_sums"


def get_logps(
    per_token_logps: Tensor, attention_mask: Tensor, prompt_id_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), each (P,): summed log-probabilities of the completions.

    Args:
        per_token_logps: (2P, S-1).
        attention_mask: (2P, S).
        prompt_id_lens: (2P,), attended tokens of the prompt.
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
    """(loss, chosen_rewards, rejected_rewards): the mean over these pairs, and the rewards, (P,).

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
    """Options of the loss, from the config; `meta_info` of a batch may override each of them."""

    beta: float
    label_smoothing: float
    loss_type: str
    reference_free: bool
    discopop_tau: float

    @classmethod
    def of(cls, pipeline_config: Any, meta_info: dict[str, Any]) -> "PreferenceSettings":
        def option(name: str, *default: Any) -> Any:
            if name in meta_info:
                return meta_info[name]
            return getattr(pipeline_config, name, *default)

        # ROLL's configs have the first three only; the defaults of the others are its behaviour.
        beta, label_smoothing, ipo = option("beta"), option("label_smoothing"), option("ipo")
        loss_type = option("loss_type", "sigmoid")
        if ipo and loss_type not in ("sigmoid", "ipo_sum"):
            raise ValueError(
                f"ipo=True and loss_type={loss_type!r} ask for two different losses; set one of "
                "them"
            )
        loss_type = "ipo_sum" if ipo else loss_type
        if label_smoothing and loss_type not in SMOOTHED_LOSSES:
            warnings.warn(
                f"label_smoothing={label_smoothing} has no effect on loss type {loss_type!r}",
                stacklevel=2,
            )
        free, tau = option("reference_free", False), option("discopop_tau", 0.05)
        return cls(beta, label_smoothing, loss_type, free, tau)

    def loss(
        self, policy_R: Tensor, reference_R: Tensor | None, lens_R: Tensor, **options: Any
    ) -> tuple[PreferenceLoss, dict[str, Tensor]]:
        """The loss of pairs, and their metrics by name, (P,) each.

        Args:
            policy_R, reference_R: (2P,) log-probs of the completions; no reference if it is free.
            lens_R: (2P,) their lengths.
        """
        chosen_P, rejected_P = split_pairs(policy_R)
        chosen_lens_P, rejected_lens_P = split_pairs(lens_R)
        reference_chosen_P = reference_rejected_P = None
        if reference_R is not None:
            reference_chosen_P, reference_rejected_P = split_pairs(reference_R)
        result = preference_loss(
            policy_chosen_P=chosen_P,
            policy_rejected_P=rejected_P,
            reference_chosen_P=reference_chosen_P,
            reference_rejected_P=reference_rejected_P,
            chosen_lens_P=chosen_lens_P,
            rejected_lens_P=rejected_lens_P,
            loss_type=self.loss_type,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            discopop_tau=self.discopop_tau,
            **options,
        )
        margins_P = result.chosen_rewards_P - result.rejected_rewards_P
        return result, {
            "acc": pair_accuracy(margins_P),
            "margin": margins_P,
            "chosen_reward": result.chosen_rewards_P,
            "reject_reward": result.rejected_rewards_P,
            "chosen_logps": chosen_P,
            "reject_logps": rejected_P,
        }


class ActorWorker(BaseActorWorker):
    """A policy trained on preference pairs, and the reference that it is compared with."""

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """Log-probability of every token given those before it: `log_probs`, (2P, S-1).

        With `meta_info["completion_only"]` the tokens of the prompt, by `prompt_id_lens` (2P,), are
        0: the loss does not read them, and computing one takes as much work as a layer or two.
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
        """Sum of the pairs' losses over the pairs of the whole optimizer step.

        Args:
            data: `input_ids`, `attention_mask` (2P, S); `prompt_id_lens` (2P,); with a reference
                also `reference_log_probs` (2P, S-1), or their sums, `reference_sums` (2P,).
            output_tensor: logits (2P, S, V), or hidden states with the head as `LinearLogits`.
        """
        settings = PreferenceSettings.of(self.pipeline_config, data.meta_info)
        mask_RS, prompt_lens_R = data["attention_mask"], data["prompt_id_lens"]
        # Only completion tokens are computed: the loss needs no others.
        log_probs_RT, _ = self.score(data, output_tensor, completion_mask(mask_RS, prompt_lens_R))
        log_probs_R, lens_R = sequence_log_probs(log_probs_RT, mask_RS, prompt_lens_R)
        reference_R = None
        if not settings.reference_free:
            reference_R = optional_column(data, REFERENCE_SUMS)
            if reference_R is None:
                reference_RT = column(data, "reference_log_probs", "a loss with a reference")
                reference_R, _ = sequence_log_probs(reference_RT, mask_RS, prompt_lens_R)
        # Of the whole optimizer step where a strategy counted its rows, else of this batch.
        counts = data.meta_info.get("global_valid_samples")
        rows = len(data) if counts is None else counts["default"]
        num_pairs: Count = at_least_one(rows / 2)
        result, per_pair = settings.loss(log_probs_R, reference_R, lens_R, num_pairs=num_pairs)
        metrics = {
            f"actor/{name}@sum": values_P.sum() / num_pairs for name, values_P in per_pair.items()
        }
        return result.loss, report({"actor/loss@sum": result.loss, **metrics}, lens_R)
