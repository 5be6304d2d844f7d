"""Laws of DataProto over random batches: any number of rows, columns, dtypes and extra
dimensions."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from roll.distributed.scheduler.protocol import (
    DataProto,
    pad_dataproto_to_divisor,
    same_value,
    unpad_dataproto,
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
KEYS = st.text(max_size=4)
DICT_KEYS = KEYS | st.integers() | st.sampled_from(["$float", "$x"]) | st.tuples(st.integers())
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ARRAYS = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.sampled_from(["<f4", "<i8", "?", "<U3", "S2", "<M8[s]", "O"]),
    st.integers(0, 99),
)
NUMPY_SCALARS = st.sampled_from(
    [np.float32(0.1), np.float64(1), np.int64(1), np.bool_(True), np.str_("s")]
)
TENSORS = st.builds(
    lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 3), st.sampled_from(DTYPES)
)
VALUES = st.recursive(
    PLAIN | ARRAYS | NUMPY_SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(DICT_KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)

laws = settings(max_examples=40, deadline=None)


@st.composite
def batches(
    draw: st.DrawFn, min_rows: int = 0, max_rows: int = 9, values: st.SearchStrategy = VALUES
) -> DataProto:
    """Tensor columns (or none, or no TensorDict at all), non-tensor columns, meta_info."""
    num_rows = draw(st.integers(min_rows, max_rows))
    tensors = {}
    for i in range(draw(st.integers(0, 3))):
        shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
        tensor = (
            torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
            * 4
        )
        if draw(st.booleans()) and tensor.ndim > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        tensors[f"t{i}"] = tensor.to(draw(st.sampled_from(DTYPES)))
    arrays = {
        f"n{i}": draw(st.lists(values, min_size=num_rows, max_size=num_rows))
        for i in range(draw(st.integers(0, 2)))
    }
    needs_batch = bool(tensors) or (min_rows > 0 and not arrays)
    batch = (
        TensorDict(tensors, batch_size=[num_rows]) if needs_batch or draw(st.booleans()) else None
    )
    meta = draw(st.dictionaries(KEYS, values, max_size=2))
    return DataProto(batch, arrays, meta)


def assert_same(left: DataProto, right: DataProto) -> None:
    """Equal in everything that a reader can see, dtypes and order of columns included."""
    assert len(left) == len(right)
    assert (left.batch is None) == (right.batch is None)
    if left.batch is not None and right.batch is not None:
        assert left.batch.batch_size == right.batch.batch_size
        assert list(left.batch.keys()) == list(right.batch.keys())
        for key in left.batch.keys():
            assert same_value(left[key], right[key]), key
    assert list(left.non_tensor_batch) == list(right.non_tensor_batch)
    for key in left.non_tensor_batch:
        assert same_value(left[key], right[key]), key
    assert same_value(left.meta_info, right.meta_info)


def pieces_of(data: DataProto, chunks: int) -> int:
    """A number of chunks that `data` allows."""
    return min(chunks, len(data)) or chunks


@laws
@given(batches(), st.integers(1, 5))
def test_chunk_then_concat_is_identity(data, chunks):
    chunks = pieces_of(data, chunks)
    pieces = data.chunk(chunks)
    assert len(pieces) == chunks and max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert_same(DataProto.concat(pieces, global_keys=()), data)
    assert_same(DataProto.concat(data.chunk(chunks, clone=False), global_keys=()), data)


@laws
@given(batches(min_rows=1), st.integers(1, 5))
def test_split_then_concat_is_identity(data, size):
    assert_same(DataProto.concat(data.split(size), global_keys=()), data)


@laws
@given(batches(min_rows=1), st.randoms(use_true_random=False))
def test_reorder_by_a_permutation_and_its_inverse_is_identity(data, rng):
    permutation = list(range(len(data)))
    rng.shuffle(permutation)
    permuted = data.clone()
    permuted.reorder(torch.tensor(permutation))
    for row, source in enumerate(permutation):
        assert_same(permuted[row], data[source])
    permuted.reorder(np.argsort(permutation))
    assert_same(permuted, data)


@laws
@given(batches(), st.integers(0, 3))
def test_repeat_orders_rows(data, times):
    rows = list(range(len(data)))
    assert_same(data.repeat(times), data.select_idxs([row for row in rows for _ in range(times)]))
    assert_same(data.repeat(times, interleave=False), data.select_idxs(rows * times))


@laws
@given(batches(), st.slices(9))
def test_slices_agree_with_positions_and_masks(data, index):
    positions = list(range(len(data)))[index]
    assert_same(data[index], data.select_idxs(positions))
    assert_same(data.select_idxs([i - len(data) for i in positions]), data.select_idxs(positions))
    mask = [i in positions for i in range(len(data))]
    assert_same(data.select_idxs(mask), data.select_idxs(sorted(positions)))


@laws
@given(batches())
def test_selected_parts_unite_to_the_whole(data):
    tensor_keys = [] if data.batch is None else list(data.batch.keys())
    for cut in range(len(tensor_keys) + 1):
        left = data.select(tensor_keys[:cut], list(data.non_tensor_batch))
        right = data.select(tensor_keys[cut:], [])
        assert_same(left.union(right), data)
    assert_same(data.clone().union(data.clone()), data)


@laws
@given(batches(min_rows=1), st.data())
def test_union_finds_one_changed_value(data, choose):
    data["x"] = torch.arange(len(data))
    data["o"] = np.array(["v"] * len(data))
    data.meta_info["m"] = {"deep": [1.0, float("nan")]}
    other, row = data.clone(), choose.draw(st.integers(0, len(data) - 1))
    where = choose.draw(st.sampled_from(["x", "o", "m"]))
    if where == "x":
        other["x"][row] += 1
    elif where == "o":
        other["o"][row] = "w"
    else:
        other.meta_info["m"]["deep"][0] = 2.0
    with pytest.raises(ValueError, match=f"'{where}' is in both batches with different values"):
        data.union(other)


@laws
@given(batches(min_rows=1), st.integers(1, 6))
def test_pad_then_unpad_is_identity(data, divisor):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    for row in range(len(data), len(padded)):
        assert_same(padded[row], data[row % len(data)])
    assert_same(unpad_dataproto(padded, pad_size), data)


@laws
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_every_epoch_of_an_iterator_visits_every_row_once(size, count, seed):
    data = DataProto.from_dict({"row": torch.arange(size * count)})
    drawn = data.make_iterator(size, 3, seed=seed, dataloader_kwargs={"shuffle": True})
    rows = torch.cat([batch["row"] for batch in drawn]).view(3, -1)
    assert all(sorted(epoch.tolist()) == list(range(size * count)) for epoch in rows)


@laws
@given(batches(min_rows=1), st.lists(st.sampled_from("abc"), min_size=9, max_size=9))
def test_groups_partition_the_rows(data, labels):
    data["label"] = np.array(labels[: len(data)])
    data["row"] = torch.arange(len(data))
    groups = data.group_by("label")
    assert list(groups) == list(dict.fromkeys(labels[: len(data)]))
    assert sorted(torch.cat([group["row"] for group in groups.values()]).tolist()) == list(
        range(len(data))
    )
    for label, group in groups.items():
        assert set(group["label"]) == {label} and group["row"].tolist() == sorted(
            group["row"].tolist()
        )


@laws
@given(batches(), st.sampled_from([4, 5]))
def test_pickle_round_trip(data, protocol):
    assert_same(pickle.loads(pickle.dumps(data, protocol=protocol)), data)
    assert_same(pickle.loads(pickle.dumps(data[1:3], protocol=protocol)), data[1:3])


@laws
@given(batches())
def test_save_load_round_trip(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump"
        data.save(path)
        loaded = DataProto.load(path)
    assert_same(loaded, data)
    assert typed(loaded.meta_info) == typed(data.meta_info)
    for key, column in data.non_tensor_batch.items():
        assert typed(list(loaded[key])) == typed(list(column))


def typed(value: object) -> object:
    """The exact types of a nested value: 1, 1.0, True and np.float32(1) all compare equal."""
    if isinstance(value, dict):
        return [(type(k), k, typed(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(v) for v in value]
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape
    return type(value)
