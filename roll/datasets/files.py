"""Data files to tables: JSON, JSONL, CSV, parquet, arrow and Hugging Face dataset folders, chosen by extension.

What may stand where a file is expected:

    data/pairs.jsonl                one file: .json, .jsonl, .ndjson, .csv, .tsv (these also as .gz), .parquet, .arrow,
                                    .feather
    [a.jsonl, b.parquet]            several, read one after the other
    data/train-*.parquet            a pattern; what matches is read in the order of the names
    data/                           a folder of such files
    data/                           a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`

A folder, or a JSON object, that holds several splits (train and test, say) has to be named more closely: nobody wants
to find out later that the model was trained on its test set.
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
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from roll.datasets.table import FirstRows, JoinedTable, Row, RowsTable, Table
from roll.exceptions import DataError

_SPLIT_NAME = re.compile(r"^(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)", re.IGNORECASE)
# Files that Hugging Face tools put beside the data.
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
_NUM_LISTED = 12
_UTF8_BOM = b"\xef\xbb\xbf"


def load_table(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Table:
    """Reads a file, a folder, a pattern or a list of these (see the module) into one table.

    Raises DataError for a file that does not exist, is empty, has an unknown extension, or is broken; the message names
    the file, and the line where there is one.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not given or any(not str(entry).strip() for entry in given):
        raise DataError(
            "no data file was given: set data_args.file_name to a file, a folder or a list of them"
        )
    tables = [_read_file(path) for entry in given for path in _expand(Path(entry).expanduser())]
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def peek_table(
    file: str | os.PathLike[str], *, max_bytes: int, max_rows: int
) -> tuple[Table | None, bool]:
    """As `load_table` for one entry, reading little: (the first rows of each of its files, whether these are all).

    Of a file that is larger than `max_bytes` only lines of JSON can be read in part; for another one it is checked that
    it exists, is not empty and has a known extension. None: no row was read.
    """
    tables: list[Table] = []
    is_whole = True
    for path in _expand(Path(file).expanduser()):
        if path.stat().st_size <= max_bytes:
            table = _read_file(path)
        else:
            _reader(path)
            is_whole = False
            if _extension(path) not in (".jsonl", ".ndjson") or path.suffix.lower() == ".gz":
                continue
            with path.open("rb") as stream:
                head = stream.read(max_bytes)
            table = JsonLinesTable(head[: head.rfind(b"\n") + 1], str(path))
        is_whole = is_whole and len(table) <= max_rows
        tables.append(table if len(table) <= max_rows else FirstRows(table, max_rows))
    return (JoinedTable(tables) if len(tables) > 1 else tables[0] if tables else None), is_whole


# ---------------------------------------------------------------------------------------------------------------------
# Which files are meant


def _expand(path: Path) -> list[Path]:
    """The data files that one entry stands for, at least one."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _expand_folder(path)
    if glob.has_magic(str(path)):
        matches = [
            Path(match)
            for match in sorted(glob.glob(str(path), recursive=True))
            if Path(match).is_file()
        ]
        if not matches:
            raise DataError(f"no file matches {path}. {_what_is_near(path)}")
        return matches
    raise DataError(f"no such file or folder: {path}. {_what_is_near(path)}")


def _expand_folder(folder: Path) -> list[Path]:
    if (folder / "state.json").is_file():
        return _expand_saved_dataset(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = _read_description(folder / "dataset_dict.json").get("splits", [])
        if len(splits) == 1:
            return _expand_folder(folder / str(splits[0]))
        choices = " or ".join(str(folder / str(split)) for split in splits) or "nothing"
        raise DataError(f"{folder} holds {len(splits)} splits: name the one to read, {choices}")

    # A downloaded dataset repository keeps its files in data/.
    found = _data_files(folder) or _data_files(folder / "data")
    if not found:
        raise DataError(
            f"{folder} holds no data file ({', '.join(sorted(_READERS))}). {_listing(folder)}"
        )
    splits = {match[1].lower(): file for file in found if (match := _SPLIT_NAME.match(file.name))}
    if len(splits) > 1:
        choices = " or ".join(str(file.parent / f"{split}*") for split, file in splits.items())
        raise DataError(f"{folder} holds files of several splits: name those to read, {choices}")
    return found


def _expand_saved_dataset(folder: Path) -> list[Path]:
    """The shards of `Dataset.save_to_disk`, in the order that its state.json gives."""
    state = _read_description(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{folder} stores a selection of rows beside the rows, as old versions of datasets did: load it with "
            "datasets and save flatten_indices() of it"
        )
    shards = [folder / str(entry["filename"]) for entry in state.get("_data_files", [])]
    if not shards:
        raise DataError(
            f"{folder}/state.json names no data files: the dataset is empty or was not saved completely"
        )
    for shard in shards:
        if not shard.is_file():
            raise DataError(
                f"{folder}/state.json names {shard.name}, which is not there. {_listing(folder)}"
            )
    return shards


def _read_description(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} is not valid JSON ({error}): the dataset was not saved completely"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {_json_type(value)}, not the description of a dataset")
    return value


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(
        file for file in files if file.name not in _NOT_DATA and _extension(file) in _READERS
    )


def _what_is_near(path: Path) -> str:
    """What a person who mistyped `path` would like to see: the nearest folder that exists and what is in it."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    advice = ""
    if folder != path.parent:
        advice = " A dataset of the Hugging Face Hub is not downloaded here: fetch it first and give its folder."
    else:
        near = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
        advice = f" Did you mean {folder / near[0]}?" if near else ""
    return _listing(folder) + advice


def _listing(folder: Path) -> str:
    names = sorted(
        entry.name + "/" * entry.is_dir()
        for entry in folder.iterdir()
        if not entry.name.startswith(".")
    )
    place = "The current folder" if folder == Path() else f"The folder {folder}"
    if not names:
        return f"{place} is empty."
    more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return f"{place} holds: {', '.join(names[:_NUM_LISTED])}{more}."


# ---------------------------------------------------------------------------------------------------------------------
# Reading one file


def _extension(path: Path) -> str:
    """The extension that says how to read the file: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _reader(path: Path) -> Callable[[Path, str], Table]:
    reader = _READERS.get(_extension(path))
    if reader is None:
        raise DataError(
            f"{path}: cannot tell the format from the extension {path.suffix or '(none)'!r}; "
            f"known are {', '.join(sorted(_READERS))}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return reader


def _read_file(path: Path) -> Table:
    table = _reader(path)(path, str(path))
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


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}:{line}: is not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error


class JsonLinesTable(Table):
    """One JSON object a line. Lines stay in the file and are parsed when they are read; blank lines are skipped.

    Every line is parsed once at the start, so that a broken one is known before anything expensive happens.
    """

    def __init__(self, content: bytes | mmap.mmap, name: str) -> None:
        self.name = name
        self._content = content
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        columns: dict[str, None] = {}
        for line, start, end in _lines(content):
            text = content[start:end]
            if not text.strip():
                continue
            columns.update(dict.fromkeys(_parse_line(text, f"{name}:{line}")))
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        index = self.check_index(index)
        return _parse_line(
            self._content[self._starts[index] : self._ends[index]], self.where(index)
        )

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[self.check_index(index)]}"


def _lines(content: bytes | mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """(line number from 1, start, end) of every line."""
    start = len(_UTF8_BOM) if content[: len(_UTF8_BOM)] == _UTF8_BOM else 0
    line = 1
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        yield line, start, end
        start, line = end + 1, line + 1


def _parse_line(text: bytes, where: str) -> Row:
    try:
        row = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: is not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: is not valid JSON: {error.msg} at column {error.colno}. Each line holds one JSON object"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is a JSON object, this line holds a {_json_type(row)}")
    return row


def _read_json_lines(path: Path, name: str) -> Table:
    if path.suffix.lower() == ".gz":
        return JsonLinesTable(_read_bytes(path), name)
    with path.open("rb") as file:
        return JsonLinesTable(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), name)


def _read_json(path: Path, name: str) -> Table:
    """A list of objects; an object whose only entry is such a list, as in {"train": [...]}; or JSON lines after all."""
    content = _read_bytes(path)
    text = _decode(content, name)
    if not text.strip():
        raise DataError(f"{name} is empty")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # Many files called .json hold one object a line: the parser then stops after the first object.
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return JsonLinesTable(content, name)
        raise DataError(
            f"{name}:{error.lineno}: is not valid JSON: {error.msg} at column {error.colno}"
        ) from error

    if isinstance(value, dict):
        value = _rows_of_object(value, name)
    if not isinstance(value, list):
        raise DataError(f"{name}: expected a list of rows, found a {_json_type(value)}")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(
                f"{name}, row {index + 1}: a row is a JSON object, found a {_json_type(row)}"
            )
    return RowsTable(name, value)


def _rows_of_object(value: dict[str, Any], name: str) -> list[Any]:
    splits = [
        key for key, rows in value.items() if _SPLIT_NAME.fullmatch(key) and isinstance(rows, list)
    ]
    if len(splits) > 1:
        raise DataError(
            f"{name} holds several splits ({', '.join(splits)}): save the one to read as a file of its own"
        )
    rows = next(iter(value.values()), None)
    if len(value) == 1 and isinstance(rows, list):
        return rows
    return [value]  # a single row


def _read_csv(path: Path, name: str, delimiter: str = ",") -> Table:
    """A header line, then one row a record. A CSV file has no types: every cell is text."""
    text = _decode(_read_bytes(path), name)
    records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    # Python stops at 128 Ki characters a cell by default, which long answers exceed. The limit is global: put it back.
    previous_limit = csv.field_size_limit(sys.maxsize)
    try:
        header = next(records, [])
        duplicates = {column for column in header if header.count(column) > 1}
        if duplicates:
            raise DataError(
                f"{name}:1: the header names a column twice: {', '.join(sorted(duplicates))}"
            )
        rows, places = [], []
        first_line = records.line_num + 1  # a quoted cell may span lines
        for record in records:
            if record:
                if len(record) != len(header):
                    raise DataError(
                        f"{name}:{first_line}: has {len(record)} cells, the header names {len(header)} columns "
                        f"({', '.join(header)}); cells that contain {delimiter!r} have to be quoted"
                    )
                rows.append(dict(zip(header, record, strict=True)))
                places.append(f"{name}:{first_line}")
            first_line = records.line_num + 1
    except csv.Error as error:
        raise DataError(f"{name}:{records.line_num}: is not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(previous_limit)
    return RowsTable(name, rows, places)


def _read_tsv(path: Path, name: str) -> Table:
    return _read_csv(path, name, delimiter="\t")


def _read_parquet(path: Path, name: str) -> Table:
    from roll.datasets import arrow_files  # needs pyarrow, which only these formats need

    return arrow_files.read_parquet(path, name)


def _read_arrow(path: Path, name: str) -> Table:
    from roll.datasets import arrow_files  # needs pyarrow, which only these formats need

    return arrow_files.read_arrow(path, name)


def _json_type(value: object) -> str:
    names = {
        "dict": "object",
        "str": "string",
        "bool": "boolean",
        "int": "number",
        "float": "number",
        "NoneType": "null",
    }
    return "null" if value is None else names.get(type(value).__name__, type(value).__name__)


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
