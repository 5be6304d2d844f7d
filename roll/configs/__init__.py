"""Typed, validated and frozen configuration with ROLL's names; needs neither torch nor a GPU."""

from roll.configs.arguments import (
    DataArguments,
    GeneratingArguments,
    LoraArguments,
    ModelArguments,
    TrainingArguments,
)

__all__ = [
    "DataArguments",
    "GeneratingArguments",
    "LoraArguments",
    "ModelArguments",
    "TrainingArguments",
]
