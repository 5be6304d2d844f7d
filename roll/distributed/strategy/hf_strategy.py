"""`hf_train` and `hf_infer`: the whole model on one device. Several `hf_train` ranks are replicas.

`strategy_config: {compile: true}` lets torch.compile fuse what lies between the matrix products of each block, about a
quarter of the time of a training step on a GPU. It costs some ten seconds at the first steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from roll.distributed.strategy.strategy import InferenceStrategy, ModelProvider, decoder_layers
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.engines.engine import end_tokens, text_of
from roll.engines.hf_engine import HFEngine
from roll.models.lora import base_model

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

BUCKET_BYTES = 64 * 2**20
RECOMPILE_LIMIT = 64  # graphs of one function before torch.compile gives up; its default is 8


class HfInferStrategy(InferenceStrategy):
    """A model that scores and generates on one device; several ranks are independent replicas."""

    strategy_name = "hf_infer"

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
        """Our own sampling loop over the model of this strategy, which may be the one that is trained."""
        model = self.unwrap_model()
        if self._engine is None:
            self._engine = HFEngine(
                model,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_ids=end_tokens(self.tokenizer, base_model(model).generation_config),
                decode=text_of(self.tokenizer),
                max_batch_size=self.options.max_batch_size,
            )
        self._engine.model = model
        self._engine.policy_version = self.policy_version
        return self._engine


class HfTrainStrategy(TrainStrategy):
    """A model that trains on one device; several ranks are replicas whose gradients are summed once a step."""

    strategy_name = "hf_train"
    fuses_optimizer = True

    def initialize(self, model_provider: ModelProvider) -> None:
        self.build_model(model_provider)
        self.join_ranks()
        self.model.to(self.device)
        if self.options.compile:
            compile_layers(self.model)
        self.make_optimizer()

    def reduce_gradients(self) -> None:
        if self.ranks.size == 1:
            return
        parameters = self.trainable_parameters()
        # A parameter may have a gradient on some ranks only; one that has none on any rank keeps none.
        used = self.ranks.sum([float(parameter.grad is not None) for parameter in parameters])
        for parameter, count in zip(parameters, used, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat)
            for gradient, summed in zip(
                bucket, _unflatten_dense_tensors(flat, bucket), strict=True
            ):
                gradient.copy_(summed)


def compile_layers(model: nn.Module) -> None:
    """Compile every block of a transformer. All share one graph; names, hooks and the saved form stay as they are.

    What is compiled is the call of a block with its gradient checkpointing inside, not the block inside of it: the
    recomputation then leaves out what no gradient needs (the last matrix product of a block), and one that is compiled
    anew for another width cannot differ from the forward pass that it repeats.
    """
    # Models share the code of their blocks: each of them, with and without gradients, for one width and for any.
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT
    )
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


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, together of at most BUCKET_BYTES (or one tensor that is larger)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
