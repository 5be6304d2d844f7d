"""DataProto by hand-written examples: columns and rows."""

import copy
import random

import numpy as np
import pytest
import torch
from protocol_batches import ids, make
from tensordict import TensorDict

from roll.distributed.scheduler.protocol import DataProto, collate_fn

# Construction


def test_batch_is_the_tensordict_and_none_without_tensors():
    tensors = TensorDict({"x": torch.ones(3)}, batch_size=[3])
    assert DataProto(batch=tensors).batch is tensors
    assert DataProto().batch is None
    assert DataProto().non_tensor_batch == {} and DataProto().meta_info == {}
    assert list(make().batch.keys()) == ["ids", "score"]


def test_meta_info_is_kept_as_the_same_object():
    meta = {"a": 1}
    assert DataProto(meta_info=meta).meta_info is meta


def test_from_dict_leaves_the_callers_dicts_alone_and_shares_tensors():
    tensors, non_tensors = {"x": torch.ones(2)}, {"tag": ["a", "b"]}
    data = DataProto.from_dict(tensors, non_tensors)
    data.batch["y"] = torch.zeros(2)
    assert non_tensors == {"tag": ["a", "b"]} and list(tensors) == ["x"]
    assert data.batch["x"] is tensors["x"]


@pytest.mark.parametrize(
    "values, expected",
    [
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),  # equal lengths: numpy alone would make this 2-D
        ([{"k": 1}, None], [{"k": 1}, None]),
        (np.array([None, "x"], dtype=object), [None, "x"]),
    ],
)
def test_non_tensor_columns_become_one_object_per_row(values, expected):
    column = DataProto.from_dict({}, {"c": values}).non_tensor_batch["c"]
    assert column.dtype == object and column.shape == (2,)
    assert column.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int64, object])
def test_rows_of_multi_dimensional_arrays_stay_one_array_per_row(dtype):
    column = DataProto(
        non_tensor_batch={"c": np.arange(6).reshape(3, 2).astype(dtype)}
    ).non_tensor_batch["c"]
    assert column.shape == (3,)
    assert [row.tolist() for row in column] == [[0, 1], [2, 3], [4, 5]]
    assert DataProto.from_dict({}, {"c": np.arange(6).reshape(3, 2)}).chunk(3)[2]["c"][
        0
    ].tolist() == [4, 5]


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict(
        {"x": torch.ones(2, 3), "t": np.array(["a", "b"])}, meta_info={"k": 1}
    )
    assert (
        data["x"].shape == (2, 3)
        and data["t"].tolist() == ["a", "b"]
        and data.meta_info == {"k": 1}
    )
    with pytest.raises(ValueError, match=r"column 't' is a list; expected a tensor or numpy array"):
        DataProto.from_single_dict({"t": ["a"]})


@pytest.mark.parametrize(
    "build, error, message",
    [
        (
            lambda: DataProto.from_dict({"x": torch.ones(2), "y": torch.ones(3)}),
            ValueError,
            r"rows: {'x': 2, 'y': 3}",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.tensor(1.0)}),
            ValueError,
            r"'x' is a single number",
        ),
        (lambda: DataProto.from_dict({"x": [1, 2]}), TypeError, "tensor column 'x' is a list"),
        (
            lambda: DataProto.from_dict({"x": torch.ones(2)}, {"t": ["a"]}),
            ValueError,
            "'t' has 1 rows; the batch",
        ),
        (
            lambda: DataProto.from_dict({}, {"t": ["a"], "u": ["a", "b"]}),
            ValueError,
            "'u' has 2 rows; the batch",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.ones(2)}, {"x": ["a", "b"]}),
            ValueError,
            "'x' is both in batch and",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.ones(2)}, {"t": "ab"}),
            TypeError,
            "'t' is a str; expected a list",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.ones(2)}, {"t": np.array(1)}),
            ValueError,
            "'t' is a single value",
        ),
        (
            lambda: DataProto.from_dict({"x": torch.ones(2, 2)}, num_batch_dims=2),
            ValueError,
            "exactly one batch dim",
        ),
        (
            lambda: DataProto(batch={"x": torch.ones(2)}),
            TypeError,
            "batch is a dict; expected a TensorDict",
        ),
        (
            lambda: DataProto(TensorDict({}, batch_size=[2, 3])),
            ValueError,
            r"batch dimensions \(2, 3\); expected one",
        ),
        (lambda: DataProto(meta_info=[1]), TypeError, "meta_info is a list"),
        (
            lambda: DataProto(non_tensor_batch={1: np.array(["a"])}),
            TypeError,
            "a column name is a string; found 1",
        ),
    ],
)
def test_inconsistent_input_is_named(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_check_consistency_sees_what_was_assigned_directly():
    data = make()
    data.non_tensor_batch["n"] = np.arange(4)
    with pytest.raises(TypeError, match=r"'n' is a int64 array; expected an object array"):
        data.check_consistency()
    data.non_tensor_batch["n"] = np.arange(3).astype(object)
    with pytest.raises(ValueError, match="'n' has 3 rows; the batch has 4"):
        data.check_consistency()


def test_batch_cannot_be_assigned_a_plain_dict():
    data = make()
    with pytest.raises(
        TypeError, match=r"batch is a dict; expected a TensorDict \(from_dict takes a dict\)"
    ):
        data.batch = {"x": torch.ones(4)}
    data.batch = TensorDict({"x": torch.ones(4)}, batch_size=[4])
    assert list(data.batch.keys()) == ["x"] and len(data) == 4


def test_repr_names_rows_columns_and_meta():
    assert repr(make()) == (
        "DataProto(4 rows; ids: int64(4, 2), score: bfloat16(4,), tag, history; meta_info: global_step, metrics)"
    )
    assert repr(DataProto()) == "DataProto(0 rows; no columns; meta_info: empty)"


# Columns by name


def test_columns_are_read_set_and_deleted_by_name():
    data = make(2)
    assert data["ids"] is data.batch["ids"] and data["tag"] is data.non_tensor_batch["tag"]
    data["mask"] = torch.tensor([True, False])
    data["domain"] = np.array(["math", "code"])
    assert data.batch["mask"].tolist() == [True, False]
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
    data = DataProto.from_dict({}, {"t": ["a", "b"]})
    data["x"] = torch.ones(2)
    assert data.batch.batch_size == torch.Size([2])
    data = DataProto.from_dict({}, {"t": ["a", "b"]})
    data["t"] = torch.ones(3)  # its only column: the number of rows is free
    assert len(data) == 3 and not data.non_tensor_batch


def test_bad_columns_are_named():
    data = make(4)
    for value in (torch.ones(3), np.ones(3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"column 'x' has shape .*; the batch has 4 rows"):
            data["x"] = value
    with pytest.raises(TypeError, match="column 'x' is a list"):
        data["x"] = [1, 2, 3, 4]
    with pytest.raises(
        KeyError, match=r"no column 'x': batch has \['ids', 'score'\], non_tensor_batch has \["
    ):
        data["x"]
    with pytest.raises(KeyError, match="no column 'x'"):
        del data["x"]


def test_update_sets_columns_of_both_kinds():
    data = make(2)
    data.update({"x": torch.zeros(2), "tag": np.array(["p", "q"])})
    assert data["x"].tolist() == [0, 0] and data["tag"].tolist() == ["p", "q"]


def test_select_takes_none_as_all_and_an_empty_list_as_none():
    data = make()
    everything = data.select()
    assert list(everything.batch.keys()) == ["ids", "score"] and list(
        everything.non_tensor_batch
    ) == ["tag", "history"]
    assert everything.meta_info is data.meta_info
    one = data.select("ids", [])
    assert list(one.batch.keys()) == ["ids"] and one.non_tensor_batch == {}
    none = data.select([], [], ["global_step", "not there"])
    assert len(none) == 4 and none.meta_info == {"global_step": 3}
    one["new"] = torch.zeros(4)
    assert "new" not in data


def test_select_deepcopy_shares_nothing():
    data = make()
    selected = data.select(["ids"], ["history"], deepcopy=True)
    selected.batch["ids"].zero_()
    selected.non_tensor_batch["history"][1].append(9)
    selected.meta_info["metrics"]["loss"] = 7
    assert (
        ids(data) == [0, 1, 2, 3]
        and data["history"][1] == [0]
        and data.meta_info["metrics"]["loss"] == 1.0
    )


@pytest.mark.parametrize("method", ["select", "pop"])
def test_select_and_pop_name_missing_keys_and_take_nothing(method):
    data = make()
    with pytest.raises(
        KeyError, match=r"no column 'nope', 'tag' in batch: batch has \['ids', 'score'\]"
    ):
        getattr(data, method)(["ids", "nope", "tag"])
    with pytest.raises(KeyError, match="no column 'ids' in non_tensor_batch"):
        getattr(data, method)("score", ["ids"])
    with pytest.raises(TypeError, match="expected a column name or a list of them; found 3"):
        getattr(data, method)(3)
    assert list(data.batch.keys()) == ["ids", "score"] and list(data.non_tensor_batch) == [
        "tag",
        "history",
    ]


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
    with pytest.raises(
        KeyError, match=r"no \['global_step'\] in meta_info, which has \['metrics'\]"
    ):
        data.pop(["ids"], meta_info_keys=["global_step"])
    assert "ids" in data


def test_popping_every_tensor_keeps_the_number_of_rows():
    data = make()
    data.pop(["ids", "score"])
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
    with pytest.raises(ValueError, match=r"\['tag'\] would name two columns"):
        data.rename("score", "tag")
    with pytest.raises(ValueError, match=r"\['input_ids'\] would name two columns"):
        data.rename("score", "input_ids")
    with pytest.raises(KeyError, match="no column 'tag' in batch"):
        data.rename("tag", "label")
    with pytest.raises(TypeError, match="found 5"):
        data.rename("score", 5)


# Union


def test_union_is_in_place_and_adds_columns_and_meta():
    data, meta = make(2), None
    meta = data.meta_info
    other = DataProto.from_dict(
        {"x": torch.ones(2), "ids": data["ids"].clone()}, {"u": ["p", "q"]}, {"k": 1}
    )
    assert data.union(other) is data
    assert list(data.batch.keys()) == ["ids", "score", "x"] and data["u"].tolist() == ["p", "q"]
    assert data.meta_info is meta and meta["k"] == 1
    assert "score" not in other


def test_union_treats_equal_nan_and_nested_values_as_equal():
    nan = float("nan")

    def build() -> DataProto:
        return DataProto.from_dict(
            {"x": torch.tensor([1.0, nan])},
            {"row": [{"a": np.array([1.0, nan])}, [torch.ones(2), (nan, "s")]]},
            {"t": torch.tensor([nan]), "a": np.arange(3), "d": {"k": [1, nan]}},
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
        (
            DataProto.from_dict({"ids": torch.zeros(2, 2, dtype=torch.int64)}),
            "tensor column 'ids' is in both",
        ),
        (
            DataProto.from_dict({"ids": torch.tensor([[0.0, 1], [2, 3]])}),
            "tensor column 'ids' is in both .*float32",
        ),
        (
            DataProto.from_dict({"ids": torch.tensor([0, 1])}),
            r"'ids' is in both .* torch.int64 \(2,\)",
        ),
        (
            DataProto.from_dict({}, {"tag": ["a", "c"]}),
            "non-tensor column 'tag' is in both batches with different",
        ),
        (DataProto.from_dict({}, {"history": [[], [1]]}), "non-tensor column 'history' is in both"),
        (
            DataProto.from_dict({}, {"ids": [1, 2]}),
            "'ids' is a tensor in one batch only",
        ),
        (
            DataProto.from_dict({"tag": torch.ones(2)}),
            "'tag' is a tensor in one batch only",
        ),
        (DataProto(meta_info={"global_step": 4}), "meta_info 'global_step' is in both .*: 3 and 4"),
        (DataProto.from_dict({"x": torch.ones(3)}), "unite 2 rows with 3 rows"),
    ],
)
def test_union_conflicts_name_the_key_and_change_nothing(other, message):
    data = make(2)
    other = copy.copy(other)
    other.meta_info["new"] = 1
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert "new" not in data.meta_info and list(data.batch.keys()) == ["ids", "score"]


def test_union_with_and_of_empty_protos():
    data = make(2).union(DataProto(meta_info={"k": 1}))
    assert len(data) == 2 and data.meta_info["k"] == 1
    empty = DataProto().union(make(2))
    assert len(empty) == 2 and list(empty.batch.keys()) == ["ids", "score"]


# Rows


@pytest.mark.parametrize("index, row", [(0, 0), (3, 3), (-1, 3), (-4, 0), (np.int64(2), 2)])
def test_an_integer_gives_one_row(index, row):
    assert len(make()[index]) == 1 and ids(make()[index]) == [row]


@pytest.mark.parametrize("index", [4, -5])
def test_rows_out_of_range_raise(index):
    with pytest.raises(IndexError, match=f"row {index} of a batch of 4 rows"):
        make()[index]
    with pytest.raises(IndexError, match=f"row {index} of a batch of 4 rows"):
        make().select_idxs([0, index])


def test_iteration_ends():
    assert [ids(row) for row in make(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, 3),
        slice(-2, None),
        slice(0, 4, 2),
        slice(3, None, -1),
        slice(2, 2),
        slice(9, 12),
    ],
)
def test_slices_mean_what_they_mean_for_lists(index):
    expected = list(range(4))[index]
    data = make()[index]
    assert ids(data) == expected and len(data) == len(expected)
    assert data["history"].tolist() == [[0] * i for i in expected]


def test_slices_share_memory_and_meta_but_not_columns():
    data = make()
    part = data.slice(1, 3)
    assert part.meta_info is data.meta_info
    part.batch["ids"][0, 0] = 100
    assert data.batch["ids"][1, 0] == 100
    shallow = data.slice()
    shallow["new"] = torch.zeros(4)
    del shallow["tag"]
    assert "new" not in data and "tag" in data


@pytest.mark.parametrize(
    "idxs",
    [
        [3, 0, 0],
        (3, 0, 0),
        [-1, 0, -4],
        np.array([3, 0, 0], dtype=np.int32),
        torch.tensor([3, 0, 0]),
        torch.tensor([3, 0, 0], dtype=torch.uint8),
    ],
)
def test_select_idxs_takes_positions(idxs):
    data = make()
    selected = data.select_idxs(idxs)
    assert ids(selected) == [3, 0, 0] and selected["tag"].tolist() == ["b", "a", "a"]
    assert selected.meta_info is data.meta_info
    assert ids(data[list(idxs)]) == [3, 0, 0]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_select_idxs_takes_masks(convert):
    assert ids(make().select_idxs(convert([True, False, False, True]))) == [0, 3]
    with pytest.raises(IndexError, match="a mask of 2 values for a batch of 4 rows"):
        make().select_idxs(convert([True, False]))


@pytest.mark.parametrize(
    "nothing", [[], np.array([], dtype=np.int64), torch.tensor([]), [False] * 4]
)
def test_select_idxs_of_nothing_keeps_the_columns(nothing):
    empty = make().select_idxs(nothing)
    assert len(empty) == 0 and empty["ids"].shape == (0, 2) and empty["tag"].shape == (0,)


def test_select_idxs_refuses_other_indices():
    with pytest.raises(TypeError, match="integers or a mask; found float64"):
        make().select_idxs([0.5])
    with pytest.raises(IndexError, match=r"row indices have shape \(1, 2\)"):
        make().select_idxs([[0, 1]])


def test_reorder_is_in_place():
    data = make()
    assert data.reorder(torch.tensor([2, 0, 3, 1])) is None
    assert ids(data) == [2, 0, 3, 1] and data["tag"].tolist() == ["a", "a", "b", "b"]
    data.reorder([-1, 0, 1, 2])
    assert ids(data) == [1, 2, 0, 3]
    one = make(1)
    one.reorder(torch.tensor(0))  # 0-d, as a squeezed index of one row is
    assert ids(one) == [0]


@pytest.mark.parametrize("indices", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 3]])
def test_reorder_wants_every_row_once(indices):
    with pytest.raises(ValueError, match="each of the 4 rows once; select_idxs"):
        make().reorder(indices)


def test_repeat():
    assert ids(make(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert ids(make(2).repeat(3, interleave=False)) == [0, 1, 0, 1, 0, 1]
    assert make(2).repeat()["tag"].tolist() == ["a", "a", "b", "b"]
    assert len(make(2).repeat(0)) == 0 and ids(make(2).repeat(1)) == [0, 1]
    with pytest.raises(ValueError, match="repeat_times=-1"):
        make(2).repeat(-1)


def test_chunk_sizes_follow_array_split():
    assert [ids(piece) for piece in make(7).chunk(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    for rows in range(1, 12):
        for chunks in range(1, rows + 1):
            expected = [len(part) for part in np.array_split(np.arange(rows), chunks)]
            assert [len(piece) for piece in make(rows).chunk(chunks)] == expected


def test_chunks_share_one_meta_info_and_own_their_tensors():
    data = make()
    pieces = data.chunk(2)
    data.meta_info["late"] = 1
    assert all(piece.meta_info is data.meta_info for piece in pieces)
    pieces[0].batch["ids"].zero_()
    pieces[0].non_tensor_batch["tag"][0] = "changed"
    assert ids(data) == [0, 1, 2, 3] and data["tag"][0] == "a"
    assert make().chunk(2, clone=False)[1].batch["ids"].is_contiguous()
    views = data.chunk(2, clone=False)
    views[1].batch["ids"].zero_()
    assert ids(data) == [0, 1, 0, 0]


@pytest.mark.parametrize("cut", [lambda data: data.chunk(4), lambda data: data.split(2)])
def test_pieces_do_not_keep_the_source_alive_nor_share_rows(cut):
    base = torch.zeros(16, 4)
    pieces = cut(DataProto.from_dict({"x": base[:8]}))  # a view of something larger
    for i, piece in enumerate(pieces):
        assert piece["x"].untyped_storage().nbytes() == 8 * 4 * 4
        piece["x"] += i
    assert [piece["x"].unique().tolist() for piece in pieces] == [
        [0],
        [1],
        [2],
        [3],
    ] and base.sum() == 0


def test_chunk_errors():
    with pytest.raises(
        ValueError, match=r"cannot cut 2 rows into 3 pieces.*pad_dataproto_to_divisor"
    ):
        make(2).chunk(3)
    with pytest.raises(ValueError, match="chunks=0"):
        make(2).chunk(0)


def test_split():
    assert [ids(piece) for piece in make(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert make(0).split(2) == []
    with pytest.raises(ValueError, match="split_size=0"):
        make().split(0)


def test_group_by_names_groups_in_order_of_appearance():
    data = DataProto.from_dict(
        {"n": torch.tensor([2, 1, 2, 1]), "v": torch.tensor([[1.5, 0], [0, 0], [1.5, 0], [1, 1]])},
        {"tag": ["b", "a", "b", "b"], "row": [0, 1, 2, 3]},
    )

    def groups(keys) -> dict[str, list[int]]:
        return {label: group["row"].tolist() for label, group in data.group_by(keys).items()}

    assert groups("tag") == {"b": [0, 2, 3], "a": [1]}
    assert list(groups("tag")) == ["b", "a"]
    assert groups("n") == {"2": [0, 2], "1": [1, 3]}
    assert groups(["tag", "n"]) == {"b|2": [0, 2], "a|1": [1], "b|1": [3]}
    assert groups("v") == {"[1.5, 0.0]": [0, 2], "[0.0, 0.0]": [1], "[1.0, 1.0]": [3]}
    assert data.group_by("tag")["b"].meta_info is data.meta_info
    with pytest.raises(KeyError, match="no column 'nope'"):
        data.group_by("nope")
    with pytest.raises(ValueError, match="at least one column"):
        data.group_by([])


def test_group_by_does_not_merge_groups_whose_joined_names_are_equal():
    data = DataProto.from_dict({}, {"x": ["a|b", "a"], "y": ["c", "b|c"]})
    with pytest.raises(ValueError, match=r"values of \['x', 'y'\] contain '\|'"):
        data.group_by(["x", "y"])


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

    first, second = epochs(seed=1)
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second and first != list(range(32))
    assert epochs(seed=1) == [first, second]
    assert epochs(seed=2) != [first, second]
    assert epochs(seed=None) != epochs(seed=None)


@pytest.mark.parametrize("seed", [None, 7])
def test_make_iterator_leaves_global_random_state_alone(seed):
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(make().make_iterator(2, 3, seed=seed, dataloader_kwargs={"shuffle": True}))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1]) and random.getstate() == states[2]


def test_make_iterator_checks_when_called_not_when_consumed():
    for size in (3, 0, -2, 8):
        with pytest.raises(
            ValueError, match=f"mini_batch_size={size} must be positive and divide the 4 rows"
        ):
            make().make_iterator(size, 1)
    with pytest.raises(
        ValueError, match=r"dataloader_kwargs \['num_workers'\]: only 'shuffle' is supported"
    ):
        make().make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})
    assert list(make(0).make_iterator(2, 1)) == []


def test_collate_fn_serves_a_dataloader():
    data = make()
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collate_fn)
    batches = list(loader)
    assert [ids(batch) for batch in batches] == [[0, 1], [2, 3]]
    assert batches[0].meta_info["metrics"] == {"loss": 1.0}
