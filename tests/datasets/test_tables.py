"""Data files: every format, every way to name files, and every way in which they can be wrong.

The folders in data/ were written by `datasets` 5.2.0.
"""

import csv
import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.datasets.tables import Table, load_table, peek_table
from roll.exceptions import DataError, MissingDependencyError, install_hint

DATA = Path(__file__).parent / "data"
TURNS = [{"role": "user", "content": "hé\u2028"}]
ROWS = [
    {"prompt": "2+2", "chosen": "4", "rejected": "5", "turns": TURNS},
    {"prompt": "1+1", "chosen": "2", "rejected": "3", "turns": []},
]
MANY = [{"prompt": f"{i}+1", "turns": [{"content": str(i)}], "score": None} for i in range(3000)]


def write_jsonl(path: Path, rows: list[dict] = ROWS) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def message_of(path) -> str:
    with pytest.raises(DataError) as error:
        load_table(path)
    return str(error.value)


# --- formats --------------------------------------------------------------------------------------


def test_jsonl_rows_and_places(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl")
    table = load_table(path)
    assert len(table) == 2 and list(table) == ROWS and [table[0], table[-1]] == ROWS
    assert table.columns == ("prompt", "chosen", "rejected", "turns")
    assert table.where(1) == f"{path}:2"
    with pytest.raises(IndexError):
        table[2]
    # Blank lines are skipped and still counted.
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": 2}')
    table = load_table(path)
    assert list(table) == [{"a": 1}, {"b": 2}] and table.columns == ("a", "b")
    assert table.where(1) == f"{path}:4"


def test_gzipped_files(tmp_path):
    plain = write_jsonl(tmp_path / "pairs.jsonl").read_bytes()
    for name, content in (("pairs.jsonl", plain), ("cells.csv", b"a,b\n1,2\n")):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert list(load_table(tmp_path / "pairs.jsonl.gz")) == ROWS
    assert list(load_table(tmp_path / "cells.csv.gz")) == [{"a": "1", "b": "2"}]
    (tmp_path / "broken.jsonl.gz").write_bytes(plain)
    assert "cannot be unpacked as gzip" in message_of(tmp_path / "broken.jsonl.gz")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (json.dumps(ROWS, indent=2), ROWS),
        (json.dumps({"train": ROWS}), ROWS),
        ("\n".join(json.dumps(row) for row in ROWS), ROWS),
        (json.dumps({"chosen": TURNS, "rejected": TURNS}), [{"chosen": TURNS, "rejected": TURNS}]),
    ],
    ids=["list", "train", "lines", "one row"],
)
def test_json_forms(tmp_path, text, rows):
    (tmp_path / "pairs.json").write_text(text)
    assert list(load_table(tmp_path / "pairs.json")) == rows


def test_csv_cells_are_text_and_places_are_lines(tmp_path):
    path = tmp_path / "pairs.csv"
    rows = [["two\nlines, quoted", "007"], ["next", "x" * 200_000]]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "chosen"], *rows])
    limit = csv.field_size_limit(1000)
    table = load_table(path)
    assert csv.field_size_limit(limit) == 1000, "the caller's limit was put back"
    assert [list(row.values()) for row in table] == rows
    assert [table.where(0), table.where(1)] == [f"{path}:2", f"{path}:4"]
    (tmp_path / "a.tsv").write_text("a\tb\n1,5\t2\n")
    assert list(load_table(tmp_path / "a.tsv")) == [{"a": "1,5", "b": "2"}]


@pytest.mark.parametrize("name", ["pairs.parquet", "file.arrow", "stream.arrow"])
def test_columnar_files(tmp_path, name):
    path, data = tmp_path / name, pa.Table.from_pylist(MANY)
    if name.endswith("parquet"):
        pq.write_table(data, path, row_group_size=1000)
    else:
        new_writer = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with new_writer(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=700)
    table = load_table(path)
    assert len(table) == 3000 and list(table) == MANY
    assert [table[2999], table[-1], table[1500]] == [MANY[2999], MANY[2999], MANY[1500]]
    assert table.columns == ("prompt", "turns", "score")
    assert table.where(1500) == f"{path}, row 1501"
    with pytest.raises(IndexError):
        table[3000]


# --- which files ----------------------------------------------------------------------------------


def test_several_files_in_the_given_order(tmp_path):
    first = write_jsonl(tmp_path / "b.jsonl", [{"a": 1}, {"a": 2}])
    second = tmp_path / "a.csv"
    second.write_text("a,b\n3,4\n")
    table = load_table([str(first), second])
    assert [row["a"] for row in table] == [1, 2, "3"]
    assert [table[i]["a"] for i in (0, 1, 2, -1)] == [1, 2, "3", "3"]
    assert table.columns == ("a", "b") and len(table) == 3
    assert [table.where(i) for i in range(3)] == [f"{first}:1", f"{first}:2", f"{second}:2"]
    assert [part.name for part in table.parts] == [str(first), str(second)]


def test_patterns_and_folders(tmp_path):
    for name in ("part-2", "part-0", "part-1"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"name": name}])
    for name in ("README.md", "dataset_infos.json", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    for given in (f"{tmp_path}/part-*.jsonl", tmp_path):
        assert [row["name"] for row in load_table(given)] == ["part-0", "part-1", "part-2"]
    assert "no file matches" in message_of(f"{tmp_path}/other-*.jsonl")
    assert len(load_table(write_jsonl(tmp_path / "pairs[1].jsonl"))) == 2, "a file, not a pattern"


def test_splits_of_a_folder_have_to_be_named(tmp_path):
    data = tmp_path / "data"  # as in a downloaded repository
    data.mkdir()
    (tmp_path / "README.md").write_text("about")
    for number in (1, 2):
        write_jsonl(data / f"train-{number}.jsonl", [{"a": number}])
    assert [row["a"] for row in load_table(tmp_path)] == [1, 2]
    write_jsonl(data / "test.jsonl", [{"a": 3}])
    message = message_of(tmp_path)
    assert (
        "several splits" in message and f"{data}/train*" in message and f"{data}/test*" in message
    )
    assert [row["a"] for row in load_table(f"{data}/train*")] == [1, 2]


def saved_row(i: int) -> dict:
    question = {"role": "user", "content": f"{i}+1?"}
    sides = [[question, {"role": "assistant", "content": str(i + n)}] for n in (1, 2)]
    return {"chosen": sides[0], "rejected": sides[1], "score": i / 2}


def test_folders_that_datasets_saved(tmp_path):
    table = load_table(DATA / "saved_dataset")
    assert list(table) == [saved_row(i) for i in range(5)] and table[4] == saved_row(4)
    assert table.where(3) == f"{DATA}/saved_dataset, row 4"
    found, is_whole = peek_table(DATA / "saved_dataset", max_bytes=10, max_rows=2)
    assert found is not None and not is_whole and list(found) == [saved_row(0), saved_row(1)]
    message = message_of(DATA / "saved_splits")
    assert "holds 2 splits" in message
    assert f"{DATA}/saved_splits/train or {DATA}/saved_splits/test" in message
    assert list(load_table(DATA / "saved_splits" / "train")) == [saved_row(0), saved_row(1)]
    shutil.copytree(DATA / "saved_splits", tmp_path / "one")
    (tmp_path / "one" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert list(load_table(tmp_path / "one")) == [saved_row(2)], "a single split needs no name"
    folder = tmp_path / "broken"
    shutil.copytree(DATA / "saved_dataset", folder)
    (folder / "data-00001-of-00002.arrow").unlink()
    assert "perhaps it was not saved completely: " in message_of(folder)
    (folder / "state.json").write_text("{")
    assert f"{folder} cannot be read as a Hugging Face dataset" in message_of(folder)


def test_names_of_the_hub(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    splits = {name: datasets.Dataset.from_list([{"a": name}]) for name in ("train", "test")}
    asked = []

    def load_dataset(name, split=None):
        asked.append((name, split))
        if name != "some/thing":
            raise datasets.exceptions.DatasetNotFoundError("doesn't exist on the Hub")
        return datasets.DatasetDict(splits) if split is None else splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_table("some/thing:test")) == [{"a": "test"}]
    assert asked == [("some/thing", "test")]
    assert "2 splits: name the one to read, some/thing:train or some/thing:test" in message_of(
        "some/thing"
    )
    message = message_of("other/thing")
    assert "perhaps it is no file here nor on the Hub: doesn't exist on the Hub" in message
    asked.clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert peek_table("some/thing", max_bytes=9, max_rows=9) == (None, False), "no download"
    (tmp_path / "other").mkdir()
    for name in ("other/thing", "some/thing.jsonl"):
        assert message_of(name).startswith("no such file or folder")
    assert not asked
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("data"))):
        load_table("some/thing")


def test_peeking_reads_the_first_rows(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"a": i} for i in range(5)])
    table, is_whole = peek_table(path, max_bytes=1000, max_rows=5)
    assert table is not None and len(table) == 5 and is_whole
    for max_bytes, max_rows in ((1000, 2), (20, 5)):  # 9 bytes a line
        table, is_whole = peek_table(path, max_bytes=max_bytes, max_rows=max_rows)
        assert table is not None and [row["a"] for row in table] == [0, 1] and not is_whole
        assert table.where(1) == f"{path}:2" and table.columns == ("a",)
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert peek_table(tmp_path / "a.csv", max_bytes=1, max_rows=1) == (None, False)


# --- what can be wrong ----------------------------------------------------------------------------


def test_what_is_not_there_lists_what_is(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "pairs.jsonl")
    (tmp_path / "old").mkdir()
    assert message_of(tmp_path / "pair.jsonl") == (
        f"no such file or folder: {tmp_path}/pair.jsonl. The folder {tmp_path} holds: old/, "
        f"pairs.jsonl. Did you mean {tmp_path}/pairs.jsonl?"
    )
    many = tmp_path / "many"
    many.mkdir()
    monkeypatch.chdir(many)
    assert "The current folder is empty." in message_of("data/pairs.jsonl")
    for index in range(20):
        (many / f"{index:02d}.bin").touch()
    assert "11.bin and 8 more." in message_of(many / "pairs.jsonl")
    assert "holds no data file (.arrow, .csv" in message_of(many)
    for files in ("", [], [""]):
        assert "no data file was given" in message_of(files)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.xlsx", "x", ": cannot tell the format from the extension '.xlsx'; known are .arrow, "),
        ("a", "x", ": cannot tell the format from the extension '(none)'"),
        ("a.json", "", " is empty"),
        ("a.parquet", "", " is empty"),
        ("a.json", "[]", " is empty: it has no rows"),
        ("a.json", " \n", " is empty"),
        ("a.jsonl", "\n\n", " is empty: it has no rows"),
        ("a.csv", "x,y\n", " is empty: it has no rows"),
        (
            "a.jsonl",
            '{"a": 1}\n\n{"a": 1,, "b": 2}\n',
            ":3: is not valid JSON: Expecting property name enclosed in double quotes at column 9. "
            "Each line holds one JSON object",
        ),
        ("a.jsonl", "{}\n[1]\n", ":2: a row is a JSON object, this line holds a list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2: is not UTF-8 text"),
        ("a.json", '[{"a": 1},\n {"a": }]', ":2: is not valid JSON: Expecting value at column 8"),
        ("a.json", '[{"a": 1}, 5]', ", row 2: a row is a JSON object, found a number"),
        ("a.json", "null", ": expected a list of rows, found a null"),
        ("a.json", '{"train": [{}], "test": [{}]}', " holds several splits (train, test): save"),
        ("a.json", b'[{"a":\n"\xff"}]', ":2: is not UTF-8 text"),
        (
            "a.csv",
            'prompt,chosen\n"two\nlines",b\n1,2,3\n',
            ":4: has 3 cells, the header names 2 columns (prompt, chosen)",
        ),
        ("a.csv", "a,a\n1,2\n", ":1: the header names a column twice: a"),
        ("a.csv", 'a,b\n"1" 2,3\n', ":2: is not valid CSV"),
        ("a.parquet", "a,b\n1,2\n", " cannot be read as a parquet file: "),
        ("a.arrow", "a,b\n1,2\n", " cannot be read as an arrow file: "),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message_of(path).startswith(f"{path}{expected}")


def test_a_columnar_file_without_rows(tmp_path):
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    assert message_of(path) == f"{path} is empty: it has no rows"


def test_required_columns_list_what_there_is():
    table = Table("pairs.jsonl", ROWS)
    table.require_columns(["chosen"], "unused")
    with pytest.raises(DataError) as error:
        table.require_columns(["chosen", "good", "bad"], "Set the keys.")
    assert str(error.value) == (
        "pairs.jsonl has no columns good, bad; "
        "its columns are: prompt, chosen, rejected, turns. Set the keys."
    )


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "pairs.parquet").write_text("x")
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("data"))):
        load_table(tmp_path / "pairs.parquet")
    assert len(load_table(write_jsonl(tmp_path / "pairs.jsonl"))) == 2
