"""A whole data set to token ids, block by block, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import Progress

from roll.datasets.chat_template import tokenize_rendered
from roll.datasets.summary import DataSummary

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

RowT = TypeVar("RowT")

_ROWS_PER_BLOCK = 256
# Fewer rows than this are ready before a progress bar could be read.
_ROWS_FOR_PROGRESS = 4 * _ROWS_PER_BLOCK


def tokenize_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[RowT],
    texts_of: Callable[[RowT], Sequence[str]],
    summary: DataSummary,
    *,
    title: str = "",
    total: int = 0,
) -> Iterator[tuple[RowT, list[list[int]]]]:
    """Each row with the token ids of its texts. Rows are taken in blocks, because tokenizers use all cores for a block.

    With a `title` there is a progress bar, if `total` is worth one; `summary` knows how many rows were read.
    """
    show = bool(title) and total >= _ROWS_FOR_PROGRESS
    with Progress(console=Console(stderr=True), transient=True, disable=not show) as progress:
        task = progress.add_task(title, total=total)
        while block := list(islice(rows, _ROWS_PER_BLOCK)):
            texts = [texts_of(row) for row in block]
            ids = iter(tokenize_rendered(tokenizer, list(chain.from_iterable(texts))))
            for row, own in zip(block, texts, strict=True):
                yield row, list(islice(ids, len(own)))
            progress.update(task, completed=summary.rows_read)
