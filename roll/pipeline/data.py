"""The data of a run: rows of a table as the config names files, columns, templates and domains.

No torch here: `roll check` reads data as training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from roll.configs.arguments import MAX_LENGTHS, DataArguments
from roll.configs.base import did_you_mean
from roll.datasets.encoding import encode_answers, encode_prompts
from roll.datasets.preference import encode_preferences
from roll.datasets.sampler import EpochSampler, PromptSampler
from roll.datasets.tables import Row, Table, load_table
from roll.exceptions import ConfigError, DataError
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

logger = get_logger(__name__)

# Columns that the RLVR pipeline makes; a data file must not have others of these names.
_OWN_COLUMNS = (
    "input_ids attention_mask position_ids prompt_mask response_mask prompts responses",
    "infer_logprobs policy_versions policy_version group_id prompt_id sample_uuid finish_reason",
    "scores response_level_rewards reward_parts drop_reason token_level_rewards token_level_scores",
    "old_log_probs ref_log_probs values entropy advantages raw_advantages returns",
    "final_response_mask origin_response_mask difficulty_mask sample_weights row_number",
    "train_infer_is_weight train_infer_filter_mask",
)
OWN_COLUMNS = frozenset(name for line in _OWN_COLUMNS for name in line.split())


def load_data(config: Any, role_name: str, tokenizer: Any) -> Any:
    """Read and encode the files of a role, None if it has none; the log gets a summary."""
    role = getattr(config, role_name)
    data_args = None if role is None else role.data_args
    if data_args is None or not data_args.files:
        return None
    table = load_table(data_args.files)
    max_length = getattr(config, MAX_LENGTHS[config.pipeline][role_name])
    dataset = encode_table(config, data_args, table, tokenizer, max_length)
    logger.info("%s: %s", table.name, dataset.summary)
    if config.pipeline == "rlvr" and config.tag_to_template:
        column = data_args.tag if data_args.tag in table.columns else None
        tags = {str(row.get(column)) for row in table if column is not None}
        for tag in [tag for tag in config.tag_to_template if tag not in tags]:
            near = did_you_mean(tag, tags) or f"its tags are {', '.join(sorted(tags)) or 'none'}"
            logger.warning(
                "without effect: tag_to_template.%s; %s has no such row; %s", tag, table.name, near
            )
    return dataset


def encode_table(
    config: Any,
    data_args: DataArguments,
    table: Table,
    tokenizer: Any,
    max_length: int,
    *,
    show_progress: bool = True,
) -> Any:
    """The pairs (dpo), answers (sft) or prompts (rlvr) of a table; DataError for other rows."""
    common: dict[str, Any] = {"max_length": max_length, "prompt_key": data_args.prompt}
    common["template"] = config.template or "native"
    if config.pipeline == "dpo":
        return encode_preferences(
            table,
            tokenizer,
            chosen_key=config.chosen_key,
            rejected_key=config.rejected_key,
            overlong=config.overlong,
            show_progress=show_progress,
            **common,
        )
    common["messages_key"] = data_args.messages
    if config.pipeline == "sft":
        answer_key = data_args.response or "response"
        return encode_answers(table, tokenizer, answer_key=answer_key, **common)
    check_columns(table.columns, table.name)
    template_options: Any = None
    if data_args.custom_data_kwargs_func is not None:
        template_options = import_class(data_args.custom_data_kwargs_func)
        if not callable(template_options):
            path = data_args.custom_data_kwargs_func
            raise ConfigError(
                f"data_args.custom_data_kwargs_func: {path} is not a function of a row"
            )
    return encode_prompts(
        table,
        tokenizer,
        tag_to_template=config.tag_to_template,
        tag_key=data_args.tag,
        domain_of=domain_of_row(config, data_args.tag),
        template_options=template_options or (lambda row: {}),
        show_progress=show_progress,
        **common,
    )


def make_sampler(config: Any, dataset: Any) -> Any:
    """Which rows come when; DataError if they do not fill a step, or a domain has none."""
    seed = config.actor_train.training_args.data_seed
    seed = config.seed if seed is None else seed
    if config.pipeline == "rlvr":
        data_args = config.actor_train.data_args
        shares = (data_args.domain_interleave_probs if data_args else None) or {}
        shares = {domain: share for domain, share in shares.items() if share > 0}
        return PromptSampler(dataset, shares=shares, seed=seed)
    size = config.pairs_per_step if config.pipeline == "dpo" else config.rows_per_step
    return EpochSampler(len(dataset), size, seed)


def check_columns(columns: Iterable[str], name: str) -> None:
    """DataError if a data file has columns of names that the pipeline gives to its own."""
    clash = sorted(OWN_COLUMNS & set(columns))
    if clash:
        raise DataError(
            f"{name}: the columns {', '.join(clash)} have names that the pipeline uses itself; "
            "rename them"
        )


def domain_of_row(config: Any, tag_column: str | None) -> Callable[[Row], str]:
    """How a row finds its domain.

    Its column `domain`, else the reward that includes its tag, else the only reward.
    """
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
            f"tag {tag!r} belongs to no domain, so nothing scores this row. Add it to "
            f"rewards.DOMAIN.tag_included ({known}), or give the rows a column `domain`"
        )

    return domain_of
