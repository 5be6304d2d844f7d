"""DataProto by hand-written examples: columns, rows, whole batches, references, pickling."""

import copy
import pickle
import random
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from protocol_batches import ids, make
from tensordict import TensorDict

from roll.distributed.scheduler.protocol import (
    DataProto,
    ExperienceItem,
    LentColumns,
    ObjectRefWrap,
    collate_fn,
    custom_np_concatenate,
    expand_requests,
    expand_responses,
    is_ref,
    list_of_dict_to_dict_of_list,
    move_tensors_to_device,
    pad_dataproto_to_divisor,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from roll.exceptions import WorkerTimeoutError

NAN = float("nan")


def objects(**columns) -> DataProto:
    return DataProto.from_dict({}, columns)


def tensors(**columns) -> DataProto:
    return DataProto.from_dict({key: torch.as_tensor(value) for key, value in columns.items()})


# Construction


def test_what_a_batch_is_made_of_stays_the_callers():
    store, meta = TensorDict({"x": torch.ones(3)}, batch_size=[3]), {"a": 1}
    assert DataProto(batch=store).batch is store and DataProto(meta_info=meta).meta_info is meta
    assert DataProto().batch is None
    assert DataProto().non_tensor_batch == {} and DataProto().meta_info == {}
    columns, non_tensors = {"x": torch.ones(2)}, {"tag": ["a", "b"]}
    data = DataProto.from_dict(columns, non_tensors)
    data.batch["y"] = torch.zeros(2)
    assert non_tensors == {"tag": ["a", "b"]} and list(columns) == ["x"]
    assert data.batch["x"] is columns["x"]


@pytest.mark.parametrize(
    "values, expected",
    [
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),  # equal lengths: numpy alone would make this 2-D
        ([{"k": 1}, None], [{"k": 1}, None]),
        (np.array([None, "x"], dtype=object), [None, "x"]),
    ],
)
def test_non_tensor_columns_become_one_object_per_row(values, expected):
    column = objects(c=values).non_tensor_batch["c"]
    assert column.dtype == object and column.shape == (2,) and column.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int64, object])
def test_rows_of_multi_dimensional_arrays_stay_one_array_per_row(dtype):
    data = DataProto(non_tensor_batch={"c": np.arange(6).reshape(3, 2).astype(dtype)})
    assert [row.tolist() for row in data["c"]] == [[0, 1], [2, 3], [4, 5]]
    assert data.chunk(3)[2]["c"][0].tolist() == [4, 5]


def test_from_single_dict_sorts_by_type():
    columns = {"x": torch.ones(2, 3), "t": np.array(["a", "b"])}
    data = DataProto.from_single_dict(columns, meta_info={"k": 1})
    assert data["x"].shape == (2, 3) and data["t"].tolist() == ["a", "b"]
    assert data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="column 't' is a list; expected a tensor or numpy array"):
        DataProto.from_single_dict({"t": ["a"]})


TWO = {"x": torch.ones(2)}


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: tensors(x=[1, 1], y=[1, 1, 1]), ValueError, r"rows: {'x': 2, 'y': 3}"),
        (lambda: tensors(x=1.0), ValueError, r"'x' is a single number"),
        (lambda: DataProto.from_dict({"x": [1, 2]}), TypeError, "tensor column 'x' is a list"),
        (lambda: DataProto.from_dict(TWO, {"t": ["a"]}), ValueError, "'t' has 1 rows; the batch"),
        (lambda: objects(t=["a"], u=["a", "b"]), ValueError, "'u' has 2 rows; the batch"),
        (lambda: DataProto.from_dict(TWO, {"x": ["a", "b"]}), ValueError, "'x' is both in batch"),
        (lambda: DataProto.from_dict(TWO, {"t": "ab"}), TypeError, "'t' is a str; expected a list"),
        (lambda: objects(t=np.array(1)), ValueError, "'t' is a single value"),
        (lambda: DataProto.from_dict(TWO, num_batch_dims=2), ValueError, "exactly one batch dim"),
        (lambda: DataProto(batch=TWO), TypeError, r"batch is a dict; .* \(from_dict takes a dict"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), ValueError, r"\(2, 3\); expected o"),
        (lambda: DataProto(meta_info=[1]), TypeError, "meta_info is a list"),
        (lambda: DataProto(None, {1: np.array(["a"])}), TypeError, "name is a string; found 1"),
    ],
)
def test_inconsistent_input_is_named(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_what_was_assigned_directly_is_checked():
    data = make()
    data.non_tensor_batch["n"] = np.arange(4)
    with pytest.raises(TypeError, match=r"'n' is a int64 array; expected an object array"):
        data.check_consistency()
    data.non_tensor_batch["n"] = np.arange(3).astype(object)
    with pytest.raises(ValueError, match="'n' has 3 rows; the batch has 4"):
        data.check_consistency()
    with pytest.raises(TypeError, match="batch is a dict"):
        data.batch = {"x": torch.ones(4)}
    data.batch = TensorDict({"x": torch.ones(4)}, batch_size=[4])
    assert list(data.batch.keys()) == ["x"] and len(data) == 4


def test_repr_names_rows_columns_and_meta():
    columns = "ids: int64(4, 2), score: bfloat16(4,), tag, history"
    assert repr(make()) == f"DataProto(4 rows; {columns}; meta_info: global_step, metrics)"
    assert repr(DataProto()) == "DataProto(0 rows; no columns; meta_info: empty)"


# Columns by name


def test_columns_are_read_set_and_deleted_by_name():
    data = make(2)
    assert data["ids"] is data.batch["ids"] and data["tag"] is data.non_tensor_batch["tag"]
    data["mask"] = torch.tensor([True, False])
    data.update({"domain": np.array(["math", "code"]), "x": torch.zeros(2)})
    assert data.batch["mask"].tolist() == [True, False] and data["x"].tolist() == [0, 0]
    assert data.non_tensor_batch["domain"].dtype == object
    del data["mask"], data["domain"]
    assert "mask" not in data and "domain" not in data and "ids" in data and "tag" in data


def test_setting_a_column_moves_the_name_between_the_stores():
    data = make(2)
    data["tag"] = torch.tensor([5, 6])
    assert "tag" not in data.non_tensor_batch and data["tag"].tolist() == [5, 6]
    data["tag"] = np.array(["x", "y"])
    assert "tag" not in data.batch.keys() and data["tag"].tolist() == ["x", "y"]
    data.check_consistency()


def test_setting_a_column_on_an_empty_or_non_tensor_proto():
    data = DataProto()
    data["x"] = torch.ones(3)
    assert len(data) == 3
    data = objects(t=["a", "b"])
    data["x"] = torch.ones(2)
    assert data.batch.batch_size == torch.Size([2])
    data = objects(t=["a", "b"])
    data["t"] = torch.ones(3)  # its only column: the number of rows is free
    assert len(data) == 3 and not data.non_tensor_batch


def test_bad_columns_are_named():
    data = make(4)
    for value in (torch.ones(3), np.ones(3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"column 'x' has shape .*; the batch has 4 rows"):
            data["x"] = value
    with pytest.raises(TypeError, match="column 'x' is a list"):
        data["x"] = [1, 2, 3, 4]
    with pytest.raises(TypeError, match="a column name is a string; found 3"):
        data[3] = torch.ones(4)
    with pytest.raises(KeyError, match=r"no column 'x': batch has \['ids', 'score'\], non_tensor"):
        data["x"]
    with pytest.raises(KeyError, match="no column 'x'"):
        del data["x"]


def test_select_takes_none_as_all_and_an_empty_list_as_none():
    data = make()
    everything = data.select()
    assert list(everything.batch.keys()) == ["ids", "score"]
    assert list(everything.non_tensor_batch) == ["tag", "history"]
    assert everything.meta_info is data.meta_info
    one = data.select("ids", [])
    assert list(one.batch.keys()) == ["ids"] and one.non_tensor_batch == {}
    none = data.select([], [], ["global_step", "not there"])
    assert len(none) == 4 and none.meta_info == {"global_step": 3}
    one["new"] = torch.zeros(4)
    assert "new" not in data


COPIES = [DataProto.clone, copy.deepcopy, lambda data: data.select(deepcopy=True)]


@pytest.mark.parametrize("duplicate", COPIES)
def test_deep_copies_share_nothing(duplicate):
    data = make()
    data.meta_info["t"] = torch.ones(2)
    other = duplicate(data)
    other.batch["ids"].zero_()
    other.non_tensor_batch["history"][1].append(9)
    other.meta_info["t"].zero_()
    other.meta_info["metrics"]["loss"] = 7
    assert ids(data) == [0, 1, 2, 3] and data["history"][1] == [0]
    assert data.meta_info["t"].tolist() == [1, 1] and data.meta_info["metrics"]["loss"] == 1.0


@pytest.mark.parametrize("method", ["select", "pop"])
def test_select_and_pop_name_missing_keys_and_take_nothing(method):
    data = make()
    with pytest.raises(KeyError, match=r"no column 'nope', 'tag' in batch: batch has \['ids', 's"):
        getattr(data, method)(["ids", "nope", "tag"])
    with pytest.raises(KeyError, match="no column 'ids' in non_tensor_batch"):
        getattr(data, method)("score", ["ids"])
    with pytest.raises(TypeError, match="expected a column name or a list of them; found 3"):
        getattr(data, method)(3)
    assert list(data.batch.keys()) == ["ids", "score"]
    assert list(data.non_tensor_batch) == ["tag", "history"]


def test_pop_returns_what_it_removes():
    data = make()
    popped = data.pop(["score"], "tag", ["global_step"])
    assert list(popped.batch.keys()) == ["score"] and popped["tag"].tolist() == ["a", "b", "a", "b"]
    assert popped.meta_info == {"global_step": 3} and len(popped) == 4
    assert list(data.batch.keys()) == ["ids"] and list(data.non_tensor_batch) == ["history"]
    assert list(data.meta_info) == ["metrics"]
    assert list(make().pop(["ids", "ids"]).batch.keys()) == ["ids"]
    only_objects = data.pop(non_tensor_batch_keys=["history"])
    assert only_objects.batch is None and len(only_objects) == 4
    with pytest.raises(KeyError, match=r"no \['global_step'\] in meta_info, .* has \['metrics'\]"):
        data.pop(["ids"], meta_info_keys=["global_step"])
    data.pop(["ids"])  # without a column, the number of rows stays
    assert len(data) == 4 and [len(piece) for piece in data.chunk(3)] == [2, 1, 1]


def test_rename():
    data = make()
    before = data.batch["ids"]
    assert data.rename("ids", "input_ids") is data
    assert data.batch["input_ids"] is before and "ids" not in data
    data.rename(["input_ids", "score"], ["score", "input_ids"])  # swap
    assert data.batch["score"] is before
    with pytest.raises(ValueError, match=r"1 old names \['score'\] but 2 new names"):
        data.rename("score", ["a", "b"])
    for taken in ("tag", "input_ids"):
        with pytest.raises(ValueError, match=rf"\['{taken}'\] would name two columns"):
            data.rename("score", taken)
    with pytest.raises(KeyError, match="no column 'tag' in batch"):
        data.rename("tag", "label")
    with pytest.raises(TypeError, match="found 5"):
        data.rename("score", 5)


# Union


def test_union_is_in_place_and_adds_columns_and_meta():
    data = make(2)
    meta, columns = data.meta_info, {"x": torch.ones(2), "ids": data["ids"].clone()}
    other = DataProto.from_dict(columns, {"u": ["p", "q"]}, {"k": 1})
    assert data.union(other) is data
    assert list(data.batch.keys()) == ["ids", "score", "x"] and data["u"].tolist() == ["p", "q"]
    assert data.meta_info is meta and meta["k"] == 1 and "score" not in other
    assert len(data.union(DataProto(meta_info={"l": 1}))) == 2 and meta["l"] == 1
    assert list(DataProto().union(make(2)).batch.keys()) == ["ids", "score"]


def test_union_treats_equal_nan_and_nested_values_as_equal():
    def build() -> DataProto:
        return DataProto.from_dict(
            {"x": torch.tensor([1.0, NAN])},
            {"row": [{"a": np.array([1.0, NAN])}, [torch.ones(2), (NAN, "s")]]},
            {"t": torch.tensor([NAN]), "a": np.arange(3), "d": {"k": [1, NAN]}},
        )

    assert len(build().union(build())) == 2
    for where in ("x", "t"):
        other = build()
        (other.batch if where == "x" else other.meta_info)[where][-1] = 2.0
        with pytest.raises(ValueError, match=f"'{where}' is in both batches with different values"):
            build().union(other)


@pytest.mark.parametrize(
    "other, message",
    [
        (tensors(ids=[[0, 0], [0, 0]]), "tensor column 'ids' is in both"),
        (tensors(ids=[[0.0, 1], [2, 3]]), "tensor column 'ids' is in both .*float32"),
        (tensors(ids=[0, 1]), r"'ids' is in both .* torch.int64 \(2,\)"),
        (objects(tag=["a", "c"]), "non-tensor column 'tag' is in both batches with different"),
        (objects(history=[[], [1]]), "non-tensor column 'history' is in both"),
        (objects(ids=[1, 2]), "'ids' is a tensor in one batch and a non-tensor"),
        (tensors(tag=[1, 1]), "'tag' is a tensor in one batch and a non-tensor"),
        (DataProto(meta_info={"global_step": 4}), "meta_info 'global_step' is in both .*: 3 and 4"),
        (tensors(x=[1, 1, 1]), "unite 2 rows with 3 rows"),
    ],
)
def test_union_conflicts_name_the_key_and_change_nothing(other, message):
    data, other = make(2), copy.copy(other)
    other.meta_info["new"] = 1
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert "new" not in data.meta_info and list(data.batch.keys()) == ["ids", "score"]


# Rows


@pytest.mark.parametrize("index, row", [(0, 0), (3, 3), (-1, 3), (-4, 0), (np.int64(2), 2)])
def test_an_integer_gives_one_row(index, row):
    assert len(make()[index]) == 1 and ids(make()[index]) == [row]


@pytest.mark.parametrize("index", [4, -5])
def test_rows_out_of_range_raise(index):
    for pick in (make().__getitem__, lambda i: make().select_idxs([0, i])):
        with pytest.raises(IndexError, match=f"row {index} of a batch of 4 rows"):
            pick(index)
    assert [ids(row) for row in make(3)] == [[0], [1], [2]]  # which is how iteration ends


SLICES = [(None,), (1, 3), (-2, None), (0, 4, 2), (3, None, -1), (2, 2), (9, 12)]


@pytest.mark.parametrize("index", [slice(*bounds) for bounds in SLICES])
def test_slices_mean_what_they_mean_for_lists(index):
    expected, data = list(range(4))[index], make()[index]
    assert ids(data) == expected and len(data) == len(expected)
    assert data["history"].tolist() == [[0] * i for i in expected]


def test_slices_and_shallow_copies():
    data = make()
    part = data.slice(1, 3)
    assert part.meta_info is data.meta_info
    part.batch["ids"][0, 0] = 100
    assert data.batch["ids"][1, 0] == 100
    for shallow in (data.slice(), copy.copy(data)):
        shallow["new"] = torch.zeros(4)
        del shallow["tag"]
        assert "new" not in data and "tag" in data
    copied = copy.copy(data)
    copied.meta_info["new"] = 1
    assert "new" not in data.meta_info and copied.batch["ids"] is data.batch["ids"]


POSITIONS = [[3, 0, 0], (3, 0, 0), [-1, 0, -4], np.array([3, 0, 0], dtype=np.int32)]


@pytest.mark.parametrize("idxs", [*POSITIONS, torch.tensor([3, 0, 0], dtype=torch.uint8)])
def test_select_idxs_takes_positions(idxs):
    data = make()
    selected = data.select_idxs(idxs)
    assert ids(selected) == [3, 0, 0] and selected["tag"].tolist() == ["b", "a", "a"]
    assert selected.meta_info is data.meta_info and ids(data[list(idxs)]) == [3, 0, 0]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_select_idxs_takes_masks(convert):
    assert ids(make().select_idxs(convert([True, False, False, True]))) == [0, 3]
    with pytest.raises(IndexError, match="a mask of 2 values for a batch of 4 rows"):
        make().select_idxs(convert([True, False]))


def test_select_idxs_of_nothing_keeps_the_columns_and_other_indices_are_refused():
    for nothing in ([], np.array([], dtype=np.int64), torch.tensor([]), [False] * 4):
        empty = make().select_idxs(nothing)
        assert len(empty) == 0 and empty["ids"].shape == (0, 2) and empty["tag"].shape == (0,)
    with pytest.raises(TypeError, match="integers or a mask; found float64"):
        make().select_idxs([0.5])
    with pytest.raises(IndexError, match=r"row indices have shape \(1, 2\)"):
        make().select_idxs([[0, 1]])


def test_reorder_is_in_place_and_wants_every_row_once():
    data = make()
    assert data.reorder(torch.tensor([2, 0, 3, 1])) is None
    assert ids(data) == [2, 0, 3, 1] and data["tag"].tolist() == ["a", "a", "b", "b"]
    data.reorder([-1, 0, 1, 2])
    assert ids(data) == [1, 2, 0, 3]
    one = make(1)
    one.reorder(torch.tensor(0))  # 0-d, as a squeezed index of one row is
    assert ids(one) == [0]
    for indices in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 3]):
        with pytest.raises(ValueError, match="each of the 4 rows once; select_idxs"):
            make().reorder(indices)


def test_repeat():
    assert ids(make(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert ids(make(2).repeat(3, interleave=False)) == [0, 1, 0, 1, 0, 1]
    assert make(2).repeat()["tag"].tolist() == ["a", "a", "b", "b"]
    assert len(make(2).repeat(0)) == 0 and ids(make(2).repeat(1)) == [0, 1]
    with pytest.raises(ValueError, match="repeat_times=-1"):
        make(2).repeat(-1)


def test_chunk_and_split_sizes():
    assert [ids(piece) for piece in make(7).chunk(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    for rows in range(1, 12):
        for chunks in range(1, rows + 1):
            expected = [len(part) for part in np.array_split(np.arange(rows), chunks)]
            assert [len(piece) for piece in make(rows).chunk(chunks)] == expected
    assert [ids(piece) for piece in make(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert make(0).split(2) == []
    with pytest.raises(ValueError, match=r"cannot cut 2 rows into 3 pieces.*pad_dataproto_to_div"):
        make(2).chunk(3)
    with pytest.raises(ValueError, match="chunks=0"):
        make(2).chunk(0)
    with pytest.raises(ValueError, match="split_size=0"):
        make().split(0)


def test_chunks_share_one_meta_info_and_own_their_tensors():
    data = make()
    pieces = data.chunk(2)
    data.meta_info["late"] = 1
    assert all(piece.meta_info is data.meta_info for piece in pieces)
    pieces[0].batch["ids"].zero_()
    pieces[0].non_tensor_batch["tag"][0] = "changed"
    assert ids(data) == [0, 1, 2, 3] and data["tag"][0] == "a"
    views = data.chunk(2, clone=False)
    assert views[1].batch["ids"].is_contiguous()
    views[1].batch["ids"].zero_()
    assert ids(data) == [0, 1, 0, 0]


@pytest.mark.parametrize("cut", [lambda data: data.chunk(4), lambda data: data.split(2)])
def test_pieces_do_not_keep_the_source_alive_nor_share_rows(cut):
    base = torch.zeros(16, 4)
    pieces = cut(tensors(x=base[:8]))  # a view of something larger
    for i, piece in enumerate(pieces):
        assert piece["x"].untyped_storage().nbytes() == 8 * 4 * 4
        piece["x"] += i
    assert [piece["x"].unique().tolist() for piece in pieces] == [[0], [1], [2], [3]]
    assert base.sum() == 0


def test_group_by_names_groups_in_order_of_appearance():
    data = DataProto.from_dict(
        {"n": torch.tensor([2, 1, 2, 1]), "v": torch.tensor([[1.5, 0], [0, 0], [1.5, 0], [1, 1]])},
        {"tag": ["b", "a", "b", "b"], "row": [0, 1, 2, 3]},
    )

    def groups(keys) -> dict[str, list[int]]:
        return {label: group["row"].tolist() for label, group in data.group_by(keys).items()}

    assert groups("tag") == {"b": [0, 2, 3], "a": [1]} and list(groups("tag")) == ["b", "a"]
    assert groups("n") == {"2": [0, 2], "1": [1, 3]}
    assert groups(["tag", "n"]) == {"b|2": [0, 2], "a|1": [1], "b|1": [3]}
    assert groups("v") == {"[1.5, 0.0]": [0, 2], "[0.0, 0.0]": [1], "[1.0, 1.0]": [3]}
    assert data.group_by("tag")["b"].meta_info is data.meta_info
    with pytest.raises(KeyError, match="no column 'nope'"):
        data.group_by("nope")
    with pytest.raises(ValueError, match="at least one column"):
        data.group_by([])
    with pytest.raises(ValueError, match=r"values of \['x', 'y'\] contain '\|'"):
        objects(x=["a|b", "a"], y=["c", "b|c"]).group_by(["x", "y"])


# Iterating


def test_make_iterator_in_order():
    data = make()
    batches = list(data.make_iterator(2, epochs=2))
    assert [ids(batch) for batch in batches] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert all(batch.meta_info is data.meta_info for batch in batches)
    batches[0].batch["ids"].zero_()
    assert ids(data) == [0, 1, 2, 3]


def test_make_iterator_shuffles_by_seed_and_anew_each_epoch():
    def epochs(seed) -> list[list[int]]:
        batches = make(32).make_iterator(8, 2, seed=seed, dataloader_kwargs={"shuffle": True})
        rows = [row for batch in batches for row in ids(batch)]
        return [rows[:32], rows[32:]]

    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, second = epochs(seed=1)
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second and first != list(range(32))
    assert epochs(seed=1) == [first, second] != epochs(seed=2)
    assert epochs(seed=None) != epochs(seed=None)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1]) and random.getstate() == states[2]


def test_make_iterator_checks_when_called_not_when_consumed():
    for size in (3, 0, -2, 8):
        message = f"mini_batch_size={size} must be positive and divide the 4 rows"
        with pytest.raises(ValueError, match=message):
            make().make_iterator(size, 1)
    with pytest.raises(ValueError, match=r"dataloader_kwargs \['num_workers'\]: only 'shuffle'"):
        make().make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})
    assert list(make(0).make_iterator(2, 1)) == []


def test_collate_fn_serves_a_dataloader():
    batches = list(torch.utils.data.DataLoader(make(), batch_size=2, collate_fn=collate_fn))
    assert [ids(batch) for batch in batches] == [[0, 1], [2, 3]]
    assert batches[0].meta_info["metrics"] == {"loss": 1.0}


# Concat


def test_concat_joins_rows_and_metrics():
    parts = [make(1), make(2), make(1)]
    for i, part in enumerate(parts):
        part.meta_info = {"step": i, "metrics": {"loss": float(i), "len": [i] * i, f"only{i}": i}}
    joined = DataProto.concat(parts)
    assert ids(joined) == [0, 0, 1, 0] and joined["tag"].tolist() == ["a", "a", "b", "a"]
    metrics = {"loss": [0.0, 1.0, 2.0], "len": [1, 2, 2], "only0": [0], "only1": [1], "only2": [2]}
    assert joined.meta_info == {"step": 0, "metrics": metrics}
    assert parts[0].meta_info["metrics"]["loss"] == 0.0  # the inputs are as they were
    assert DataProto.concat(parts[:1]) is parts[0]


def test_concat_keeps_ragged_and_mixed_metrics():
    values = [1, [2, 3], (4,), np.array([5, 6]), np.array([[7, 8], [9, 10]]), torch.tensor(11), []]
    parts = [DataProto(meta_info={"metrics": {"m": value}}) for value in values]
    merged = DataProto.concat(parts).meta_info["metrics"]["m"]
    assert merged[:6] == [1, 2, 3, 4, 5, 6]
    assert [row.tolist() for row in merged[6:8]] == [[7, 8], [9, 10]]
    assert merged[8] == torch.tensor(11) and len(merged) == 9


def test_concat_global_keys_and_elements_without_columns():
    metas = [{"metrics": {"a": 1}, "x": 1}, {"metrics": {"a": 2}, "x": {"k": 2}}, {"y": 3}]
    parts = [DataProto(meta_info=meta) for meta in metas]
    assert DataProto.concat(parts).meta_info == {"metrics": {"a": [1, 2]}, "x": 1}
    joined = DataProto.concat(parts, global_keys={"x", "y"}).meta_info
    assert joined == {"metrics": {"a": 1}, "x": [1, {"k": 2}], "y": [3]}
    joined = DataProto.concat([parts[0], make(2), DataProto(), make(1)])
    assert ids(joined) == [0, 1, 0]
    assert joined.meta_info["metrics"] == {"a": [1], "loss": [1.0, 1.0]}


def test_concat_names_what_does_not_fit():
    with pytest.raises(ValueError, match=r"batch of element 2 lacks \['score'\] and adds \['new'"):
        DataProto.concat([DataProto(), make(1), make(1).rename("score", "new")])
    with pytest.raises(ValueError, match=r"non_tensor_batch of element 1 lacks \['tag'\] and adds"):
        DataProto.concat([make(1), make(1).select(None, ["history"])])
    with pytest.raises(ValueError, match=r"'x' of \['torch.float32 \(1, 2\)', 'torch.float32 \(1"):
        DataProto.concat([tensors(x=torch.ones(1, n)) for n in (2, 3)])
    with pytest.raises(ValueError, match="cannot concat an empty list"):
        DataProto.concat([])


def test_large_and_non_contiguous_columns_survive_chunk_and_concat():
    # Above the size from which copies lie in huge pages.
    columns = {
        "t": torch.arange(2 * 1024 * 1024).view(2048, 1024).t(),
        "b": torch.randn(1024, 3, 2048).to(torch.bfloat16)[:, 1],
        "m": torch.rand(1024, 8192) < 0.5,
    }
    for clone in (True, False):
        joined = DataProto.concat(DataProto.from_dict(columns).chunk(3, clone=clone))
        for key, value in columns.items():
            assert joined[key].dtype == value.dtype and torch.equal(joined[key], value)


def test_concat_does_what_torch_does():
    parts = [tensors(x=torch.ones(1, dtype=kind)) for kind in (torch.float32, torch.float64)]
    assert DataProto.concat(parts)["x"].dtype == torch.float64
    x = torch.ones(4, 2, requires_grad=True)
    DataProto.concat(tensors(x=x * 2).chunk(2))["x"].sum().backward()
    assert x.grad.tolist() == [[2, 2]] * 4


# Devices


def test_to_moves_tensors_of_batch_and_meta_without_touching_shared_meta():
    data = make()
    assert data.chunk(2)[0].to("meta").meta_info is data.meta_info  # it holds no tensors
    data.meta_info["nested"] = {"list": [torch.ones(2), 1], "tuple": (torch.ones(1),)}
    piece = data.chunk(2)[0]
    assert piece.to("meta") is piece and piece.batch["ids"].device.type == "meta"
    moved = piece.meta_info["nested"]
    assert moved["list"][0].device.type == moved["tuple"][0].device.type == "meta"
    assert moved["list"][1] == 1
    assert data.meta_info["nested"]["list"][0].device.type == "cpu"  # shared by the other chunk


def test_move_tensors_to_device_returns_unchanged_parts_as_they_are():
    plain = {"a": [1, 2], "b": ("x",)}
    assert move_tensors_to_device(plain, "meta") is plain
    tree = defaultdict(list, {"t": [torch.ones(1)], "plain": plain})
    moved = move_tensors_to_device(tree, "meta")
    assert isinstance(moved, defaultdict) and moved["plain"] is plain
    assert moved["t"][0].device.type == "meta" and tree["t"][0].device.type == "cpu"
    assert move_tensors_to_device(torch.ones(1), "meta").device.type == "meta"


# Pickling


def test_pickle_keeps_columns_dtypes_and_meta():
    data = make()
    data["mask"] = torch.tensor([True, False, True, True])
    data["f8"] = torch.ones(4, 2).to(torch.float8_e4m3fn)
    data["z"] = torch.ones(4, dtype=torch.complex64)
    data.meta_info["tensor"] = {"deep": [torch.arange(3, dtype=torch.bfloat16)]}
    data.meta_info["sparse"] = torch.eye(2).to_sparse()  # goes torch's own way
    images = [{"pixels": torch.ones(2)}, None, torch.ones(1), [1]]
    data.non_tensor_batch["image"] = np.array(images, dtype=object)
    loaded = pickle.loads(pickle.dumps(data))
    assert list(loaded.batch.keys()) == list(data.batch.keys())
    for key, value in data.batch.items():
        assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key
    assert loaded["tag"].tolist() == data["tag"].tolist()
    assert loaded["image"][0]["pixels"].tolist() == [1, 1] and loaded["image"][3] == [1]
    assert torch.equal(loaded.meta_info["tensor"]["deep"][0], torch.arange(3, dtype=torch.bfloat16))
    assert loaded.meta_info["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert loaded.meta_info["metrics"] == {"loss": 1.0}


def test_pickle_drops_gradients_and_lazy_conjugation():
    x = torch.ones(2, requires_grad=True)
    data = DataProto.from_dict({"x": x * 2, "z": torch.tensor([1 + 2j, 3j]).conj()})
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded["x"].tolist() == [2, 2] and not loaded["x"].requires_grad
    assert loaded["z"].tolist() == [1 - 2j, -3j]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_arrive_on_the_cpu():
    data = make().to("cuda")
    data.meta_info["t"] = torch.ones(1, device="cuda")
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded["ids"].device.type == loaded.meta_info["t"].device.type == "cpu"
    assert torch.equal(loaded["ids"], make()["ids"])


def test_a_slice_pickles_only_its_own_rows_out_of_band():
    columns = {"x": torch.arange(1000 * 1000).view(1000, 1000)}
    data = DataProto.from_dict(columns, {"t": ["a"] * 1000})
    data.meta_info["part"] = data["x"][:1]
    data["t"][10] = {"pixels": [data["x"][10:13]]}
    buffers = []
    stream = pickle.dumps(data[10:12], protocol=5, buffer_callback=buffers.append)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [8000, 16000, 24000]
    assert len(stream) < 2000 and len(pickle.dumps(data[10:12])) < 50_000


def arrive(data: DataProto, memory: type = bytes) -> tuple[DataProto, list]:
    """What a process gets from Ray, and the buffers it lies in: `bytes` are read-only memory."""
    buffers = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    blocks = [memory(buffer.raw()) for buffer in buffers]
    return pickle.loads(stream, buffers=blocks), blocks


def test_tensors_are_copied_from_read_only_memory_alone():
    """A write must neither crash nor reach the other readers of the same memory."""
    first, blocks = arrive(make())
    assert not is_lent(first)  # small columns are copied at once
    before = [bytes(block) for block in blocks]
    first.batch["ids"].fill_(77)
    first.batch["score"].mul_(2)
    assert blocks == before
    writable, blocks = arrive(make(), bytearray)
    addresses = {np.frombuffer(block, dtype=np.uint8).ctypes.data for block in blocks}
    assert writable.batch["ids"].data_ptr() in addresses


def large(first: int = 0) -> DataProto:
    """5 MiB in column x, above the size from which columns stay lent; rows count from `first`."""
    rows = torch.arange(first, first + 5, dtype=torch.bfloat16)
    columns = {"x": rows[:, None].repeat(1, 1 << 19), "small": rows}
    return DataProto.from_dict(columns, {"t": ["a"] * 5}, {"step": 1})


def is_lent(data: DataProto) -> bool:
    return isinstance(data._batch, LentColumns)


def test_large_columns_stay_lent_until_they_are_read():
    data, _ = arrive(large())
    assert len(data) == 5 and data["t"].tolist() == ["a"] * 5 and "x" in data
    assert data.meta_info == {"step": 1}
    columns = "x: bfloat16(5, 524288), small: bfloat16(5,), t"
    assert repr(data) == f"DataProto(5 rows; {columns}; meta_info: step)"
    data.check_consistency()
    assert is_lent(data)
    batch = data.batch
    assert not is_lent(data) and data.batch is batch
    batch["x"].add_(1)
    assert batch["x"][:, 7].tolist() == [1, 2, 3, 4, 5]
    assert batch["small"].tolist() == [0, 1, 2, 3, 4]


def test_lent_columns_are_joined_and_sent_on_without_a_copy_in_between():
    first, second = arrive(large(0))[0], arrive(large(5))[0]
    joined = DataProto.concat([first, large(10), second])
    assert is_lent(first) and is_lent(second) and not is_lent(joined)
    expected = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 5, 6, 7, 8, 9]
    assert joined["x"][:, -1].tolist() == joined["small"].tolist() == expected
    again, _ = arrive(first)
    assert is_lent(first) and is_lent(again) and again["x"][4, 0] == 4
    other = large(0)
    other["x"] = other["x"].float()
    assert DataProto.concat([first, other])["x"].dtype == torch.float32  # promoted, as others


def test_lent_columns_can_be_replaced_compared_and_read_by_threads():
    data, _ = arrive(large())
    with ThreadPoolExecutor(8) as pool:
        assert len({id(batch) for batch in pool.map(lambda _: data.batch, range(32))}) == 1
    assert len(arrive(large())[0].union(large())) == 5
    assert [len(piece) for piece in arrive(large())[0].chunk(2)] == [3, 2]
    data, _ = arrive(large())
    data.batch = TensorDict({"y": torch.ones(5)}, batch_size=[5])
    assert list(data.batch.keys()) == ["y"]


# References


class RayRef:
    """A Ray ObjectRef as far as DataProto can tell."""

    def __init__(self, value):
        self._future = finished(value)

    def future(self) -> Future:
        return self._future


def finished(value=None, error=None) -> Future:
    future = Future()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
    return future


def test_materialize_concat_takes_every_kind_of_reference():
    refs = [make(1), finished(make(2)), RayRef(make(3)), ObjectRefWrap(finished(make(1)), True)]
    assert ids(DataProto.materialize_concat(refs)) == [0, 0, 1, 0, 1, 2, 0]
    refs = [ObjectRefWrap(finished(make(2)), True), ObjectRefWrap(finished(None), False)]
    refs.append(ObjectRefWrap(RayRef(make(1)), True))
    joined = DataProto.materialize_concat(refs, global_keys={"global_step"})
    assert ids(joined) == [0, 1, 0] and joined.meta_info["global_step"] == [3, 3]
    assert all(map(is_ref, (Future(), RayRef(1))))
    assert not any(map(is_ref, (None, 1, [], make(1), make(1).batch, torch.ones(1), Future)))


def test_materialize_concat_waits():
    late = Future()
    threading.Timer(0.1, late.set_result, [make(1)]).start()
    assert ids(DataProto.materialize_concat([finished(make(2)), late], timeout=1e6)) == [0, 1, 0]


def test_materialize_concat_raises_a_failure_at_once_even_of_an_uncollected_rank():
    failed = finished(error=RuntimeError("rank 1 broke"))
    refs = [ObjectRefWrap(Future(), True), ObjectRefWrap(failed, False)]
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        DataProto.materialize_concat(refs, timeout=1e6)


def test_materialize_concat_timeout_says_which():
    message = r"waited 0.05 s for 3 results; still missing: \[1, 2\]"
    with pytest.raises(WorkerTimeoutError, match=message):
        DataProto.materialize_concat([finished(make(1)), Future(), Future()], timeout=0.05)
    own = finished(error=TimeoutError("the worker's own"))
    with pytest.raises(TimeoutError, match="the worker's own") as caught:
        DataProto.materialize_concat([own], timeout=60)
    assert not isinstance(caught.value, WorkerTimeoutError)


def test_materialize_concat_refuses_other_values():
    with pytest.raises(TypeError, match="a reference gave a NoneType; expected a DataProto"):
        DataProto.materialize_concat([finished(make(1)), finished(None)])
    with pytest.raises(ValueError, match="empty list"):
        DataProto.materialize_concat([ObjectRefWrap(finished(make(1)), False)])


# Edge shapes through every operation


NON_TENSOR_ONLY = objects(t=["a", "b", "c"])
ZERO_COLUMNS = DataProto(TensorDict({}, batch_size=[3]))


@pytest.mark.parametrize("data", [NON_TENSOR_ONLY, ZERO_COLUMNS, make(3)])
def test_every_row_operation_works_whatever_the_columns(data):
    assert len(data) == 3 and len(data[-1]) == 1 and len(data[1:]) == 2
    assert len(data.select_idxs([0, 0])) == 2 and len(data.repeat(2)) == 6
    assert [len(piece) for piece in data.chunk(2)] == [2, 1]
    assert [len(piece) for piece in data.split(2)] == [2, 1]
    assert len(DataProto.concat(data.chunk(2))) == 3
    assert len(data.clone()) == 3 and len(copy.copy(data)) == 3
    assert len(data.select([], [])) == (0 if data.batch is None else 3)
    padded, pad_size = pad_dataproto_to_divisor(data, 4)
    assert (len(padded), pad_size, len(unpad_dataproto(padded, pad_size))) == (4, 1, 3)
    assert len(list(data.make_iterator(1, 2, seed=0, dataloader_kwargs={"shuffle": True}))) == 6
    reordered = copy.copy(data)
    reordered.reorder([2, 1, 0])
    assert len(reordered) == 3
    united = copy.copy(data).union(tensors(new=[1, 1, 1]))
    united.check_consistency()
    assert len(united) == 3 and united.to("cpu") is united
    assert len(pickle.loads(pickle.dumps(data))) == 3


def test_non_tensor_only_values():
    assert NON_TENSOR_ONLY[::2]["t"].tolist() == ["a", "c"]
    assert NON_TENSOR_ONLY.group_by("t")["b"]["t"].tolist() == ["b"]
    assert DataProto.concat(NON_TENSOR_ONLY.chunk(3))["t"].tolist() == ["a", "b", "c"]


def test_zero_rows():
    empty = make(0)
    assert len(empty) == 0 and [len(piece) for piece in empty.chunk(3)] == [0, 0, 0]
    assert empty.chunk(3)[1]["ids"].shape == (0, 2)
    assert len(DataProto.concat(empty.chunk(3))) == 0 and empty.group_by("tag") == {}
    assert ids(DataProto.concat([empty, make(2)])) == [0, 1]
    assert len(empty.repeat(3)) == 0 and pad_dataproto_to_divisor(empty, 4)[1] == 0
    empty.reorder([])
    with pytest.raises(IndexError):
        empty[0]
    pieces = DataProto(meta_info={"k": 1}).chunk(3)  # no columns at all
    assert [len(piece) for piece in pieces] == [0, 0, 0]
    assert all(piece.batch is None for piece in pieces)
    assert DataProto.concat(pieces).meta_info == {"k": 1}


# Helpers


def test_pad_repeats_leading_rows_cyclically():
    padded, pad_size = pad_dataproto_to_divisor(make(3), 8)
    assert pad_size == 5 and ids(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert ids(unpad_dataproto(padded, pad_size)) == [0, 1, 2]
    data = make(4)
    assert pad_dataproto_to_divisor(data, 2) == (data, 0) and unpad_dataproto(data, 0) is data
    assert padded.meta_info["metrics"] == {"loss": 1.0}
    with pytest.raises(ValueError, match="size_divisor=0"):
        pad_dataproto_to_divisor(data, 0)
    for pad_size in (5, -1):
        with pytest.raises(ValueError, match=f"cannot drop {pad_size} of 4 rows"):
            unpad_dataproto(data, pad_size)


def test_rolls_helpers_on_columns():
    rows = [{"a": 1, "b": 2}, {"b": 4, "a": 3}]
    assert list_of_dict_to_dict_of_list(rows) == {"a": [1, 3], "b": [2, 4]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(ValueError, match=r"row 1 has keys \['a'\]; row 0 has \['a', 'b'\]"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 1}])
    ragged = np.empty(1, dtype=object)
    ragged[0] = [7, 8, 9]
    joined = custom_np_concatenate([np.arange(4).reshape(2, 2), ragged, np.array(["x"])])
    assert joined.shape == (4,) and joined.dtype == object
    assert [list(row) for row in joined[:3]] == [[0, 1], [2, 3], [7, 8, 9]] and joined[3] == "x"


def test_union_of_the_stores_alone():
    left = TensorDict({"x": torch.ones(2)}, batch_size=[2])
    assert union_tensor_dict(left, TensorDict({"y": torch.zeros(2)}, batch_size=[2])) is left
    assert list(left.keys()) == ["x", "y"]
    with pytest.raises(ValueError, match="tensor column 'x' is in both"):
        union_tensor_dict(left, TensorDict({"x": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(ValueError, match="2 rows with 3 rows"):
        union_tensor_dict(left, TensorDict({}, batch_size=[3]))
    arrays = {"a": np.array([1, 2], dtype=object)}
    assert union_numpy_dict(arrays, {"b": np.array([3, 4], dtype=object)}) is arrays
    assert list(arrays) == ["a", "b"]
    with pytest.raises(ValueError, match="non-tensor column 'a'"):
        union_numpy_dict(arrays, {"a": np.array([1, 3], dtype=object)})


@pytest.mark.parametrize(("expand", "num_requests", "each"), [(True, 3, 1), (False, 1, 3)])
def test_rolls_requests_and_responses(expand, num_requests, each):
    data = tensors(row=[7])
    with pytest.raises(KeyError, match="generation_config"):
        expand_requests(data, 2, True)
    data.meta_info["generation_config"] = {"num_return_sequences": 9}
    requests = expand_requests(data, 3, expand)
    configs = [request.meta_info["generation_config"] for request in requests]
    assert configs == [{"num_return_sequences": each}] * num_requests
    configs[0]["top_p"] = 0.5  # a copy of its own
    assert data.meta_info["generation_config"] == {"num_return_sequences": each}
    assert expand_responses(None) == []
    found = expand_responses([[tensors(row=[1, 2]), tensors(row=[3])], tensors(row=[4, 5])])
    assert [item["row"].tolist() for item in found] == [[1], [2], [3], [4], [5]]
    assert ExperienceItem(3).domain == "default" and ExperienceItem(3).data is None
