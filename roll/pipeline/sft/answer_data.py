"""Rows of a table as prompts with answers, as the config names them. No torch: `roll check` does it too."""

from __future__ import annotations

from typing import Any

from roll.configs.data_args import DataArguments
from roll.datasets.prompt_answers import PromptAnswers, encode_answers
from roll.datasets.sampler import EpochSampler
from roll.datasets.table import Table
from roll.pipeline.sft.sft_config import SFTConfig


def encode_table(
    config: SFTConfig,
    data_args: DataArguments,
    table: Table,
    tokenizer: Any,
    max_length: int,
    *,
    show_progress: bool = True,
) -> PromptAnswers:
    """The prompts and answers of a table; DataError for rows that have none. There is no progress to show."""
    return encode_answers(
        table,
        tokenizer,
        max_length=max_length,
        template=config.template,
        prompt_key=data_args.prompt,
        messages_key=data_args.messages,
        answer_key=data_args.response or "response",
    )


def make_sampler(config: SFTConfig, dataset: PromptAnswers) -> EpochSampler:
    """Which of the rows come when; DataError if they do not fill a step."""
    seed = config.actor_train.training_args.data_seed
    return EpochSampler(len(dataset), config.rows_per_step, config.seed if seed is None else seed)
