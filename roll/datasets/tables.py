"""Data files as tables: what may stand where a file is expected, and how each kind is read.

    data/pairs.jsonl            .json, .jsonl, .ndjson, .csv, .tsv (these also as .gz), .parquet,
                                .arrow, .feather
    [a.jsonl, b.parquet]        several, read one after the other
    data/train-*.parquet        a pattern; what matches is read in the order of the names
    data/                       a folder of such files, or one that `Dataset.save_to_disk` wrote
    owner/name, owner/name:train   a dataset of the Hugging Face Hub, and a split of it

A folder or file that holds several splits has to be named more closely, so that nobody trains on
the test set by accident. JSON and CSV are read by hand because no library names the file and line
of a broken row.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import mmap
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from roll.exceptions import DataError, MissingDependencyError, install_hint

# A row as it stands in the file: JSON-like values, so Any.
Row = dict[str, Any]

_SPLIT_NAME = re.compile(r"^(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:\w+)?")
# Files that Hugging Face tools put beside the data.
_NOT_DATA = ("dataset_info.json", "dataset_infos.json")
_NUM_LISTED = 12
_NOT_UTF8 = "is not UTF-8 text, save the file as UTF-8"
_UTF8_BOM = b"\xef\xbb\xbf"
_ARROW_FILE_MAGIC = b"ARROW1"
_JSON_TYPES: dict[type, str] = {
    dict: "object",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
}


class Table:
    """An indexable sequence of rows. A column that a row lacks and one that holds None are equal.

    Attributes:
        name: the file as the user named it, for messages.
        columns: every column that occurs in any row, in order of first appearance.
        parts: the tables of the single files, in order.
    """

    def __init__(
        self,
        name: str,
        rows: Any,
        columns: Sequence[str] | None = None,
        lines: Sequence[int] | None = None,
    ) -> None:
        """`rows` has a length and can be indexed; `lines` are the line numbers of the rows."""
        if columns is None:
            columns = list(dict.fromkeys(key for row in rows for key in row))
        self.name, self.columns = name, tuple(columns)
        self.parts: tuple[Table, ...] = (self,)
        self._rows, self._lines = rows, lines

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[range(len(self))[index]]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, index: int) -> str:
        """Where a row stands: `pairs.jsonl:17`, or `pairs.parquet, row 17`."""
        if self._lines is None:
            return f"{self.name}, row {index + 1}"
        return f"{self.name}:{self._lines[index]}"

    def head(self, num_rows: int) -> Table:
        rows = [self[index] for index in range(min(num_rows, len(self)))]
        lines = None if self._lines is None else self._lines[:num_rows]
        return Table(self.name, rows, self.columns, lines)

    def require_columns(self, names: Sequence[str], fix: str) -> None:
        """Raise a DataError that lists the columns there are if one of `names` is missing."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise DataError(
                f"{self.name} has no column{plural} {', '.join(missing)}; "
                f"its columns are: {', '.join(self.columns) or 'none'}. {fix}"
            )


class JoinedTable(Table):
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        columns = dict.fromkeys(column for table in tables for column in table.columns)
        super().__init__(", ".join(table.name for table in tables), (), list(columns))
        self.parts = tuple(part for table in tables for part in table.parts)
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, index = self._locate(index)
        return part[index]

    def __iter__(self) -> Iterator[Row]:
        return (row for part in self.parts for row in part)

    def where(self, index: int) -> str:
        part, index = self._locate(index)
        return part.where(index)

    def _locate(self, index: int) -> tuple[Table, int]:
        index = range(len(self))[index]
        number = bisect_right(self._ends, index)
        part = self.parts[number]
        return part, index - self._ends[number] + len(part)


def load_table(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Table:
    """Read a file, a folder, a pattern, a Hub name or a list of these into one table.

    Raises DataError for what does not exist, is empty, broken or of an unknown format; the message
    names the file, and the line where there is one.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not given or any(not str(entry).strip() for entry in given):
        raise DataError(
            "no data file was given: set data_args.file_name to a file, a folder or a list of them"
        )
    tables: list[Table] = []
    for entry in given:
        if needs_datasets(str(entry)):
            table = _read_with_datasets(str(entry))
            assert table is not None
            tables.append(table)
        else:
            tables += [_read_file(path) for path in _expand(Path(entry).expanduser())]
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def peek_table(
    file: str | os.PathLike[str], *, max_bytes: int, max_rows: int
) -> tuple[Table | None, bool]:
    """The first rows of each file of one entry (None: no row was read), and whether these are all.

    Of a file larger than `max_bytes` only lines of JSON can be read in part; of another one it is
    checked that it exists, is not empty and has a known extension. Nothing is downloaded.
    """
    tables: list[Table] = []
    is_whole = True
    if needs_datasets(str(file)):
        # Without network the cache decides, so it is asked: a name that is not in it is an error.
        is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        table = _read_with_datasets(str(file), download=is_offline)
        if table is None:
            return None, False
        return table.head(max_rows), len(table) <= max_rows
    for path in _expand(Path(file).expanduser()):
        if path.stat().st_size <= max_bytes:
            table = _read_file(path)
        else:
            _check_format(path)
            is_whole = False
            if _extension(path) not in (".jsonl", ".ndjson") or path.suffix.lower() == ".gz":
                continue
            with path.open("rb") as stream:
                head = stream.read(max_bytes)
            table = _json_lines(head[: head.rfind(b"\n") + 1], str(path))
        is_whole = is_whole and len(table) <= max_rows
        tables.append(table.head(max_rows))
    if not tables:
        return None, is_whole
    return (tables[0] if len(tables) == 1 else JoinedTable(tables)), is_whole


# --------------------------------------------------------------------------------------------------
# Which files are meant


def _expand(path: Path) -> list[Path]:
    """The data files that one entry stands for, at least one."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _expand_folder(path)
    if glob.has_magic(str(path)):
        found = sorted(glob.glob(str(path), recursive=True))
        matches = [Path(match) for match in found if Path(match).is_file()]
        if matches:
            return matches
        problem = f"no file matches {path}"
    else:
        problem = f"no such file or folder: {path}"
    # What a person who mistyped it would like to see: the nearest folder and what is in it.
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    advice = ""
    if folder == path.parent:
        near = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
        advice = f" Did you mean {folder / near[0]}?" if near else ""
    raise DataError(f"{problem}. {_listing(folder)}{advice}")


def _expand_folder(folder: Path) -> list[Path]:
    # A downloaded dataset repository keeps its files in data/.
    found: list[Path] = []
    for place in (folder, folder / "data"):
        if not found and place.is_dir():
            found = sorted(
                file
                for file in place.iterdir()
                if file.is_file()
                and not file.name.startswith(".")
                and file.name not in _NOT_DATA
                and _extension(file) in _READERS
            )
    if not found:
        known = ", ".join(sorted(_READERS))
        raise DataError(f"{folder} holds no data file ({known}). {_listing(folder)}")
    splits = {match[1].lower(): file for file in found if (match := _SPLIT_NAME.match(file.name))}
    if len(splits) > 1:
        choices = " or ".join(str(file.parent / f"{split}*") for split, file in splits.items())
        raise DataError(f"{folder} holds files of several splits: name those to read, {choices}")
    return found


def _listing(folder: Path) -> str:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    place = "The current folder" if folder == Path() else f"The folder {folder}"
    if not names:
        return f"{place} is empty."
    more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return f"{place} holds: {', '.join(names[:_NUM_LISTED])}{more}."


def needs_datasets(entry: str) -> bool:
    """Whether a folder of `save_to_disk`, or `owner/name[:split]` on the Hub, is meant."""
    path = Path(entry).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return True
    if path.exists() or path.parent.is_dir() or _extension(path) in _READERS:
        return False
    return _HUB_NAME.fullmatch(entry) is not None


def _read_with_datasets(entry: str, *, download: bool = True) -> Table | None:
    """A saved folder, or a dataset of the Hub, which is None where nothing may be downloaded."""
    path = Path(entry).expanduser()
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{entry} is not a data file: to read it as a folder that datasets saved, or from the "
            f"Hugging Face Hub, takes datasets: {install_hint('data')}"
        ) from error
    name, _, split = entry.partition(":")
    try:
        if path.is_dir():
            name, split, separator = entry, "", "/"
            found = datasets.load_from_disk(str(path))
        elif download:
            separator = ":"
            found = datasets.load_dataset(name, split=split or None)
        else:
            return None
    except (
        *(OSError, ValueError, KeyError, RuntimeError),
        datasets.exceptions.DatasetsError,
    ) as error:
        what = "was not saved completely" if path.is_dir() else "is no file here nor on the Hub"
        raise DataError(
            f"{entry} cannot be read as a Hugging Face dataset; perhaps it {what}: {error}"
        ) from error
    if isinstance(found, dict):
        if len(found) != 1:
            choices = " or ".join(f"{name}{separator}{choice}" for choice in found) or "nothing"
            raise DataError(f"{name} holds {len(found)} splits: name the one to read, {choices}")
        found = next(iter(found.values()))
    if len(found) == 0:
        raise DataError(f"{entry} is empty: it has no rows")
    return Table(entry, found, found.column_names)


# --------------------------------------------------------------------------------------------------
# Reading one file


def _extension(path: Path) -> str:
    """The extension that says how to read a file: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _check_format(path: Path) -> None:
    if _extension(path) not in _READERS:
        raise DataError(
            f"{path}: cannot tell the format from the extension {path.suffix or '(none)'!r}; "
            f"known are {', '.join(sorted(_READERS))}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")


def _read_file(path: Path) -> Table:
    _check_format(path)
    table = _READERS[_extension(path)](path)
    if len(table) == 0:
        raise DataError(f"{path} is empty: it has no rows")
    return table


def _read_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix.lower() != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked as gzip: {error}") from error


def _read_text(path: Path) -> str:
    content = _read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: {_NOT_UTF8} ({error.reason})") from error


class _JsonLines:
    """Lines that stay in the file and are parsed when they are read."""

    def __init__(self, content: bytes | mmap.mmap) -> None:
        self.content = content
        self.starts, self.ends = array("q"), array("q")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        return json.loads(self.content[self.starts[index] : self.ends[index]])


def _json_lines(content: bytes | mmap.mmap, name: str) -> Table:
    """One JSON object a line; blank lines are skipped.

    Every line is parsed once here, so that a broken one is known before anything expensive happens.
    """
    rows, lines = _JsonLines(content), array("q")
    columns: dict[str, None] = {}
    end = len(_UTF8_BOM) - 1 if content[: len(_UTF8_BOM)] == _UTF8_BOM else -1
    line = 0
    while end + 1 < len(content):
        start, line = end + 1, line + 1
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        text = content[start:end]
        if not text.strip():
            continue
        try:
            row = json.loads(text.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{line}: {_NOT_UTF8} ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}:{line}: is not valid JSON: {error.msg} at column {error.colno}. "
                "Each line holds one JSON object"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{name}:{line}: a row is a JSON object, this line holds a {_json_type(row)}"
            )
        columns.update(dict.fromkeys(row))
        rows.starts.append(start)
        rows.ends.append(end)
        lines.append(line)
    return Table(name, rows, list(columns), lines)


def _read_json_lines(path: Path) -> Table:
    if path.suffix.lower() == ".gz":
        return _json_lines(_read_bytes(path), str(path))
    with path.open("rb") as file:
        return _json_lines(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))


def _read_json(path: Path) -> Table:
    """A list of rows, one row, {"train": a list of rows}, or lines of JSON after all."""
    text = _read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # Many files called .json hold one object a line: the parser stops after the first one.
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _read_json_lines(path)
        raise DataError(
            f"{path}:{error.lineno}: is not valid JSON: {error.msg} at column {error.colno}"
        ) from error

    if isinstance(value, dict):
        lists = [key for key, rows in value.items() if isinstance(rows, list)]
        splits = [key for key in lists if _SPLIT_NAME.fullmatch(key)]
        if len(splits) > 1:
            raise DataError(
                f"{path} holds several splits ({', '.join(splits)}): save the one to read as a "
                "file of its own"
            )
        value = value[lists[0]] if lists and len(value) == 1 else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of rows, found a {_json_type(value)}")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, row {index + 1}: a row is a JSON object, found a {_json_type(row)}"
            )
    return Table(str(path), value)


def _read_csv(path: Path) -> Table:
    """A header line, then one row a record. A CSV file has no types: every cell is text."""
    delimiter = "\t" if _extension(path) == ".tsv" else ","
    text = io.StringIO(_read_text(path), newline="")
    records = csv.reader(text, delimiter=delimiter, strict=True)
    # Python stops at 128 Ki characters a cell, which long answers exceed. The limit is that of the
    # whole process: put it back.
    previous_limit = csv.field_size_limit(sys.maxsize)
    try:
        header = next(records, [])
        duplicates = {column for column in header if header.count(column) > 1}
        if duplicates:
            raise DataError(
                f"{path}:1: the header names a column twice: {', '.join(sorted(duplicates))}"
            )
        rows, lines = [], []
        first_line = records.line_num + 1  # a quoted cell may span lines
        for record in records:
            if record and len(record) != len(header):
                raise DataError(
                    f"{path}:{first_line}: has {len(record)} cells, the header names "
                    f"{len(header)} columns ({', '.join(header)}); cells that contain "
                    f"{delimiter!r} have to be quoted"
                )
            if record:
                rows.append(dict(zip(header, record, strict=True)))
                lines.append(first_line)
            first_line = records.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{records.line_num}: is not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(previous_limit)
    return Table(str(path), rows, lines=lines)


class _ArrowRows:
    """Rows in Arrow's columnar form: compact in memory, or mapped from the file."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.num_rows

    def __getitem__(self, index: int) -> Row:
        return self.data.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        # Converting a block of rows costs little more than converting one of them.
        for batch in self.data.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def _read_arrow(path: Path) -> Table:
    """Parquet, and both formats of Arrow: of files (feather) and of streams, as datasets writes."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError(
            "parquet and arrow files, and Hugging Face dataset folders, need pyarrow: "
            f"{install_hint('data')}. JSON, JSONL and CSV files need nothing"
        ) from error
    kind = "a parquet file" if _extension(path) == ".parquet" else "an arrow file"
    try:
        if _extension(path) == ".parquet":
            data = pq.read_table(path, memory_map=True)
        else:
            source = pa.memory_map(str(path))
            is_file_format = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
            source.seek(0)
            data = (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(source).read_all()
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error
    return Table(str(path), _ArrowRows(data), data.column_names)


def _json_type(value: object) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), type(value).__name__)


_READERS: dict[str, Callable[[Path], Table]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
