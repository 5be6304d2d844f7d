"""`fsdp2_train` and `fsdp2_infer`: weights, gradients and optimizer state sharded with
`fully_shard`.

`roll.configs.strategy_info` has the keys of `strategy_config`. Training keeps float32 master
weights whatever `param_dtype` is. All ranks run equally many forward and backward passes: a rank
with fewer micro-batches takes part with an empty one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

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

from roll.configs.strategy_info import STRATEGIES
from roll.distributed.strategy.micro_batches import Rows, split_to
from roll.distributed.strategy.strategy import (
    InferenceStrategy,
    ModelProvider,
    decoder_layers,
    full_tensor,
)
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.models.checkpoint import read_hf_weights, read_optimizer, write_optimizer
from roll.models.model_providers import DTYPES


class Fsdp2InferStrategy(InferenceStrategy):
    """A sharded model for forward passes."""

    info = STRATEGIES["fsdp2_infer"]

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.model.requires_grad_(False)
        self.shard_model()

    def same_length_on_all_ranks(self, plan: list[Rows], unit: int) -> list[Rows]:
        return split_to(plan, int(self.ranks.max(len(plan))), unit=unit)

    def shard_model(self) -> None:
        """Shard every decoder layer, then what is left (embeddings, final norm, head).

        The head belongs into that root group, which stays gathered from its forward to its
        backward: log-probs read the head's weight after the model has returned.
        """
        options = self.options
        on_gpu = self.device.type == "cuda"
        self.join_ranks("cpu:gloo,cuda:nccl" if options.offload_policy and on_gpu else None)
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[options.param_dtype or self.worker_config.model_args.dtype],
            reduce_dtype=DTYPES[options.reduce_dtype] if self.info.trains else None,
        )
        shared = {
            "mesh": init_device_mesh(self.device.type, (self.ranks.size,)),
            "mp_policy": policy,
            "offload_policy": OffloadPolicy(),
        }
        if options.offload_policy:
            shared["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        reshard = options.reshard_after_forward is not False
        for layer in decoder_layers(self.model):
            fully_shard(layer, reshard_after_forward=reshard, **shared)
        fully_shard(self.model, reshard_after_forward=False, **shared)
        if not options.offload_policy:
            self.model.to(self.device)


class Fsdp2TrainStrategy(Fsdp2InferStrategy, TrainStrategy):
    """A sharded model that trains."""

    info = STRATEGIES["fsdp2_train"]

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.model.float()
        self.shard_model()
        self.make_optimizer()

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
        weights: dict[str, Any] = {}
        if self.ranks.rank == 0:
            # Rank 0 reads and checks; the others receive their shards from it.
            weights = dict(read_hf_weights(self.model, folder))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self.model, weights, options=options)

    def save_optimizer(self, folder: Path) -> None:
        write_optimizer(folder, self.model, self.optimizer, sharded=True)

    def load_optimizer(self, folder: Path) -> None:
        read_optimizer(folder, self.model, self.optimizer, sharded=True)
