"""The prompts of an RLVR run: files, columns and chat templates as the config names them, and each row's domain.

No torch here: `roll check` reads prompts as training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll.configs.data_args import DataArguments
from roll.datasets.files import load_table
from roll.datasets.prompts import PromptDataset, PromptSampler, encode_prompts
from roll.datasets.table import Row, Table
from roll.exceptions import ConfigError, DataError
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

logger = get_logger(__name__)

# Columns that the pipeline makes; a data file must not have others of these names.
OWN_COLUMNS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "prompt_mask",
        "response_mask",
        "prompts",
        "responses",
    }
    | {
        "infer_logprobs",
        "policy_versions",
        "policy_version",
        "group_id",
        "prompt_id",
        "sample_uuid",
        "finish_reason",
    }
    | {
        "scores",
        "response_level_rewards",
        "reward_parts",
        "drop_reason",
        "token_level_rewards",
        "token_level_scores",
    }
    | {
        "old_log_probs",
        "ref_log_probs",
        "values",
        "entropy",
        "advantages",
        "raw_advantages",
        "returns",
    }
    | {
        "final_response_mask",
        "origin_response_mask",
        "difficulty_mask",
        "sample_weights",
        "row_number",
    }
    | {"train_infer_is_weight", "train_infer_filter_mask"}
)


def load_train_prompts(config: RLVRConfig, tokenizer: Any) -> PromptSampler:
    """The prompts to train on, and their order. Errors here come before any model is loaded."""
    data_args = config.actor_train.data_args
    assert data_args is not None  # missing_for_training
    return make_sampler(config, _load(config, data_args, tokenizer, config.prompt_length))


def make_sampler(config: RLVRConfig, dataset: PromptDataset) -> PromptSampler:
    """Which of the prompts come when."""
    data_args = config.actor_train.data_args
    shares = (data_args.domain_interleave_probs if data_args else None) or {}
    seed = config.actor_train.training_args.data_seed
    return PromptSampler(
        dataset,
        shares={domain: share for domain, share in shares.items() if share > 0},
        seed=config.seed if seed is None else seed,
    )


def load_val_prompts(config: RLVRConfig, tokenizer: Any) -> PromptDataset | None:
    """The prompts of the validation, if there is one."""
    if config.validation is None or config.validation.data_args is None:
        return None
    return _load(config, config.validation.data_args, tokenizer, config.val_prompt_length)


def domain_of_row(config: RLVRConfig, tag_column: str | None) -> Callable[[Row], str]:
    """How a row finds its domain: its column `domain`, else the reward that includes its tag, else the only reward."""
    rewards, by_tag = config.rewards, config.tag_2_domain
    takes_any_tag = [domain for domain, reward in rewards.items() if not reward.tag_included]

    def domain_of(row: Row) -> str:
        named = row.get("domain")
        if named is not None:
            if named not in rewards:
                raise DataError(f"domain {named!r} has no reward; rewards are {', '.join(rewards)}")
            return str(named)
        tag = None if tag_column is None else row.get(tag_column)
        if tag in by_tag:
            return by_tag[str(tag)]
        if len(takes_any_tag) == 1:
            return takes_any_tag[0]
        known = "; ".join(
            f"{domain}: {', '.join(reward.tag_included)}" for domain, reward in rewards.items()
        )
        raise DataError(
            f"tag {tag!r} belongs to no domain, so nothing scores this row. Add it to rewards.DOMAIN.tag_included "
            f"({known}), or give the rows a column `domain`"
        )

    return domain_of


def _load(
    config: RLVRConfig, data_args: DataArguments, tokenizer: Any, max_length: int
) -> PromptDataset:
    table = load_table(data_args.files)
    dataset = encode_table(config, data_args, table, tokenizer, max_length)
    logger.info("%s: %s", table.name, dataset.summary)
    return dataset


def encode_table(
    config: RLVRConfig,
    data_args: DataArguments,
    table: Table,
    tokenizer: Any,
    max_length: int,
    *,
    show_progress: bool = True,
) -> PromptDataset:
    """The prompts of a table; DataError for rows that cannot be one."""
    check_columns(table.columns, table.name)
    return encode_prompts(
        table,
        tokenizer,
        max_length=max_length,
        template=config.template,
        tag_to_template=config.tag_to_template,
        prompt_key=data_args.prompt,
        messages_key=data_args.messages,
        tag_key=data_args.tag,
        domain_of=domain_of_row(config, data_args.tag),
        template_options=_template_options(data_args),
        show_progress=show_progress,
    )


def check_columns(columns: Iterable[str], name: str) -> None:
    """DataError if a data file has columns of names that the pipeline gives to its own."""
    clash = sorted(OWN_COLUMNS & set(columns))
    if clash:
        raise DataError(
            f"{name}: the columns {', '.join(clash)} have names that the pipeline uses itself; rename them"
        )


def _template_options(data_args: DataArguments) -> Callable[[Row], Mapping[str, Any]]:
    if data_args.custom_data_kwargs_func is None:
        return lambda row: {}
    function = import_class(data_args.custom_data_kwargs_func)
    if not callable(function):
        path = data_args.custom_data_kwargs_func
        raise ConfigError(f"data_args.custom_data_kwargs_func: {path} is not a function of a row")
    return function
