"""Splitting and joining over grids of ranks, as pure functions: no cluster anywhere."""

import itertools
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch

from roll.distributed.scheduler.dispatch import (
    collect_all_to_all,
    collect_all_to_one,
    collect_dp_mp_compute,
    dispatch_all_to_all,
    dispatch_dp_mp_compute,
    dispatch_dp_mp_dispatch_first,
    dispatch_one_to_all,
    need_collect_dp_mp_compute,
)
from roll.distributed.scheduler.protocol import DataProto, ObjectRefWrap


@dataclass(frozen=True)
class Position:
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    pp_size: int

    @property
    def is_pipeline_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


class FakeGrid:
    """Ranks counted with the last axis of `order` fastest: order ("dp", "tp") puts tp peers next to each other.

    With `reverse`, rank 0 has the highest dp_rank: nothing may rely on ranks and DP ranks growing together.
    """

    def __init__(self, dp=1, tp=1, pp=1, cp=1, order=("pp", "dp", "cp", "tp"), reverse=False):
        sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
        self.name = (
            f"dp{dp}-tp{tp}-pp{pp}-cp{cp}-{order[-1]}-fastest{'-reverse' if reverse else ''}"
        )
        self.dp_size = dp
        self.ranks = []
        for coordinates in itertools.product(*(range(sizes[axis]) for axis in order)):
            at = dict(zip(order, coordinates, strict=True))
            self.ranks.append(Position(at["dp"], at["tp"], at["pp"], at["cp"], pp))
        if reverse:
            self.ranks.reverse()
        self.world_size = len(self.ranks)

    def get_rank_info(self, rank: int) -> Position:
        return self.ranks[rank]


SIZES = [
    {"dp": 1},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "pp": 3},
    {"dp": 3, "cp": 2},
    {"dp": 2, "tp": 2, "pp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
]
ORDERS = [
    ("pp", "dp", "cp", "tp"),
    ("tp", "cp", "dp", "pp"),
    ("dp", "pp", "tp", "cp"),
    ("cp", "tp", "pp", "dp"),
]
LAYOUTS = [*((order, False) for order in ORDERS), (ORDERS[0], True)]
GRIDS = [
    FakeGrid(**sizes, order=order, reverse=reverse) for sizes in SIZES for order, reverse in LAYOUTS
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)


def batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"row": torch.arange(rows)}, {"name": [f"r{i}" for i in range(rows)]}, {"step": 1}
    )


def rows(data: DataProto) -> list[int]:
    return [] if data.batch is None else data.batch["row"].tolist()


# Splitting


@grids
def test_peers_of_a_dp_rank_get_the_same_piece_and_pieces_follow_dp_rank(grid):
    (pieces,), kwargs = dispatch_dp_mp_compute(grid, batch(7), ids=list(range(12)))
    expected = [piece.batch["row"].tolist() for piece in batch(7).chunk(grid.dp_size)]
    for rank, position in enumerate(grid.ranks):
        assert rows(pieces[rank]) == expected[position.dp_rank]
        size = 12 // grid.dp_size
        assert kwargs["ids"][rank] == list(
            range(position.dp_rank * size, (position.dp_rank + 1) * size)
        )
    assert len(pieces) == len(kwargs["ids"]) == grid.world_size


@grids
def test_dispatch_first_sends_rows_to_one_rank_of_each_dp_group(grid):
    (pieces, lists), _ = dispatch_dp_mp_dispatch_first(grid, batch(7), list(range(12)))
    (full, full_lists), _ = dispatch_dp_mp_compute(grid, batch(7), list(range(12)))
    for rank, position in enumerate(grid.ranks):
        first = position.tp_rank == position.pp_rank == position.cp_rank == 0
        assert rows(pieces[rank]) == (rows(full[rank]) if first else [])
        assert (pieces[rank].batch is None) == (not first)
        assert pieces[rank].non_tensor_batch.keys() == ({"name"} if first else set())
        assert pieces[rank].meta_info == {"step": 1}
    assert lists == full_lists  # only batches are held back
    assert sorted(row for piece in pieces for row in rows(piece)) == list(range(7))


@grids
def test_one_to_all_repeats_the_same_objects(grid):
    data = batch(1)
    args, kwargs = dispatch_one_to_all(grid, data, None, step=3)
    assert len(args[0]) == grid.world_size and all(value is data for value in args[0])
    assert args[1] == [None] * grid.world_size and kwargs == {"step": [3] * grid.world_size}


def test_all_to_all_takes_one_value_per_worker():
    assert dispatch_all_to_all(FakeGrid(dp=2), ["a", "b"], x=(1, 2)) == (
        (["a", "b"],),
        {"x": [1, 2]},
    )
    with pytest.raises(
        ValueError,
        match="positional argument 1 has 3 values; ALL_TO_ALL needs one for each of the 2",
    ):
        dispatch_all_to_all(FakeGrid(dp=2), ["a", "b"], [1, 2, 3])
    with pytest.raises(
        TypeError, match=r"argument 'data' is a DataProto; .* list .*Dispatch.ONE_TO_ALL"
    ):
        dispatch_all_to_all(FakeGrid(dp=2), data=batch(2))


@pytest.mark.parametrize(
    "dispatch",
    [
        dispatch_one_to_all,
        dispatch_all_to_all,
        dispatch_dp_mp_compute,
        dispatch_dp_mp_dispatch_first,
    ],
)
def test_a_call_without_arguments_has_nothing_to_split(dispatch):
    assert dispatch(FakeGrid(dp=2)) == ((), {})


@pytest.mark.parametrize("dp", [1, 2])
def test_pieces_are_views_with_columns_and_meta_of_their_own(dp):
    data = batch(4)
    (pieces,), _ = dispatch_dp_mp_compute(FakeGrid(dp=dp), data)
    assert pieces[0].batch["row"].data_ptr() == data.batch["row"].data_ptr()
    for piece in pieces:
        piece["new"] = torch.zeros(len(piece))
        piece.meta_info["new"] = 1
    assert "new" not in data and data.meta_info == {"step": 1}


def test_peers_receive_one_object_so_that_it_can_be_sent_once():
    (pieces,), _ = dispatch_dp_mp_compute(FakeGrid(dp=2, tp=2), batch(4))
    assert pieces[0] is pieces[1] and pieces[2] is pieces[3] and pieces[0] is not pieces[2]


def test_batches_without_rows_reach_every_rank():
    for data in (DataProto(meta_info={"k": 1}), batch(0)):
        (pieces,), _ = dispatch_dp_mp_dispatch_first(FakeGrid(dp=3), data)
        assert [len(piece) for piece in pieces] == [0, 0, 0] and all(
            p.meta_info == data.meta_info for p in pieces
        )


def test_tuples_and_chunkable_objects_are_split():
    args, _ = dispatch_dp_mp_compute(FakeGrid(dp=2), ("a", "b"), torch.arange(5))
    assert args[0] == [("a",), ("b",)] and [piece.tolist() for piece in args[1]] == [
        [0, 1, 2],
        [3, 4],
    ]


@pytest.mark.parametrize(
    "value, error, message",
    [
        (
            [1, 2, 3],
            ValueError,
            "argument 'x' is a list of 3 values, not divisible by dp_size=2; pass 2 or 4",
        ),
        (
            None,
            TypeError,
            r"argument 'x' is None, which cannot be split over dp_size=2: .* DataProto, list.*meta_",
        ),
        (3, TypeError, "argument 'x' is a int, which cannot be split"),
        ({"a": 1}, TypeError, "argument 'x' is a dict, which cannot be split"),
        (
            batch(1),
            ValueError,
            r"'x' is a DataProto of 1 rows, fewer than dp_size=2.* pad_dataproto_to_divisor",
        ),
        (torch.arange(1), ValueError, r"argument 'x': Tensor.chunk\(chunks=2\) gave 1 pieces"),
    ],
)
@pytest.mark.parametrize("dispatch", [dispatch_dp_mp_compute, dispatch_dp_mp_dispatch_first])
def test_what_cannot_be_split_is_named(dispatch, value, error, message):
    with pytest.raises(error, match=message):
        dispatch(FakeGrid(dp=2, tp=2), batch(4), x=value)
    with pytest.raises(error, match="positional argument 1"):
        dispatch(FakeGrid(dp=2), batch(4), value)


# Joining


@grids
@pytest.mark.parametrize("dispatch", [dispatch_dp_mp_compute, dispatch_dp_mp_dispatch_first])
def test_split_then_joined_is_the_input_in_its_order(grid, dispatch):
    data = batch(9)
    (pieces,), _ = dispatch(grid, data)
    peers = {p.dp_rank: piece for p, piece in zip(grid.ranks, pieces, strict=True) if len(piece)}
    # Every rank has its group's rows, as after the strategy's broadcast; those that do not speak return rubbish.
    output = [
        peers[position.dp_rank]
        if need_collect_dp_mp_compute(position)
        else f"rubbish of rank {rank}"
        for rank, position in enumerate(grid.ranks)
    ]
    joined = collect_dp_mp_compute(grid, output)
    assert rows(joined) == list(range(9)) and joined["name"].tolist() == [f"r{i}" for i in range(9)]


@grids
def test_lists_are_flattened_in_dp_order(grid):
    output = [
        [position.dp_rank, "x"] if need_collect_dp_mp_compute(position) else None
        for position in grid.ranks
    ]
    assert collect_dp_mp_compute(grid, output) == [
        item for dp in range(grid.dp_size) for item in (dp, "x")
    ]


@grids
def test_references_are_wrapped_for_all_ranks(grid):
    data = batch(9)
    pieces = data.chunk(grid.dp_size)
    refs = [Future() for _ in grid.ranks]
    wraps = collect_dp_mp_compute(grid, refs)
    assert len(wraps) == grid.world_size and {id(wrap.obj_ref) for wrap in wraps} == set(
        map(id, refs)
    )
    for ref, position in zip(refs, grid.ranks, strict=True):
        wrap = next(wrap for wrap in wraps if wrap.obj_ref is ref)
        assert wrap.collected == need_collect_dp_mp_compute(position)
        ref.set_result(pieces[position.dp_rank])
    assert rows(DataProto.materialize_concat(wraps)) == list(range(9))


def test_one_speaker_per_dp_group():
    grid = FakeGrid(dp=2, tp=2, pp=2, cp=2)
    speakers = [position for position in grid.ranks if need_collect_dp_mp_compute(position)]
    assert [(p.dp_rank, p.tp_rank, p.cp_rank, p.pp_rank) for p in speakers] == [
        (0, 0, 0, 1),
        (1, 0, 0, 1),
    ]


def test_none_everywhere_is_none():
    assert collect_dp_mp_compute(FakeGrid(dp=2, tp=2), [None, batch(1), None, 5]) is None


def test_metrics_are_joined_and_meta_only_outputs_add_no_rows():
    outputs = [DataProto(meta_info={"metrics": {"loss": value}}) for value in (1.0, 2.0)]
    joined = collect_dp_mp_compute(FakeGrid(dp=2), outputs)
    assert len(joined) == 0 and joined.meta_info == {"metrics": {"loss": [1.0, 2.0]}}


@pytest.mark.parametrize(
    "outputs, found",
    [
        ([{"a": 1}, {"a": 2}], "rank 0: dict, rank 1: dict"),
        ([None, batch(1)], "rank 0: NoneType, rank 1: DataProto"),
        ([batch(1), [1]], "rank 0: DataProto, rank 1: list"),
        ([torch.ones(1), torch.ones(1)], "rank 0: Tensor, rank 1: Tensor"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs, found):
    with pytest.raises(TypeError, match=rf"\({found}\): .* returns a DataProto, a list or None"):
        collect_dp_mp_compute(FakeGrid(dp=2), outputs)


def test_collecting_all_or_one():
    grid = FakeGrid(dp=2)
    assert collect_all_to_all(grid, [1, 2]) == [1, 2]
    assert collect_all_to_one(grid, [1, 2]) == 1
    refs = [Future(), Future()]
    assert collect_all_to_all(grid, refs) == refs
    assert collect_all_to_one(grid, refs) == [
        ObjectRefWrap(refs[0], True),
        ObjectRefWrap(refs[1], False),
    ]


@pytest.mark.parametrize("collect", [collect_all_to_all, collect_all_to_one, collect_dp_mp_compute])
def test_the_number_of_outputs_is_checked(collect):
    with pytest.raises(ValueError, match="got 1 outputs from 2 workers"):
        collect(FakeGrid(dp=2), [None])


def test_an_impossible_grid_is_named():
    grid = FakeGrid(dp=2)
    grid.ranks[1] = grid.ranks[0]
    with pytest.raises(ValueError, match="ranks 0 and 1 both speak for dp_rank 0"):
        collect_dp_mp_compute(grid, [None, None])
    grid.ranks[1] = Position(dp_rank=1, tp_rank=1, pp_rank=0, cp_rank=0, pp_size=1)
    with pytest.raises(
        ValueError, match=r"only dp_ranks \[0\] have a rank with tp_rank=0.* dp_size=2"
    ):
        collect_dp_mp_compute(grid, [None, None])
