"""The policy loss of RLVR pipelines: one prompt and one answer in a row, rows dropped by masks or
weighted."""

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
    """Weights of the rows, (B,), mean 1 over the rows that are trained on: more for difficult
    prompts (`difficulty_loss_weight`, from the column `difficulty` in [0, 1]) and for short answers
    (`length_loss_weight`).

    The pipeline calls this on the whole batch and keeps the result as the column `sample_weights`.
    ROLL normalises inside each micro-batch, which makes the gradient depend on how the batch is
    cut.
    """
    mask_BT = loss_mask(data, _mask_key(data))
    difficulty_B = None
    if pipeline_config.difficulty_loss_weight:
        values = column(data, "difficulty", "difficulty_loss_weight")
        for row, value in enumerate([] if isinstance(values, Tensor) else values):
            if not isinstance(value, Real):
                raise ValueError(
                    f"column 'difficulty', row {row}: expected a number in [0, 1], found {value!r}"
                )
        if not isinstance(values, Tensor):
            values = torch.tensor([float(value) for value in values])
        difficulty_B = values.to(mask_BT.device, torch.float32)
    return mean_one_sample_weights(
        valid_B=mask_BT.any(-1),
        difficulty_B=difficulty_B,
        lengths_B=mask_BT.sum(-1) if pipeline_config.length_loss_weight else None,
    )


class ActorWorker(BaseActorWorker):
    """An actor with row weights and an importance ratio per token, run or row
    (`importance_sampling`)."""

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """(weighted PPO + KL) * rl_loss_coef - entropy, on the tokens of `final_response_mask`.

        Args:
            data: as for the base class; `final_response_mask` (B, S-1), default `response_mask`;
                `sample_weights` (B,) if row weights are on.
            output_tensor: logits (B, S, V), or hidden states with the head as `LinearLogits`.
        """
        config = self.pipeline_config
        terms = self.policy_terms(data, output_tensor, _mask_key(data))
        weights_B = None
        if config.difficulty_loss_weight or config.length_loss_weight:
            # Without counts of a step the batch is the whole step.
            if SAMPLE_WEIGHTS not in data and "global_valid_samples" not in data.meta_info:
                weights_B = compute_sample_weights(data, config)
            else:
                needed_by = (
                    "difficulty_loss_weight or length_loss_weight (see compute_sample_weights)"
                )
                weights_B = column(data, SAMPLE_WEIGHTS, needed_by)
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
        counts = loss_counts(data, "response_mask", loss_mask(data), config)
        valid_B = loss.mask_BT.any(-1)
        num_valid = valid_B.sum()
        if weights_B is None:
            weights_B = torch.ones_like(valid_B, dtype=torch.float32)
        metrics |= {
            "actor/weighted_pg_loss@sum": loss.weighted_pg,
            "actor/valid_samples@sum": num_valid,
            "actor/total_samples@sum": float(len(data)),
            "actor/valid_sample_ratio@sum": num_valid / counts["num_sequences"],
            "actor/sample_weights_mean@mean": select(weights_B, valid_B).sum() / num_valid,
            "actor/sample_weights_min@min": select(weights_B, valid_B, torch.inf).min(),
            "actor/sample_weights_max@max": select(weights_B, valid_B, -torch.inf).max(),
        }
        return loss.total, report(metrics, loss.mask_BT)


ActorPGWorker = ActorWorker  # ROLL's name; every actor reads `pg_variant`


def _mask_key(data: DataProto) -> str:
    return "final_response_mask" if "final_response_mask" in data else "response_mask"
