"""Which data a role reads, and which columns of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import model_validator

from roll.configs.config_model import UNUSED_IN_ROLL, AtLeastOne, ConfigModel, NoEffect, NonNegative
from roll.configs.problems import ConfigProblems, wrong

# The key that bounds the tokens of a row, for each role that reads data.
MAX_LENGTHS: Mapping[str, Mapping[str, str]] = {
    "rlvr": {"actor_train": "prompt_length", "validation": "val_prompt_length"},
    "dpo": {"actor_train": "sequence_length", "validation": "sequence_length"},
    "sft": {"actor_train": "sequence_length", "validation": "val_sequence_length"},
}


class DataArguments(ConfigModel):
    """Files, columns and chat template of a role's data."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"dataset_dir", "interleave_probs", "dataset_name"}
    )

    template: str | None = "native"
    """Chat template that renders conversations; `native` is the one that comes with the tokenizer."""

    domain_interleave_probs: dict[str, NonNegative] | None = None
    """Share of each domain in a batch of prompts; the shares add up to 1."""

    preprocessing_num_workers: Annotated[
        AtLeastOne | None, NoEffect("the tokenizer uses all cores")
    ] = None
    """Processes that tokenize the data; null tokenizes in this process."""

    cache_path: Annotated[str | None, NoEffect("files are read anew")] = None
    """Folder that keeps tokenized data between runs."""

    file_name: str | list[str] | None = None
    """File or files to read."""

    eval_file_name: Annotated[str | None, NoEffect("validation.data_args names the files")] = None
    """File to evaluate on."""

    dataset_type: Annotated[str | list[str] | None, NoEffect("the file's ending says it")] = "json"
    """Format of the files, or one format per file."""

    tag: str | None = "tag"
    """Column that says which kind of task a row is; it selects the reward."""

    id: Annotated[str | None, UNUSED_IN_ROLL] = "id"
    """Column that identifies a row."""

    prompt: str | None = None
    """Column that holds the prompt as plain text; `prompt` and `messages` exclude each other."""

    response: str | None = "solution"
    """Column that holds the expected answer."""

    messages: str | None = None
    """Column that holds the prompt as a list of chat messages; `prompt` and `messages` exclude each other."""

    custom_data_kwargs_func: str | None = None
    """Dotted path of a function that turns a row into extra arguments of the chat template."""

    @model_validator(mode="after")
    def _check_columns(self) -> DataArguments:
        problems = []
        if self.prompt is not None and self.messages is not None:
            problems.append(
                wrong(
                    "messages",
                    self.messages,
                    f'null, because prompt is "{self.prompt}"',
                    "keep one of them",
                )
            )
        shares = self.domain_interleave_probs
        if shares and abs(sum(shares.values()) - 1) > 1e-6:
            problems.append(
                wrong(
                    "domain_interleave_probs",
                    shares,
                    f"shares that add up to 1, not {sum(shares.values()):g}",
                )
            )
        if problems:
            raise ConfigProblems(problems)
        return self

    @property
    def files(self) -> list[str]:
        """`file_name` as a list, whichever way it was written."""
        if self.file_name is None:
            return []
        return [self.file_name] if isinstance(self.file_name, str) else list(self.file_name)
