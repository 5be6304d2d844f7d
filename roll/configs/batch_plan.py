"""The arithmetic between a pipeline step and the optimizer: who gets how many rows, how often."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from roll.configs.base import Problem, nearest_multiples, wrong
from roll.configs.worker_config import WorkerConfig


@dataclass(frozen=True)
class BatchPlan:
    """What one training role does with the rows of one pipeline step.

    Example: 64 prompts x 8 samples = 512 rows; on 4 ranks 128 rows each; micro-batches of 2 rows,
    16 of them to an optimizer step, so 4 optimizer steps per batch and 2,000 in 500 pipeline steps.
    """

    role: WorkerConfig
    prompts: int  # prompts, trajectories or pairs of one pipeline step
    samples_per_prompt: int
    sequence_length: int
    steps: int  # pipeline steps in which the role is trained
    epochs: int = 1
    rows_per_sample: int = 1  # 2 for a pair, whose micro-batch size counts pairs
    rows_are_turns: bool = False  # a trajectory has a row per turn: counts are lower bounds
    max_turns: int | None = None  # of a trajectory, if that is known

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def rows(self) -> int:
        return self.samples * self.rows_per_sample

    @property
    def ranks(self) -> int:
        return self.role.dp_size

    @property
    def rows_per_rank(self) -> int:
        return self.rows // self.ranks

    @property
    def rows_per_micro_batch(self) -> int:
        return self.role.training_args.per_device_train_batch_size * self.rows_per_sample

    @property
    def micro_batches_per_optimizer_step(self) -> int:
        return self.role.training_args.gradient_accumulation_steps

    @property
    def samples_per_optimizer_step(self) -> int:
        """Over all ranks."""
        return self.ranks * self.role.rows_per_optimizer_step

    @property
    def optimizer_steps_per_batch(self) -> int:
        # Rounded up for turns, whose number is adjusted to fill optimizer steps; else it divides.
        return math.ceil(self.samples / self.samples_per_optimizer_step) * self.epochs

    @property
    def total_optimizer_steps(self) -> int:
        return self.steps * self.optimizer_steps_per_batch

    @property
    def tokens_per_step(self) -> int:
        """At most, with rows of `sequence_length` tokens (and one turn to a trajectory)."""
        return self.rows * self.sequence_length

    def learning_rates(self) -> tuple[float, float, float]:
        """At the first, the middle and the last optimizer step."""
        args, total = self.role.training_args, self.total_optimizer_steps
        first, middle = args.learning_rate_at(0, total), args.learning_rate_at(total // 2, total)
        return first, middle, args.learning_rate_at(total - 1, total)

    @property
    def divisor(self) -> int:
        """What the number of prompts has to be a multiple of, to fill optimizer steps."""
        step = self.samples_per_optimizer_step
        return step // math.gcd(step, self.samples_per_prompt)


def division_problems(
    plans: Iterable[BatchPlan], key: str, *, multiple_of: int = 1
) -> list[Problem]:
    """The first plan that does not divide, under `key`, with values that suit all plans.

    Args:
        multiple_of: a further condition on the number of prompts.
    """
    plans = list(plans)
    common = math.lcm(multiple_of, *(plan.divisor for plan in plans))
    for plan in plans:
        if plan.prompts % plan.divisor == 0:
            continue
        low, high = nearest_multiples(plan.prompts, common)
        args, step = plan.role.training_args, plan.samples_per_optimizer_step
        expected = (
            f"a multiple of {common}, so that {plan.prompts} x {plan.samples_per_prompt} samples "
            f"fill the optimizer steps of {plan.role.name} ({step} = {plan.ranks} ranks x "
            f"per_device_train_batch_size {args.per_device_train_batch_size} x "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps})"
        )
        return [wrong(key, plan.prompts, expected, f"use {low} or {high}")]
    return []
