"""The workers of the pipelines that hold a model: what they do, and what their loss is made of."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms.masking import segment_masked_mean, select
from roll.algorithms.policy_loss import PolicyLoss, policy_loss
from roll.algorithms.surrogates import surrogate_of
from roll.algorithms.value_loss import value_loss
from roll.distributed.scheduler.decorator import Dispatch, Grid, RankArgs, register
from roll.distributed.scheduler.protocol import DataProto
from roll.engines.request import GenerationOutput, GenerationRequest, generate_with_retry
from roll.models.model_providers import default_reward_model_provider, default_value_model_provider
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.loss_io import (
    RATIO_TYPES,
    LossCounts,
    Metrics,
    loss_counts,
    optional_column,
    policy_metrics,
    report,
    sampling_metrics,
)
from roll.pipeline.model_worker import ModelWorker
from roll.utils.columns import column, loss_mask
from roll.utils.generation import prompt_requests, rows_of_outputs
from roll.utils.metrics.reduction import Scalar, append_to_dict, flatten_sum
from roll.utils.train_infer_corrections import (
    FILTER_MASK,
    IS_WEIGHT,
    correction_enabled,
    train_infer_correction,
)

ModelOutput = Tensor | LinearLogits
compute_segment_masked_mean = segment_masked_mean  # ROLL's name


@dataclass(frozen=True)
class PolicyTerms:
    """The columns that a policy loss is made of, each (B, T), and the counts that divide it."""

    log_probs_BT: Tensor
    old_log_probs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    ref_log_probs_BT: Tensor | None
    entropy_BT: Tensor | None
    counts: LossCounts


@dataclass(frozen=True)
class LossCorrection:
    """What train/infer correction does to a policy loss; None for what is off."""

    is_weight_BT: Tensor | None
    keep_BT: Tensor | None
    metrics: dict[str, Tensor]


class ActorWorker(ModelWorker):
    """A policy that is trained or scored.

    It computes its loss without a cluster, and without a strategy, too:

        worker = ActorWorker(worker_config)
        worker.pipeline_config = config       # any object with the fields that the loss reads
        loss, metrics = worker.loss_func(data, logits)
    """

    # Logits are divided by this before log-probabilities are taken, here and in the strategies.
    log_prob_temperature: float = 1.0

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config)
        # Old log-probabilities of response tokens by sample_uuid, for one training step.
        self._old_log_probs_cache: dict[str, Tensor] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        # Configurations that do not sample have no temperature.
        self.log_prob_temperature = getattr(pipeline_config, "log_prob_temperature", 1.0)
        super().initialize(pipeline_config)

    def loss_func(self, data: DataProto, output_tensor: ModelOutput) -> tuple[Tensor, Metrics]:
        """The policy loss with one ratio for each token, turn or row (`ratio_type`), corrected for
        the gap to the inference engine. Rows may have several turns, with gaps in the mask.

        Args:
            data: `input_ids`, `response_mask` (B, S); `advantages` (B, S-1); `old_log_probs`
                (B, S-1), see `get_old_log_probs_with_cache`; `ref_log_probs` (B, S-1) if the KL
                loss is on, for its metric otherwise; `infer_logprobs` (B, S-1), the engine's, if
                `train_infer_correction` is on.
            output_tensor: logits (B, S, V), or hidden states with the head as `LinearLogits`.

        Returns:
            (loss, metrics): a part of the loss of the optimizer step that `meta_info` counts, or
            that of the batch alone when `meta_info` has no counts.
        """
        terms = self.policy_terms(data, output_tensor)
        correction = self.train_infer_correction(data, terms)
        loss = self.policy_loss(
            terms,
            ratio_type=getattr(self.pipeline_config, "ratio_type", "token"),
            is_weight_BT=correction.is_weight_BT,
            keep_BT=correction.keep_BT,
        )
        metrics = self.policy_metrics(loss, terms, data) | correction.metrics
        return loss.total, report(metrics, loss.mask_BT)

    # -- training and scoring ----------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def train_step(self, data: DataProto) -> DataProto:
        """Train on all rows, `ppo_epochs` times, with `rows_per_optimizer_step` rows a rank.

        Returns no rows, only `meta_info["metrics"]`; `actor/sampling_*` are averages over the
        updates, and `actor/first_*` the same at the first, before any weight has changed.
        """
        metrics: dict[str, Any] = {}
        first: dict[str, Any] = {}
        with self.timed("train_step", metrics):
            data = self.strategy.get_data_input(data)
            steps = list(self.optimizer_steps(data, epochs=self.pipeline_config.ppo_epochs))
            for index, mini_batch in enumerate(steps):
                update = self.strategy.train_step(mini_batch, self.loss_func)
                if index == 0:
                    first = first_update_metrics(update)
                append_to_dict(metrics, update)
            self.clear_old_log_probs_cache()
        metrics = self.step_metrics("actor", metrics, len(steps)) | first
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """`log_probs` and `entropy` of every response token, each (rows, S-1), 0 elsewhere.

        `meta_info["disable_adapter"]` asks a LoRA model as it was before training.
        """
        metrics: dict[str, Any] = {}
        with self.timed("compute_log_probs", metrics):
            data = self.strategy.get_data_input(data)
            results = self.strategy.forward_step(data, self.forward_func_log_probs)
        return DataProto.from_dict(results, meta_info={"metrics": metrics})

    def forward_func_log_probs(
        self, data: DataProto, output_tensor: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = data["response_mask"][:, 1:].bool()
        log_probs_BT, entropy_BT = self.score(data, output_tensor, mask_BT, with_entropy=True)
        assert entropy_BT is not None
        return log_probs_BT, {"log_probs": log_probs_BT, "entropy": entropy_BT}

    # -- parts of a policy loss --------------------------------------------------------------------

    def policy_terms(
        self, data: DataProto, output_tensor: ModelOutput, mask_key: str = "response_mask"
    ) -> PolicyTerms:
        """Gather what the loss needs. `mask_key` names the tokens that take part: (B, S)
        `response_mask`, or a column (B, S-1) that selects among them."""
        config = self.pipeline_config
        mask_BT = loss_mask(data, mask_key)
        log_probs_BT, entropy_BT = self.score(
            data, output_tensor, mask_BT, with_entropy=config.entropy_loss_coef != 0
        )
        if config.use_kl_loss:
            column(data, "ref_log_probs", "use_kl_loss")
        return PolicyTerms(
            log_probs_BT=log_probs_BT,
            old_log_probs_BT=self.get_old_log_probs_with_cache(data, log_probs_BT, mask_BT),
            advantages_BT=column(data, "advantages", "the policy loss"),
            mask_BT=mask_BT,
            ref_log_probs_BT=optional_column(data, "ref_log_probs"),
            entropy_BT=entropy_BT,
            counts=loss_counts(data, mask_key, mask_BT, config),
        )

    def score(
        self,
        data: DataProto,
        output_tensor: ModelOutput,
        mask_BT: Tensor,
        *,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(log-probs of the next tokens, their entropy), each (B, S-1), exactly 0 off `mask_BT`."""
        mask_BS, input_ids = F.pad(mask_BT, (1, 0)), data["input_ids"]
        options = {"temperature": self.log_prob_temperature, "with_entropy": with_entropy}
        if self.strategy is None:
            return next_token_log_probs(output_tensor, input_ids, mask_BS, **options)
        if hasattr(self.strategy, "score"):
            return self.strategy.score(output_tensor, input_ids, mask_BS, **options)
        # A strategy with ROLL's interface computes them in two calls.
        log_probs_BT = self.strategy.op_compute_log_probs(
            logits=output_tensor, input_ids=input_ids, attention_mask=mask_BS
        )
        if not with_entropy:
            return log_probs_BT, None
        return log_probs_BT, self.strategy.op_compute_entropy(
            logits=output_tensor, attention_mask=mask_BS
        )

    def policy_loss(self, terms: PolicyTerms, *, ratio_type: str, **options: Any) -> PolicyLoss:
        """The loss that the configuration describes, with ROLL's names for `ratio_type`; `options`
        are further arguments of `roll.algorithms.policy_loss.policy_loss`."""
        config = self.pipeline_config
        return policy_loss(
            log_probs_BT=terms.log_probs_BT,
            old_log_probs_BT=terms.old_log_probs_BT,
            advantages_BT=terms.advantages_BT,
            mask_BT=terms.mask_BT,
            ref_log_probs_BT=terms.ref_log_probs_BT,
            entropy_BT=terms.entropy_BT,
            surrogate=surrogate_of(config, self.worker_config),
            ratio_type=RATIO_TYPES.get(ratio_type, ratio_type),
            agg_mode=config.loss_agg_mode,
            kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
            # Not a field of ROLL's configurations, so one written for them does not have it.
            kl_kind=getattr(config, "kl_loss_type", "k3"),
            entropy_coef=config.entropy_loss_coef,
            **terms.counts,
            **options,
        )

    def policy_metrics(
        self, loss: PolicyLoss, terms: PolicyTerms, data: DataProto | None = None
    ) -> dict[str, Scalar]:
        """ROLL's metrics of the update; with the batch, also the gap to the engine's log-probs."""
        metrics = policy_metrics(loss)
        if data is not None and "infer_logprobs" in data:
            metrics |= sampling_metrics(
                terms.log_probs_BT, data["infer_logprobs"], loss.mask_BT, terms.counts["num_tokens"]
            )
        return metrics

    def train_infer_correction(self, data: DataProto, terms: PolicyTerms) -> LossCorrection:
        """Weights and filter of the loss against the gap to the inference engine.

        When old log-probs are recomputed, the driver made both columns before the step
        (`apply_train_infer_correction_to_batch`) and reported the metrics; else they are made here.
        """
        config = self.pipeline_config
        cfg = config.train_infer_correction
        has_filters = any(item.enabled for item in cfg.filters)
        if config.enable_old_logprobs_recompute:
            needed_by = "train_infer_correction (see apply_train_infer_correction_to_batch)"
            weight_BT = column(data, IS_WEIGHT, needed_by) if cfg.is_weight.enabled else None
            keep_BT = column(data, FILTER_MASK, needed_by) if has_filters else None
            return LossCorrection(weight_BT, keep_BT, {})
        if "infer_logprobs" not in data and not correction_enabled(cfg):
            return LossCorrection(None, None, {})
        correction = train_infer_correction(
            cfg,
            mask_BT=terms.mask_BT,
            old_log_probs_BT=terms.old_log_probs_BT,
            infer_log_probs_BT=column(data, "infer_logprobs", "train_infer_correction"),
            num_tokens=terms.counts["num_tokens"],
            num_sequences=terms.counts["num_sequences"],
        )
        return LossCorrection(
            correction.weight_BT if cfg.is_weight.enabled else None,
            correction.keep_BT if has_filters else None,
            correction.metrics,
        )

    # -- old log-probabilities ---------------------------------------------------------------------

    def get_old_log_probs_with_cache(
        self, data: DataProto, log_probs: Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Log-probs of the policy before this training step, (B, S-1), without gradient.

        With `enable_old_logprobs_recompute` they are the column `old_log_probs`. Otherwise the
        policy that a sample meets first in the step counts as the old one: the current `log_probs`
        then, and, when there are more epochs, what is kept of them under the row's `sample_uuid`.
        Rows without `sample_uuid` use the column if it has numbers; a column of integers is a
        placeholder, and is never used. Kept are the values of the tokens under the mask, so later
        epochs may see the row in a batch of another width.
        """
        config = self.pipeline_config
        given = optional_column(data, "old_log_probs")
        is_placeholder = given is None or not given.is_floating_point()
        if config.enable_old_logprobs_recompute:
            if is_placeholder:
                found = "no such column" if given is None else f"{given.dtype}, a placeholder"
                raise KeyError(
                    "enable_old_logprobs_recompute needs the column 'old_log_probs' as floats; "
                    f"found {found}"
                )
            return given
        if "sample_uuid" in data:
            mask_BT = loss_mask(data) if mask_BT is None else mask_BT
            return self._first_log_probs(data["sample_uuid"], log_probs.detach(), mask_BT)
        if not is_placeholder:
            return given
        if config.ppo_epochs > 1:
            raise KeyError(
                f"ppo_epochs={config.ppo_epochs} needs the old log-probabilities of the first "
                "epoch: give the batch the column 'old_log_probs' (enable_old_logprobs_recompute), "
                "or 'sample_uuid' to remember them by"
            )
        return log_probs.detach()

    def clear_old_log_probs_cache(self) -> None:
        """Forget the old log-probabilities: the next training step starts with a new old policy."""
        self._old_log_probs_cache.clear()

    def _first_log_probs(self, uuids: Any, log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
        cache = self._old_log_probs_cache
        if self.pipeline_config.ppo_epochs <= 1:
            return log_probs_BT
        hits = [uuid in cache for uuid in uuids]
        lengths = mask_BT.sum(-1).tolist()
        for uuid, hit, length in zip(uuids, hits, lengths, strict=True):
            if hit and len(cache[uuid]) != length:
                raise ValueError(
                    f"sample {uuid!r} has {length} response tokens, but had {len(cache[uuid])} "
                    "when its old log-probabilities were kept; is sample_uuid unique, and was the "
                    "cache cleared between steps?"
                )
        if not all(hits):
            rows = log_probs_BT[mask_BT].cpu().split(lengths)
            for uuid, row, hit in zip(uuids, rows, hits, strict=True):
                if not hit:
                    cache[uuid] = row
        if not any(hits):
            return log_probs_BT
        # In row-major order, the order of the rows' values one after the other.
        known_BT = mask_BT & torch.tensor(hits, device=mask_BT.device).unsqueeze(-1)
        known = torch.cat([cache[uuid] for uuid, hit in zip(uuids, hits, strict=True) if hit])
        return log_probs_BT.masked_scatter(known_BT, known.to(log_probs_BT))


def first_update_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """`actor/sampling_*` of one optimizer step, under the names `actor/first_*`."""
    first = {}
    for key, value in metrics.items():
        if "/sampling_" in key:
            name = key.replace("actor/sampling_", "actor/first_", 1)
            first[name] = flatten_sum(value) if key.endswith("@sum") else value
    return first


class CriticWorker(ModelWorker):
    """A value function that is trained or asked for values."""

    model_provider = staticmethod(default_value_model_provider)

    def loss_func(self, data: DataProto, output_tensor: Tensor) -> tuple[Tensor, Metrics]:
        """Squared error to `returns`, clipped around the old `values` by `value_clip`; (B, S-1)."""
        mask_BT = loss_mask(data)
        result = value_loss(
            values_BT=self.predicted_values(output_tensor),
            returns_BT=column(data, "returns", "the value loss"),
            mask_BT=mask_BT,
            old_values_BT=optional_column(data, "values"),
            clip=self.pipeline_config.value_clip,
            **loss_counts(data, "response_mask", mask_BT, self.pipeline_config),
        )
        metrics = {
            "critic/loss@sum": result.loss,
            "critic/error@sum": result.error,
            "critic/clipfrac@sum": result.clip_fraction,
            "critic/vpred@sum": result.prediction,
        }
        if result.old_prediction is not None:
            metrics["critic/value@sum"] = result.old_prediction
        return result.loss, report(metrics, mask_BT)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values`, (rows, S-1): the value before every response token, 0 elsewhere."""
        metrics: dict[str, Any] = {}
        with self.timed("compute_values", metrics):
            results = self.strategy.forward_step(data, self.forward_func_values)
        return DataProto.from_dict(results, meta_info={"metrics": metrics})

    def forward_func_values(
        self, data: DataProto, output_tensor: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values_BT = select(self.predicted_values(output_tensor), data["response_mask"][:, 1:])
        return values_BT, {"values": values_BT}

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, data: DataProto) -> DataProto:
        """Train once on all rows, in optimizer steps as the actor's; only metrics come back."""
        metrics: dict[str, Any] = {}
        with self.timed("train_step", metrics):
            steps = list(self.optimizer_steps(data, epochs=1))
            for mini_batch in steps:
                append_to_dict(metrics, self.strategy.train_step(mini_batch, self.loss_func))
        return DataProto(meta_info={"metrics": self.step_metrics("critic", metrics, len(steps))})

    @staticmethod
    def predicted_values(output_tensor: Tensor) -> Tensor:
        """(B, S-1) from (B, S, 1) or (B, S): column t is the value before token t+1."""
        values_BS = output_tensor.squeeze(-1) if output_tensor.ndim == 3 else output_tensor
        return values_BS[:, :-1]


class RewardWorker(ModelWorker):
    """A reward model: one score for each row."""

    model_provider = staticmethod(default_reward_model_provider)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """`response_level_rewards` (rows,), and `token_level_rewards` (rows, S-1), 0 everywhere: a
        model of whole answers says nothing about tokens."""
        metrics: dict[str, Any] = {}
        with self.timed("compute_rewards", metrics):
            rewards_B = self.strategy.forward_step(data, self.forward_func_rewards)["rewards"]
        tokens_BT = torch.zeros(len(data), data["attention_mask"].shape[1] - 1)
        return DataProto.from_dict(
            {"response_level_rewards": rewards_B, "token_level_rewards": tokens_BT},
            meta_info={"metrics": metrics},
        )

    @staticmethod
    def forward_func_rewards(
        data: DataProto, output_tensor: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The score of a sequence classifier (rows, 1), or of a token classifier (rows, S, 1) at
        the last token."""
        scores_B = output_tensor.squeeze(-1).float()
        if scores_B.ndim == 2:
            attended = data["attention_mask"]
            places_S = torch.arange(attended.shape[1], device=attended.device)
            last_B = (places_S * (attended != 0)).argmax(1)
            scores_B = scores_B.gather(1, last_B[:, None])[:, 0]
        return scores_B, {"rewards": scores_B}


def dispatch_requests(cluster: Grid, requests: list[GenerationRequest]) -> RankArgs:
    """A contiguous share of the requests for each rank; the first have one more if need be."""
    size, longer = divmod(len(requests), cluster.world_size)
    starts = [rank * size + min(rank, longer) for rank in range(cluster.world_size + 1)]
    return ([requests[start:stop] for start, stop in pairwise(starts)],), {}


def collect_outputs(cluster: Grid, output: list[Any]) -> list[Any]:
    """The outputs of all ranks, one after the other; references of a running call stay a list."""
    if not all(isinstance(share, list) for share in output):
        return output
    return list(chain.from_iterable(output))


# Functions instead of a mode, because a list of requests need not divide by the number of workers.
DISPATCH_REQUESTS = {"dispatch_fn": dispatch_requests, "collect_fn": collect_outputs}


class InferWorker(ModelWorker):
    """A policy that answers prompts, through the engine of its strategy."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def generate(self, data: DataProto) -> DataProto:
        """Answers to left-padded prompts as right-padded rows, a prompt's rows side by side.

        `meta_info["generation_config"]` has the options of generation. What is drawn depends on the
        run's seed, on `meta_info["global_step"]` and on the prompt. A prompt that fails is tried
        again; if it fails again, its rows have no response, and `drop_reason` says why. This worker
        answers nothing else meanwhile.
        """
        metrics: dict[str, Any] = {}
        seed = self.pipeline_config.seed * 1_000_003 + data.meta_info.get("global_step", 0)
        requests = prompt_requests(data, data.meta_info["generation_config"], seed=seed)
        with self.timed("generate", metrics):
            result = generate_with_retry(self.strategy.generation_engine, requests)
        prefix = f"{self.cluster_name}/generate"
        metrics[f"{prefix}/num_retried@sum"] = result.num_retried
        metrics |= {f"{prefix}/dropped/{why}@sum": n for why, n in result.reasons.items()}
        rows = rows_of_outputs(
            data,
            result.all_outputs,
            sequence_length=self.pipeline_config.sequence_length,
            pad_token_id=self.strategy.tokenizer.pad_token_id,
            pad_to_seq_len=data.meta_info.get("pad_to_seq_len", True),
        )
        rows.meta_info = {**rows.meta_info, "metrics": metrics}
        return rows

    @register(dispatch_mode=DISPATCH_REQUESTS, clear_cache=False)
    def answer_requests(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """All samples of the requests, in order. Through a cluster, each worker answers a share.

        Failed samples have `finish_reason` "error" after a second attempt. This worker does nothing
        else meanwhile. In one process it runs in the caller's thread: a second thread with tensors
        would make both of them slow.
        """
        return generate_with_retry(self.strategy.generation_engine, requests).all_outputs

    @register(dispatch_mode=DISPATCH_REQUESTS, clear_cache=False)
    async def generate_requests(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """As `answer_requests`, in a thread of its own, so that `abort_requests` gets through."""
        return await asyncio.to_thread(self.answer_requests, requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=False)
    async def abort_requests(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all) of calls that run now; they return what they have."""
        self.strategy.generation_engine.abort(request_ids)
