"""`hf_train` and `hf_infer`: the whole model on one device. Several ranks are replicas.

`strategy_config: {compile: true}` lets torch.compile fuse what lies between the matrix products of
each block, about a quarter of the time of a training step on a GPU, for ten seconds at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from roll.configs.strategy_info import STRATEGIES
from roll.distributed.strategy.strategy import InferenceStrategy, ModelProvider, decoder_layers
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.engines.hf_engine import HFEngine
from roll.engines.request import end_tokens, text_of
from roll.models.lora import base_model

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

BUCKET_BYTES = 64 * 2**20
RECOMPILE_LIMIT = 64  # graphs of one function before torch.compile gives up; its default is 8


class HfInferStrategy(InferenceStrategy):
    """A model for forward passes and generation on one device; ranks are independent replicas."""

    info = STRATEGIES["hf_infer"]

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._engine: HFEngine | None = None

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.model.requires_grad_(False).to(self.device)
        if self.options.compile:
            compile_layers(self.model)

    @property
    def generation_engine(self) -> HFEngine:
        """Our own sampling loop over the model, which may be the very one that is trained."""
        if self._engine is None:
            self._engine = HFEngine(
                self.model,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_ids=end_tokens(self.tokenizer, base_model(self.model).generation_config),
                decode=text_of(self.tokenizer),
                max_batch_size=self.options.max_batch_size,
            )
        self._engine.model = self.model
        self._engine.policy_version = self.policy_version
        return self._engine


class HfTrainStrategy(TrainStrategy):
    """A model that trains on one device; the gradients of replicas are summed once a step."""

    info = STRATEGIES["hf_train"]
    fuses_optimizer = True

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        if self.worker.world_size > 1:
            self.join_ranks()
        self.model.to(self.device)
        if self.options.compile:
            compile_layers(self.model)
        self.make_optimizer()

    def reduce_gradients(self) -> None:
        if self.ranks.size == 1:
            return
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # A parameter may have a gradient on some ranks only; without one on any, it keeps none.
        used = self.ranks.sum([float(parameter.grad is not None) for parameter in parameters])
        for parameter, count in zip(parameters, used, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # Buckets of consecutive gradients of one dtype: many small collectives would be slow.
        buckets: list[list[Tensor]] = []
        size = 0
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            size += gradient.nbytes
            if not buckets or gradient.dtype != buckets[-1][0].dtype or size > BUCKET_BYTES:
                buckets.append([])
                size = gradient.nbytes
            buckets[-1].append(gradient)
        for bucket in buckets:
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat)
            summed = _unflatten_dense_tensors(flat, bucket)
            for gradient, total in zip(bucket, summed, strict=True):
                gradient.copy_(total)


def compile_layers(model: nn.Module) -> None:
    """Compile every block of a transformer. All share one graph; names and hooks stay as they are.

    What is compiled is the call of a block with its gradient checkpointing inside: the
    recomputation then leaves out what no gradient needs (the last matrix product of a block), and
    one that is compiled anew for another width cannot differ from the forward pass that it repeats.
    """
    # Models share the code of their blocks: each with and without gradients, one width and any.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    compiled: dict[type, type] = {}
    for layer in decoder_layers(model):
        cls = type(layer)
        if cls not in compiled:
            members = {
                "__call__": torch.compile(cls.__call__),
                "__module__": cls.__module__,
                "__doc__": cls.__doc__,
            }
            compiled[cls] = type(cls.__name__, (cls,), members)
        layer.__class__ = compiled[cls]
