"""Rows of data files behind one small interface: how many there are, which columns they have, where each stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from roll.exceptions import DataError

# A row as it stands in the file: JSON-like values, so Any.
Row = dict[str, Any]


class Table(ABC):
    """An indexable sequence of rows. A row may lack a column or hold None in it; both mean "no value"."""

    name: str
    """The file as the user named it, for messages."""
    columns: tuple[str, ...]
    """Every column that occurs in any row, in order of first appearance."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The place of a row in words that lead a person to it: `pairs.jsonl:17`, or `pairs.parquet, row 17`."""

    @property
    def parts(self) -> tuple[Table, ...]:
        """The tables of the single files, in order."""
        return (self,)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def require_columns(self, names: Sequence[str], fix: str) -> None:
        """Raises a DataError that lists the columns there are, if one of `names` is not among them."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            found = ", ".join(self.columns) or "none"
            plural = "s" if len(missing) > 1 else ""
            raise DataError(
                f"{self.name} has no column{plural} {', '.join(missing)}; its columns are: {found}. {fix}"
            )

    def check_index(self, index: int) -> int:
        """`index` counted from the front; IndexError outside the table."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {self.name}, which has {len(self)} rows")
        return index % len(self)


class RowsTable(Table):
    """Rows that are held in memory."""

    def __init__(self, name: str, rows: Sequence[Row], places: Sequence[str] | None = None) -> None:
        self.name = name
        self.columns = tuple(dict.fromkeys(key for row in rows for key in row))
        self._rows = rows
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self.check_index(index)]

    def where(self, index: int) -> str:
        index = self.check_index(index)
        return self._places[index] if self._places is not None else f"{self.name}, row {index + 1}"


class FirstRows(Table):
    """The beginning of another table."""

    def __init__(self, table: Table, num_rows: int) -> None:
        self.name, self.columns = table.name, table.columns
        self._table, self._num_rows = table, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        return self._table[self.check_index(index)]

    def where(self, index: int) -> str:
        return self._table.where(self.check_index(index))


class JoinedTable(Table):
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.name = ", ".join(table.name for table in tables)
        self.columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
        self._parts = tuple(tables)
        self._ends = list(accumulate(len(table) for table in tables))

    @property
    def parts(self) -> tuple[Table, ...]:
        return self._parts

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        table, local = self._locate(index)
        return table[local]

    def __iter__(self) -> Iterator[Row]:
        return (row for table in self._parts for row in table)

    def where(self, index: int) -> str:
        table, local = self._locate(index)
        return table.where(local)

    def _locate(self, index: int) -> tuple[Table, int]:
        index = self.check_index(index)
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)
