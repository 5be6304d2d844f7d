"""Typed, validated and frozen configuration with ROLL's names. Importing it needs neither torch nor a GPU."""

from roll.configs.data_args import DataArguments
from roll.configs.generating_args import GeneratingArguments
from roll.configs.model_args import LoraArguments, ModelArguments
from roll.configs.training_args import TrainingArguments

__all__ = [
    "DataArguments",
    "GeneratingArguments",
    "LoraArguments",
    "ModelArguments",
    "TrainingArguments",
]
