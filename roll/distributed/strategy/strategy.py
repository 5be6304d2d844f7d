"""The interface between a worker and a model: forward passes for scoring, optimizer steps for training.

A strategy owns one model on one rank and everything that depends on how it is placed: micro-batches, collectives,
precision, checkpoints. A worker gives it a batch and a function of one micro-batch; the strategy alone knows how many
micro-batches and ranks there are. The loss contract that makes this work: a loss is a masked sum divided by counts of
the *whole* optimizer step, so the losses, and the gradients, of micro-batches and ranks simply add up.

`InferenceStrategy` scores, `TrainStrategy` also trains. Subclasses place the model and reduce gradients.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.configs.strategy_options import options_of
from roll.datasets.collator import positions
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.micro_batches import (
    MicroBatch,
    Rows,
    make_micro_batch,
    plan_by_rows,
    plan_by_tokens,
    row_windows,
)
from roll.distributed.strategy.ranks import Ranks
from roll.distributed.strategy.weight_sync import SyncPlan, WeightChannel, checksum
from roll.engines.engine import Engine
from roll.models.linear_head import use_linear_logits
from roll.models.lora import adapter_disabled, base_model, is_lora_model, merged_state_dict
from roll.models.model_providers import default_tokenizer_provider
from roll.models.token_tree import GPU_MULTIPLE, token_tree, use_token_tree
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.utils.offload_states import OffloadStateType, includes
from roll.utils.seeding import seed_everything

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

ModelOutput = Tensor | LinearLogits
Metrics = dict[str, Any]
ForwardFunction = Callable[[DataProto, ModelOutput], tuple[Tensor, Mapping[str, Any]]]
LossFunction = Callable[[DataProto, ModelOutput], tuple[Tensor, Mapping[str, Any]]]
ModelProvider = Callable[..., nn.Module]
LARGE_ON_A_CPU = 100_000_000  # parameters


class InferenceStrategy(ABC):
    """A model on this rank that scores batches, and perhaps generates.

    Attributes that callers read: `worker`, `worker_config`, `model`, `tokenizer`, `device`, `ranks`, `strategy_name`.
    """

    strategy_name: ClassVar[str]
    is_trainable: ClassVar[bool] = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.worker_config = worker.worker_config
        self.strategy_config: Mapping[str, Any] = worker.worker_config.strategy_args.strategy_config
        self.options: Any = options_of(
            worker.worker_config.strategy_args.strategy_name, self.strategy_config
        )
        self.model: nn.Module
        self.tokenizer: Any = None
        self.device = torch.device("cpu")
        self.ranks = Ranks.alone(self.device)
        self.weight_channel: WeightChannel | None = None
        self.sync_plan = SyncPlan(())
        self.shares_prefixes = False  # whether tokens that rows have in common are computed once
        self.policy_version = 0  # of the weights; whoever brings new ones sets it

    # -- set-up ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def initialize(self, model_provider: ModelProvider) -> None:
        """Build tokenizer and model, place the model, fill `worker.rank_info`. Called once on every rank."""

    def build_model(self, model_provider: ModelProvider) -> None:
        """Seed this process, then make tokenizer and model on the CPU; where the head allows it, without logits."""
        seed_everything(self.worker.pipeline_config.seed)
        if self.worker.device_index is not None:
            self.device = torch.device("cuda", self.worker.device_index)
            self.ranks = Ranks.alone(self.device)
        model_args = self.worker_config.model_args
        self.tokenizer = default_tokenizer_provider(model_args)
        self.model = model_provider(
            tokenizer=self.tokenizer,
            model_args=model_args,
            training_args=self.worker_config.training_args,
            is_trainable=self.is_trainable,
        )
        self._mention_unused_gpus()
        head = base_model(self.model).get_output_embeddings()
        builds_logits = head is not None
        if builds_logits and self.options.linear_logits:
            builds_logits = not use_linear_logits(self.model)
        wanted = self.options.share_prefixes
        # Spreading logits over the rows of a batch would copy them; hidden states and values are small.
        if not builds_logits and wanted is not False:
            self.shares_prefixes = use_token_tree(self.model)
        if wanted and not self.shares_prefixes:
            self.worker.logger.warning(
                "share_prefixes has no effect: %s is computed row by row", type(self.model)
            )

    def _mention_unused_gpus(self) -> None:
        """A large model on the CPU of a machine with GPUs is more often forgotten than meant."""
        if self.device.type != "cpu" or not torch.cuda.is_available():
            return
        if sum(parameter.numel() for parameter in self.model.parameters()) > LARGE_ON_A_CPU:
            self.worker.logger.warning(
                f"{self.worker_config.name} computes on the CPU, although this machine has {torch.cuda.device_count()} "
                f"GPU(s): its device_mapping names none. {self.worker_config.name}.device_mapping: [0] is the first"
            )

    def join_ranks(self) -> None:
        """Meet the other ranks of this role; alone, nothing happens."""
        if self.worker.world_size > 1:
            self.worker.init_process_group()
            self.ranks = Ranks.of_default_group(self.device)

    def get_data_input(self, batch: DataProto) -> DataProto:
        """The batch of this rank's data-parallel group. Strategies that split a model over ranks broadcast it here."""
        return batch

    def unwrap_model(self) -> nn.Module:
        """The Hugging Face (or peft) model inside whatever wraps it."""
        return self.model

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward_step(self, batch: DataProto, forward_func: ForwardFunction) -> dict[str, Tensor]:
        """Run `forward_func(micro_batch, output)` over all rows without gradients.

        Its dict of results is joined over micro-batches, in the order of the input rows; results with one column per
        predicted token come back as (rows, S-1), zero outside of the columns that a micro-batch looked at.
        `meta_info["micro_batch_size"]` sets the rows of a micro-batch (default `infer_batch_size`).
        """
        self._require_rows(batch)
        width = batch["attention_mask"].shape[1]
        pieces: dict[str, list[Tensor]] = {}
        order: Rows = []
        self.set_training(False)
        with torch.no_grad(), self._adapter_context(batch):
            plan = self.same_length_on_all_ranks(self._plan_inference(batch))
            for rows, micro in zip(plan, self._micro_batches(batch, plan), strict=True):
                output = self.forward_model(micro.data)
                if not rows:
                    continue
                _, results = forward_func(micro.data, output)
                for key, value in results.items():
                    per_token = value.dim() >= 2 and value.shape[1] == micro.stop - micro.start - 1
                    pieces.setdefault(key, []).append(
                        (micro.widen(value, width) if per_token else value).cpu()
                    )
                order.extend(micro.rows)
        back = torch.tensor(order).argsort()
        return {key: torch.cat(values)[back] for key, values in pieces.items()}

    def set_training(self, mode: bool) -> None:
        """Switch dropout on or off. Going through all modules takes as long as a small layer, so only on a change."""
        if self.model.training != mode:
            self.model.train(mode)

    def forward_model(self, data: DataProto) -> ModelOutput:
        """One forward pass of the model over a micro-batch; logits are not built when the head allows it."""
        if (
            self.shares_prefixes
            and data.meta_info["right_padded"]
            and not data.meta_info["own_positions"]
        ):
            round_to = 1 if self.device.type == "cpu" else GPU_MULTIPLE
            tree = token_tree(
                data["input_ids"].to(self.device),
                data["attention_mask"].to(self.device),
                round_to=round_to,
            )
            if tree is not None:
                return tree.rows_of(self.model(**tree.model_inputs(), use_cache=False).logits)
        return self.model(**self._model_inputs(data), use_cache=False).logits

    def score(
        self,
        output: ModelOutput,
        input_ids: Tensor,
        mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each next token and entropy of its distribution, (B, S-1), 0 where `mask[:, 1:]` is 0."""
        return next_token_log_probs(
            output, input_ids, mask, temperature=temperature, with_entropy=with_entropy
        )

    def op_compute_log_probs(
        self, logits: ModelOutput, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """Log-probability of each next token, (B, S-1), exactly 0 where `attention_mask[:, 1:]` is 0.

        The mask is whatever the caller wants scored: DPO passes the attention mask, RL the response mask.
        """
        return self.score(logits, input_ids, attention_mask)[0]

    def op_compute_entropy(self, logits: ModelOutput, attention_mask: Tensor) -> Tensor:
        """Entropy of each next-token distribution, (B, S-1), exactly 0 where `attention_mask[:, 1:]` is 0."""
        any_label = torch.zeros_like(attention_mask, dtype=torch.long)
        entropy = self.score(logits, any_label, attention_mask, with_entropy=True)[1]
        assert entropy is not None
        return entropy

    @property
    def generation_engine(self) -> Engine:
        """What answers generation requests with this model."""
        raise RuntimeError(
            f"{self.strategy_name} does not generate; give this role the strategy hf_infer or vllm"
        )

    def get_metrics(self, metric_names: Collection[str] | None = None) -> Metrics:
        """Numbers that only the strategy knows, such as the state of a generation engine."""
        return {}

    # -- moving and saving -------------------------------------------------------------------------------------------

    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Bring states to the device that they are used on: all, or those that `include` names (OffloadStateType)."""
        if includes(include, OffloadStateType.model_params):
            self.model.to(self.device, non_blocking=non_blocking)

    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Move states to host memory: all, or those that `include` names. A model on the CPU is there already."""
        if includes(include, OffloadStateType.model_params) and self.device.type != "cpu":
            self.model.to("cpu", non_blocking=non_blocking)
            torch.cuda.empty_cache()

    def process_weights_after_loading(self) -> None:  # noqa: B027  (doing nothing is the right default)
        """Finish weights that were just written into the model. Plain modules need nothing."""

    # -- weights of another role -------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as plain `transformers` names them, adapters merged, one full tensor at a time.

        Ranks that share a sharded model must iterate together.
        """
        if is_lora_model(self.model):
            weights = self.full_state_dict()
            if weights is None or weights:  # of a sharded model, rank 0 alone has gathered them
                tied = getattr(base_model(self.model), "all_tied_weights_keys", None) or {}
                merged = merged_state_dict(self.model, weights)
                yield from ((name, weight) for name, weight in merged.items() if name not in tied)
            return
        for name, parameter in self.model.named_parameters():
            yield name, full_tensor(parameter.detach())

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """All weights on the CPU, on rank 0; None: the model's own `state_dict` is complete. All ranks call it."""
        return None

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights under those names into the model."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)

    def receive_weights(self, buckets: Iterator[Mapping[str, Tensor]]) -> None:
        """Write all weights into the model; the tensors of a bucket are gone when the next one is asked for."""
        for bucket in buckets:
            self.update_weights(bucket)

    @property
    def holds_whole_model(self) -> bool:
        """Whether `model`'s parameters are the whole weights, not shards or placeholders of them."""
        return not isinstance(next(self.model.parameters()), DTensor)

    def setup_model_update(
        self,
        *,
        rank: int | None,
        host: str,
        port: int,
        size: int,
        timeout: timedelta,
        plan: SyncPlan,
    ) -> None:
        """Join the channel that weights travel in: rank 0 sends, the others receive, None only helps to gather."""
        self.sync_plan = plan
        if rank is not None:
            self.weight_channel = WeightChannel(
                host=host, port=port, rank=rank, size=size, device=self.device, timeout=timeout
            )

    def model_update(self) -> dict[str, int]:
        """Send or receive all weights, according to the role in the channel. Returns checksums of the sample."""
        channel = self.weight_channel
        if channel is not None and channel.rank > 0:
            self.receive_weights(channel.receive(self.sync_plan))
            return self.weight_checksums(self.sync_plan.sampled_names)
        weights = self.named_weights()
        if channel is not None:
            return channel.send(self.sync_plan, weights)
        for _ in weights:  # gathering a sharded tensor takes all ranks
            pass
        return {}

    def share_model(self, source: InferenceStrategy) -> bool:
        """Use the model of another strategy of this process, which then is one and the same; False if it cannot be.

        The two must hold the same architecture in the same precision on the same device, and the other's model must
        be whole.
        """
        same = (
            type(base_model(self.model)) is type(base_model(source.model))
            and base_model(self.model).dtype == base_model(source.model).dtype
            and self.device == source.device
            and source.holds_whole_model
        )
        if same:
            self.model = source.model
        return same

    def weight_checksums(self, names: Collection[str]) -> dict[str, int]:
        return {name: checksum(weight) for name, weight in self.named_weights() if name in names}

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _model_inputs(self, data: DataProto) -> dict[str, Tensor | None]:
        """Arguments of the model. Ids and positions under the mask are neutralised: padding may hold anything.

        Rows that start at column 0 and have no holes need no attention mask: a causal model cannot see the padding to
        their right, and without a mask torch picks its fastest attention. Positions that the caller chose need one:
        without it transformers takes a step other than 1 for the start of another sequence.
        """
        attention_mask = data["attention_mask"].to(self.device)
        input_ids = data["input_ids"].to(self.device)
        input_ids = torch.where(attention_mask != 0, input_ids, self.tokenizer.pad_token_id)
        if data.meta_info["right_padded"] and not data.meta_info["own_positions"]:
            return {"input_ids": input_ids, "attention_mask": None, "position_ids": None}
        position_ids = positions(attention_mask)
        if data.meta_info["own_positions"]:
            position_ids = torch.where(
                attention_mask != 0, data["position_ids"].to(self.device), position_ids
            )
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int = 1) -> list[Rows]:
        """The plan itself, where ranks compute on their own. Ranks that share a sharded model must run equally many."""
        return plan

    def _micro_batches(self, batch: DataProto, plan: list[Rows]) -> Iterator[MicroBatch]:
        """The micro-batches of a plan, on the device. An empty one stands for a rank that only keeps step: row 0."""
        layout = {
            "right_padded": is_right_padded(batch["attention_mask"]),
            "own_positions": has_own_positions(batch),
        }
        for rows in plan:
            micro = make_micro_batch(batch, rows or [0])
            micro.data.meta_info = {**batch.meta_info, **layout}
            micro.data.to(self.device)
            yield micro

    def _plan_inference(self, batch: DataProto) -> list[Rows]:
        config = self.worker_config
        if config.use_dynamic_batching_in_infer:
            return plan_by_tokens(
                row_lengths(batch),
                config.max_tokens_per_microbatch_in_infer,
                round_to=config.sequence_length_round_in_infer,
            )
        return plan_by_rows(
            len(batch), batch.meta_info.get("micro_batch_size", config.infer_batch_size)
        )

    @contextlib.contextmanager
    def _adapter_context(self, batch: DataProto) -> Iterator[None]:
        """With `meta_info["disable_adapter"]` a LoRA model answers as its base model: the reference for free."""
        if not batch.meta_info.get("disable_adapter", False):
            yield
            return
        with adapter_disabled(self.unwrap_model()):
            yield

    @staticmethod
    def _require_rows(batch: DataProto) -> None:
        if len(batch) == 0:
            raise ValueError(
                "the batch has no rows; a rank needs at least one (see pad_dataproto_to_divisor)"
            )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the entries of its longest ModuleList."""
    lists = [module for module in base_model(model).modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered from all ranks; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_right_padded(attention_mask_BS: Tensor) -> bool:
    """True when every row's attended tokens are its first ones, without holes."""
    attended = attention_mask_BS != 0
    return bool((attended.long().diff(dim=1) <= 0).all())


def has_own_positions(batch: DataProto) -> bool:
    """Whether the column `position_ids` puts any attended token elsewhere than the attention mask does.

    ROLL gives models that also see images positions of several channels, (B, C, S). Channels that all agree with the
    mask say nothing new; other ones have no meaning for a text model.
    """
    if "position_ids" not in batch:
        return False
    given, mask_BS = batch["position_ids"], batch["attention_mask"]
    channels_BCS = given if given.dim() == 3 else given[:, None]
    fits = channels_BCS.shape[::2] == mask_BS.shape
    differs = not fits or bool(
        ((channels_BCS != positions(mask_BS)[:, None]) & (mask_BS != 0)[:, None]).any()
    )
    if differs and given.shape != mask_BS.shape:
        raise ValueError(
            f"position_ids have shape {tuple(given.shape)}, expected {tuple(mask_BS.shape)}: one position per token "
            "of a text model; several, as models that see images have them, only where all agree with attention_mask"
        )
    return differs


def row_lengths(batch: DataProto) -> list[int]:
    """Columns from the first to the last attended token of each row."""
    first, stop = row_windows(batch["attention_mask"])
    return (stop - first).tolist()
