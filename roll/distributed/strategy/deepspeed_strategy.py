"""`deepspeed_train` and `deepspeed_infer`: ZeRO stages 1 to 3.

`strategy_config` is DeepSpeed's own configuration (see deepspeed_config). Stage 1 shards the optimizer's state over the
ranks, stage 2 (the default of training) gradients as well, stage 3 (the default of inference) also the weights.
Stage 0 trains as stage 1, and both as stage 2 in a bf16 run: the same numbers in less memory (see training_stage).
Inference below stage 3 shards nothing, so every rank is a replica and needs no engine. `linear_logits` is roll's own
key, as in the other strategies; at stage 3 weights leave a rank after each module's forward, so there the model builds
its logits tensor.

How this fits the one gradient of `TrainStrategy`: DeepSpeed is told which micro-batch is the last of a step, divides
by nothing but the number of ranks, and the loss is multiplied by that number. The norm is read before DeepSpeed's own
step; a step that must not happen goes through the path that DeepSpeed has for overflows, which drops the gradients and
touches neither weights nor optimizer state.

In a bf16 or fp16 run DeepSpeed keeps float32 master weights beside the model's. Gradients are summed in float32
(`communication_data_type` and `data_types.grad_accum_dtype` change that). fp16 scales the loss; a checkpoint does not
hold the current scale, so a resumed fp16 run finds it anew.

From the first stage 3 model on, DeepSpeed replaces `torch.nn.functional.linear` in that process by a version that does
not keep gathered weights alive; in bf16 it rounds differently, for every model of the process.
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
from torch import Tensor, nn

from roll.configs.problems import did_you_mean
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.deepspeed_config import (
    RunSettings,
    complete_config,
    training_stage,
    zero_stage,
)
from roll.distributed.strategy.deepspeed_state import ZeroState
from roll.distributed.strategy.micro_batches import Rows, split_to
from roll.distributed.strategy.ranks import Ranks
from roll.distributed.strategy.strategy import InferenceStrategy, ModelOutput, ModelProvider
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.models.hf_checkpoint import load_hf_weights, read_hf_weights
from roll.models.lora import is_lora_model

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker


class DeepSpeedStrategy(InferenceStrategy):
    """What both strategies share: the stage, the engine if there is one, and weights that may be elsewhere.

    `model` stays the Hugging Face (or peft) model; `engine` is DeepSpeed's wrapper around it.
    """

    default_stage: ClassVar[int]

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.engine: Any = None
        self.deepspeed = import_deepspeed(on_cpu=worker.device_index is None)
        self.stage = zero_stage(self.strategy_config, self.worker_config.name, self.default_stage)
        if self.stage == 3:
            self._switch_linear_logits_off()

    def engine_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, checked against the run's."""
        args = self.worker_config.training_args
        run = RunSettings(
            role=self.worker_config.name,
            dtype=self.worker_config.model_args.dtype,
            world_size=self.worker.world_size,
            micro_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            max_grad_norm=self.worker.pipeline_config.max_grad_norm,
        )
        config = complete_config(self.strategy_config, run, self.stage)
        known = words_of_deepspeed()
        for key in config.keys() - known:
            guess = did_you_mean(key, known)
            raise ConfigError(f"{run.key(key)}: DeepSpeed has no such key; {guess or 'remove it'}")
        return config

    def start_engine(
        self, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Meet the other ranks and hand the model, and what trains it, to DeepSpeed."""
        self.worker.init_process_group()
        self.ranks = Ranks.of_default_group(self.device)
        # The one variable that DeepSpeed insists on once torch.distributed is up: the device within this process.
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        self.deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo", verbose=False
        )
        self.engine, *_ = self.deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def forward_model(self, data: DataProto) -> ModelOutput:
        if self.engine is None:
            return super().forward_model(data)
        return self.engine(**self._model_inputs(data), use_cache=False).logits

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int = 1) -> list[Rows]:
        return split_to(plan, int(self.ranks.max(len(plan))), unit=unit)

    # -- weights -------------------------------------------------------------------------------------------------------

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
        """Inside, the parameters are whole; at stage 3 what rank 0 then holds is what all ranks get."""
        is_elsewhere = not self.holds_whole_model
        return self.deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0, enabled=is_elsewhere
        )

    # -- moving --------------------------------------------------------------------------------------------------------

    def load_states(self, include: Any = None, non_blocking: bool = False) -> None:
        if self.engine is None:
            super().load_states(include, non_blocking)
        elif self._can_move:
            self.engine.reload_states(non_blocking=non_blocking)

    def offload_states(self, include: Any = None, non_blocking: bool = False) -> None:
        """Everything at once, where an engine can: in training at stage 3. Other engines keep what they have."""
        if self.engine is None:
            super().offload_states(include, non_blocking)
        elif self._can_move:
            self.engine.offload_states(non_blocking=non_blocking)
            torch.cuda.empty_cache()
        elif self.device.type != "cpu":
            self.worker.logger.warning(
                f"{self.strategy_name} at ZeRO stage {self.stage} keeps its states on the device; deepspeed_train can "
                "move them at stage 3, and hf_infer always"
            )

    @property
    def _can_move(self) -> bool:
        has_offload = "offload_param" in self.strategy_config.get("zero_optimization", {})
        return (
            self.device.type != "cpu" and self.is_trainable and self.stage == 3 and not has_offload
        )

    def _switch_linear_logits_off(self) -> None:
        if self.strategy_config.get("linear_logits", False):
            raise ConfigError(
                f"{self.worker_config.name}.strategy_args.strategy_config.linear_logits: found true, but ZeRO stage "
                "3 takes the head's weight away before the loss reads it; leave the key out, or use stage 2 or fsdp2"
            )
        self.options = self.options.model_copy(update={"linear_logits": False})


class DeepSpeedInferStrategy(DeepSpeedStrategy):
    """A model that scores batches: sharded at stage 3, a replica on every rank below."""

    strategy_name = "deepspeed_infer"
    default_stage = 3

    def initialize(self, model_provider: ModelProvider) -> None:
        config = self.engine_config()
        self.build_model(model_provider)
        self.model.requires_grad_(False)
        if self.stage == 3:
            self.start_engine(config)
        else:
            self.model.to(self.device)


class DeepSpeedTrainStrategy(DeepSpeedStrategy, TrainStrategy):
    """A model that trains."""

    strategy_name = "deepspeed_train"
    default_stage = 2

    zero: ZeroState
    _has_gradients = False
    _clip_factor = 1.0

    def initialize(self, model_provider: ModelProvider) -> None:
        stage = training_stage(
            self.strategy_config, self.stage, self.worker_config.model_args.dtype
        )
        if stage != self.stage:
            self.worker.logger.warning(
                f"ZeRO stage {self.stage} runs as stage {stage}: the same numbers, less memory"
            )
            self.stage = stage
        config = self.engine_config()
        self.build_model(model_provider)
        self.make_optimizer()
        self.start_engine(config, self.optimizer)
        self.zero = ZeroState(self.engine, self.optimizer, self.model, self.ranks)

    # -- the step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        # The reduction over ranks is a mean; the losses of ranks add up.
        self.engine.backward(loss * self.ranks.size)
        self._has_gradients = True

    def reduce_gradients(self) -> None:
        """Nothing left to do: the last backward has reduced them."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Read the norm; DeepSpeed itself scales in its step, by the same `gradient_clipping`."""
        norm = self.zero.grad_norm()
        self._clip_factor = (
            min(1.0, max_norm / (float(norm) + 1e-6)) if math.isfinite(float(norm)) else 1.0
        )
        return norm

    def apply_gradients(self) -> None:
        self.engine.step()
        self._has_gradients = False

    def clear_gradients(self) -> None:
        if self._has_gradients:
            self.zero.discard_gradients()
            self._has_gradients = False

    def full_gradients(self) -> dict[str, Tensor]:
        """As DeepSpeed applies them, after clipping; a parameter that took no part has zeros."""
        return {name: (value * self._clip_factor).cpu() for name, value in self.zero.gradients()}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def load_weights(self, folder: Path) -> None:
        if self.holds_whole_model:
            load_hf_weights(self.model, folder)
        else:
            self._load_sharded_weights(folder)
        self.zero.refresh_master_weights()

    def _load_sharded_weights(self, folder: Path) -> None:
        # Checking an adapter compares with the shapes of the model's own tensors, so these have to be there.
        adapter = (
            [p for p in self.model.parameters() if p.requires_grad]
            if is_lora_model(self.model)
            else []
        )
        with self.deepspeed.zero.GatheredParameters(adapter):
            weights = read_hf_weights(self.model, folder) if self.ranks.rank == 0 else {}
        names = self.ranks.share(list(weights))
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name in names and isinstance(value, nn.Parameter):
                with torch.no_grad(), self._writable([value]):
                    if self.ranks.rank == 0:
                        value.copy_(weights[name])

    def save_training_state(self, folder: Path) -> None:
        self.zero.save(folder / "optimizer")

    def load_training_state(self, folder: Path) -> None:
        self.zero.load(folder / "optimizer")

    def load_checkpoint(self, load_dir: str | Path) -> int:
        global_step = super().load_checkpoint(load_dir)
        for group, learning_rate in zip(
            self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = learning_rate
        return global_step


@functools.cache
def words_of_deepspeed() -> frozenset[str]:
    """Among these texts are all top-level keys of DeepSpeed's configuration.

    DeepSpeed refuses unknown keys in its sections and ignores them at the top, where it has no list of them: a key is
    a constant of one of its modules, or a text in the code of one that is about configuration.
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

    On a CPU the first start would otherwise compile shared-memory collectives for minutes, and one that is killed
    meanwhile leaves a lock behind on which all later starts wait. Only inference kernels use them.
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
            f"{install_hint('deepspeed')}; the nearest strategies without it are fsdp2_train and fsdp2_infer"
        ) from error
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # It calls collectives by names that torch has since renamed.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning
    )
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
