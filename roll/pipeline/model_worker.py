"""What every worker with a model has in common: strategy, checkpoints, optimizer steps.

Which rows make up each optimizer step is drawn over the *global* row numbers from the seed alone:
every rank draws the same permutation, and a run with two ranks takes its optimizer steps on the
same rows as a run with one. A rank picks those of a step's rows that it holds. `balance_ranks`
deals rows of all lengths evenly to the ranks, and numbers them first, so that balancing changes no
step either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.strategy import create_strategy
from roll.distributed.strategy.train_strategy import PLACEHOLDER, TrainStrategy
from roll.models.checkpoint import checkpoint_folder, find_checkpoint
from roll.models.model_providers import default_actor_model_provider
from roll.utils.balancing import get_seqlen_balanced_partitions
from roll.utils.metrics.reduction import flatten_sum

ROW_NUMBER = "row_number"
# meta_info key: {role: optimizer steps of an epoch}, where rows are dealt evenly to them.
NUM_STEPS = "optimizer_steps"


class ModelWorker(Worker):
    """A worker whose strategy holds a model."""

    model_provider: ClassVar[Callable[..., nn.Module]] = staticmethod(default_actor_model_provider)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Build strategy and model; a role that trains continues from `resume_from_checkpoint`."""
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
        """Save what exact resume needs, and weights that `transformers` reads. Returns timings.

        `is_last_step` is accepted because ROLL's pipelines pass it; saving is always finished here.
        """
        run_dir = self.pipeline_config.output_dir
        folder = checkpoint_folder(run_dir, global_step) / self.cluster_name
        timings = self.strategy.save_checkpoint(folder, global_step)
        prefix = f"time/{self.cluster_name}/do_checkpoint"
        return {f"{prefix}/{name}": seconds for name, seconds in timings.items()}

    @contextmanager
    def timed(self, method: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Add the seconds of the block to `metrics` under ROLL's name."""
        started = time.monotonic()
        yield
        metrics[f"time/{self.cluster_name}/{method}/total"] = time.monotonic() - started

    # -- optimizer steps ---------------------------------------------------------------------------

    def optimizer_steps(
        self, data: DataProto, *, epochs: int, unit: int = 1
    ) -> Iterator[DataProto]:
        """This rank's rows of each optimizer step, `epochs` times over the rows of all ranks."""
        counts = [int(count) for count in self.strategy.ranks.gather(len(data))]
        first = sum(counts[: self.strategy.ranks.rank])
        numbers = list(range(first, first + len(data)))
        if ROW_NUMBER in data:
            numbers = data[ROW_NUMBER].tolist()
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
            # A rank without rows in this step still takes part in its collectives.
            mini_batch = data.select_idxs(rows or [0])
            mini_batch.meta_info = {**data.meta_info, PLACEHOLDER: not rows, "rows_per_unit": unit}
            yield mini_batch

    def step_metrics(self, role: str, metrics: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """Metrics of several optimizer steps as those of one; what `@sum` adds up is averaged."""
        reduced = dict(metrics)
        for key, value in metrics.items():
            if key.endswith("@sum"):
                reduced[key] = flatten_sum(value) / num_steps
        reduced[f"{role}/lr"] = self.strategy.learning_rate
        reduced[f"{role}/backward_steps"] = num_steps
        return reduced

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(worker, ...)` on this worker; how `roll.distributed.weight_sync` reaches it."""
        return function(self, *args, **kwargs)


def balance_ranks(batch: DataProto, num_ranks: int, unit: int = 1) -> DataProto:
    """The rows in an order that gives every rank about as many tokens, and equally many rows.

    The new column `row_number` (B,) holds where each row was. `unit` neighbouring rows stay
    together (2 for pairs). Where the ranks do not divide the rows, the first ranks get one more, as
    `DataProto.chunk` deals them.
    Example: rows of 8, 8, 1 and 1 tokens on 2 ranks -> one long and one short row each.
    """
    uneven = unit > 1 and len(batch) % (num_ranks * unit)
    if len(batch) % unit or len(batch) < num_ranks * unit or uneven:
        raise ValueError(
            f"{len(batch)} rows cannot be dealt to {num_ranks} ranks in units of {unit} rows"
        )
    numbered = batch.slice()  # a shallow copy
    numbered[ROW_NUMBER] = torch.arange(len(batch))
    if num_ranks == 1:
        return numbered
    lengths = batch["attention_mask"].sum(1).view(-1, unit).sum(1).tolist()
    # Rows of no length make the parts equal. They are the shortest: each part gets at most one.
    num_units = len(lengths)
    padded = lengths + [0] * (-num_units % num_ranks)
    partitions = get_seqlen_balanced_partitions(padded, num_ranks, equal_size=True)
    partitions = [[index for index in partition if index < num_units] for partition in partitions]
    partitions.sort(key=len, reverse=True)
    units = torch.tensor([index for partition in partitions for index in sorted(partition)])
    return numbered.select_idxs((units[:, None] * unit + torch.arange(unit)).flatten())


def local_rows_of_steps(
    numbers: Sequence[int],
    *,
    num_global: int,
    rows_per_step: int,
    epochs: int,
    seed: int,
    unit: int = 1,
    num_steps: int | None = None,
) -> Iterator[list[int]]:
    """For each optimizer step, the local indices of this rank's rows in it.

    `numbers` are the global numbers, out of `num_global`, of the rows that this rank holds. Each
    epoch is a new permutation, cut into steps of `rows_per_step`; the last step of an epoch may be
    smaller. With `num_steps` it is dealt evenly to that many steps instead, so that every row has
    the same weight in its step (up to one row more or less). With `unit` 2, rows 2i and 2i+1 stay
    together. Steps that hold all rows keep their order.

    Example: 4 rows, 2 a step, on ranks that hold rows 0-1 and 2-3. If the permutation is 3 0 1 2,
    rank 0 gets [0] and [1], rank 1 gets [1] and [0].
    """
    if num_global % unit or len(numbers) % unit:
        raise ValueError(
            f"{len(numbers)} of {num_global} rows: rows come in units of {unit} that must not be "
            "cut apart"
        )
    local = {number: index for index, number in enumerate(numbers)}
    generator = torch.Generator().manual_seed(seed)
    units_per_step = max(rows_per_step // unit, 1)
    num_units = num_global // unit
    is_cut = units_per_step < num_units if num_steps is None else num_steps > 1
    for _ in range(epochs):
        order = torch.arange(num_units)
        if is_cut:
            order = torch.randperm(num_units, generator=generator)
        if num_steps is None:
            parts = order.split(units_per_step)
        else:
            parts = order.tensor_split(min(num_steps, num_units))
        for units in parts:
            rows = (units[:, None] * unit + torch.arange(unit)).flatten().tolist()
            yield [local[row] for row in rows if row in local]
