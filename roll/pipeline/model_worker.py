"""What every worker with a model has in common: it gets its model from a strategy, saves and resumes it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.factory import create_strategy
from roll.distributed.strategy.train_strategy import PLACEHOLDER, TrainStrategy
from roll.distributed.strategy.weight_sync import SyncPlan, TensorSpec
from roll.models.model_providers import default_actor_model_provider
from roll.pipeline.mini_batches import NUM_STEPS, ROW_NUMBER, local_rows_of_steps
from roll.utils.checkpoint_manager import find_checkpoint, role_folder
from roll.utils.metrics.reduction import flatten_sum


class ModelWorker(Worker):
    """A worker whose strategy holds a model."""

    model_provider: ClassVar[Callable[..., nn.Module]] = staticmethod(default_actor_model_provider)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Build strategy and model; a role that trains continues from `resume_from_checkpoint` if there is one."""
        super().initialize(pipeline_config)
        self.strategy = create_strategy(self)
        self.strategy.initialize(self.model_provider)
        checkpoint = find_checkpoint(
            pipeline_config.output_dir, pipeline_config.resume_from_checkpoint
        )
        if checkpoint is not None and isinstance(self.strategy, TrainStrategy):
            self.strategy.load_checkpoint(checkpoint / self.cluster_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> dict[str, float]:
        """Save what exact resume needs, and weights that plain `transformers` reads. Returns timings.

        `is_last_step` is accepted because ROLL's pipelines pass it; saving is never left unfinished here.
        """
        folder = role_folder(self.pipeline_config.output_dir, global_step, self.cluster_name)
        timings = self.strategy.save_checkpoint(folder, global_step)
        return {
            f"time/{self.cluster_name}/do_checkpoint/{name}": seconds
            for name, seconds in timings.items()
        }

    @contextmanager
    def timed(self, method: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Add the seconds of the block to `metrics` under ROLL's name."""
        started = time.monotonic()
        yield
        metrics[f"time/{self.cluster_name}/{method}/total"] = time.monotonic() - started

    # -- optimizer steps ---------------------------------------------------------------------------------------------

    def optimizer_steps(
        self, data: DataProto, *, epochs: int, unit: int = 1
    ) -> Iterator[DataProto]:
        """This rank's rows of each optimizer step, `epochs` times over the rows of all ranks (see mini_batches)."""
        counts = [int(count) for count in self.strategy.ranks.gather(len(data))]
        first = sum(counts[: self.strategy.ranks.rank])
        numbers = (
            data[ROW_NUMBER].tolist()
            if ROW_NUMBER in data
            else list(range(first, first + len(data)))
        )
        steps = local_rows_of_steps(
            numbers,
            num_global=sum(counts),
            rows_per_step=self.worker_config.rows_per_optimizer_step * unit * len(counts),
            epochs=epochs,
            seed=self.pipeline_config.seed + data.meta_info.get("global_step", 0),
            unit=unit,
            num_steps=data.meta_info.get(NUM_STEPS, {}).get(self.cluster_name),
        )
        for rows in steps:
            mini_batch = data.select_idxs(rows or [0])
            mini_batch.meta_info = {**data.meta_info, PLACEHOLDER: not rows, "rows_per_unit": unit}
            yield mini_batch

    def step_metrics(self, role: str, metrics: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """Metrics of several optimizer steps as those of one: `@sum` adds up within a step, then is averaged."""
        reduced = {
            key: flatten_sum(value) / num_steps if key.endswith("@sum") else value
            for key, value in metrics.items()
        }
        reduced[f"{role}/lr"] = self.strategy.learning_rate
        reduced[f"{role}/backward_steps"] = num_steps
        return reduced

    # -- weights of another role -------------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of the weights that this role can send. All ranks call it."""
        return [
            TensorSpec(name, tuple(w.shape), w.dtype) for name, w in self.strategy.named_weights()
        ]

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

    def setup_model_update(self, *, first_rank: int, **channel: Any) -> None:
        """Join the channel that weights travel in: rank 0 of the source (`first_rank` 0), all ranks of the target."""
        is_bystander = first_rank == 0 and self.rank > 0
        self.strategy.setup_model_update(
            rank=None if is_bystander else first_rank + self.rank, **channel
        )

    def start_model_update(self) -> dict[str, int]:
        """Send or receive the weights. Returns checksums of a sample of them; those of rank 0 count for a source."""
        return self.strategy.model_update()

    def set_policy_version(self, version: int) -> None:
        """Say which weights the model holds now: generated tokens carry this number."""
        self.strategy.policy_version = version

    def copy_weights_of(
        self, source: ModelWorker, plan: SyncPlan
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Load the weights of another worker of this process. Returns checksums of the sample: as sent, as held."""
        sent: dict[str, int] = {}
        self.strategy.sync_plan = plan
        self.strategy.receive_weights(plan.buckets_of(source.strategy.named_weights(), sent))
        return sent, self.weight_checksums(plan.sampled_names)
