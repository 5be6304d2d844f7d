"""Prompts with the answers to imitate: rows of a file as tokens, and which of the tokens are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from roll.datasets.chat_template import get_chat_template
from roll.datasets.preference_rows import num_shared
from roll.datasets.prompts import PromptColumns
from roll.datasets.summary import DataSummary, LengthStats
from roll.datasets.table import Row, Table
from roll.datasets.tokenizing import tokenize_rows
from roll.exceptions import DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

LABEL_PAD = -100  # what torch's cross entropy ignores


class PromptAnswer(TypedDict):
    """One row as the collator takes it: `labels` are the ids of the answer, -100 on the prompt."""

    input_ids: np.ndarray
    labels: np.ndarray


class PromptAnswers:
    """Tokenised rows; `.summary` says what was left out."""

    def __init__(self, rows: list[PromptAnswer], summary: DataSummary) -> None:
        self.rows = rows
        self.summary = summary

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
    """Render and tokenise every row: the prompt, then the answer in `answer_key`, then the template's end of a turn.

    A conversation whose last message is the assistant's has its answer there and needs no `answer_key`. Rows longer
    than `max_length` tokens and rows without an answer are left out and counted; no row left is a DataError.
    """
    columns = PromptColumns.find(table, prompt=prompt_key, messages=messages_key, tag=None)
    chat_template = get_chat_template(template, tokenizer)
    summary = DataSummary(
        {"too_long": f"longer than {max_length:,} tokens", "empty_answer": "with an empty answer"}
    )

    def texts() -> Iterator[tuple[int, str, str]]:
        for index, row in enumerate(table):
            summary.rows_read += 1
            try:
                messages = columns.messages_of(row)
                prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
                answer = messages[-1] if prompt is not messages else _answer(table, row, answer_key)
                if not answer["content"]:
                    summary.drop("empty_answer", table.where(index))
                    continue
                yield (
                    index,
                    chat_template(prompt, add_generation_prompt=True),
                    chat_template([*prompt, answer], add_generation_prompt=False),
                )
            except ValueError as error:
                raise DataError(f"{table.where(index)}: {error}") from error

    rows: list[PromptAnswer] = []
    for (index, _, _), (prompt_ids, full_ids) in tokenize_rows(
        tokenizer, texts(), lambda row: row[1:], summary
    ):
        prompt_len = num_shared(prompt_ids, full_ids)
        if len(full_ids) > max_length or prompt_len == len(full_ids):
            summary.drop(
                "too_long" if len(full_ids) > max_length else "empty_answer", table.where(index)
            )
            continue
        labels = np.asarray(full_ids, dtype=np.int32)
        labels[:prompt_len] = LABEL_PAD
        rows.append({"input_ids": np.asarray(full_ids, dtype=np.int32), "labels": labels})
    if not rows:
        raise DataError(f"{table.name}: no row is left to train on.\n{summary}")
    summary.kept = len(rows)
    lengths = np.asarray([len(row["input_ids"]) for row in rows])
    answers = np.asarray([(row["labels"] != LABEL_PAD).sum() for row in rows])
    summary.lengths = {"row": LengthStats.of(lengths), "answer": LengthStats.of(answers)}
    return PromptAnswers(rows, summary)


def _answer(table: Table, row: Row, answer_key: str) -> dict[str, str]:
    table.require_columns([answer_key], "Name the column of the answers in data_args.response")
    value = row.get(answer_key)
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"column {answer_key!r} holds a {type(value).__name__}: {value!r}, expected text"
        )
    return {"role": "assistant", "content": value or ""}
