"""How a role's parameters are updated."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from roll.configs.config_model import (
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    NoEffect,
    NonNegative,
    Number,
    Positive,
    Whole,
)
from roll.configs.problems import ConfigProblems, wrong

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
POLYNOMIAL_END = 1e-7  # transformers' lr_end
Beta = Annotated[Number, Field(ge=0, lt=1)]


class TrainingArguments(ConfigModel):
    """Optimizer, schedule and micro-batches of a role that trains."""

    output_dir: str = ""
    """Where the role writes; set from the pipeline's `output_dir`."""

    max_steps: Annotated[Whole, Field(ge=-1)] = -1
    """Optimizer steps of the whole run, the length of the learning-rate schedule; the pipeline works it out."""

    num_train_epochs: Positive = 1.0
    """Passes over the data, where the pipeline goes over a fixed data set."""

    learning_rate: NonNegative = 5e-5
    """Highest learning rate of the schedule."""

    lr_scheduler_type: Scheduler = "linear"
    """Shape of the learning-rate schedule, by the names of transformers."""

    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""

    adam_beta1: Beta = 0.9
    """AdamW's decay of the gradient average."""

    adam_beta2: Beta = 0.999
    """AdamW's decay of the squared-gradient average."""

    per_device_train_batch_size: AtLeastOne = 8
    """Rows of a micro-batch on one rank; DPO counts pairs."""

    gradient_accumulation_steps: AtLeastOne = 1
    """Micro-batches of an optimizer step on one rank."""

    seed: Whole = 42
    """Copied from the pipeline's `seed`."""

    data_seed: Whole | None = None
    """Seed of the data order; null uses `seed`."""

    dataloader_num_workers: Annotated[
        AtLeastZero, NoEffect("data is tokenized before training")
    ] = 0
    """Processes that prepare batches."""

    fp16: bool = False
    """Train in float16; follows `model_args.dtype`."""

    bf16: bool = False
    """Train in bfloat16; follows `model_args.dtype`."""

    tf32: Annotated[bool | None, NoEffect("set torch.backends yourself")] = None
    """Allow TF32 matrix products on NVIDIA GPUs; null leaves torch's setting."""

    warmup_ratio: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of the optimizer steps that warm the learning rate up; used when `warmup_steps` is 0."""

    warmup_steps: AtLeastZero = 0
    """Optimizer steps that warm the learning rate up."""

    save_hf_model: Annotated[bool, NoEffect("every checkpoint opens with transformers")] = False
    """Also save weights that transformers can read, for strategies whose own format differs."""

    @model_validator(mode="after")
    def _check_together(self) -> TrainingArguments:
        problems = []
        if self.fp16 and self.bf16:
            problems.append(wrong("fp16", True, "false, because bf16 is on", "keep one of them"))
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            expected = f"more than {POLYNOMIAL_END:g}, where the polynomial schedule ends"
            problems.append(wrong("learning_rate", self.learning_rate, expected))
        if problems:
            raise ConfigProblems(problems)
        return self

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `num_training_steps`."""
        return self.warmup_steps or math.ceil(num_training_steps * self.warmup_ratio)
