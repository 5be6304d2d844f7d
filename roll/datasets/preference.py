r"""Preference pairs as token ids: rendered by a chat template, tokenised once, with an exact length of the prompt.

What is trained is the answer, and nothing but the answer. Each side of a pair is rendered as a whole conversation and
tokenised as one text, because tokens may span the place where prompt and answer meet. The prompt, with the header under
which the model answers, is tokenised as well, and the tokens that both begin with are the prompt of that side:

    prompt        <|im_start|> user \n 2 + 2 ? <|im_end|> \n <|im_start|> assistant \n
    chosen        <|im_start|> user \n 2 + 2 ? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
                  ------------------------------ prompt, 12 tokens ----------------- | trained, 3

    prompt        a dd Ġ                   where the tokenizer joins the space to what follows
    chosen        a dd Ġ4 <eos>
                  ---- | trained, 2 tokens: Ġ4 is one of them, and is seen as such by the model that answers

Differs from ROLL, which counts the tokens of a prompt without the answer's header (so the header is trained), tokenised
apart from the answer (so a joined token shifts the mask).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import numpy as np

from roll.datasets.chat_template import ChatTemplate, get_chat_template
from roll.datasets.preference_rows import (
    PreferenceColumns,
    PreferenceRow,
    find_preference_columns,
    is_same_answer,
    num_shared,
    parse_preference_row,
    says_nothing,
)
from roll.datasets.summary import DataSummary, LengthStats
from roll.datasets.table import Table
from roll.datasets.tokenizing import tokenize_rows
from roll.exceptions import ConfigError, DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "truncate_answer", "truncate_prompt"]


class PreferencePair(TypedDict):
    """One pair as the collator takes it. The prompt lengths count leading tokens that are not trained."""

    chosen_ids: np.ndarray
    reject_ids: np.ndarray
    chosen_prompt_len: int
    reject_prompt_len: int


class PreferenceDataset:
    """Encoded pairs, four bytes a token.

    Rows are interleaved as in a batch: row 2i is the chosen side of pair i and row 2i+1 the rejected one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        prompt_lens: np.ndarray,
        origins: np.ndarray,
        summary: DataSummary,
    ) -> None:
        self.tokens = tokens
        """(number of tokens,) int32: all rows, one after the other."""
        self.lengths = lengths
        """(2N,) tokens of each row."""
        self.prompt_lens = prompt_lens
        """(2N,) leading tokens of each row that are not trained."""
        self.origins = origins
        """(N,) which row of the table each pair was made from."""
        self.summary = summary
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self.lengths) // 2

    def __getitem__(self, index: int) -> PreferencePair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of a data set of {len(self)} pairs")
        row = 2 * (index % len(self))
        return {
            "chosen_ids": self._row(row),
            "reject_ids": self._row(row + 1),
            "chosen_prompt_len": int(self.prompt_lens[row]),
            "reject_prompt_len": int(self.prompt_lens[row + 1]),
        }

    def __iter__(self) -> Iterator[PreferencePair]:
        return (self[index] for index in range(len(self)))

    def _row(self, row: int) -> np.ndarray:
        return self.tokens[self._starts[row] : self._starts[row + 1]]

    def fingerprint(self) -> str:
        """Changes with any token, prompt length and the order: tells whether stored log-probs belong to these pairs."""
        digest = hashlib.sha256()
        for values in (self.tokens, self.lengths, self.prompt_lens):
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Rendered:
    """A pair as text, with its place."""

    origin: int
    where: str
    prompt: str
    chosen: str
    rejected: str


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
    """Renders and tokenises every row of `table`; `.summary` of the result says what was left out and why.

    `max_length` bounds the tokens of each side. A pair with a longer side is handled as `overlong` says:

        drop               it is left out
        truncate_answer    the end of the longer answer is cut off; left out if its prompt alone fills the length
        truncate_prompt    the beginning of the prompt is cut off, equally for both sides, except for a BOS token; left
                           out if an answer alone fills the length

    Left out are also pairs with an empty prompt, an empty answer or two equal answers, those whose answer goes over
    several turns, and those whose prompt the template renders differently once the answer follows.

    Raises DataError for a row that is not a pair (with file and line), for a missing column, and if no pair is left.
    The result depends on nothing but the arguments. Tokenizing uses all cores where the tokenizer is a fast one.
    """
    if overlong not in get_args(Overlong):
        raise ConfigError(
            f"overlong={overlong!r} is not known; use one of {', '.join(get_args(Overlong))}"
        )
    if max_length < 2:
        raise ConfigError(
            f"max_length={max_length} leaves no room for a prompt and an answer; use at least 2"
        )
    chat_template = get_chat_template(template, tokenizer)
    columns = {
        part.name: find_preference_columns(
            part, chosen_key=chosen_key, rejected_key=rejected_key, prompt_key=prompt_key
        )
        for part in table.parts
    }
    summary = DataSummary(_explanations(max_length, overlong))
    rendered = _render_rows(table, columns, chat_template, dict(template_options or {}), summary)
    builder = _Builder(max_length, overlong, tokenizer.bos_token_id, summary)

    title = "Encoding preference pairs" if show_progress else ""
    texts = tokenize_rows(
        tokenizer,
        rendered,
        lambda p: (p.prompt, p.chosen, p.rejected),
        summary,
        title=title,
        total=len(table),
    )
    for pair, (prompt, chosen, rejected) in texts:
        builder.add(pair, prompt=prompt, chosen=chosen, rejected=rejected)
    return builder.build(table.name)


def _explanations(max_length: int, overlong: Overlong) -> dict[str, str]:
    too_long = {
        "drop": f"with a side longer than {max_length:,} tokens",
        "truncate_answer": f"whose prompt alone fills {max_length:,} tokens",
        "truncate_prompt": f"with an answer that alone fills {max_length:,} tokens",
    }
    return {
        "too_long": too_long[overlong],
        "empty_prompt": "with an empty prompt",
        "empty_answer": "with an empty answer",
        "equal_answers": "whose two answers are equal",
        "several_turns": "with an answer over several turns",
        "prompt_rewritten": "whose prompt the chat template renders differently once the answer follows",
    }


def _render_rows(
    table: Table,
    columns: Mapping[str, PreferenceColumns],
    template: ChatTemplate,
    options: dict[str, Any],
    summary: DataSummary,
) -> Iterator[_Rendered]:
    """The rows that can be used, as text. Counts those it reads and those it leaves out."""
    for part in table.parts:
        for index, row in enumerate(part):
            where = part.where(index)
            pair = parse_preference_row(
                row, columns[part.name], where, allow_bare_texts=template.name == "base"
            )
            origin = summary.rows_read
            summary.rows_read += 1
            reason = _why_unusable(pair)
            if reason is not None:
                summary.drop(reason, where)
                continue
            try:
                prompt = template(pair.prompt, add_generation_prompt=True, **options)
                chosen, rejected = (
                    template([*pair.prompt, *answer], add_generation_prompt=False, **options)
                    for answer in (pair.chosen, pair.rejected)
                )
                rewritten = any(
                    not full.startswith(prompt)
                    and _is_rewritten(prompt, full, pair, template, options)
                    for full in (chosen, rejected)
                )
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            if rewritten:
                summary.drop("prompt_rewritten", where)
            else:
                yield _Rendered(origin, where, prompt, chosen, rejected)


def _why_unusable(pair: PreferenceRow) -> str | None:
    if is_same_answer(pair.chosen, pair.rejected):
        return "equal_answers"
    if says_nothing(pair.chosen) or says_nothing(pair.rejected):
        return "empty_answer"
    if all(not message["content"].strip() for message in pair.prompt):
        return "empty_prompt"
    # With a user's turn inside an answer, a prompt length cannot say what the model wrote.
    if any(message["role"] != "assistant" for message in [*pair.chosen, *pair.rejected]):
        return "several_turns"
    return None


def _is_rewritten(
    prompt: str, full: str, pair: PreferenceRow, template: ChatTemplate, options: dict[str, Any]
) -> bool:
    """Whether `full` departs from `prompt` before the header of the answer.

    Departing inside the header is fine: templates that open a thought there close it, or leave it out, when they render
    the answer. Departing earlier means that the messages themselves changed, and that they would be trained.
    """
    without_header = template(pair.prompt, add_generation_prompt=False, **options)
    return num_shared(prompt, full) < num_shared(prompt, without_header)


class _Builder:
    """Collects encoded pairs in flat arrays."""

    def __init__(
        self, max_length: int, overlong: Overlong, bos_token_id: int | None, summary: DataSummary
    ) -> None:
        self._max_length = max_length
        self._overlong = overlong
        self._bos_token_id = bos_token_id
        self._summary = summary
        self._tokens, self._lengths, self._prompt_lens, self._origins = (
            array(code) for code in "iqqq"
        )

    def add(
        self, pair: _Rendered, *, prompt: list[int], chosen: list[int], rejected: list[int]
    ) -> None:
        sides = [(ids, num_shared(prompt, ids)) for ids in (chosen, rejected)]
        is_long = max(len(chosen), len(rejected)) > self._max_length
        if is_long:
            shortened = self._shorten(sides)
            if shortened is None:
                return self._summary.drop("too_long", pair.where)
            sides = shortened
        if any(prompt_len == 0 for _, prompt_len in sides):
            return self._summary.drop("empty_prompt", pair.where)
        if any(prompt_len == len(ids) for ids, prompt_len in sides):
            return self._summary.drop("empty_answer", pair.where)
        if sides[0][0] == sides[1][0]:
            return self._summary.drop("equal_answers", pair.where)
        for ids, prompt_len in sides:
            self._tokens.extend(ids)
            self._lengths.append(len(ids))
            self._prompt_lens.append(prompt_len)
        self._origins.append(pair.origin)
        self._summary.kept += 1
        self._summary.truncated += is_long
        return None

    def _shorten(self, sides: list[tuple[list[int], int]]) -> list[tuple[list[int], int]] | None:
        """The two sides within the length, each with its prompt length; None if that cannot be done."""
        limit = self._max_length
        if self._overlong == "truncate_answer" and all(
            prompt_len < limit for _, prompt_len in sides
        ):
            return [(ids[:limit], prompt_len) for ids, prompt_len in sides]
        if self._overlong == "truncate_prompt":
            num_kept_first = int(all(ids[0] == self._bos_token_id for ids, _ in sides))
            num_cut = max(len(ids) for ids, _ in sides) - limit
            if all(prompt_len - num_cut > num_kept_first for _, prompt_len in sides):
                return [
                    (ids[:num_kept_first] + ids[num_kept_first + num_cut :], prompt_len - num_cut)
                    for ids, prompt_len in sides
                ]
        return None

    def build(self, name: str) -> PreferenceDataset:
        if not self._summary.kept:
            raise DataError(f"{name}: no preference pair is left to train on.\n{self._summary}")
        tokens = np.frombuffer(self._tokens, dtype=np.int32)
        lengths, prompt_lens, origins = (
            np.frombuffer(values, dtype=np.int64)
            for values in (self._lengths, self._prompt_lens, self._origins)
        )
        answer_lens = lengths - prompt_lens
        self._summary.lengths = {
            "prompt": LengthStats.of(prompt_lens),
            "chosen answer": LengthStats.of(answer_lens[0::2]),
            "rejected answer": LengthStats.of(answer_lens[1::2]),
            "longest side": LengthStats.of(lengths.reshape(-1, 2).max(axis=1)),
        }
        return PreferenceDataset(tokens, lengths, prompt_lens, origins, self._summary)
