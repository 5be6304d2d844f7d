"""What became of the rows of a data set, in numbers and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LengthStats:
    """Token counts over the rows that were kept."""

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray) -> LengthStats:
        values = np.asarray(lengths)
        if values.size == 0:
            return cls(0, 0.0, 0)
        return cls(int(values.min()), float(values.mean()), int(values.max()))

    def __str__(self) -> str:
        return f"{self.min:,} to {self.max:,} (mean {self.mean:,.1f})"


@dataclass
class Dropped:
    """Rows that were left out for one reason."""

    explanation: str
    count: int = 0
    first: str = ""
    """Where the first of them stands."""


@dataclass
class DataSummary:
    """Counts rows while a data set is made; `str()` of it is the report.

    >>> summary = DataSummary({"too_long": "longer than 512 tokens"})
    >>> summary.rows_read = 3
    >>> summary.drop("too_long", "pairs.jsonl:2")
    >>> summary.kept = 2
    >>> print(summary)
    3 rows read, 2 kept, 1 dropped
      1 longer than 512 tokens (first: pairs.jsonl:2)
    """

    explanations: dict[str, str]
    """The reasons for which rows can be left out, and how to say each after a number."""
    rows_read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    lengths: dict[str, LengthStats] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        entry = self.dropped.setdefault(reason, Dropped(self.explanations[reason], first=where))
        entry.count += 1

    @property
    def num_dropped(self) -> int:
        return sum(entry.count for entry in self.dropped.values())

    def to_dict(self) -> dict[str, Any]:
        """The same for a JSON file."""
        return {
            "rows_read": self.rows_read,
            "kept": self.kept,
            "truncated": self.truncated,
            "dropped": {
                reason: {"count": entry.count, "first": entry.first}
                for reason, entry in self.dropped.items()
            },
            "lengths": {
                name: {"min": stats.min, "mean": stats.mean, "max": stats.max}
                for name, stats in self.lengths.items()
            },
        }

    def __str__(self) -> str:
        head = f"{self.rows_read:,} rows read, {self.kept:,} kept, {self.num_dropped:,} dropped"
        if self.truncated:
            head += f", {self.truncated:,} truncated"
        by_count = sorted(self.dropped.values(), key=lambda entry: -entry.count)
        lines = [
            f"  {entry.count:,} {entry.explanation} (first: {entry.first})" for entry in by_count
        ]
        if self.kept:
            lines += [f"  tokens of {name}: {stats}" for name, stats in self.lengths.items()]
        return "\n".join([head, *lines])
