"""The policy loss of agentic pipelines: rows are trajectories of several turns, with gaps in `response_mask`."""

from torch import Tensor

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.utils import compute_segment_masked_mean
from roll.pipeline.base_worker import ActorWorker as BaseActorWorker
from roll.pipeline.base_worker import ModelOutput
from roll.pipeline.loss_io import Metrics, report

__all__ = ["ActorWorker", "compute_segment_masked_mean"]


class ActorWorker(BaseActorWorker):
    """An actor whose importance ratio may be formed per turn (`ratio_type: segment`)."""

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """PPO with one ratio for each token, turn or row, corrected for the gap to the inference engine.

        Args:
            data: as for the base class, and `infer_logprobs` (B, S-1), the engine's log-probabilities, which
                `train_infer_correction` needs.
            output_tensor: the model's logits (B, S, V), or hidden states with the head as `LinearLogits`.

        Returns:
            (loss, metrics): a part of the loss of the optimizer step that `meta_info` counts, or that of the batch
            alone when `meta_info` has no counts.
        """
        terms = self.policy_terms(data, output_tensor)
        correction = self.train_infer_correction(data, terms)
        loss = self.policy_loss(
            terms,
            ratio_type=self.pipeline_config.ratio_type,
            is_weight_BT=correction.is_weight_BT,
            keep_BT=correction.keep_BT,
        )
        metrics = self.policy_metrics(loss, terms, data) | correction.metrics
        return loss.total, report(metrics, loss.num_valid)
