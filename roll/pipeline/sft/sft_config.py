"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from roll.configs.base_config import BaseConfig
from roll.configs.batch_plan import BatchPlan
from roll.configs.config_model import Fraction, Positive
from roll.configs.pipeline_config import NO_ROLLOUTS
from roll.configs.problems import Problem, wrong
from roll.configs.worker_config import TRAIN_STRATEGIES, WorkerConfig


class SFTConfig(BaseConfig):
    """Learning to give the answers of a file: a warm start before reinforcement, or fine-tuning on its own.

    One pipeline step is one optimizer step, on `per_device_train_batch_size * gradient_accumulation_steps` rows a rank.
    """

    inherited_without_effect: ClassVar[Mapping[str, str]] = NO_ROLLOUTS | {
        "val_prompt_length": "val_sequence_length is the limit of a row",
        "is_offload_states": "there is one model",
    }

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
    """Stop at the first validation where this share of rows is answered exactly as in the file; null never does."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.sft.sft_worker.SFTWorker"
    }

    def default_model(self, role_name: str) -> str | None:
        return self.pretrain

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
        if self.actor_train.data_args is None or not self.actor_train.data_args.files:
            problems.append(
                Problem(
                    "actor_train.data_args.file_name",
                    "missing; name the file of prompts and answers",
                )
            )
        if self.validation is not None and not (
            self.validation.data_args and self.validation.data_args.files
        ):
            problems.append(
                Problem(
                    "validation.data_args.file_name", "missing; name a file of prompts and answers"
                )
            )
        return problems

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self.actor_train.dp_size * self.actor_train.rows_per_optimizer_step

    @property
    def template(self) -> str:
        """The chat template in effect."""
        data_args = self.actor_train.data_args
        return self.global_template or (data_args.template if data_args else None) or "native"
