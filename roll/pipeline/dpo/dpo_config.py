"""Configuration of direct preference optimisation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll.configs.base import AtLeastOne, Number, Positive, Problem, wrong
from roll.configs.batch_plan import BatchPlan
from roll.configs.pipeline_config import BaseConfig
from roll.configs.worker_config import INFER_STRATEGIES, TRAIN_STRATEGIES, WorkerConfig

ACTOR_WORKER = "roll.pipeline.dpo.actor_worker.ActorWorker"
SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")


class DPOConfig(BaseConfig):
    """Learning from pairs of a chosen and a rejected answer.

    Sizes count pairs: with `per_device_train_batch_size: 4` a micro-batch is 4 pairs, which are 8
    rows. (ROLL doubles the sizes in the config each time one is built from the same roles.)
    """

    pipeline: Literal["dpo"] = "dpo"
    """Which pipeline this config is for."""

    global_template: str | None = None
    """Chat template of all roles; `actor_train.data_args.template` if left out."""

    max_grad_norm: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down."""

    pretrain: str | None = None
    """Model of every role that names none."""

    validation: WorkerConfig = Field(default_factory=WorkerConfig)
    """Data of the validation."""

    actor_train: WorkerConfig = Field(default_factory=WorkerConfig)
    """Trains the policy."""

    reference: WorkerConfig = Field(default_factory=WorkerConfig)
    """The policy before training."""

    loss_type: Literal[
        "sigmoid",
        "ipo",
        "ipo_sum",
        "hinge",
        "robust",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "aot",
        "aot_unpaired",
        "discopop",
        "sigmoid_norm",
    ] = "sigmoid"
    """Loss of a pair; `ipo` averages over tokens, `ipo_sum` adds them up."""

    ipo: bool = False
    """ROLL's switch for `loss_type: ipo_sum`."""

    beta: Positive = 0.1
    """Strength of the pull towards the reference."""

    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the two answers of a pair are the wrong way round."""

    discopop_tau: Positive = 0.05
    """Temperature of `loss_type: discopop`."""

    reference_free: bool = False
    """Compare with a uniform policy instead of the reference, which is then not loaded."""

    reference_log_probs: Literal["live", "precompute"] = "live"
    """Log-probs of the reference step by step, or all before training, to unload it then."""

    chosen_key: str = "chosen"
    """Column of the better answer."""

    rejected_key: str = "rejected"
    """Column of the worse answer."""

    overlong: Literal["drop", "truncate_answer", "truncate_prompt"] = "drop"
    """Pairs over `sequence_length`: drop them, cut the longer answer, or the prompts' start."""

    early_stop_patience: AtLeastOne | None = None
    """Stop after so many validations without a lower loss, keeping the best model; null: never."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": ACTOR_WORKER,
        "reference": ACTOR_WORKER,
    }

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.ipo and self.loss_type not in ("sigmoid", "ipo_sum"):
            expected = "ipo_sum, because ipo is on"
            problems.append(wrong("loss_type", self.loss_type, expected, "keep one of the two"))
        loss = "ipo_sum" if self.ipo else self.loss_type
        smoothing = self.label_smoothing
        if smoothing and loss not in SMOOTHED_LOSSES:
            expected = f"0, because the {loss} loss does not use it"
            fix = "or use one of " + ", ".join(SMOOTHED_LOSSES)
            problems.append(wrong("label_smoothing", smoothing, expected, fix))
        if loss == "exo_pair" and not smoothing:
            expected = "more than 0 for the exo_pair loss"
            problems.append(wrong("label_smoothing", smoothing, expected, "0.001 is usual"))
        if self.reference_free and self.reference_log_probs == "precompute":
            expected = "live, because reference_free is on and there is nothing to compute"
            problems.append(wrong("reference_log_probs", self.reference_log_probs, expected))
        is_validated = self.eval_steps > 0 and self.has_validation
        if self.early_stop_patience is not None and not is_validated:
            expected = "null, because nothing is validated"
            fix = "set eval_steps and validation.data_args.file_name"
            problems.append(wrong("early_stop_patience", self.early_stop_patience, expected, fix))
        return problems

    def all_roles(self) -> dict[str, WorkerConfig]:
        return {
            "actor_train": self.actor_train,
            "reference": self.reference,
            "validation": self.validation,
        }

    def active_roles(self) -> dict[str, WorkerConfig]:
        """Without a reference that is not used, or is the policy without its adapter."""
        if self.reference_free or self.actor_train.model_args.is_lora:
            return {"actor_train": self.actor_train}
        return {"actor_train": self.actor_train, "reference": self.reference}

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        return {"actor_train": TRAIN_STRATEGIES, "reference": INFER_STRATEGIES}

    def batch_plans(self) -> dict[str, BatchPlan]:
        if not self.actor_train.holds_model:
            return {}
        plan = BatchPlan(
            role=self.actor_train,
            prompts=self.pairs_per_step,
            samples_per_prompt=1,
            sequence_length=self.sequence_length,
            steps=self.max_steps,
            rows_per_sample=2,
        )
        return {"actor_train": plan}

    def missing_for_training(self) -> list[Problem]:
        missing = self._missing_file("actor_train", "the file of preference pairs")
        return super().missing_for_training() + missing

    @property
    def pairs_per_step(self) -> int:
        """Pairs of one optimizer step, which is one pipeline step, over all ranks."""
        return self.actor_train.dp_size * self.actor_train.rows_per_optimizer_step

    @property
    def has_validation(self) -> bool:
        return self.validation.data_args is not None and bool(self.validation.data_args.files)

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of a run over data with that many steps in an epoch.

        `num_train_epochs` and `max_steps` each end the run, whichever comes first; one that was
        left to its default does not end it before the one that was set. With neither set: one
        epoch, and at most `max_steps`.
        """
        training_args = self.actor_train.training_args
        by_epochs = max(int(training_args.num_train_epochs * steps_per_epoch + 1e-6), 1)
        are_epochs_set = "num_train_epochs" in training_args.model_fields_set
        if are_epochs_set != ("max_steps" in self.model_fields_set):
            return by_epochs if are_epochs_set else self.max_steps
        return min(by_epochs, self.max_steps)

    @property
    def rows_per_step(self) -> int:
        return 2 * self.pairs_per_step
