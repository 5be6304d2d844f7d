"""Parquet and Arrow files as tables. The only module that imports pyarrow; `roll.datasets.files` loads it on demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from roll.datasets.table import Row, Table
from roll.exceptions import DataError, MissingDependencyError, install_hint

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingDependencyError(
        f"parquet and arrow files, and Hugging Face dataset folders, need pyarrow: {install_hint('data')}. "
        "JSON, JSONL and CSV files need nothing"
    ) from error

_ARROW_FILE_MAGIC = b"ARROW1"
_ROWS_PER_BLOCK = 1024


class ArrowTable(Table):
    """Rows in Arrow's columnar form: compact in memory, or mapped from the file for Arrow's own formats."""

    def __init__(self, name: str, data: pa.Table) -> None:
        self.name = name
        self.columns = tuple(data.column_names)
        self._data = data

    def __len__(self) -> int:
        return self._data.num_rows

    def __getitem__(self, index: int) -> Row:
        return self._data.slice(self.check_index(index), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        # Converting a block of rows costs little more than converting one of them.
        for batch in self._data.to_batches(max_chunksize=_ROWS_PER_BLOCK):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        return f"{self.name}, row {self.check_index(index) + 1}"


def read_parquet(path: Path, name: str) -> Table:
    try:
        return ArrowTable(name, pq.read_table(path, memory_map=True))
    except pa.ArrowException as error:
        raise DataError(f"{name} cannot be read as a parquet file: {error}") from error


def read_arrow(path: Path, name: str) -> Table:
    """Reads both of Arrow's formats: the file format (feather) and the stream format that `datasets` writes."""
    try:
        source = pa.memory_map(str(path))
        is_file_format = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)
        return ArrowTable(name, reader.read_all())
    except pa.ArrowException as error:
        raise DataError(f"{name} cannot be read as an arrow file: {error}") from error
