"""How the rows of a batch, whose number is known only after the episodes, fill the optimizer steps.

The number of optimizer steps is fixed: that of the batch plan, where a trajectory counts as one row, so that learning
rate schedules end where the run ends. The rows are dealt evenly to these steps: no row is repeated, none is lost, and
all have the same weight. (ROLL fills steps up with copies, which then count twice, or deletes rows.)
"""

from __future__ import annotations

import math

import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.agentic_config import AgenticConfig


def optimizer_steps(config: AgenticConfig) -> dict[str, int]:
    """Optimizer steps that each trained role takes on a batch in one epoch."""
    return {
        name: plan.optimizer_steps_per_batch // plan.epochs
        for name, plan in config.batch_plans().items()
    }


def adjust_batch(
    batch: DataProto, config: AgenticConfig, *, seed: int
) -> tuple[DataProto, dict[str, float]]:
    """The rows to train on, as `batch_adjust_mode` says.

    copy, auto       all of them
    delete           without a few random rows, so that every optimizer step has equally many
    random_sample    as many random rows as one optimizer step has by the batch plan
    """
    plans = config.batch_plans().values()
    keep = len(batch)
    if config.batch_adjust_mode == "delete":
        divisor = math.lcm(*(steps for steps in optimizer_steps(config).values()))
        keep = len(batch) - len(batch) % divisor if len(batch) >= divisor else len(batch)
    elif config.batch_adjust_mode == "random_sample":
        keep = min(len(batch), math.lcm(*(plan.samples_per_optimizer_step for plan in plans)))
    removed = len(batch) - keep
    if removed:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(batch), generator=generator)[:keep].sort().values
        batch = batch.select_idxs(chosen)
    return batch, {"system/batch_add_count": 0.0, "system/batch_remove_count": float(removed)}
