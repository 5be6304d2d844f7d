"""Rows of a table as preference pairs, as the config names columns and template. No torch: `roll check` does it too."""

from __future__ import annotations

from typing import Any

from roll.configs.data_args import DataArguments
from roll.datasets.preference import PreferenceDataset, encode_preferences
from roll.datasets.sampler import EpochSampler
from roll.datasets.table import Table
from roll.pipeline.dpo.dpo_config import DPOConfig


def encode_table(
    config: DPOConfig,
    data_args: DataArguments,
    table: Table,
    tokenizer: Any,
    max_length: int,
    *,
    show_progress: bool = True,
) -> PreferenceDataset:
    """The pairs of a table; DataError for rows that are none."""
    return encode_preferences(
        table,
        tokenizer,
        max_length=max_length,
        template=config.template or "native",
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        prompt_key=data_args.prompt,
        overlong=config.overlong,
        show_progress=show_progress,
    )


def make_sampler(config: DPOConfig, dataset: PreferenceDataset) -> EpochSampler:
    """Which of the pairs come when; DataError if they do not fill a step."""
    data_seed = config.actor_train.training_args.data_seed
    return EpochSampler(
        len(dataset), config.pairs_per_step, config.seed if data_seed is None else data_seed
    )
