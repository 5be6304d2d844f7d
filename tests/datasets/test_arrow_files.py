"""Parquet, Arrow and Hugging Face dataset folders. The folders in data/ were written by `datasets` 5.2.0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from roll.datasets.files import load_table  # noqa: E402
from roll.exceptions import DataError  # noqa: E402

DATA = Path(__file__).parent / "data"
ROWS = [
    {"prompt": f"{i}+1", "turns": [{"role": "user", "content": str(i)}], "score": None}
    for i in range(3000)
]


def saved_row(i: int) -> dict:
    return {
        "chosen": [
            {"role": "user", "content": f"{i}+1?"},
            {"role": "assistant", "content": str(i + 1)},
        ],
        "rejected": [
            {"role": "user", "content": f"{i}+1?"},
            {"role": "assistant", "content": str(i + 2)},
        ],
        "score": i / 2,
    }


def message_of(path: Path) -> str:
    with pytest.raises(DataError) as error:
        load_table(path)
    return str(error.value)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=1000)
    table = load_table(path)
    assert len(table) == 3000
    assert table.columns == ("prompt", "turns", "score")
    assert list(table) == ROWS
    assert [table[2999], table[-1], table[1500]] == [ROWS[2999], ROWS[2999], ROWS[1500]]
    assert table.where(1500) == f"{path}, row 1501"
    with pytest.raises(IndexError):
        table[3000]


@pytest.mark.parametrize("new_writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_arrow_in_both_formats(tmp_path: Path, new_writer: object) -> None:
    path = tmp_path / "pairs.arrow"
    data = pa.Table.from_pylist(ROWS)
    with new_writer(str(path), data.schema) as writer:  # type: ignore[operator]
        writer.write_table(data, max_chunksize=700)
    table = load_table(path)
    assert list(table) == ROWS
    assert table[1999] == ROWS[1999]


def test_a_saved_dataset_of_two_shards() -> None:
    table = load_table(DATA / "saved_dataset")
    assert list(table) == [saved_row(i) for i in range(5)]
    assert table.where(3) == f"{DATA}/saved_dataset/data-00001-of-00002.arrow, row 1"


def test_saved_splits_have_to_be_named() -> None:
    message = message_of(DATA / "saved_splits")
    assert "holds 2 splits" in message
    assert f"{DATA}/saved_splits/train or {DATA}/saved_splits/test" in message
    assert list(load_table(DATA / "saved_splits" / "train")) == [saved_row(0), saved_row(1)]


def test_a_single_saved_split_needs_no_name(tmp_path: Path) -> None:
    shutil.copytree(DATA / "saved_splits", tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert list(load_table(tmp_path / "saved")) == [saved_row(2)]


def test_incomplete_folders(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(DATA / "saved_dataset", folder)
    (folder / "data-00001-of-00002.arrow").unlink()
    assert (
        "state.json names data-00001-of-00002.arrow, which is not there. The folder"
        in message_of(folder)
    )
    (folder / "state.json").write_text(json.dumps({"_data_files": []}))
    assert "names no data files" in message_of(folder)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "x"}]})
    )
    assert "flatten_indices()" in message_of(folder)
    (folder / "state.json").write_text("{")
    assert "state.json is not valid JSON" in message_of(folder)
    (folder / "state.json").write_text("[]")
    assert "holds a list, not the description of a dataset" in message_of(folder)


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.arrow"])
def test_files_that_are_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    assert f"{name} cannot be read as a" in message_of(tmp_path / name)


def test_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert (
        message_of(tmp_path / "none.parquet") == f"{tmp_path}/none.parquet is empty: it has no rows"
    )
