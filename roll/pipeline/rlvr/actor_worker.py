"""The policy loss of RLVR pipelines: one prompt and one answer in a row, rows dropped by masks or weighted."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import mean_one_sample_weights
from roll.algorithms.masking import select
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.base_worker import ActorWorker as BaseActorWorker
from roll.pipeline.base_worker import ModelOutput
from roll.pipeline.loss_io import Metrics, loss_counts, report
from roll.utils.columns import column, loss_mask

SAMPLE_WEIGHTS = "sample_weights"


def compute_sample_weights(data: DataProto, pipeline_config: Any) -> Tensor:
    """Weights of the rows, (B,), mean 1 over the rows that are trained on: more for difficult prompts
    (`difficulty_loss_weight`, from the column `difficulty` in [0, 1]) and for short answers (`length_loss_weight`).

    The pipeline calls this on the whole batch and keeps the result as the column `sample_weights`. ROLL normalises
    inside each micro-batch, which makes the gradient depend on how the batch is cut.
    """
    mask_BT = loss_mask(data, _mask_key(data))
    difficulty_B = None
    if pipeline_config.difficulty_loss_weight:
        values = column(data, "difficulty", "difficulty_loss_weight")
        difficulty_B = _numbers(values).to(mask_BT.device)
    return mean_one_sample_weights(
        valid_B=mask_BT.any(-1),
        difficulty_B=difficulty_B,
        lengths_B=mask_BT.sum(-1) if pipeline_config.length_loss_weight else None,
    )


class ActorWorker(BaseActorWorker):
    """An actor with row weights and an importance ratio per token, run or row (`importance_sampling`)."""

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """(weighted PPO + KL) * rl_loss_coef - entropy, on the tokens of `final_response_mask`.

        Args:
            data: as for the base class; `final_response_mask` (B, S-1), default `response_mask`; `infer_logprobs`
                (B, S-1) if `train_infer_correction` is on; `sample_weights` (B,) if row weights are on.
            output_tensor: the model's logits (B, S, V), or hidden states with the head as `LinearLogits`.
        """
        config = self.pipeline_config
        terms = self.policy_terms(data, output_tensor, _mask_key(data))
        weights_B = self._sample_weights(data)
        correction = self.train_infer_correction(data, terms)
        loss = self.policy_loss(
            terms,
            ratio_type=config.importance_sampling,
            is_weight_BT=correction.is_weight_BT,
            keep_BT=correction.keep_BT,
            sample_weights_B=weights_B,
            pg_coef=config.rl_loss_coef,
        )
        metrics = self.policy_metrics(loss, terms, data) | correction.metrics
        metrics["actor/weighted_pg_loss@sum"] = loss.weighted_pg
        metrics |= self._sample_metrics(data, loss.mask_BT.any(-1), weights_B)
        return loss.total, report(metrics, loss.num_valid)

    def _sample_weights(self, data: DataProto) -> Tensor | None:
        config = self.pipeline_config
        if not (config.difficulty_loss_weight or config.length_loss_weight):
            return None
        if SAMPLE_WEIGHTS not in data and "global_valid_samples" not in data.meta_info:
            return compute_sample_weights(data, config)  # the batch is the whole step
        return column(
            data,
            SAMPLE_WEIGHTS,
            "difficulty_loss_weight or length_loss_weight (see compute_sample_weights)",
        )

    def _sample_metrics(
        self, data: DataProto, valid_B: Tensor, weights_B: Tensor | None
    ) -> dict[str, Tensor | float]:
        counts = loss_counts(data, "response_mask", loss_mask(data), self.pipeline_config)
        num_valid = valid_B.sum()
        weights_B = (
            torch.ones_like(valid_B, dtype=torch.float32) if weights_B is None else weights_B
        )
        return {
            "actor/valid_samples@sum": num_valid,
            "actor/total_samples@sum": float(len(data)),
            "actor/valid_sample_ratio@sum": num_valid / counts["num_sequences"],
            "actor/sample_weights_mean@mean": select(weights_B, valid_B).sum() / num_valid,
            "actor/sample_weights_min@min": select(weights_B, valid_B, torch.inf).min(),
            "actor/sample_weights_max@max": select(weights_B, valid_B, -torch.inf).max(),
        }


def _mask_key(data: DataProto) -> str:
    return "final_response_mask" if "final_response_mask" in data else "response_mask"


def _numbers(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.float()
    for row, value in enumerate(values):
        if not isinstance(value, Real):
            raise ValueError(
                f"column 'difficulty', row {row}: expected a number in [0, 1], found {value!r}"
            )
    return torch.tensor([float(value) for value in values])
