"""Preference pairs: rows of a file to a prompt and two answers, and these to tokens.

Layouts that are understood (`chosen` and `rejected` stand for the columns that `chosen_key` and
`rejected_key` name; each layout may have a `system` column):

    instruction, [input,] chosen, rejected   ROLL's rows: texts; `input` goes below the instruction
    prompt, chosen, rejected                 texts, or lists of messages; or `question`
    chosen, rejected                         lists of messages: those that both begin with are the
                                             prompt
    prompt, chosen, rejected                 where both repeat the prompt's messages: as above
    chosen, rejected                         texts: what both begin with is the prompt (template
                                             `base` only)

Which columns a file has decides once for the file, what stands in them for each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import numpy as np

from roll.datasets.chat_template import (
    ChatTemplate,
    Message,
    get_chat_template,
    parse_messages,
    roles_of,
)
from roll.datasets.encoding import DataSummary, num_shared, tokenize_rows
from roll.datasets.tables import Row, Table
from roll.exceptions import ConfigError, DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "truncate_answer", "truncate_prompt"]
_PROMPT_COLUMNS = ("instruction", "prompt", "question")


# --------------------------------------------------------------------------------------------------
# Rows to pairs


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
    """A prompt and two answers; `prompt + chosen` is a whole conversation."""

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
    """The columns of a pair in a file; DataError with the columns there are, if one is missing.

    `prompt_key` names the prompt's column where it has an unusual name.
    """
    table.require_columns(
        [key for key in (chosen_key, rejected_key, prompt_key) if key is not None],
        "Set chosen_key, rejected_key and data_args.prompt to the names that the file uses",
    )
    prompt = prompt_key or next((name for name in _PROMPT_COLUMNS if name in table.columns), None)
    has_input = prompt == "instruction" and "input" in table.columns
    has_system = "system" in table.columns
    return PreferenceColumns(
        chosen=chosen_key,
        rejected=rejected_key,
        prompt=prompt,
        input="input" if has_input else None,
        system="system" if has_system else None,
    )


def parse_preference_row(
    row: Row, columns: PreferenceColumns, *, bare_texts: bool = False
) -> PreferenceRow:
    """The pair that a row holds; ValueError, without a place, if it does not hold one.

    `bare_texts` admits texts without a prompt column: only a template without markup can render
    their parts.
    """
    try:
        return _parse_row(row, columns, bare_texts)
    except ValueError as error:
        raise ValueError(f"is not a pair: {error}") from error


def _parse_row(row: Row, columns: PreferenceColumns, bare_texts: bool) -> PreferenceRow:
    chosen, rejected = _cell(row, columns.chosen), _cell(row, columns.rejected)
    if chosen is None or rejected is None:
        missing = columns.chosen if chosen is None else columns.rejected
        raise ValueError(f"{missing!r} has no value")
    prompt = _cell(row, columns.prompt)
    prompt_is_text = isinstance(prompt, str)
    if isinstance(prompt, str):
        extra = _cell(row, columns.input)
        if isinstance(extra, list):
            raise ValueError(f"column {columns.input!r} holds messages, expected text")
        prompt = [_message("user", f"{prompt}\n{extra}" if extra else prompt)]

    if isinstance(chosen, list) != isinstance(rejected, list):
        kinds = {True: "a list of messages", False: "text"}
        raise ValueError(
            f"{columns.chosen!r} is {kinds[isinstance(chosen, list)]} "
            f"but {columns.rejected!r} is {kinds[isinstance(rejected, list)]}"
        )
    if isinstance(chosen, list) and isinstance(rejected, list):
        # A prompt text beside whole conversations is a copy of their first question, often
        # reformatted: it is not compared.
        pair = _split_conversations(prompt, not prompt_is_text, chosen, rejected)
    elif prompt is not None:
        answers = ([_message("assistant", text)] for text in (chosen, rejected))
        pair = PreferenceRow(prompt, *answers)
    elif columns.prompt is not None:
        raise ValueError(f"{columns.prompt!r} has no value")
    elif not bare_texts:
        raise ValueError(
            f"{columns.chosen!r} and {columns.rejected!r} are texts and the file has no prompt "
            f"column ({', '.join(_PROMPT_COLUMNS)}). Name it in data_args.prompt; or set the "
            "template to base, and the text that both begin with is taken as the prompt"
        )
    else:
        # What both begin with, up to the last whole word, is the prompt. The space before a word
        # belongs to the word: most tokenizers join the two.
        shared = chosen[: num_shared(chosen, rejected)]
        text = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1].removesuffix(" ")
        if not text and chosen != rejected:
            raise ValueError("there is no prompt; the two texts share no first word")
        answers = ([_message("assistant", a.removeprefix(text))] for a in (chosen, rejected))
        pair = PreferenceRow([_message("user", text)], *answers)

    system = None if columns.system is None else row.get(columns.system)
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


def _cell(row: Row, column: str | None) -> Any:
    """Text, a conversation, or None for no value."""
    value = None if column is None else row.get(column)
    try:
        messages = parse_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error
    return value if messages is None else messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _split_conversations(
    prompt: list[Message] | None,
    compare_prompt: bool,
    chosen: list[Message],
    rejected: list[Message],
) -> PreferenceRow:
    """Separate the prompt from lists of messages that may or may not begin with it."""
    answers_only = [conversation[0]["role"] == "assistant" for conversation in (chosen, rejected)]
    if all(answers_only) and prompt is not None:
        pair = PreferenceRow(prompt, chosen, rejected)
    elif any(answers_only):
        raise ValueError(
            f"there is no prompt; the roles are {roles_of(chosen)} in chosen and "
            f"{roles_of(rejected)} in rejected. Give a prompt column, or let both begin with the "
            "prompt's messages"
        )
    else:
        # The last message is the answer, even where the two are equal.
        split = min(num_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        pair = PreferenceRow(chosen[:split], chosen[split:], rejected[split:])
        if prompt is not None and compare_prompt and pair.prompt[: len(prompt)] != prompt:
            raise ValueError(
                "chosen and rejected do not both begin with the messages of the prompt"
            )
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        for place, message in (("begins", answer[0]), ("ends", answer[-1])):
            if message["role"] != "assistant":
                raise ValueError(
                    f"the {name} answer {place} with a message of role {message['role']!r}, not "
                    f"'assistant' (after {len(pair.prompt)} messages of prompt its roles are "
                    f"{roles_of(answer)})"
                )
    return pair


def why_unusable(pair: PreferenceRow) -> str | None:
    """Why a pair cannot be trained on, None if it can."""
    # Most templates remove the space around a text.
    stripped = [
        [{**message, "content": message["content"].strip()} for message in answer]
        for answer in (pair.chosen, pair.rejected)
    ]
    if stripped[0] == stripped[1]:
        return "equal_answers"
    for answer in stripped:
        if not any(message["content"] or message.get("tool_calls") for message in answer):
            return "empty_answer"
    if not any(message["content"].strip() for message in pair.prompt):
        return "empty_prompt"
    # With a user's turn inside an answer, a prompt length cannot say what the model wrote.
    if any(message["role"] != "assistant" for message in [*pair.chosen, *pair.rejected]):
        return "several_turns"
    return None


# --------------------------------------------------------------------------------------------------
# Pairs to tokens


class PreferencePair(TypedDict):
    """One pair as the collator takes it; the prompt lengths count tokens that are not trained."""

    chosen_ids: np.ndarray
    reject_ids: np.ndarray
    chosen_prompt_len: int
    reject_prompt_len: int


class PreferenceDataset:
    """Encoded pairs. Rows are interleaved: 2i is the chosen side of pair i, 2i+1 the rejected one.

    Attributes:
        rows: the tokens of each row, int32.
        lengths, prompt_lens: (2N,) tokens of each row, and how many of them are not trained.
    """

    def __init__(
        self, rows: list[np.ndarray], prompt_lens: Sequence[int], summary: DataSummary
    ) -> None:
        self.rows, self.summary = rows, summary
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.prompt_lens = np.array(prompt_lens, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> PreferencePair:
        row = 2 * range(len(self))[index]
        return {
            "chosen_ids": self.rows[row],
            "reject_ids": self.rows[row + 1],
            "chosen_prompt_len": int(self.prompt_lens[row]),
            "reject_prompt_len": int(self.prompt_lens[row + 1]),
        }

    def fingerprint(self) -> str:
        """Changes with any token, prompt length and the order of the pairs."""
        digest = hashlib.sha256()
        for values in (np.concatenate(self.rows), self.lengths, self.prompt_lens):
            digest.update(values.tobytes())
        return digest.hexdigest()


def encode_preferences(
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template: str = "native",
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    prompt_key: str | None = None,
    overlong: Overlong = "drop",
    template_options: Mapping[str, Any] | None = None,
    show_progress: bool = True,
) -> PreferenceDataset:
    """Render and tokenise every row of `table`; `summary` of the result says what was left out.

    `max_length` bounds the tokens of each side. A pair with a longer side is handled as `overlong`
    says:

        drop               it is left out
        truncate_answer    the end of the longer answer is cut off; left out if its prompt alone
                           fills the length
        truncate_prompt    the beginning of the prompt is cut off, equally for both sides, except
                           for a BOS token; left out if an answer alone fills the length

    Left out are also pairs with an empty prompt, an empty answer or two equal answers, those whose
    answer goes over several turns, and those whose prompt the template renders differently once the
    answer follows. Raises DataError for a row that is not a pair (with file and line), for a
    missing column, and if no pair is left.
    """
    if overlong not in get_args(Overlong):
        raise ConfigError(
            f"overlong={overlong!r} is not known; use one of {', '.join(get_args(Overlong))}"
        )
    if max_length < 2:
        raise ConfigError(
            f"max_length={max_length} leaves no room for a prompt and an answer; use at least 2"
        )
    chat = get_chat_template(template, tokenizer)
    columns = [
        find_preference_columns(
            part, chosen_key=chosen_key, rejected_key=rejected_key, prompt_key=prompt_key
        )
        for part in table.parts
    ]
    too_long = {
        "drop": f"with a side longer than {max_length:,} tokens",
        "truncate_answer": f"whose prompt alone fills {max_length:,} tokens",
        "truncate_prompt": f"with an answer that alone fills {max_length:,} tokens",
    }
    summary = DataSummary(
        {
            "too_long": too_long[overlong],
            "empty_prompt": "with an empty prompt",
            "empty_answer": "with an empty answer",
            "equal_answers": "whose two answers are equal",
            "several_turns": "with an answer over several turns",
            "prompt_rewritten": "whose prompt the chat template renders differently once the "
            "answer follows",
        }
    )

    def rendered() -> Iterator[tuple[str, str, str, str]]:
        for part, own_columns in zip(table.parts, columns, strict=True):
            for index, row in enumerate(part):
                where = part.where(index)
                summary.rows_read += 1
                try:
                    pair = parse_preference_row(row, own_columns, bare_texts=template == "base")
                    reason = why_unusable(pair)
                    texts = None if reason else _render_pair(pair, chat, template_options or {})
                except ValueError as error:  # DataError is one
                    raise DataError(f"{where}: {error}") from error
                if texts is None:
                    summary.drop(reason or "prompt_rewritten", where)
                else:
                    yield where, *texts

    rows: list[np.ndarray] = []
    prompt_lens: list[int] = []
    title = "Encoding preference pairs" if show_progress else ""
    texts = tokenize_rows(tokenizer, rendered(), 3, summary, title=title, total=len(table))
    for (where, *_), (prompt, *answers) in texts:
        sides = [(ids, num_shared(prompt, ids)) for ids in answers]
        is_long = max(len(ids) for ids, _ in sides) > max_length
        if is_long:
            sides = _shorten(sides, max_length, overlong, tokenizer.bos_token_id)
        if not sides:
            summary.drop("too_long", where)
        elif any(prompt_len == 0 for _, prompt_len in sides):
            summary.drop("empty_prompt", where)
        elif any(prompt_len == len(ids) for ids, prompt_len in sides):
            summary.drop("empty_answer", where)
        elif sides[0][0] == sides[1][0]:
            summary.drop("equal_answers", where)
        else:
            rows += [np.asarray(ids, dtype=np.int32) for ids, _ in sides]
            prompt_lens += [prompt_len for _, prompt_len in sides]
            summary.kept += 1
            summary.truncated += is_long
    if not rows:
        raise DataError(f"{table.name}: no preference pair is left to train on.\n{summary}")
    dataset = PreferenceDataset(rows, prompt_lens, summary)
    answer_lens = dataset.lengths - dataset.prompt_lens
    summary.set_lengths(
        prompt=dataset.prompt_lens,
        chosen_answer=answer_lens[0::2],
        rejected_answer=answer_lens[1::2],
        longest_side=dataset.lengths.reshape(-1, 2).max(axis=1),
    )
    return dataset


def _render_pair(
    pair: PreferenceRow, chat: ChatTemplate, options: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """Prompt and both sides; None if the template changes the prompt once an answer follows."""
    prompt = chat(pair.prompt, add_generation_prompt=True, **options)
    sides = [
        chat([*pair.prompt, *answer], add_generation_prompt=False, **options)
        for answer in (pair.chosen, pair.rejected)
    ]
    for side in sides:
        if side.startswith(prompt):
            continue
        # Departing inside the header is fine: templates that open a thought there close it, or
        # leave it out, when they render the answer. Departing earlier means that the messages
        # themselves changed, and that they would be trained.
        without_header = chat(pair.prompt, add_generation_prompt=False, **options)
        if num_shared(prompt, side) < num_shared(prompt, without_header):
            return None
    return prompt, sides[0], sides[1]


def _shorten(
    sides: list[tuple[list[int], int]], limit: int, overlong: Overlong, bos_token_id: int | None
) -> list[tuple[list[int], int]]:
    """The two sides within the length, each with its prompt length; [] if that cannot be done."""
    if overlong == "truncate_answer" and all(prompt_len < limit for _, prompt_len in sides):
        return [(ids[:limit], prompt_len) for ids, prompt_len in sides]
    if overlong == "truncate_prompt":
        kept = int(all(ids[0] == bos_token_id for ids, _ in sides))
        num_cut = max(len(ids) for ids, _ in sides) - limit
        if all(prompt_len - num_cut > kept for _, prompt_len in sides):
            return [
                (ids[:kept] + ids[kept + num_cut :], prompt_len - num_cut)
                for ids, prompt_len in sides
            ]
    return []
