"""`fsdp2_train` and `fsdp2_infer`: parameters, gradients and optimizer state sharded over all ranks with `fully_shard`.

`roll.configs.strategy_options` has the keys of `strategy_config`.

Training keeps float32 master weights whatever `param_dtype` is. All ranks run equally many forward and backward
passes: a rank with fewer micro-batches takes part with an empty one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from roll.configs.strategy_options import Fsdp2Options, Fsdp2TrainOptions
from roll.distributed.strategy.checkpoint import load_optimizer, save_optimizer
from roll.distributed.strategy.micro_batches import Rows, split_to
from roll.distributed.strategy.ranks import Ranks
from roll.distributed.strategy.strategy import (
    InferenceStrategy,
    ModelProvider,
    decoder_layers,
    full_tensor,
)
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.models.hf_checkpoint import read_hf_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Fsdp2InferStrategy(InferenceStrategy):
    """A sharded model that scores batches."""

    strategy_name = "fsdp2_infer"

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.model.requires_grad_(False)
        shard_model(self)

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int = 1) -> list[Rows]:
        return split_to(plan, int(self.ranks.max(len(plan))), unit=unit)


class Fsdp2TrainStrategy(TrainStrategy):
    """A sharded model that trains."""

    strategy_name = "fsdp2_train"

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.model.float()
        shard_model(self)
        self.make_optimizer()

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int = 1) -> list[Rows]:
        return split_to(plan, int(self.ranks.max(len(plan))), unit=unit)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        if not self.options.reduce_scatter_during_grad_accumulation:
            self.model.set_requires_gradient_sync(is_last)
        # The reduction over ranks is a mean; the losses of ranks add up.
        (loss * self.ranks.size).backward()

    def reduce_gradients(self) -> None:
        """Nothing left to do: backward has reduced them."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        return full_tensor(super().clip_gradients(max_norm))

    def full_state_dict(self) -> dict[str, Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast("dict[str, Tensor]", get_model_state_dict(self.model, options=options))

    def load_weights(self, folder: Path) -> None:
        # Rank 0 reads and checks; the others receive their shards from it.
        weights: dict[str, Any] = (
            dict(read_hf_weights(self.unwrap_model(), folder)) if self.ranks.rank == 0 else {}
        )
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self.model, weights, options=options)

    def save_training_state(self, folder: Path) -> None:
        save_optimizer(folder / "optimizer", self.model, self.optimizer, sharded=True)

    def load_training_state(self, folder: Path) -> None:
        load_optimizer(folder / "optimizer", self.model, self.optimizer, sharded=True)


def shard_model(strategy: InferenceStrategy) -> None:
    """Shard every decoder layer, then what is left (embeddings, final norm, head) as the root group.

    The head belongs into the root group, which stays gathered from its forward to its backward: the log-prob operators
    read the head's weight after the model has returned.
    """
    options: Fsdp2Options = strategy.options
    offload = options.offload_policy
    on_gpu = strategy.device.type == "cuda"
    strategy.worker.init_process_group(backend="cpu:gloo,cuda:nccl" if offload and on_gpu else None)
    strategy.ranks = Ranks.of_default_group(strategy.device)
    mesh = init_device_mesh(strategy.device.type, (strategy.ranks.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[options.param_dtype or strategy.worker_config.model_args.dtype],
        reduce_dtype=DTYPES[options.reduce_dtype]
        if isinstance(options, Fsdp2TrainOptions)
        else None,
    )
    offload_policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    for layer in decoder_layers(strategy.model):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward is not False,
            mp_policy=policy,
            offload_policy=offload_policy,
        )
    fully_shard(
        strategy.model,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=policy,
        offload_policy=offload_policy,
    )
    if not offload:
        strategy.model.to(strategy.device)
