"""What every worker with a model has in common: it gets its model from a strategy, saves and resumes it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.factory import create_strategy
from roll.distributed.strategy.train_strategy import PLACEHOLDER, TrainStrategy
from roll.distributed.strategy.weight_sync import SyncPlan, TensorSpec, WeightChannel
from roll.models.model_providers import default_actor_model_provider
from roll.pipeline.mini_batches import local_rows_of_steps
from roll.utils.checkpoint_manager import find_checkpoint, role_folder
from roll.utils.metrics.reduction import flatten_sum


class ModelWorker(Worker):
    """A worker whose strategy holds a model."""

    model_provider: ClassVar[Callable[..., nn.Module]] = staticmethod(default_actor_model_provider)

    _weight_channel: WeightChannel | None = None
    _sync_plan: SyncPlan

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Build strategy and model; a role that trains continues from `resume_from_checkpoint` if there is one."""
        super().initialize(pipeline_config)
        self.strategy = create_strategy(self)
        self.strategy.initialize(self.model_provider)
        checkpoint = find_checkpoint(pipeline_config.output_dir, pipeline_config.resume_from_checkpoint)
        if checkpoint is not None and isinstance(self.strategy, TrainStrategy):
            self.strategy.load_checkpoint(checkpoint / self.cluster_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> dict[str, float]:
        """Save what exact resume needs, and weights that plain `transformers` reads. Returns timings.

        `is_last_step` is accepted because ROLL's pipelines pass it; saving is never left unfinished here.
        """
        folder = role_folder(self.pipeline_config.output_dir, global_step, self.cluster_name)
        timings = self.strategy.save_checkpoint(folder, global_step)
        return {f"time/{self.cluster_name}/do_checkpoint/{name}": seconds for name, seconds in timings.items()}

    @contextmanager
    def timed(self, method: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Add the seconds of the block to `metrics` under ROLL's name."""
        started = time.monotonic()
        yield
        metrics[f"time/{self.cluster_name}/{method}/total"] = time.monotonic() - started

    # -- optimizer steps ---------------------------------------------------------------------------------------------

    def optimizer_steps(self, data: DataProto, *, epochs: int, unit: int = 1) -> Iterator[DataProto]:
        """This rank's rows of each optimizer step, `epochs` times over the rows of all ranks (see mini_batches)."""
        counts = [int(count) for count in self.strategy.ranks.gather(len(data))]
        rank = self.strategy.ranks.rank
        steps = local_rows_of_steps(
            num_local=len(data),
            offset=sum(counts[:rank]),
            num_global=sum(counts),
            rows_per_step=self.worker_config.rows_per_optimizer_step * unit * len(counts),
            epochs=epochs,
            seed=self.pipeline_config.seed + data.meta_info.get("global_step", 0),
            unit=unit,
        )
        for rows in steps:
            mini_batch = data.select_idxs(rows or [0])
            mini_batch.meta_info = {**data.meta_info, PLACEHOLDER: not rows, "rows_per_unit": unit}
            yield mini_batch

    def step_metrics(self, role: str, metrics: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """Metrics of several optimizer steps as those of one: `@sum` adds up within a step, then is averaged."""
        reduced = {
            key: flatten_sum(value) / num_steps if key.endswith("@sum") else value for key, value in metrics.items()
        }
        reduced[f"{role}/lr"] = self.strategy.learning_rate
        reduced[f"{role}/backward_steps"] = num_steps
        return reduced

    # -- weights of another role -------------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of the weights that this role can send."""
        return [TensorSpec(name, tuple(w.shape), w.dtype) for name, w in self.strategy.named_weights()]

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        return {spec.name: spec.dtype for spec in self.weight_specs()}

    def weight_checksums(self, names: Collection[str]) -> dict[str, int]:
        return self.strategy.weight_checksums(names)

    def share_weights_of(self, source: ModelWorker) -> bool:
        """Use the model of another worker of this process as one's own. False where the two cannot be one model."""
        return self.strategy.share_model(source.strategy)

    def free_address(self) -> tuple[str, int]:
        """An address of this machine that the other side of a weight channel can connect to."""
        host = self.context.master[0] if self.context.master else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    def open_weight_channel(
        self, *, host: str, port: int, size: int, timeout: timedelta, plan: SyncPlan, first_rank: int
    ) -> None:
        """Join the group that weights travel in. Of a source role only rank 0 does: `first_rank` is 0 there."""
        self._sync_plan = plan
        is_source = first_rank == 0
        if is_source and self.rank > 0:
            return
        self._weight_channel = WeightChannel(
            host=host, port=port, rank=first_rank + self.rank, size=size, device=self.strategy.device, timeout=timeout
        )

    def send_weights(self) -> dict[str, int]:
        """Broadcast all weights; every rank of a sharded model takes part. Returns checksums (rank 0)."""
        weights = self.strategy.named_weights()
        if self._weight_channel is not None:
            return self._weight_channel.send(self._sync_plan, weights)
        for _ in weights:
            pass
        return {}

    def receive_weights(self) -> dict[str, int]:
        """Write the weights that arrive into the model. Returns checksums of what the model then holds."""
        assert self._weight_channel is not None, "open_weight_channel comes first"
        for bucket in self._weight_channel.receive(self._sync_plan):
            self.strategy.update_weights(bucket)
        return self.strategy.weight_checksums(self._sync_plan.sampled_names)
