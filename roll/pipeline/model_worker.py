"""What every worker with a model has in common: it gets its model from a strategy, saves and resumes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.strategy import create_strategy
from roll.distributed.strategy.train_strategy import PLACEHOLDER, TrainStrategy
from roll.models.checkpoint import checkpoint_folder, find_checkpoint
from roll.models.model_providers import default_actor_model_provider
from roll.pipeline.mini_batches import NUM_STEPS, ROW_NUMBER, local_rows_of_steps
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
        run_dir = self.pipeline_config.output_dir
        folder = checkpoint_folder(run_dir, global_step) / self.cluster_name
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

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(worker, ...)` on this worker; how `roll.distributed.weight_sync` reaches it."""
        return function(self, *args, **kwargs)
