"""Saving a batch to a folder and reading it again."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from roll.distributed.scheduler import protocol
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import DataError


def make() -> DataProto:
    columns = {"z": torch.arange(3), "a": torch.ones(3, 2)}
    return DataProto.from_dict(columns, {"t": ["x", "y", "z"]}, {"step": 1})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_holds_safetensors_and_json(tmp_path):
    dump = tmp_path / "new" / "dump"
    make().save(str(dump))
    assert names(dump) == ["data.json", "tensors.safetensors"] and names(dump.parent) == ["dump"]
    assert load_file(dump / "tensors.safetensors")["z"].tolist() == [0, 1, 2]
    document = json.loads((dump / "data.json").read_text())
    assert document["rows"] == 3 and document["columns"] == ["z", "a"]
    assert document["meta_info"] == {"step": 1}
    assert document["non_tensor_batch"] == {"t": ["x", "y", "z"]}
    loaded = DataProto.load(str(dump))
    assert list(loaded.batch.keys()) == ["z", "a"]
    loaded["z"][0] = 9  # ordinary memory
    assert DataProto.load(dump)["z"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", sorted(protocol._SAFETENSORS_DTYPES, key=str), ids=str)
def test_every_dtype_and_empty_shape(tmp_path, dtype):
    columns = {"x": torch.tensor([[0.0], [1.0]]).to(dtype), "none": torch.empty(2, 0).to(dtype)}
    data = DataProto.from_dict(columns)
    data.save(tmp_path / "a")
    data[:0].save(tmp_path / "b")
    loaded = DataProto.load(tmp_path / "a")
    assert loaded["x"].dtype == dtype and loaded["x"].float().tolist() == [[0], [1]]
    assert loaded["none"].shape == (2, 0)
    assert DataProto.load(tmp_path / "b")["x"].shape == (0, 1)


def test_views_and_columns_on_the_same_memory(tmp_path):
    base = torch.arange(12).view(3, 4)
    columns = {"a": base, "b": base, "c": base[:, 1:3], "d": base.t().contiguous().t()}
    DataProto.from_dict(columns)[1:].save(tmp_path / "dump")
    loaded = DataProto.load(tmp_path / "dump")
    for key, column in columns.items():
        assert torch.equal(loaded[key], column[1:]), key
    loaded["a"].zero_()
    assert torch.equal(loaded["b"], base[1:])
    assert (tmp_path / "dump" / "tensors.safetensors").stat().st_size < 2000


def test_no_columns_no_rows_and_no_tensors(tmp_path):
    for data in (DataProto(meta_info={"k": None}), DataProto(TensorDict({}, batch_size=[3]))):
        data.save(tmp_path / "dump")
        loaded = DataProto.load(tmp_path / "dump")
        assert len(loaded) == len(data) and (loaded.batch is None) == (data.batch is None)
        assert loaded.meta_info == data.meta_info
    DataProto.from_dict({}, {"t": ["a", "b"]}).save(tmp_path / "dump")
    loaded = DataProto.load(tmp_path / "dump")
    assert loaded.batch is None and loaded["t"].tolist() == ["a", "b"]


def test_values_that_json_does_not_know(tmp_path):
    scalars = [np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("é"), np.float64("nan")]
    plain = {
        "int": 2**80,
        "text": "\ud800 é \x00 $float",
        "tuple": (1, (2,), []),
        "keys": {1: "int", (2, "b"): "tuple", None: "none", "$float": "nan"},
    }
    meta = {
        **plain,
        "float": [math.nan, math.inf, -math.inf, -0.0, 1e-300],
        "numpy": [*scalars, np.datetime64("2024-01-02")],
        "arrays": [
            np.arange(6, dtype=">i2").reshape(2, 3).T,
            np.array(["ab", "c"]),
            np.array([[None, "x"]], dtype=object),
        ],
        "tensor": torch.tensor([[1.5, math.nan]], dtype=torch.bfloat16),
        "default": defaultdict(list, {"a": [1]}),
    }
    DataProto(meta_info=meta).save(tmp_path / "dump")
    loaded = DataProto.load(tmp_path / "dump").meta_info
    assert str(loaded["float"]) == str(meta["float"])
    assert {key: loaded[key] for key in plain} == plain
    for new, old in zip(loaded["numpy"], meta["numpy"], strict=True):
        assert type(new) is type(old) and new.tobytes() == old.tobytes()
    for new, old in zip(loaded["arrays"], meta["arrays"], strict=True):
        assert new.dtype == old.dtype and new.tolist() == old.tolist()
    loaded["arrays"][0][0, 0] = 7  # writable
    assert loaded["tensor"].dtype == torch.bfloat16
    assert loaded["tensor"][0, 0] == 1.5 and loaded["tensor"].isnan()[0, 1]
    assert type(loaded["default"]) is dict and loaded["default"] == {"a": [1]}


def meta(**values) -> DataProto:
    return DataProto(meta_info=values)


NESTED = TensorDict({"n": TensorDict({}, batch_size=[1])}, batch_size=[1])
COMPLEX = DataProto.from_dict({"x": torch.ones(1, dtype=torch.complex128)})
SPARSE = DataProto.from_dict({"x": torch.eye(2).to_sparse()})
OBJECTS = DataProto.from_dict({}, {"t": ["a", 1j]})


@pytest.mark.parametrize(
    "data, message",
    [
        (meta(a={"b": [1, {2}]}), r"meta_info\['a'\]\['b'\]\[1\] is a builtins.set, which"),
        (meta(f=print), r"meta_info\['f'\] is a builtins.builtin_function_or_method"),
        (meta(p=Path("x")), r"meta_info\['p'\] is a pathlib.*Path"),
        (meta(k={b"x": 1}), r"key b'x' of meta_info\['k'\] is a builtins.bytes"),
        (meta(v=np.zeros(1, dtype="i4,f4")), r"meta_info\['v'\] is a numpy.ndarray"),
        (OBJECTS, r"non_tensor_batch\['t'\], row 1 is a builtins.complex"),
        (COMPLEX, r"batch\['x'\]: safetensors cannot save torch.complex128"),
        (SPARSE, r"batch\['x'\] is a Tensor; only dense"),
        (DataProto(NESTED), r"batch\['n'\] is a TensorDict; only dense"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_no_file(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        data.save(tmp_path / "dump")
    assert names(tmp_path) == []


def test_a_save_replaces_an_earlier_one_and_nothing_else(tmp_path):
    make().save(tmp_path / "dump")
    make()[:1].save(tmp_path / "dump")
    assert len(DataProto.load(tmp_path / "dump")) == 1 and names(tmp_path) == ["dump"]
    (tmp_path / "empty").mkdir()
    make().save(tmp_path / "empty")
    assert len(DataProto.load(tmp_path / "empty")) == 3
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("...")
    for name in ("precious", "precious/thesis.txt"):
        with pytest.raises(DataError, match="exists and is not a saved DataProto"):
            make().save(tmp_path / name)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "..."


@pytest.mark.parametrize("earlier", [False, True])
def test_a_crash_while_writing_leaves_what_was_there(tmp_path, monkeypatch, earlier):
    if earlier:
        make().save(tmp_path / "dump")

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(protocol.json, "dump", full_disk)
    with pytest.raises(OSError, match="no space left"):
        make()[:1].save(tmp_path / "dump")
    assert names(tmp_path) == (["dump"] if earlier else [])
    if earlier:
        assert len(DataProto.load(tmp_path / "dump")) == 3


def test_the_earlier_save_comes_back_when_renaming_fails(tmp_path, monkeypatch):
    make().save(tmp_path / "dump")
    replace, calls = Path.replace, []

    def fail_second(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise OSError("rename failed")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_second)
    with pytest.raises(OSError, match="rename failed"):
        make()[:1].save(tmp_path / "dump")
    assert names(tmp_path) == ["dump"] and len(DataProto.load(tmp_path / "dump")) == 3


def with_json(**changes):
    """A batch whose data.json has these entries instead of its own."""

    def damage(folder: Path) -> None:
        document = json.loads((folder / "data.json").read_text())
        (folder / "data.json").write_text(json.dumps(document | changes))

    return damage


def with_value(kind: str, dtype: str, data: str = "AAAAAAAAAAA=", shape: int = 1):
    content = {"dtype": dtype, "shape": [shape], "data": data}
    return with_json(meta_info={"x": {kind: content}})


def with_file(name: str, content: bytes | None):
    """A batch whose file has this content, or is not there."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return damage


def cut_short(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    "damage, message",
    [
        (with_file("data.json", None), "dump/data.json does not exist: not a saved DataProto"),
        (with_file("data.json", b"{"), "cannot read .*data.json: Expecting"),
        (with_file("data.json", b"\xff\xfe"), "cannot read .*data.json"),
        (with_file("data.json", b"[]"), "data.json is not part of a saved DataProto"),
        (with_json(format="other"), "data.json is not part of a saved DataProto"),
        (with_json(version=2), "data.json has version 2; this program reads 1"),
        (with_json(rows="many"), "data.json is damaged: ValueError"),
        (with_json(columns=5), "data.json is damaged: TypeError"),
        (with_json(meta_info=[1]), "data.json is damaged: TypeError: meta_info is a list"),
        (with_json(meta_info={"x": {"$what": 1}}), r"ValueError: unknown tag '\$what'"),
        (with_value("$array", "<f8", "AAA="), "is damaged: TypeError: buffer is too small"),
        (with_value("$array", "<f8", "?"), "data.json is damaged: Error"),
        (with_value("$array", "|O"), r"data.json is damaged: ValueError: an array of '\|O'"),
        (with_value("$tensor", "int64", shape=2), "data.json is damaged: RuntimeError: shape"),
        (with_value("$tensor", "load", "AAAA"), "data.json is damaged: TypeError"),
        (with_json(non_tensor_batch={"t": ["x"]}), r"expected 3 rows, found {'t': 1}"),
        (with_json(columns=["z"]), r"has columns and rows .* expects 3 rows of \['z'\]"),
        (with_json(rows=4, non_tensor_batch={}), "expects 4 rows of"),
        (with_file("tensors.safetensors", None), r"does not exist, but .*\['z', 'a'\]"),
        (with_file("tensors.safetensors", b"junk"), "cannot read .*tensors.safetensors"),
        (cut_short, "cannot read .*tensors.safetensors"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    make().save(tmp_path / "dump")
    damage(tmp_path / "dump")
    with pytest.raises(DataError, match=message):
        DataProto.load(tmp_path / "dump")
