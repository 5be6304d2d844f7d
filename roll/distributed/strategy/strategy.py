"""The interface between a worker and a model: forward passes here, optimizer steps in
train_strategy.

A strategy owns one model on one rank and everything that depends on how it is placed:
micro-batches, collectives, precision, weights. A worker gives it a batch and a function of one
micro-batch; the strategy alone knows how many micro-batches and ranks there are. The loss contract
that makes this work: a loss is a masked sum divided by counts of the *whole* optimizer step, so the
losses, and the gradients, of micro-batches and ranks simply add up.

`docs/custom-strategy.md` shows how a strategy is added.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.configs.strategy_info import StrategyInfo, strategy_class
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
from roll.distributed.weight_sync import SyncPlan, WeightChannel, checksum
from roll.exceptions import ConfigError
from roll.models.checkpoint import seed_everything
from roll.models.linear_head import use_linear_logits
from roll.models.lora import adapter_disabled, base_model, is_lora_model, merged_state_dict
from roll.models.model_providers import default_tokenizer_provider
from roll.models.token_tree import GPU_MULTIPLE, token_tree, use_token_tree
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker
    from roll.engines.request import Engine

ModelOutput = Tensor | LinearLogits
Metrics = dict[str, Any]
ForwardFunction = Callable[[DataProto, ModelOutput], tuple[Tensor, Mapping[str, Any]]]
LossFunction = Callable[[DataProto, ModelOutput], tuple[Tensor, Mapping[str, Any]]]
ModelProvider = Callable[..., nn.Module]
LARGE_ON_A_CPU = 100_000_000  # parameters
# meta_info key: this rank has no rows in this step; its one row only keeps step with others.
PLACEHOLDER = "is_placeholder"


class OffloadStateType(StrEnum):
    """The parts of a strategy's state that can be moved to host memory on their own."""

    model_params = "model_params"
    optimizer_states = "optimizer_states"
    other_params = "other_params"  # gradient buffers, caches of a generation engine


def includes(include: Collection[str] | None, part: OffloadStateType) -> bool:
    """Whether `include` names `part`; None names everything."""
    unknown = set(include or ()) - {str(kind) for kind in OffloadStateType}
    if unknown:
        known = ", ".join(OffloadStateType)
        raise ConfigError(f"include: found {', '.join(sorted(unknown))}, expected some of {known}")
    return include is None or part in include


@dataclass(frozen=True)
class Ranks:
    """`size` processes in torch.distributed's default group, or one process without any group.

    Alone, each of the collectives is the identity.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def of_default_group(cls, device: torch.device) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over ranks, in float64: exact for counts up to 2**53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, value: float) -> list[float]:
        """The value of every rank, in rank order."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        self.sum([0.0])

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


def create_strategy(worker: Worker) -> InferenceStrategy:
    """The strategy that the role's `strategy_args.strategy_name` names, not yet initialised."""
    config = worker.worker_config
    problems = [problem.under(str(config.name)) for problem in config.start_problems()]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return strategy_class(config.strategy_args.strategy_name)(worker)


class InferenceStrategy(ABC):
    """A model on this rank that computes log-probs and values, and perhaps generates.

    `info` says what the strategy is; the configs ask it. Callers also read `worker_config`,
    `model`, `tokenizer`, `device`, `ranks` and `options`, the checked `strategy_config`.
    """

    info: ClassVar[StrategyInfo]

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.worker_config = worker.worker_config
        self.strategy_name: str = worker.worker_config.strategy_args.strategy_name
        self.strategy_config: Mapping[str, Any] = worker.worker_config.strategy_args.strategy_config
        own = {
            key: value
            for key, value in self.strategy_config.items()
            if key in self.info.options.model_fields or not self.info.passes_other_keys
        }
        self.options: Any = self.info.options(**own)
        self.model: nn.Module
        self.tokenizer: Any = None
        self.device = torch.device("cpu")
        if worker.device_index is not None:
            self.device = torch.device("cuda", worker.device_index)
        self.ranks = Ranks(0, 1, self.device)
        self.weight_channel: WeightChannel | None = None
        self.sync_plan = SyncPlan(())
        self.shares_prefixes = False  # whether tokens that rows have in common are computed once
        self.policy_version = 0  # of the weights; whoever brings new ones sets it

    # -- set-up ------------------------------------------------------------------------------------

    @abstractmethod
    def initialize(self, model_provider: ModelProvider) -> None:
        """Build tokenizer and model and place the model. Called once on every rank."""

    def build_model(self, model_provider: ModelProvider) -> None:
        """Seed this process, then make tokenizer and model on the CPU."""
        seed_everything(self.worker.pipeline_config.seed)
        model_args = self.worker_config.model_args
        self.tokenizer = default_tokenizer_provider(model_args)
        self.model = model_provider(
            tokenizer=self.tokenizer,
            model_args=model_args,
            training_args=self.worker_config.training_args,
            is_trainable=self.info.trains,
        )
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        on_cpu = self.device.type == "cpu" and torch.cuda.is_available()
        if on_cpu and num_parameters > LARGE_ON_A_CPU:
            # This is more often forgotten than meant.
            name = self.worker_config.name
            self.worker.logger.warning(
                f"{name} computes on the CPU, although this machine has "
                f"{torch.cuda.device_count()} GPU(s): its device_mapping names none. "
                f"{name}.device_mapping: [0] is the first"
            )
        builds_logits = base_model(self.model).get_output_embeddings() is not None
        if builds_logits and self.options.linear_logits:
            builds_logits = not use_linear_logits(self.model)
        wanted = self.options.share_prefixes
        # Spreading logits over the rows of a batch would copy them; hidden states are small.
        if not builds_logits and wanted is not False:
            self.shares_prefixes = use_token_tree(self.model)
        if wanted and not self.shares_prefixes:
            self.worker.logger.warning(
                "share_prefixes has no effect: %s is computed row by row", type(self.model)
            )

    def join_ranks(self, backend: str | None = None) -> None:
        """Meet the other ranks of this role in torch.distributed's default group."""
        self.worker.init_process_group(backend=backend)
        self.ranks = Ranks.of_default_group(self.device)

    def get_data_input(self, batch: DataProto) -> DataProto:
        """The batch of this rank's data-parallel group; a model split over ranks gets it here."""
        return batch

    # -- forward -----------------------------------------------------------------------------------

    def forward_step(self, batch: DataProto, forward_func: ForwardFunction) -> dict[str, Tensor]:
        """Run `forward_func(micro_batch, output)` over all rows without gradients.

        Its dict of results is joined over micro-batches, in the order of the input rows. Results
        with a column per predicted token come back as (rows, S-1), zero outside of the columns that
        a micro-batch looked at. `meta_info["micro_batch_size"]` sets the rows of a micro-batch
        (default `infer_batch_size`); with `meta_info["disable_adapter"]` a LoRA model answers as
        its base model, which is the reference for free.
        """
        if len(batch) == 0:
            raise ValueError(
                "the batch has no rows; a rank needs at least one (see pad_dataproto_to_divisor)"
            )
        width = batch["attention_mask"].shape[1]
        without_adapter = batch.meta_info.get("disable_adapter", False)
        pieces: dict[str, list[Tensor]] = {}
        order: Rows = []
        self.set_training(False)
        adapter = adapter_disabled(self.model) if without_adapter else contextlib.nullcontext()
        with torch.no_grad(), adapter:
            plan = self.plan_micro_batches(batch, training=False)
            for rows, micro in zip(plan, self.micro_batches(batch, plan), strict=True):
                output = self.forward_model(micro.data)
                if not rows:
                    continue
                _, results = forward_func(micro.data, output)
                for key, value in results.items():
                    if value.dim() >= 2 and value.shape[1] == micro.stop - micro.start - 1:
                        value = micro.widen(value, width)
                    pieces.setdefault(key, []).append(value.cpu())
                order.extend(micro.rows)
        back = torch.tensor(order).argsort()
        return {key: torch.cat(values)[back] for key, values in pieces.items()}

    def set_training(self, mode: bool) -> None:
        """Switch dropout on or off; only on a change, for it goes through all modules."""
        if self.model.training != mode:
            self.model.train(mode)

    def forward_model(self, data: DataProto) -> ModelOutput:
        """A forward pass over a micro-batch; logits are not built when the head allows it."""
        is_plain = data.meta_info["right_padded"] and not data.meta_info["own_positions"]
        if self.shares_prefixes and is_plain:
            tree = token_tree(
                data["input_ids"].to(self.device),
                data["attention_mask"].to(self.device),
                round_to=1 if self.device.type == "cpu" else GPU_MULTIPLE,
            )
            if tree is not None:
                return tree.rows_of(self.model(**tree.model_inputs(), use_cache=False).logits)
        return self.model(**self.model_inputs(data), use_cache=False).logits

    def model_inputs(self, data: DataProto) -> dict[str, Tensor | None]:
        """Arguments of the model. Ids and positions under the mask are neutralised: padding may
        hold anything."""
        attention_mask = data["attention_mask"].to(self.device)
        input_ids = data["input_ids"].to(self.device)
        input_ids = torch.where(attention_mask != 0, input_ids, self.tokenizer.pad_token_id)
        if data.meta_info["right_padded"] and not data.meta_info["own_positions"]:
            # A causal model cannot see the padding to the right of a row, and without a mask torch
            # picks its fastest attention.
            return {"input_ids": input_ids, "attention_mask": None, "position_ids": None}
        position_ids = positions(attention_mask)
        if data.meta_info["own_positions"]:
            # These need a mask: without one transformers takes a step other than 1 for the start
            # of another sequence.
            given = data["position_ids"].to(self.device)
            position_ids = torch.where(attention_mask != 0, given, position_ids)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }

    def plan_micro_batches(self, batch: DataProto, *, training: bool) -> list[Rows]:
        """The rows of each micro-batch, by number of rows or of tokens as the config says."""
        config, meta_info = self.worker_config, batch.meta_info
        phase = "train" if training else "infer"
        unit = meta_info.get("rows_per_unit", 1) if training else 1
        if training and meta_info.get(PLACEHOLDER, False):
            plan: list[Rows] = [[]]
        elif getattr(config, f"use_dynamic_batching_in_{phase}"):
            first, stop = row_windows(batch["attention_mask"])
            plan = plan_by_tokens(
                (stop - first).tolist(),
                getattr(config, f"max_tokens_per_microbatch_in_{phase}"),
                round_to=getattr(config, f"sequence_length_round_in_{phase}"),
                unit=unit,
            )
        elif training:
            plan = plan_by_rows(len(batch), config.training_args.per_device_train_batch_size * unit)
        else:
            rows = meta_info.get("micro_batch_size", config.infer_batch_size)
            plan = plan_by_rows(len(batch), rows)
        return self.same_length_on_all_ranks(plan, unit)

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int) -> list[Rows]:
        """The plan itself, where ranks compute on their own. Ranks that share a sharded model must
        run equally many passes (see `micro_batches.split_to`)."""
        return plan

    def micro_batches(self, batch: DataProto, plan: list[Rows]) -> Iterator[MicroBatch]:
        """The micro-batches of a plan, on the device. An empty one, of a rank that only keeps step
        with the others, is row 0."""
        attended = batch["attention_mask"] != 0
        layout = {
            # Every row's attended tokens are its first ones, without holes.
            "right_padded": bool((attended.long().diff(dim=1) <= 0).all()),
            "own_positions": has_own_positions(batch),
        }
        for rows in plan:
            micro = make_micro_batch(batch, rows or [0])
            micro.data.meta_info = {**batch.meta_info, **layout}
            micro.data.to(self.device)
            yield micro

    def score(
        self,
        output: ModelOutput,
        input_ids: Tensor,
        mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of each next token and entropy of its distribution, (B, S-1), 0 where
        `mask[:, 1:]` is 0."""
        return next_token_log_probs(
            output, input_ids, mask, temperature=temperature, with_entropy=with_entropy
        )

    def op_compute_log_probs(
        self, logits: ModelOutput, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """ROLL's name: log-prob of each next token, (B, S-1), 0 where `attention_mask[:, 1:]` is 0.

        The mask is whatever the caller wants: DPO passes the attention mask, RL the response mask.
        """
        return self.score(logits, input_ids, attention_mask)[0]

    def op_compute_entropy(self, logits: ModelOutput, attention_mask: Tensor) -> Tensor:
        """ROLL's name: entropy of each next-token distribution, (B, S-1), 0 where the mask is 0."""
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

    # -- moving ------------------------------------------------------------------------------------

    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Bring states to their device: all, or those that `include` names (OffloadStateType)."""
        if includes(include, OffloadStateType.model_params):
            self.model.to(self.device, non_blocking=non_blocking)

    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Move states to host memory. A model on the CPU is there already."""
        if includes(include, OffloadStateType.model_params) and self.device.type != "cpu":
            self.model.to("cpu", non_blocking=non_blocking)
            torch.cuda.empty_cache()

    def process_weights_after_loading(self) -> None:  # noqa: B027  (nothing is the right default)
        """Finish weights that were just written into the model."""

    # -- weights, as roll.distributed.weight_sync reads and writes them ----------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as plain `transformers` names them, adapters merged, one full tensor at a
        time. Ranks that share a sharded model iterate together."""
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
        """All weights on the CPU, on rank 0; None where the model's own `state_dict` is complete.
        All ranks call it."""
        return None

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights under those names into the model."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)

    def receive_weights(self, buckets: Iterator[Mapping[str, Tensor]]) -> None:
        """Write all weights into the model; a bucket is gone when the next one is asked for."""
        for bucket in buckets:
            self.update_weights(bucket)

    def weight_checksums(self, names: Collection[str]) -> dict[str, int]:
        return {name: checksum(weight) for name, weight in self.named_weights() if name in names}

    @property
    def holds_whole_model(self) -> bool:
        """Whether `model`'s parameters are the whole weights, not shards of them."""
        return not isinstance(next(self.model.parameters()), DTensor)

    def share_model(self, source: InferenceStrategy) -> bool:
        """Use the model of another strategy of this process as one's own; False if that cannot be:
        both must hold one architecture in one precision on one device, the other a whole model."""
        ours, theirs = base_model(self.model), base_model(source.model)
        same = type(ours) is type(theirs) and ours.dtype == theirs.dtype
        same = same and self.device == source.device and source.holds_whole_model
        if same:
            self.model = source.model
        return same


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the entries of its longest ModuleList."""
    lists = [module for module in base_model(model).modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered from all ranks; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def has_own_positions(batch: DataProto) -> bool:
    """Whether `position_ids` puts any attended token elsewhere than the attention mask does.

    ROLL gives models that also see images positions of several channels, (B, C, S). Channels that
    all agree with the mask say nothing new; others have no meaning for a text model.
    """
    if "position_ids" not in batch:
        return False
    given, mask_BS = batch["position_ids"], batch["attention_mask"]
    channels_BCS = given if given.dim() == 3 else given[:, None]
    differs = channels_BCS.shape[::2] != mask_BS.shape or bool(
        ((channels_BCS != positions(mask_BS)[:, None]) & (mask_BS != 0)[:, None]).any()
    )
    if differs and given.shape != mask_BS.shape:
        raise ValueError(
            f"position_ids have shape {tuple(given.shape)}, expected {tuple(mask_BS.shape)}: one "
            "position per token of a text model; several, as models that see images have them, "
            "only where all agree with attention_mask"
        )
    return differs
