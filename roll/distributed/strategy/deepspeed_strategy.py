"""`deepspeed_train` and `deepspeed_infer`: ZeRO stages 1 to 3.

`strategy_config` is DeepSpeed's own configuration (see deepspeed_config). Stage 1 shards the
optimizer's state over the ranks, stage 2 (the default of training) gradients as well, stage 3 (the
default of inference) also the weights. Stage 0 trains as stage 1, and both as stage 2 in a bf16 run
(see training_stage). Inference below stage 3 shards nothing: every rank is a replica without an
engine. At stage 3 weights leave a rank after each module's forward, so the model builds its logits.

How this fits the one gradient of `TrainStrategy`: DeepSpeed is told which micro-batch is the last
of a step, divides by nothing but the number of ranks, and the loss is multiplied by that number.
The norm is read before DeepSpeed's own step; a step that must not happen goes through the path that
DeepSpeed has for overflows, which drops the gradients and touches neither weights nor state.

In a bf16 or fp16 run DeepSpeed keeps float32 master weights. fp16 scales the loss; a checkpoint
does not hold the current scale, so a resumed fp16 run finds it anew. From the first stage 3 model
on, DeepSpeed replaces `torch.nn.functional.linear` in that process by a version that rounds
differently in bf16, for every model of the process.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from roll.configs.base import did_you_mean
from roll.configs.strategy_info import STRATEGIES
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.deepspeed_config import complete_config, training_stage, zero_stage
from roll.distributed.strategy.micro_batches import Rows, split_to
from roll.distributed.strategy.strategy import (
    InferenceStrategy,
    ModelOutput,
    ModelProvider,
    Ranks,
)
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.exceptions import ConfigError, DataError, MissingDependencyError, install_hint
from roll.models.checkpoint import load_hf_weights, read_hf_weights, without_dcp_warning
from roll.models.lora import is_lora_model

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
LOAD_ELEMENTS = 2**28  # of parameters whose whole state a rank holds while loading: 1 GiB a tensor


class DeepSpeedInferStrategy(InferenceStrategy):
    """A model for forward passes: sharded at stage 3, a replica on every rank below.

    `model` stays the Hugging Face (or peft) model; `engine` is DeepSpeed's wrapper around it.
    """

    info = STRATEGIES["deepspeed_infer"]
    default_stage: ClassVar[int] = 3

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.engine: Any = None
        self.deepspeed = import_deepspeed(on_cpu=worker.device_index is None)
        self.stage = zero_stage(self.worker_config, self.default_stage)
        if self.stage == 3:
            if self.strategy_config.get("linear_logits", False):
                raise ConfigError(
                    f"{self.worker_config.name}.strategy_args.strategy_config.linear_logits: found "
                    "true, but ZeRO stage 3 takes the head's weight away before the loss reads it; "
                    "leave the key out, or use stage 2 or fsdp2"
                )
            self.options = self.options.model_copy(update={"linear_logits": False})

    def initialize(self, model_provider: ModelProvider) -> None:
        config = self.engine_config()
        self.build_model(model_provider)
        self.model.requires_grad_(False)
        if self.stage == 3:
            self.start_engine(config)
        else:
            self.model.to(self.device)

    def engine_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, checked against the run's."""
        role = self.worker_config
        config = complete_config(role, self.stage, self.worker.pipeline_config.max_grad_norm)
        known = words_of_deepspeed()
        for key in config.keys() - known:
            guess = did_you_mean(key, known) or "remove it"
            raise ConfigError(
                f"{role.name}.strategy_args.strategy_config.{key}: DeepSpeed has no such key; "
                f"{guess}"
            )
        return config

    def start_engine(
        self, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Meet the other ranks and hand the model, and what trains it, to DeepSpeed."""
        self.join_ranks()
        # The one variable that DeepSpeed insists on once torch.distributed is up.
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.deepspeed.init_distributed(dist_backend=backend, verbose=False)
        self.engine, *_ = self.deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def forward_model(self, data: DataProto) -> ModelOutput:
        if self.engine is None:
            return super().forward_model(data)
        return self.engine(**self.model_inputs(data), use_cache=False).logits

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int) -> list[Rows]:
        return split_to(plan, int(self.ranks.max(len(plan))), unit=unit)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def holds_whole_model(self) -> bool:
        return self.engine is None or self.stage < 3

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.holds_whole_model or is_lora_model(self.model):
            yield from super().named_weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, self._gathered(parameter)

    def full_state_dict(self) -> dict[str, Tensor] | None:
        if self.holds_whole_model:
            return None
        state = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            whole = self._gathered(value) if isinstance(value, nn.Parameter) else value
            if self.ranks.rank == 0:
                state[name] = whole.cpu()
        return state

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad(), self._writable([own[name] for name in weights]):
            if self.holds_whole_model or self.ranks.rank == 0:
                for name, weight in weights.items():
                    own[name].copy_(weight)

    def share_model(self, source: InferenceStrategy) -> bool:
        """Only without an engine, which would go on with the model that it was made for."""
        return self.engine is None and super().share_model(source)

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        with self.deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _writable(self, parameters: list[nn.Parameter]) -> Any:
        """Inside, the parameters are whole; at stage 3 all ranks get what rank 0 then holds."""
        return self.deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0, enabled=not self.holds_whole_model
        )

    # -- moving ------------------------------------------------------------------------------------

    def load_states(self, include: Any = None, non_blocking: bool = False) -> None:
        if self.engine is None:
            super().load_states(include, non_blocking)
        elif self._can_move:
            self.engine.reload_states(non_blocking=non_blocking)

    def offload_states(self, include: Any = None, non_blocking: bool = False) -> None:
        """Everything at once, where an engine can. Other engines keep what they have."""
        if self.engine is None:
            super().offload_states(include, non_blocking)
        elif self._can_move:
            self.engine.offload_states(non_blocking=non_blocking)
            torch.cuda.empty_cache()
        elif self.device.type != "cpu":
            self.worker.logger.warning(
                f"{self.strategy_name} at ZeRO stage {self.stage} keeps its states on the device; "
                "deepspeed_train can move them at stage 3, and hf_infer always"
            )

    @property
    def _can_move(self) -> bool:
        has_offload = "offload_param" in self.strategy_config.get("zero_optimization", {})
        is_sharded = self.info.trains and self.stage == 3
        return self.device.type != "cpu" and is_sharded and not has_offload


class DeepSpeedTrainStrategy(DeepSpeedInferStrategy, TrainStrategy):
    """A model that trains. Its `optimizer` is DeepSpeed's, behind `ZeroOptimizer`."""

    info = STRATEGIES["deepspeed_train"]
    default_stage = 2

    _clip_factor = 1.0

    def initialize(self, model_provider: ModelProvider) -> None:
        stage = training_stage(self.worker_config, self.default_stage)
        if stage != self.stage:
            self.worker.logger.warning(
                f"ZeRO stage {self.stage} runs as stage {stage}: the same numbers, less memory"
            )
            self.stage = stage
        config = self.engine_config()
        self.build_model(model_provider)
        self.make_optimizer()
        adam = self.optimizer
        self.start_engine(config, adam)
        self.optimizer = ZeroOptimizer(self.engine, adam, self.model, self.ranks)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        # The reduction over ranks is a mean; the losses of ranks add up.
        self.engine.backward(loss * self.ranks.size)
        self.optimizer.has_gradients = True

    def reduce_gradients(self) -> None:
        """Nothing left to do: the last backward has reduced them."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Read the norm; DeepSpeed itself scales in its step, by the same `gradient_clipping`."""
        norm = self.optimizer.grad_norm()
        self._clip_factor = 1.0
        if math.isfinite(float(norm)):
            self._clip_factor = min(1.0, max_norm / (float(norm) + 1e-6))
        return norm

    def full_gradients(self) -> dict[str, Tensor]:
        """As DeepSpeed applies them, after clipping; a parameter that took no part has zeros."""
        gradients = self.optimizer.gradients()
        return {name: (value * self._clip_factor).cpu() for name, value in gradients}

    def load_weights(self, folder: Path) -> None:
        if self.holds_whole_model:
            load_hf_weights(self.model, folder)
        else:
            # Checking an adapter compares shapes with the model's, so its tensors must be there.
            adapter: list[nn.Parameter] = []
            if is_lora_model(self.model):
                adapter = [p for p in self.model.parameters() if p.requires_grad]
            with self.deepspeed.zero.GatheredParameters(adapter):
                weights = read_hf_weights(self.model, folder) if self.ranks.rank == 0 else {}
            names = self.ranks.share(list(weights))
            for name, value in self.model.state_dict(keep_vars=True).items():
                if name in names and isinstance(value, nn.Parameter):
                    with torch.no_grad(), self._writable([value]):
                        if self.ranks.rank == 0:
                            value.copy_(weights[name])
        self.engine.optimizer.refresh_fp32_params()  # the float32 master weights

    def save_optimizer(self, folder: Path) -> None:
        self.optimizer.save(folder)

    def load_optimizer(self, folder: Path) -> None:
        self.optimizer.load(folder)


class ZeroOptimizer:
    """Gradients and optimizer state inside DeepSpeed's ZeRO optimizers, under the names and in the
    shapes of the parameters. All ranks call every method.

    ZeRO flattens the parameters, cuts the result over the ranks and gives torch's AdamW one flat
    float32 tensor per group. Here a checkpoint is written in the layout of the other strategies: it
    loads with any number of ranks and at any stage, and no pickled object of DeepSpeed's is ever
    loaded, which its own checkpoints need.
    """

    def __init__(
        self, engine: Any, adam: torch.optim.Optimizer, model: nn.Module, ranks: Ranks
    ) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.adam = adam
        self.ranks = ranks
        self.is_stage3 = engine.zero_optimization_stage() == 3
        # Any: DeepSpeed has put methods on the parameters.
        self.parameters: dict[str, Any] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self.has_gradients = False

    def step(self) -> None:
        self.engine.step()
        self.has_gradients = False

    def zero_grad(self) -> None:
        """Gradients that no step has used are dropped as after an overflow: weights and optimizer
        state stay, and fp16 scales less."""
        if not self.has_gradients:
            return
        zero, update_scale = self.zero, self.zero._update_scale

        # Every stage asks for the next loss scale right before it looks at `overflow`.
        def overflow(has_overflow: bool = False) -> None:
            zero.overflow = True
            update_scale(True)

        zero._update_scale = overflow
        try:
            self.engine.step()
        finally:
            del zero._update_scale
        self.has_gradients = False

    def grad_norm(self) -> Tensor:
        """Of the sum over all ranks, before clipping; inf if any element is not finite."""
        if self.is_stage3:
            norms = torch.stack([norm.float() for norm in self.zero._get_norm_groups()])
            # -1 is how DeepSpeed says that a group's norm is not finite.
            norm = torch.where((norms < 0).any(), torch.inf, torch.linalg.vector_norm(norms))
        else:
            norm = torch.as_tensor(self.zero.scaled_global_norm())
        return norm / self.zero.loss_scale

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole gradient, between the last backward pass of a step and the step."""
        for name, parameter in self.parameters.items():
            # Not safe_get_full_grad: there a gradient that this rank has not shared comes first.
            if self.is_stage3:
                gradient = self.zero.get_fp32_grad_for_param(parameter)
            else:
                gradient = parameter.get_full_hp_grad()
            yield name, gradient / self.zero.loss_scale

    def save(self, folder: Path) -> None:
        """Every parameter's state whole, the parameters dealt out over the ranks that write."""
        step = self.flat_states()[0]["step"]
        mine: dict[str, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            whole = {key: self.whole_state(parameter, key) for key in self.state_keys()}
            if index % self.ranks.size == self.ranks.rank:
                mine[name] = {key: value.cpu().clone() for key, value in whole.items()}
                mine[name]["step"] = step.clone()
        state: dict[str, Any] = {"state": mine} if mine else {}
        if self.ranks.rank == 0:
            (group,) = self.adam.param_groups
            state["param_groups"] = [{**group, "params": list(self.parameters)}]
        with without_dcp_warning():
            dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=self.ranks.size == 1)

    def load(self, folder: Path) -> None:
        """Read what `save`, or another strategy, wrote; only tensors are read."""
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        missing = [
            name for name in self.parameters if f"optimizer.state.{name}.exp_avg" not in saved
        ]
        if missing:
            raise DataError(
                f"{folder}: no optimizer state for {', '.join(missing[:5])}; is another model "
                "trained here?"
            )
        flat_states = self.flat_states()
        first = next(iter(self.parameters))
        # A run in half precision without master weights has none to give.
        keys = [key for key in self.state_keys() if f"optimizer.state.{first}.{key}" in saved]
        waiting = list(self.parameters.items())
        while waiting:
            # Some parameters at a time, because a rank reads whole tensors.
            bucket = {}
            size = 0
            while waiting:
                name, parameter = waiting[0]
                shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
                size += shape.numel()
                if bucket and size > LOAD_ELEMENTS:
                    break
                bucket[name] = {key: torch.empty(shape) for key in keys}
                bucket[name]["step"] = torch.zeros(())
                del waiting[0]
            with without_dcp_warning():
                dcp.load({"optimizer": {"state": bucket}}, checkpoint_id=folder, no_dist=True)
            for name, state in bucket.items():
                for key in keys:
                    self.set_state(self.parameters[name], key, state[key])
                for flat_state in flat_states:
                    flat_state["step"].copy_(state["step"])

    def state_keys(self) -> tuple[str, ...]:
        is_float32 = next(iter(self.parameters.values())).dtype == torch.float32
        return MOMENTS if is_float32 else (*MOMENTS, MASTER)

    def flat_states(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each flat tensor; before its first step AdamW has none, and it is
        made."""
        zero = self.zero
        flats = (
            zero.fp32_partitioned_groups_flat
            if self.is_stage3
            else zero.single_partition_of_fp32_groups
        )
        for flat in flats:
            if not self.adam.state.get(flat):
                moments = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
                self.adam.state[flat] = {"step": torch.tensor(0.0), **moments}
        if not self.is_stage3:
            zero._lazy_init_hp_params_optimizer_state()
        return [self.adam.state[flat] for flat in flats]

    def whole_state(self, parameter: Any, key: str) -> Tensor:
        state_key = None if key == MASTER else key
        if self.is_stage3:
            return self.zero.get_full_hp_param(parameter, state_key)
        return parameter.get_full_hp_param(state_key)

    def set_state(self, parameter: Any, key: str, value: Tensor) -> None:
        state_key = None if key == MASTER else key
        if not self.is_stage3:
            parameter.set_full_hp_param(value, state_key)
            return
        # This rank's part; DeepSpeed's method for whole values fails where the last is padded.
        length = parameter.ds_tensor.numel()
        padding = length * self.ranks.size - value.numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, padding))
        part = padded.narrow(0, length * self.ranks.rank, length)
        self.zero.set_local_hp_param(part, parameter, state_key)


@functools.cache
def words_of_deepspeed() -> frozenset[str]:
    """Among these texts are all top-level keys of DeepSpeed's configuration.

    DeepSpeed refuses unknown keys in its sections and ignores them at the top, where it has no list
    of them: a key is a constant of one of its modules, or a text in the code of one that is about
    configuration.
    """
    words: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed":
            words |= {value for value in vars(module).values() if isinstance(value, str)}
            if name.endswith("config"):
                nodes = ast.walk(ast.parse(inspect.getsource(module)))
                constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
                words |= {value for value in constants if isinstance(value, str)}
    return frozenset(words)


def import_deepspeed(*, on_cpu: bool) -> Any:
    """The package, prepared for the device, without compiling anything on a CPU.

    On a CPU the first start would otherwise compile shared-memory collectives for minutes, and one
    that is killed meanwhile leaves a lock behind on which all later starts wait. Only inference
    kernels use them.
    """
    if on_cpu:
        # Before anything, such as transformers, has made DeepSpeed look for an accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        # By name: type checkers need not have the package.
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise MissingDependencyError(
            "the strategies deepspeed_train and deepspeed_infer need the package deepspeed: "
            f"{install_hint('deepspeed')}; the nearest strategies without it are fsdp2_train and "
            "fsdp2_infer"
        ) from error
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # It calls collectives by names that torch has since renamed.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning
    )
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
