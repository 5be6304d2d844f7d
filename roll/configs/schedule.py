"""The learning rate of any optimizer step, without torch: the numbers of transformers' schedulers."""

from __future__ import annotations

import math

from roll.configs.training_args import POLYNOMIAL_END, TrainingArguments

INVERSE_SQRT_TIMESCALE = 10_000  # transformers' timescale for a schedule without warm-up


def learning_rate_at(args: TrainingArguments, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first) in a run of `total` optimizer steps.

    A warm-up starts from 0, so with one the first step has learning rate 0, as in transformers.
    """
    warmup = args.get_warmup_steps(total)
    kind = args.lr_scheduler_type
    if kind == "constant":
        return args.learning_rate
    if step < warmup:
        return args.learning_rate * step / warmup
    if kind == "constant_with_warmup":
        return args.learning_rate
    if kind == "inverse_sqrt":
        timescale = warmup or INVERSE_SQRT_TIMESCALE
        return args.learning_rate / math.sqrt((step + timescale - warmup) / timescale)
    progress = min((step - warmup) / max(1, total - warmup), 1.0)
    if kind == "linear":
        return args.learning_rate * (1 - progress)
    if kind == "polynomial":
        return POLYNOMIAL_END + (args.learning_rate - POLYNOMIAL_END) * (1 - progress)
    assert kind in ("cosine", "cosine_with_restarts"), kind
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
