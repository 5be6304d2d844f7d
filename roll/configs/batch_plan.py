"""The arithmetic between one pipeline step and the optimizer: who gets how many rows, and how often weights change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from roll.configs.problems import Problem, nearest_multiples, wrong
from roll.configs.schedule import learning_rate_at
from roll.configs.worker_config import WorkerConfig


@dataclass(frozen=True)
class BatchPlan:
    """What one training role does with the rows of one pipeline step.

    Example: 64 prompts x 8 samples = 512 rows; on 4 ranks 128 rows each; micro-batches of 2 rows, 16 of them to an
    optimizer step, so 4 optimizer steps per batch and, over 500 pipeline steps, 2,000 in all.
    """

    role: WorkerConfig
    prompts: int  # prompts, trajectories or pairs of one pipeline step
    samples_per_prompt: int
    sequence_length: int
    steps: int  # pipeline steps in which the role is trained
    epochs: int = 1
    rows_per_sample: int = 1  # 2 for a pair, whose micro-batch size counts pairs
    rows_are_turns: bool = (
        False  # a trajectory gives one row per turn: all counts of rows are lower bounds
    )
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
        # Rounded up for turns, whose number is adjusted to fill optimizer steps; otherwise it divides.
        return math.ceil(self.samples / self.samples_per_optimizer_step) * self.epochs

    @property
    def total_optimizer_steps(self) -> int:
        return self.steps * self.optimizer_steps_per_batch

    @property
    def tokens_per_step(self) -> int:
        """At most: every row as long as `sequence_length` allows. (With one turn per trajectory, if rows are turns.)"""
        return self.rows * self.sequence_length

    def learning_rates(self) -> tuple[float, float, float]:
        """At the first, the middle and the last optimizer step."""
        total = self.total_optimizer_steps
        first, middle, last = (
            learning_rate_at(self.role.training_args, step, total)
            for step in (0, total // 2, total - 1)
        )
        return first, middle, last

    def schedule_problems(self, role_key: str) -> list[Problem]:
        """A polynomial schedule divides by the steps after its warm-up, so there has to be one."""
        args, total = self.role.training_args, self.total_optimizer_steps
        warmup = args.get_warmup_steps(total)
        if args.lr_scheduler_type != "polynomial" or warmup < total:
            return []
        expected = f"fewer than the {total} optimizer steps of the run for a polynomial schedule"
        return [wrong(f"{role_key}.training_args.warmup_steps", warmup, expected)]

    @property
    def divisor(self) -> int:
        """What the number of prompts has to be a multiple of, so that their samples fill optimizer steps."""
        step = self.samples_per_optimizer_step
        return step // math.gcd(step, self.samples_per_prompt)

    def problems(self, key: str, *, multiple_of: int = 1) -> list[Problem]:
        """What does not divide, reported under `key`, which holds the number of prompts.

        Args:
            multiple_of: a further condition on the number of prompts; the values that are proposed meet it too.
        """
        if self.prompts % self.divisor == 0:
            return []
        divisor = math.lcm(self.divisor, multiple_of)
        low, high = nearest_multiples(self.prompts, divisor)
        args, step = self.role.training_args, self.samples_per_optimizer_step
        expected = (
            f"a multiple of {divisor}, so that {self.prompts} x {self.samples_per_prompt} samples fill the optimizer "
            f"steps of {self.role.name} ({step} = {self.ranks} ranks x per_device_train_batch_size "
            f"{args.per_device_train_batch_size} x gradient_accumulation_steps {args.gradient_accumulation_steps})"
        )
        return [wrong(key, self.prompts, expected, f"use {low} or {high}")]


def division_problems(
    plans: Iterable[BatchPlan], key: str, *, multiple_of: int = 1
) -> list[Problem]:
    """The first plan that does not divide, with values that suit all of them."""
    plans = list(plans)
    common = math.lcm(multiple_of, *(plan.divisor for plan in plans))
    found = [problem for plan in plans for problem in plan.problems(key, multiple_of=common)]
    return found[:1]
