r"""Rows of a table as token ids: prompts, and prompts with the answers to imitate.

Preference pairs are in `roll.datasets.preference`; what is said here holds for them too.

What is trained is the answer, and nothing but the answer. Prompt and answer are rendered as a
conversation and tokenised as one text, because a token may span the place where they meet. The
prompt, with the header under which the model answers, is tokenised as well, and the tokens that
both begin with are the prompt:

    prompt    <|im_start|> user \n 2 + 2 ? <|im_end|> \n <|im_start|> assistant \n
    whole     <|im_start|> user \n 2 + 2 ? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
              ------------------------------ prompt, 12 tokens ----------------- | trained, 3

    prompt    a dd Ġ                   where the tokenizer joins the space to what follows
    whole     a dd Ġ4 <eos>
              ---- | trained, 2 tokens: Ġ4 is one that the model itself will give

Differs from ROLL, which counts the tokens of a prompt without the answer's header (so the header is
trained), tokenised apart from the answer (so a joined token shifts the mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from roll.datasets.chat_template import (
    Message,
    get_chat_template,
    parse_messages,
    tokenize_rendered,
)
from roll.datasets.tables import Row, Table
from roll.exceptions import DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

LABEL_PAD = -100  # what torch's cross entropy ignores
GROUND_TRUTH = "ground_truth"
EVERYTHING = "all"  # the one pool that prompts are drawn from when no shares are given

_ROWS_PER_BLOCK = 256
# Fewer rows than this are ready before a progress bar could be read.
_ROWS_FOR_PROGRESS = 4 * _ROWS_PER_BLOCK
_RowT = TypeVar("_RowT", bound=tuple[Any, ...])


@dataclass
class DataSummary:
    """Counts rows while a data set is made; `str()` of it is the report.

    >>> summary = DataSummary({"too_long": "longer than 512 tokens"}, rows_read=3, kept=2)
    >>> summary.drop("too_long", "pairs.jsonl:2")
    >>> print(summary)
    3 rows read, 2 kept, 1 dropped
      1 longer than 512 tokens (first: pairs.jsonl:2)

    Attributes:
        explanations: how to say each reason for which rows are left out, after a number.
        dropped: by reason, the count, and where the first such row stands.
        lengths: min, mean and max number of tokens, by what they are tokens of.
    """

    explanations: dict[str, str]
    rows_read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        self.dropped.setdefault(reason, {"count": 0, "first": where})["count"] += 1

    def set_lengths(self, **lengths: Sequence[int] | np.ndarray) -> None:
        for name, values in lengths.items():
            array = np.asarray(values)
            self.lengths[name.replace("_", " ")] = {
                "min": int(array.min()),
                "mean": float(array.mean()),
                "max": int(array.max()),
            }

    @property
    def num_dropped(self) -> int:
        return sum(entry["count"] for entry in self.dropped.values())

    def to_dict(self) -> dict[str, Any]:
        """The same for a JSON file."""
        names = ("rows_read", "kept", "truncated", "dropped", "lengths")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        head = f"{self.rows_read:,} rows read, {self.kept:,} kept, {self.num_dropped:,} dropped"
        if self.truncated:
            head += f", {self.truncated:,} truncated"
        lines = [head]
        for reason, entry in sorted(self.dropped.items(), key=lambda item: -item[1]["count"]):
            words = self.explanations[reason]
            lines.append(f"  {entry['count']:,} {words} (first: {entry['first']})")
        for name, stats in self.lengths.items():
            low, high, mean = stats["min"], stats["max"], stats["mean"]
            lines.append(f"  tokens of {name}: {low:,} to {high:,} (mean {mean:,.1f})")
        return "\n".join(lines)


def tokenize_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[_RowT],
    num_texts: int,
    summary: DataSummary,
    *,
    title: str = "",
    total: int = 0,
) -> Iterator[tuple[_RowT, list[list[int]]]]:
    """Each row with the token ids of its last `num_texts` elements, which are texts.

    Rows are taken in blocks, because tokenizers use all cores for a block. With a `title` there is
    a progress bar, if `total` is worth one; `summary` knows how many rows were read.
    """
    show = bool(title) and total >= _ROWS_FOR_PROGRESS
    with Progress(console=Console(stderr=True), transient=True, disable=not show) as progress:
        task = progress.add_task(title, total=total)
        while block := list(islice(rows, _ROWS_PER_BLOCK)):
            texts = list(chain.from_iterable(row[-num_texts:] for row in block))
            ids = iter(tokenize_rendered(tokenizer, texts))
            for row in block:
                yield row, list(islice(ids, num_texts))
            progress.update(task, completed=summary.rows_read)


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading elements two sequences share."""
    num = min(len(one), len(other))
    if one[:num] == other[:num]:
        return num
    return next(i for i in range(num) if one[i] != other[i])


# --------------------------------------------------------------------------------------------------
# Prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt as a pipeline takes it.

    Attributes:
        index: its number in the data set.
        ids: its tokens.
        text: what these tokens say, chat markup included.
        question: the prompt as it stands in the file: its text, or the content of the last message.
        row: all columns of the row that it was made from, which rewards get.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    question: str
    ground_truth: Any
    tag: str
    domain: str
    row: Row


@dataclass
class PromptDataset:
    """Tokenised prompts. The rows themselves stay in their table."""

    table: Table
    column: str
    """Where the prompts stand."""
    tag_column: str | None
    summary: DataSummary
    ids: list[np.ndarray] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """Which row of the table each prompt was made from."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Prompt:
        row = self.table[self.origins[index]]
        return Prompt(
            index=index,
            ids=tuple(self.ids[index].tolist()),
            text=self.texts[index],
            question=str(_prompt_messages(row, self.column)[-1]["content"]),
            ground_truth=row.get(GROUND_TRUTH),
            tag=_tag(row, self.tag_column),
            domain=self.domains[index],
            row=row,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


def encode_prompts(
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template: str = "native",
    tag_to_template: Mapping[str, str] | None = None,
    prompt_key: str | None = None,
    messages_key: str | None = None,
    tag_key: str | None = "tag",
    domain_of: Callable[[Row], str] = lambda row: EVERYTHING,
    template_options: Callable[[Row], Mapping[str, Any]] = lambda row: {},
    show_progress: bool = True,
) -> PromptDataset:
    """Render and tokenise every row. Prompts of more than `max_length` tokens are left out.

    A row whose tag is in `tag_to_template` is rendered by that template. Raises DataError for a
    missing column (naming those there are), for a row without a prompt (with file and line), and if
    no prompt is left.
    """
    column = _prompt_column(table, prompt_key, messages_key)
    default = get_chat_template(template, tokenizer)
    by_tag = tag_to_template or {}
    templates = {tag: get_chat_template(name, tokenizer) for tag, name in by_tag.items()}
    summary = DataSummary(
        {"too_long": f"longer than {max_length:,} tokens", "empty_prompt": "with an empty prompt"}
    )
    dataset = PromptDataset(table, column, tag_key if tag_key in table.columns else None, summary)

    def rendered() -> Iterator[tuple[int, str, str]]:
        for index, row in enumerate(table):
            summary.rows_read += 1
            try:
                messages = _prompt_messages(row, column)
                if not any(message["content"].strip() for message in messages):
                    summary.drop("empty_prompt", table.where(index))
                    continue
                chat = templates.get(_tag(row, dataset.tag_column), default)
                text = chat(messages, add_generation_prompt=True, **template_options(row))
                yield index, domain_of(row), text
            except ValueError as error:  # DataError is one
                raise DataError(f"{table.where(index)}: {error}") from error

    longest = 0
    title = "Encoding prompts" if show_progress else ""
    rows = tokenize_rows(tokenizer, rendered(), 1, summary, title=title, total=len(table))
    for (index, domain, text), (ids,) in rows:
        longest = max(longest, len(ids))
        if len(ids) > max_length or not ids:
            summary.drop("too_long" if ids else "empty_prompt", table.where(index))
            continue
        dataset.ids.append(np.asarray(ids, dtype=np.int32))
        dataset.texts.append(text)
        dataset.domains.append(domain)
        dataset.origins.append(index)
    if not dataset.ids:
        raise DataError(
            f"{table.name}: no prompt is left. The longest of them has {longest:,} tokens and "
            f"prompt_length is {max_length:,}; raise prompt_length, or shorten the prompts.\n"
            f"{summary}"
        )
    summary.kept = len(dataset)
    summary.set_lengths(prompt=[len(ids) for ids in dataset.ids])
    return dataset


def _prompt_column(table: Table, prompt: str | None, messages: str | None) -> str:
    """The column that was named, else `prompt` or `messages`."""
    named = prompt or messages
    if named is not None:
        key = "prompt" if prompt else "messages"
        table.require_columns([named], f"Name the column of the prompts in data_args.{key}")
        return named
    if "prompt" not in table.columns and "messages" in table.columns:
        return "messages"
    fix = "Name the column of the prompts in data_args.prompt or .messages"
    table.require_columns(["prompt"], fix)
    return "prompt"


def _prompt_messages(row: Row, column: str) -> list[Message]:
    """The prompt as a conversation. ValueError, without a place, for a row that has none."""
    value = row.get(column)
    messages = parse_messages(value)
    if messages is not None:
        return messages
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} has no prompt in it")
    return [{"role": "user", "content": value}]


def _tag(row: Row, column: str | None) -> str:
    value = None if column is None else row.get(column)
    return "" if value is None else str(value)


# --------------------------------------------------------------------------------------------------
# Prompts with the answers to imitate


class PromptAnswer(TypedDict):
    """One row as the collator takes it: `labels` are the ids of the answer, -100 on the prompt."""

    input_ids: np.ndarray
    labels: np.ndarray


@dataclass
class PromptAnswers:
    """Tokenised rows; `summary` says what was left out."""

    rows: list[PromptAnswer]
    summary: DataSummary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptAnswer:
        return self.rows[index]


def encode_answers(
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template: str = "native",
    prompt_key: str | None = None,
    messages_key: str | None = None,
    answer_key: str = "response",
) -> PromptAnswers:
    """Render and tokenise every row: prompt, answer in `answer_key`, the template's end of a turn.

    A conversation whose last message is the assistant's has its answer there and needs no
    `answer_key`. Rows longer than `max_length` tokens and rows without an answer are left out and
    counted; no row left is a DataError.
    """
    column = _prompt_column(table, prompt_key, messages_key)
    chat = get_chat_template(template, tokenizer)
    summary = DataSummary(
        {"too_long": f"longer than {max_length:,} tokens", "empty_answer": "with an empty answer"}
    )

    def rendered() -> Iterator[tuple[int, str, str]]:
        for index, row in enumerate(table):
            summary.rows_read += 1
            try:
                messages = _prompt_messages(row, column)
                if messages[-1]["role"] != "assistant":
                    fix = "Name the column of the answers in data_args.response"
                    table.require_columns([answer_key], fix)
                    text = row.get(answer_key)
                    if text is not None and not isinstance(text, str):
                        raise ValueError(
                            f"column {answer_key!r} holds a {type(text).__name__}: {text!r}, "
                            "expected text"
                        )
                    messages = [*messages, {"role": "assistant", "content": text or ""}]
                if not messages[-1]["content"]:
                    summary.drop("empty_answer", table.where(index))
                    continue
                prompt = chat(messages[:-1], add_generation_prompt=True)
                yield index, prompt, chat(messages, add_generation_prompt=False)
            except ValueError as error:
                raise DataError(f"{table.where(index)}: {error}") from error

    rows: list[PromptAnswer] = []
    for (index, _, _), (prompt, whole) in tokenize_rows(tokenizer, rendered(), 2, summary):
        prompt_len = num_shared(prompt, whole)
        if len(whole) > max_length or prompt_len == len(whole):
            reason = "too_long" if len(whole) > max_length else "empty_answer"
            summary.drop(reason, table.where(index))
            continue
        labels = np.asarray(whole, dtype=np.int32)
        labels[:prompt_len] = LABEL_PAD
        rows.append({"input_ids": np.asarray(whole, dtype=np.int32), "labels": labels})
    if not rows:
        raise DataError(f"{table.name}: no row is left to train on.\n{summary}")
    summary.kept = len(rows)
    summary.set_lengths(
        row=[len(row["input_ids"]) for row in rows],
        answer=[(row["labels"] != LABEL_PAD).sum() for row in rows],
    )
    return PromptAnswers(rows, summary)
