"""Rows of a file to preference pairs: a prompt, an answer that was chosen and one that was rejected.

Layouts that are understood (`chosen` and `rejected` stand for the columns that `chosen_key` and `rejected_key` name):

    instruction, [input,] chosen, rejected      ROLL's rows: texts; `input` is appended to the instruction on a new line
    prompt, chosen, rejected                    texts, or lists of messages; `question` is taken for `prompt`
    chosen, rejected                            lists of messages: the messages that both begin with are the prompt
    prompt, chosen, rejected                    where chosen and rejected repeat the prompt's messages: as above
    chosen, rejected                            texts: what both begin with is the prompt (template `base` only)

Each may have a `system` column. Which layout a file has is decided from its columns, and for each row from what stands
in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.datasets.messages import Message, parse_messages, roles_of
from roll.datasets.table import Row, Table
from roll.exceptions import DataError

_PROMPT_COLUMNS = ("instruction", "prompt", "question")


@dataclass(frozen=True)
class PreferenceColumns:
    """Where in a row the parts of a pair stand; None for a part that the file does not have."""

    chosen: str
    rejected: str
    prompt: str | None
    input: str | None
    system: str | None


@dataclass(frozen=True)
class PreferenceRow:
    """A prompt and two answers: `prompt + chosen` is a whole conversation, and so is `prompt + rejected`."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def find_preference_columns(
    table: Table,
    *,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    prompt_key: str | None = None,
) -> PreferenceColumns:
    """The columns of a pair in a file. `prompt_key` names the prompt's column where it has an unusual name.

    Raises DataError, with the columns that were found, if one is missing.
    """
    needed = [chosen_key, rejected_key] + ([prompt_key] if prompt_key is not None else [])
    table.require_columns(
        needed, "Set chosen_key, rejected_key and data_args.prompt to the names that the file uses"
    )
    prompt = prompt_key or next((name for name in _PROMPT_COLUMNS if name in table.columns), None)
    return PreferenceColumns(
        chosen=chosen_key,
        rejected=rejected_key,
        prompt=prompt,
        input="input" if prompt == "instruction" and "input" in table.columns else None,
        system="system" if "system" in table.columns else None,
    )


def parse_preference_row(
    row: Row, columns: PreferenceColumns, where: str, *, allow_bare_texts: bool = False
) -> PreferenceRow:
    """The pair that a row holds. Raises DataError that begins with `where` if it does not hold one.

    `allow_bare_texts` admits texts without a prompt column; only a template without markup can render their parts.
    """
    try:
        return _with_system(_parse(row, columns, allow_bare_texts), row, columns)
    except ValueError as error:
        raise DataError(f"{where}: is not a pair: {error}") from error


# The functions below raise ValueError with the reason alone.


def _parse(row: Row, columns: PreferenceColumns, allow_bare_texts: bool) -> PreferenceRow:
    chosen, rejected = (_cell(row, name) for name in (columns.chosen, columns.rejected))
    if chosen is None or rejected is None:
        raise ValueError(f"{columns.chosen if chosen is None else columns.rejected!r} has no value")
    prompt, prompt_is_text = _prompt(row, columns)
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_conversations(prompt, prompt_is_text, chosen, rejected)
    if isinstance(chosen, list) or isinstance(rejected, list):
        kinds = [
            "a list of messages" if isinstance(value, list) else "text"
            for value in (chosen, rejected)
        ]
        raise ValueError(f"{columns.chosen!r} is {kinds[0]} but {columns.rejected!r} is {kinds[1]}")
    if prompt is not None:
        return PreferenceRow(
            prompt, [_message("assistant", chosen)], [_message("assistant", rejected)]
        )
    if columns.prompt is not None:
        raise ValueError(f"{columns.prompt!r} has no value")
    if not allow_bare_texts:
        raise ValueError(
            f"{columns.chosen!r} and {columns.rejected!r} are texts and the file has no prompt column "
            f"({', '.join(_PROMPT_COLUMNS)}). Name it in data_args.prompt; or set the template to base, and the text "
            "that both begin with is taken as the prompt"
        )
    return _split_bare_texts(chosen, rejected)


def _cell(row: Row, column: str) -> str | list[Message] | None:
    """Text, a conversation, or None for no value."""
    value = row.get(column)
    try:
        messages = parse_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error
    return value if messages is None else messages


def _prompt(row: Row, columns: PreferenceColumns) -> tuple[list[Message] | None, bool]:
    """The prompt's messages, None if the row has no prompt; and whether it stands there as text."""
    prompt = _cell(row, columns.prompt) if columns.prompt is not None else None
    if not isinstance(prompt, str):
        return prompt, False
    extra = _cell(row, columns.input) if columns.input is not None else None
    if isinstance(extra, list):
        raise ValueError(f"column {columns.input!r} holds messages, expected text")
    return [_message("user", f"{prompt}\n{extra}" if extra else prompt)], True


def _split_conversations(
    prompt: list[Message] | None,
    prompt_is_text: bool,
    chosen: list[Message],
    rejected: list[Message],
) -> PreferenceRow:
    """Separates the prompt from answers that are lists of messages, and that may or may not begin with the prompt."""
    answers_only = [conversation[0]["role"] == "assistant" for conversation in (chosen, rejected)]
    if all(answers_only) and prompt is not None:
        pair = PreferenceRow(prompt, chosen, rejected)
    elif any(answers_only):
        raise ValueError(
            f"there is no prompt; the roles are {roles_of(chosen)} in chosen and {roles_of(rejected)} in rejected. "
            "Give a prompt column, or let both begin with the prompt's messages"
        )
    else:
        # The last message is the answer, even where the two are equal.
        split = min(num_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        pair = PreferenceRow(chosen[:split], chosen[split:], rejected[split:])
        # A prompt text beside whole conversations is a copy of their first question, often reformatted: not compared.
        if prompt is not None and not prompt_is_text and pair.prompt[: len(prompt)] != prompt:
            raise ValueError(
                "chosen and rejected do not both begin with the messages of the prompt"
            )

    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        for place, message in (("begins", answer[0]), ("ends", answer[-1])):
            if message["role"] != "assistant":
                raise ValueError(
                    f"the {name} answer {place} with a message of role {message['role']!r}, not 'assistant' (after "
                    f"{len(pair.prompt)} messages of prompt its roles are {roles_of(answer)})"
                )
    return pair


def _split_bare_texts(chosen: str, rejected: str) -> PreferenceRow:
    """The text that both begin with, up to the last whole word, is the prompt."""
    shared = chosen[: num_shared(chosen, rejected)]
    prompt = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    # The space before a word belongs to the word: most tokenizers join the two.
    prompt = prompt.removesuffix(" ")
    if not prompt and chosen != rejected:
        raise ValueError("there is no prompt; the two texts share no first word")
    answers = ([_message("assistant", text.removeprefix(prompt))] for text in (chosen, rejected))
    return PreferenceRow([_message("user", prompt)], *answers)


def _with_system(pair: PreferenceRow, row: Row, columns: PreferenceColumns) -> PreferenceRow:
    system = row.get(columns.system) if columns.system is not None else None
    if system is None or system == "":
        return pair
    if not isinstance(system, str):
        raise ValueError(
            f"column {columns.system!r} holds a {type(system).__name__}, expected text"
        )
    if pair.prompt[0]["role"] != "system":
        return PreferenceRow([_message("system", system), *pair.prompt], pair.chosen, pair.rejected)
    if pair.prompt[0]["content"] != system:
        raise ValueError(
            f"there is a text in {columns.system!r} and another one as system message; keep one"
        )
    return pair


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading elements two sequences share."""
    num = min(len(one), len(other))
    if one[:num] == other[:num]:
        return num
    return next(i for i in range(num) if one[i] != other[i])


def says_nothing(answer: Sequence[Message]) -> bool:
    """Whether an answer has no text and calls no tool."""
    return not any(message["content"].strip() or message.get("tool_calls") for message in answer)


def is_same_answer(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two answers differ at most in the space around their texts, which most templates remove."""
    return _stripped(one) == _stripped(other)


def _stripped(answer: Sequence[Message]) -> list[Message]:
    return [{**message, "content": message["content"].strip()} for message in answer]
