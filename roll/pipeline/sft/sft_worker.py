"""Cross-entropy on the tokens of the answers, for training and for validation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import aggregate_loss
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.linear_logits import LinearLogits
from roll.pipeline.base_worker import ActorWorker, ModelOutput
from roll.pipeline.loss_io import Metrics, loss_counts, report
from roll.utils.columns import loss_mask
from roll.utils.metrics.reduction import append_to_dict

# Positions whose logits are built at the same time to see which token is the most likely one.
_POSITIONS_AT_ONCE = 1024


class SFTWorker(ActorWorker):
    """A model that learns the answers. `response_mask` (B, S) marks their tokens."""

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimizer step on all rows. Returns no rows, only `meta_info["metrics"]`."""
        metrics: dict[str, Any] = {}
        with self.timed("train_step", metrics):
            append_to_dict(
                metrics,
                self.strategy.train_step(self.strategy.get_data_input(data), self.loss_func),
            )
        return DataProto(meta_info={"metrics": self.step_metrics("actor", metrics, 1)})

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """The mean over all answer tokens of the optimizer step of minus their log-probability."""
        mask_BT = loss_mask(data)
        log_probs_BT, _ = self.score(data, output_tensor, mask_BT)
        counts = loss_counts(data, "response_mask", mask_BT, self.pipeline_config)
        loss = aggregate_loss(-log_probs_BT, mask_BT, "token-mean", num_tokens=counts["num_tokens"])
        return loss, report({"actor/loss@sum": loss}, mask_BT)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def evaluate(self, data: DataProto) -> DataProto:
        """How well the model knows the answers.

        Returns (rows,): `loss` summed over the answer, `tokens` in it, and `correct`, how many of
        them are the most likely next token; a row where all are is what greedy decoding would
        answer. And `log_probs`, (rows, S-1), of every token of the answer, 0 elsewhere.
        """
        results = self.strategy.forward_step(
            self.strategy.get_data_input(data), self.forward_func_evaluate
        )
        return DataProto.from_dict(results)

    def forward_func_evaluate(
        self, data: DataProto, output_tensor: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = loss_mask(data)
        log_probs_BT, _ = self.score(data, output_tensor, mask_BT)
        labels = data["input_ids"][:, 1:][mask_BT]
        answer_logits, best = output_tensor[:, :-1][mask_BT], []
        for start in range(0, answer_logits.shape[0], _POSITIONS_AT_ONCE):
            logits = answer_logits[start : start + _POSITIONS_AT_ONCE]
            if isinstance(logits, LinearLogits):
                logits = logits.materialize()
            best.append(logits.argmax(-1))
        is_best_BT = torch.zeros_like(mask_BT)
        is_best_BT[mask_BT] = torch.cat(best) == labels
        loss_B = -log_probs_BT.sum(-1)
        counts = {"tokens": mask_BT.sum(-1), "correct": is_best_BT.sum(-1)}
        return loss_B, {"loss": loss_B, "log_probs": log_probs_BT, **counts}
