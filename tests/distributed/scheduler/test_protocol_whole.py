"""DataProto by hand-written examples: whole batches, joined, copied, pickled, and of unusual shapes."""

import copy
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from protocol_batches import ids, make
from tensordict import TensorDict

from roll.distributed.scheduler.protocol import (
    DataProto,
    LentColumns,
    custom_np_concatenate,
    list_of_dict_to_dict_of_list,
    move_tensors_to_device,
    pad_dataproto_to_divisor,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)

# Concat


def test_concat_of_one_returns_it():
    data = make()
    assert DataProto.concat([data]) is data


def test_concat_joins_rows_and_metrics():
    parts = [make(1), make(2), make(1)]
    for i, part in enumerate(parts):
        part.meta_info = {"step": i, "metrics": {"loss": float(i), "len": [i] * i, f"only{i}": i}}
    joined = DataProto.concat(parts)
    assert ids(joined) == [0, 0, 1, 0] and joined["tag"].tolist() == ["a", "a", "b", "a"]
    assert joined.meta_info == {
        "step": 0,
        "metrics": {
            "loss": [0.0, 1.0, 2.0],
            "len": [1, 2, 2],
            "only0": [0],
            "only1": [1],
            "only2": [2],
        },
    }
    assert parts[0].meta_info["metrics"]["loss"] == 0.0  # the inputs are as they were


def test_concat_keeps_ragged_and_mixed_metrics():
    values = [1, [2, 3], (4,), np.array([5, 6]), np.array([[7, 8], [9, 10]]), torch.tensor(11), []]
    parts = [DataProto(meta_info={"metrics": {"m": value}}) for value in values]
    merged = DataProto.concat(parts).meta_info["metrics"]["m"]
    assert merged[:6] == [1, 2, 3, 4, 5, 6]
    assert [row.tolist() for row in merged[6:8]] == [[7, 8], [9, 10]]
    assert merged[8] == torch.tensor(11) and len(merged) == 9


def test_concat_global_keys():
    parts = [
        DataProto(meta_info={"metrics": {"a": 1}, "x": 1}),
        DataProto(meta_info={"metrics": {"a": 2}, "x": {"k": 2}}),
        DataProto(meta_info={"y": 3}),
    ]
    assert DataProto.concat(parts).meta_info == {"metrics": {"a": [1, 2]}, "x": 1}
    assert DataProto.concat(parts, global_keys={"x", "y"}).meta_info == {
        "metrics": {"a": 1},
        "x": [1, {"k": 2}],
        "y": [3],
    }


def test_concat_skips_elements_without_columns():
    joined = DataProto.concat(
        [DataProto(meta_info={"metrics": {"a": 1}}), make(2), DataProto(), make(1)]
    )
    assert ids(joined) == [0, 1, 0] and joined.meta_info == {
        "metrics": {"a": [1], "loss": [1.0, 1.0]}
    }


def test_concat_names_what_does_not_fit():
    with pytest.raises(
        ValueError, match=r"batch of element 2 lacks \['score'\] and adds \['new'\]"
    ):
        other = make(1).rename("score", "new")
        DataProto.concat([DataProto(), make(1), other])
    with pytest.raises(
        ValueError, match=r"non_tensor_batch of element 1 lacks \['tag'\] and adds \[\]"
    ):
        DataProto.concat([make(1), make(1).select(None, ["history"])])
    with pytest.raises(
        ValueError, match=r"column 'x' of \['torch.float32 \(1, 2\)', 'torch.float32 \(1, 3\)"
    ):
        DataProto.concat([DataProto.from_dict({"x": torch.ones(1, n)}) for n in (2, 3)])
    with pytest.raises(ValueError, match="cannot concat an empty list"):
        DataProto.concat([])


def test_concat_promotes_dtypes_as_torch_does():
    parts = [
        DataProto.from_dict({"x": torch.ones(1, dtype=d)}) for d in (torch.float32, torch.float64)
    ]
    assert DataProto.concat(parts)["x"].dtype == torch.float64


def test_large_and_non_contiguous_columns_survive_chunk_and_concat():
    # Above the size from which copies lie in huge pages.
    tensors = {
        "t": torch.arange(2 * 1024 * 1024).view(2048, 1024).t(),
        "b": torch.randn(1024, 3, 2048).to(torch.bfloat16)[:, 1],
        "m": torch.rand(1024, 8192) < 0.5,
    }
    for clone in (True, False):
        joined = DataProto.concat(DataProto.from_dict(tensors).chunk(3, clone=clone))
        for key, value in tensors.items():
            assert joined[key].dtype == value.dtype and torch.equal(joined[key], value)


def test_gradients_flow_through_chunk_and_concat():
    x = torch.ones(4, 2, requires_grad=True)
    DataProto.concat(DataProto.from_dict({"x": x * 2}).chunk(2))["x"].sum().backward()
    assert x.grad.tolist() == [[2, 2]] * 4


# Copies and devices


def test_clone_and_deepcopy_share_nothing():
    for duplicate in (DataProto.clone, copy.deepcopy):
        data = make()
        data.meta_info["t"] = torch.ones(2)
        other = duplicate(data)
        other.batch["ids"].zero_()
        other.non_tensor_batch["history"][1].append(9)
        other.meta_info["t"].zero_()
        other.meta_info["metrics"]["loss"] = 7
        assert ids(data) == [0, 1, 2, 3] and data["history"][1] == [0]
        assert data.meta_info["t"].tolist() == [1, 1] and data.meta_info["metrics"]["loss"] == 1.0


def test_copy_has_its_own_containers_around_the_same_tensors():
    data = make()
    other = copy.copy(data)
    other["new"], other.meta_info["new"] = torch.zeros(4), 1
    del other["tag"]
    assert "new" not in data and "new" not in data.meta_info and "tag" in data
    assert other.batch["ids"] is data.batch["ids"]


def test_to_moves_tensors_of_batch_and_meta_without_touching_shared_meta():
    data = make()
    data.meta_info["nested"] = {"list": [torch.ones(2), 1], "tuple": (torch.ones(1),)}
    piece = data.chunk(2)[0]
    assert piece.to("meta") is piece
    assert piece.batch["ids"].device.type == "meta"
    assert (
        piece.meta_info["nested"]["list"][0].device.type == "meta"
        and piece.meta_info["nested"]["list"][1] == 1
    )
    assert piece.meta_info["nested"]["tuple"][0].device.type == "meta"
    assert (
        data.meta_info["nested"]["list"][0].device.type == "cpu"
    )  # the parent's dict, shared by the other chunk


def test_to_keeps_the_shared_meta_info_when_it_holds_no_tensors():
    data = make()
    piece = data.chunk(2)[0].to("meta")
    assert piece.meta_info is data.meta_info


def test_move_tensors_to_device_returns_unchanged_parts_as_they_are():
    plain = {"a": [1, 2], "b": ("x",)}
    assert move_tensors_to_device(plain, "meta") is plain
    tree = defaultdict(list, {"t": [torch.ones(1)], "plain": plain})
    moved = move_tensors_to_device(tree, "meta")
    assert (
        isinstance(moved, defaultdict)
        and moved["plain"] is plain
        and tree["t"][0].device.type == "cpu"
    )
    assert (
        moved["t"][0].device.type == "meta"
        and move_tensors_to_device(torch.ones(1), "meta").device.type == "meta"
    )


# Pickling


def test_pickle_keeps_columns_dtypes_and_meta():
    data = make()
    data["mask"] = torch.tensor([True, False, True, True])
    data["f8"] = torch.ones(4, 2).to(torch.float8_e4m3fn)
    data["z"] = torch.ones(4, dtype=torch.complex64)
    data.meta_info["tensor"] = {"deep": [torch.arange(3, dtype=torch.bfloat16)]}
    data.non_tensor_batch["image"] = np.array(
        [{"pixels": torch.ones(2)}, None, torch.ones(1), [1]], dtype=object
    )
    loaded = pickle.loads(pickle.dumps(data))
    assert list(loaded.batch.keys()) == list(data.batch.keys())
    for key, value in data.batch.items():
        assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key
    assert loaded["tag"].tolist() == data["tag"].tolist()
    assert loaded["image"][0]["pixels"].tolist() == [1, 1] and loaded["image"][3] == [1]
    assert torch.equal(loaded.meta_info["tensor"]["deep"][0], torch.arange(3, dtype=torch.bfloat16))
    assert loaded.meta_info["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"k": 1}),
        DataProto(TensorDict({}, batch_size=[3])),
        DataProto.from_dict({}, {"t": ["a", "b"]}),
        DataProto.from_dict({"x": torch.ones(0, 3), "y": torch.ones(0)}, {"t": []}),
        DataProto.from_dict({"x": torch.ones(2, 0)}),
    ],
)
def test_pickle_of_edge_cases(data):
    loaded = pickle.loads(pickle.dumps(data))
    assert len(loaded) == len(data) and loaded.meta_info == data.meta_info
    assert (loaded.batch is None) == (data.batch is None)
    for key in () if data.batch is None else data.batch.keys():
        assert loaded[key].shape == data[key].shape


def test_a_slice_pickles_only_its_own_rows_out_of_band():
    data = DataProto.from_dict(
        {"x": torch.arange(1000 * 1000).view(1000, 1000)}, {"t": ["a"] * 1000}
    )
    data.meta_info["part"] = data["x"][:1]
    data["t"][10] = {"pixels": [data["x"][10:13]]}
    buffers = []
    stream = pickle.dumps(data[10:12], protocol=5, buffer_callback=buffers.append)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [8000, 16000, 24000]
    assert len(stream) < 2000
    assert len(pickle.dumps(data[10:12])) < 50_000


def test_tensors_from_read_only_memory_are_writable_copies():
    """Ray hands out read-only memory that all readers share; a write must neither crash nor reach the others."""
    data = make()
    buffers = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    first, second = (pickle.loads(stream, buffers=frozen) for _ in range(2))
    first.batch["ids"].fill_(77)
    first.batch["score"].mul_(2)
    assert ids(second) == [0, 1, 2, 3] and second["score"].tolist() == [0, 0.5, 1, 1.5]


def test_tensors_from_writable_memory_are_not_copied():
    buffers = []
    stream = pickle.dumps(make(), protocol=5, buffer_callback=buffers.append)
    memory = [bytearray(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(stream, buffers=memory)
    addresses = {np.frombuffer(block, dtype=np.uint8).ctypes.data for block in memory}
    assert loaded.batch["ids"].data_ptr() in addresses


def arrive_from_ray(data: DataProto) -> DataProto:
    """What a process gets from Ray: buffers in read-only memory."""
    buffers = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])


def large(first: int = 0) -> DataProto:
    """5 MiB in column x, above the size from which columns stay lent; rows count from `first`."""
    rows = torch.arange(first, first + 5, dtype=torch.bfloat16)
    return DataProto.from_dict(
        {"x": rows[:, None].repeat(1, 1 << 19), "small": rows}, {"t": ["a"] * 5}, {"step": 1}
    )


def is_lent(data: DataProto) -> bool:
    return isinstance(data._batch, LentColumns)


def test_large_columns_stay_lent_until_they_are_read():
    data = arrive_from_ray(large())
    assert (
        len(data) == 5
        and data["t"].tolist() == ["a"] * 5
        and data.meta_info == {"step": 1}
        and "x" in data
    )
    assert (
        repr(data)
        == "DataProto(5 rows; x: bfloat16(5, 524288), small: bfloat16(5,), t; meta_info: step)"
    )
    data.check_consistency()
    assert is_lent(data)
    batch = data.batch
    assert not is_lent(data) and data.batch is batch
    batch["x"].add_(1)
    assert batch["x"][:, 7].tolist() == [1, 2, 3, 4, 5] and batch["small"].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    data.check_consistency()


def test_small_columns_are_copied_at_once():
    assert not is_lent(arrive_from_ray(make()))


def test_lent_columns_are_joined_and_sent_on_without_a_copy_in_between():
    first, second = arrive_from_ray(large(0)), arrive_from_ray(large(5))
    joined = DataProto.concat([first, large(10), second])
    assert is_lent(first) and is_lent(second) and not is_lent(joined)
    assert (
        joined["x"][:, -1].tolist()
        == joined["small"].tolist()
        == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 5, 6, 7, 8, 9]
    )
    again = arrive_from_ray(first)
    assert is_lent(first) and is_lent(again) and again["x"][4, 0] == 4
    other = large(0)
    other["x"] = other["x"].float()
    assert (
        DataProto.concat([first, other])["x"].dtype == torch.float32
    )  # promoted, as for other tensors


def test_lent_columns_can_be_replaced_and_compared():
    data = arrive_from_ray(large())
    data.batch = TensorDict({"y": torch.ones(5)}, batch_size=[5])
    assert list(data.batch.keys()) == ["y"]
    assert len(arrive_from_ray(large()).union(large())) == 5
    assert [len(piece) for piece in arrive_from_ray(large()).chunk(2)] == [3, 2]


def test_threads_that_read_lent_columns_get_the_same_tensors():
    data = arrive_from_ray(large())
    with ThreadPoolExecutor(8) as pool:
        assert len({id(batch) for batch in pool.map(lambda _: data.batch, range(32))}) == 1


def test_pickle_drops_gradients_and_lazy_conjugation():
    x = torch.ones(2, requires_grad=True)
    data = DataProto.from_dict({"x": x * 2, "z": torch.tensor([1 + 2j, 3j]).conj()})
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded["x"].tolist() == [2, 2] and not loaded["x"].requires_grad
    assert loaded["z"].tolist() == [1 - 2j, -3j]


def test_special_tensors_pickle_torchs_own_way():
    data = DataProto(meta_info={"s": torch.eye(2).to_sparse()})
    assert pickle.loads(pickle.dumps(data)).meta_info["s"].to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_arrive_on_the_cpu():
    data = make().to("cuda")
    data.meta_info["t"] = torch.ones(1, device="cuda")
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded["ids"].device.type == "cpu" and loaded.meta_info["t"].device.type == "cpu"
    assert torch.equal(loaded["ids"], make()["ids"])


# Edge shapes through every operation


NON_TENSOR_ONLY = DataProto.from_dict({}, {"t": ["a", "b", "c"]})
ZERO_COLUMNS = DataProto(TensorDict({}, batch_size=[3]))


@pytest.mark.parametrize("data", [NON_TENSOR_ONLY, ZERO_COLUMNS, make(3)])
def test_every_row_operation_works_whatever_the_columns(data):
    assert (
        len(data) == 3
        and len(data[-1]) == 1
        and len(data[1:]) == 2
        and len(data.select_idxs([0, 0])) == 2
    )
    assert [len(piece) for piece in data.chunk(2)] == [2, 1] and [
        len(piece) for piece in data.split(2)
    ] == [2, 1]
    assert len(DataProto.concat(data.chunk(2))) == 3
    assert len(data.repeat(2)) == 6 and len(data.clone()) == 3 and len(copy.copy(data)) == 3
    assert len(data.select([], [])) == (0 if data.batch is None else 3)
    padded, pad_size = pad_dataproto_to_divisor(data, 4)
    assert (len(padded), pad_size, len(unpad_dataproto(padded, pad_size))) == (4, 1, 3)
    assert len(list(data.make_iterator(1, 2, seed=0, dataloader_kwargs={"shuffle": True}))) == 6
    reordered = copy.copy(data)
    reordered.reorder([2, 1, 0])
    assert len(reordered) == 3
    united = copy.copy(data).union(DataProto.from_dict({"new": torch.ones(3)}))
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


def test_no_columns_at_all():
    empty = DataProto(meta_info={"k": 1})
    pieces = empty.chunk(3)
    assert [len(piece) for piece in pieces] == [0, 0, 0] and all(
        piece.batch is None for piece in pieces
    )
    assert pieces[2].meta_info is empty.meta_info
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


def test_list_of_dict_to_dict_of_list():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 4, "a": 3}]) == {
        "a": [1, 3],
        "b": [2, 4],
    }
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(ValueError, match=r"row 1 has keys \['a'\]; row 0 has \['a', 'b'\]"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 1}])


def test_custom_np_concatenate_keeps_one_object_per_row():
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
    with pytest.raises(ValueError, match=r"2 rows with 3 rows"):
        union_tensor_dict(left, TensorDict({}, batch_size=[3]))
    arrays = {"a": np.array([1, 2], dtype=object)}
    assert union_numpy_dict(arrays, {"b": np.array([3, 4], dtype=object)}) is arrays and list(
        arrays
    ) == ["a", "b"]
    with pytest.raises(ValueError, match="non-tensor column 'a'"):
        union_numpy_dict(arrays, {"a": np.array([1, 3], dtype=object)})
