"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.base import Fraction, Positive, Problem, wrong
from roll.configs.batch_plan import BatchPlan
from roll.configs.pipeline_config import BaseConfig
from roll.configs.worker_config import TRAIN_STRATEGIES, WorkerConfig


class SFTConfig(BaseConfig):
    """Learning to give the answers of a file: fine-tuning, or a warm start before reinforcement.

    One pipeline step is one optimizer step, on `per_device_train_batch_size *
    gradient_accumulation_steps` rows a rank.
    """

    pipeline: Literal["sft"] = "sft"
    """Which pipeline this config is for."""

    global_template: str | None = None
    """Chat template; `actor_train.data_args.template` if left out."""

    max_grad_norm: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down."""

    pretrain: str | None = None
    """The model to start from."""

    actor_train: WorkerConfig = Field(default_factory=WorkerConfig)
    """Trains the model."""

    validation: WorkerConfig | None = None
    """Data of the validation; null does not validate."""

    stop_at_exact_match: Fraction | None = None
    """Stop once this share of the validation is answered exactly as in the file; null: never."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.sft.sft_worker.SFTWorker"
    }

    def all_roles(self) -> dict[str, WorkerConfig]:
        roles = {"actor_train": self.actor_train}
        return roles if self.validation is None else {**roles, "validation": self.validation}

    def active_roles(self) -> dict[str, WorkerConfig]:
        return {"actor_train": self.actor_train}

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        return {"actor_train": TRAIN_STRATEGIES}

    def batch_plans(self) -> dict[str, BatchPlan]:
        if not self.actor_train.holds_model:
            return {}
        plan = BatchPlan(
            role=self.actor_train,
            prompts=self.rows_per_step,
            samples_per_prompt=1,
            sequence_length=self.sequence_length,
            steps=self.max_steps,
        )
        return {"actor_train": plan}

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.stop_at_exact_match is not None and self.validation is None:
            expected = "null, because there is no validation to measure it"
            problems.append(
                wrong("stop_at_exact_match", self.stop_at_exact_match, expected, "set validation")
            )
        return problems

    def missing_for_training(self) -> list[Problem]:
        problems = super().missing_for_training()
        problems += self._missing_file("actor_train", "the file of prompts and answers")
        if self.validation is not None:
            problems += self._missing_file("validation", "a file of prompts and answers")
        return problems

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self.actor_train.dp_size * self.actor_train.rows_per_optimizer_step
