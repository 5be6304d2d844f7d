"""Data files: every format, every way to name files, and every way in which they can be wrong."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from pathlib import Path

import pytest

import roll.datasets
from roll.datasets.files import load_table
from roll.exceptions import DataError, MissingDependencyError, install_hint

ROWS = [
    {
        "prompt": "2+2",
        "chosen": "4",
        "rejected": "5",
        "turns": [{"role": "user", "content": "hé\u2028"}],
    },
    {"prompt": "1+1", "chosen": "2", "rejected": "3", "turns": []},
]


def write_jsonl(path: Path, rows: list[dict] = ROWS) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def message_of(path: object) -> str:
    with pytest.raises(DataError) as error:
        load_table(path)  # type: ignore[arg-type]
    return str(error.value)


# --- formats ---------------------------------------------------------------------------------------------------------


def test_jsonl_rows_and_places(tmp_path: Path) -> None:
    table = load_table(write_jsonl(tmp_path / "pairs.jsonl"))
    assert len(table) == 2
    assert table.columns == ("prompt", "chosen", "rejected", "turns")
    assert list(table) == ROWS
    assert [table[0], table[-1]] == ROWS
    assert table.where(1) == f"{tmp_path}/pairs.jsonl:2"
    with pytest.raises(IndexError, match=r"row 2 of .*pairs.jsonl, which has 2 rows"):
        table[2]


def test_jsonl_skips_blank_lines_and_still_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": 2}')
    table = load_table(path)
    assert list(table) == [{"a": 1}, {"b": 2}]
    assert table.columns == ("a", "b")
    assert table.where(1).endswith("pairs.jsonl:4")


def test_gzipped_files(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "pairs.jsonl").read_bytes()
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "cells.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert list(load_table(tmp_path / "pairs.jsonl.gz")) == ROWS
    assert list(load_table(tmp_path / "cells.csv.gz")) == [{"a": "1", "b": "2"}]
    (tmp_path / "broken.jsonl.gz").write_bytes(plain)
    assert "cannot be unpacked as gzip" in message_of(tmp_path / "broken.jsonl.gz")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps({"train": ROWS}),
        "\n".join(json.dumps(row) for row in ROWS),
    ],
    ids=["list", "indented", "train", "lines"],
)
def test_json_forms(tmp_path: Path, text: str) -> None:
    (tmp_path / "pairs.json").write_text(text)
    assert list(load_table(tmp_path / "pairs.json")) == ROWS


def test_a_json_object_can_be_a_single_row(tmp_path: Path) -> None:
    row = {
        "chosen": [{"role": "user", "content": "a"}],
        "rejected": [{"role": "user", "content": "b"}],
    }
    (tmp_path / "one.json").write_text(json.dumps(row))
    assert list(load_table(tmp_path / "one.json")) == [row]


def test_csv_cells_are_text_and_places_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    long_answer = "x" * 200_000
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [["prompt", "chosen"], ["two\nlines, quoted", "007"], ["next", long_answer]]
        )
    limit = csv.field_size_limit(1000)
    table = load_table(path)
    assert csv.field_size_limit(limit) == 1000  # the caller's limit was put back
    assert list(table) == [
        {"prompt": "two\nlines, quoted", "chosen": "007"},
        {"prompt": "next", "chosen": long_answer},
    ]
    assert [table.where(0), table.where(1)] == [f"{path}:2", f"{path}:4"]


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n1,5\t2\n")
    assert list(load_table(tmp_path / "a.tsv")) == [{"a": "1,5", "b": "2"}]


# --- which files -----------------------------------------------------------------------------------------------------


def test_several_files_in_the_given_order(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "b.jsonl", [{"a": 1}, {"a": 2}])
    second = tmp_path / "a.csv"
    second.write_text("a,b\n3,4\n")
    table = load_table([str(first), second])
    assert [row["a"] for row in table] == [1, 2, "3"]
    assert [table[i]["a"] for i in (0, 1, 2, -1)] == [1, 2, "3", "3"]
    assert table.columns == ("a", "b")
    assert [table.where(i) for i in range(3)] == [f"{first}:1", f"{first}:2", f"{second}:2"]
    assert [part.name for part in table.parts] == [str(first), str(second)]


def test_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("part-2", "part-0", "part-1"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"name": name}])
    assert [row["name"] for row in load_table(f"{tmp_path}/part-*.jsonl")] == [
        "part-0",
        "part-1",
        "part-2",
    ]
    assert "no file matches" in message_of(f"{tmp_path}/other-*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "pairs[1].jsonl")
    assert len(load_table(path)) == 2


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"a": 2}])
    write_jsonl(tmp_path / "a.jsonl", [{"a": 1}])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".hidden.jsonl").write_text("{}")
    assert [row["a"] for row in load_table(tmp_path)] == [1, 2]


def test_a_downloaded_repository_keeps_its_files_in_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("about")
    write_jsonl(tmp_path / "data" / "train-00000-of-00001.jsonl", [{"a": 1}])
    assert len(load_table(tmp_path)) == 1


def test_a_folder_with_several_splits_has_to_be_named_more_closely(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-0.jsonl", [{"a": 1}])
    write_jsonl(tmp_path / "train-1.jsonl", [{"a": 2}])
    write_jsonl(tmp_path / "test.jsonl", [{"a": 3}])
    message = message_of(tmp_path)
    assert (
        "several splits" in message
        and f"{tmp_path}/train*" in message
        and f"{tmp_path}/test*" in message
    )
    assert [row["a"] for row in load_table(f"{tmp_path}/train*")] == [1, 2]


# --- what can be wrong -----------------------------------------------------------------------------------------------


def test_no_such_file_lists_the_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl")
    (tmp_path / "old").mkdir()
    message = message_of(tmp_path / "pair.jsonl")
    assert message.startswith(f"no such file or folder: {tmp_path}/pair.jsonl.")
    assert f"The folder {tmp_path} holds: old/, pairs.jsonl." in message
    assert f"Did you mean {tmp_path}/pairs.jsonl?" in message


def test_no_such_folder_names_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = message_of("some-organisation/some-dataset")
    assert "The current folder is empty." in message
    assert "Hugging Face Hub is not downloaded" in message


def test_long_listings_are_cut(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index:02d}.bin").touch()
    assert "11.bin and 8 more." in message_of(tmp_path / "pairs.jsonl")
    assert "holds no data file (.arrow, .csv" in message_of(tmp_path)


@pytest.mark.parametrize("files", ["", [], [""]])
def test_nothing_given(files: object) -> None:
    assert "no data file was given" in message_of(files)


def test_unknown_extension(tmp_path: Path) -> None:
    (tmp_path / "pairs.xlsx").write_text("x")
    (tmp_path / "pairs").write_text("x")
    assert "extension '.xlsx'; known are .arrow, .csv, " in message_of(tmp_path / "pairs.xlsx")
    assert "extension '(none)'" in message_of(tmp_path / "pairs")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.arrow"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert message_of(tmp_path / name) == f"{tmp_path}/{name} is empty"


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "[]"), ("a.json", " \n"), ("a.jsonl", "\n\n"), ("a.csv", "x,y\n")]
)
def test_file_without_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert f"{name} is empty" in message_of(tmp_path / name)


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 1,, "b": 2}\n')
    expected = "Expecting property name enclosed in double quotes at column 9. Each line holds one JSON object"
    assert message_of(path) == f"{path}:3: is not valid JSON: {expected}"
    path.write_text('{"a": 1}\n[1]\n')
    assert message_of(path) == f"{path}:2: a row is a JSON object, this line holds a list"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    assert message_of(path).startswith(f"{path}:2: is not UTF-8 text")


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text('[{"a": 1},\n {"a": }]')
    assert message_of(path).startswith(f"{path}:2: is not valid JSON: Expecting value at column 8")
    path.write_text('[{"a": 1}, 5]')
    assert message_of(path) == f"{path}, row 2: a row is a JSON object, found a number"
    path.write_text("null")
    assert message_of(path) == f"{path}: expected a list of rows, found a null"
    path.write_text('{"train": [{"a": 1}], "test": [{"a": 2}]}')
    assert "holds several splits (train, test)" in message_of(path)
    path.write_bytes(b'[{"a":\n"\xff"}]')
    assert message_of(path).startswith(f"{path}:2: is not UTF-8 text")


def test_broken_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text('prompt,chosen\n"two\nlines",b\n1,2,3\n')
    assert message_of(path).startswith(
        f"{path}:4: has 3 cells, the header names 2 columns (prompt, chosen)"
    )
    path.write_text("a,a\n1,2\n")
    assert message_of(path) == f"{path}:1: the header names a column twice: a"
    path.write_text('a,b\n"1" 2,3\n')
    assert message_of(path).startswith(f"{path}:2: is not valid CSV")


def test_required_columns_list_what_there_is(tmp_path: Path) -> None:
    table = load_table(write_jsonl(tmp_path / "pairs.jsonl"))
    table.require_columns(["chosen"], "unused")
    with pytest.raises(DataError) as error:
        table.require_columns(["chosen", "good", "bad"], "Set the keys.")
    expected = f"{tmp_path}/pairs.jsonl has no columns good, bad; its columns are: prompt, chosen, rejected, turns. "
    assert str(error.value) == expected + "Set the keys."


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "roll.datasets.arrow_files", raising=False)
    monkeypatch.delattr(roll.datasets, "arrow_files", raising=False)
    (tmp_path / "pairs.parquet").write_text("x")
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("data"))):
        load_table(tmp_path / "pairs.parquet")
    assert len(load_table(write_jsonl(tmp_path / "pairs.jsonl"))) == 2
