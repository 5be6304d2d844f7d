"""Splitting and joining over grids of ranks, and `register`: pure functions, without a cluster."""

import asyncio
import functools
import inspect
import itertools
from concurrent.futures import Future

import pytest
import torch

from roll.distributed.scheduler.decorator import (
    BIND_WORKER_METHOD_FLAG,
    Dispatch,
    Execute,
    MethodSpec,
    RankInfo,
    collect_all_to_all,
    collect_all_to_one,
    collect_dp_mp_compute,
    dispatch_all_to_all,
    dispatch_dp_mp_compute,
    dispatch_dp_mp_dispatch_first,
    dispatch_one_to_all,
    func_generator,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    method_spec,
    need_collect_dp_mp_compute,
    register,
    registered_methods,
)
from roll.distributed.scheduler.protocol import DataProto, ObjectRefWrap


class Grid:
    """Ranks counted with the last axis of `order` fastest: ("dp", "tp") puts tp peers side by side.

    With `reverse`, rank 0 has the highest dp_rank: ranks and DP ranks need not grow together.
    """

    def __init__(self, dp=1, tp=1, pp=1, cp=1, order=("pp", "dp", "cp", "tp"), reverse=False):
        sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
        self.name = f"dp{dp}-tp{tp}-pp{pp}-cp{cp}-{order[-1]}{'-reverse' if reverse else ''}"
        self.dp_size = dp
        self.ranks = []
        for coordinates in itertools.product(*(range(sizes[axis]) for axis in order)):
            at = {f"{axis}_rank": i for axis, i in zip(order, coordinates, strict=True)}
            self.ranks.append(RankInfo(pp_size=pp, **at))
        if reverse:
            self.ranks.reverse()
        self.world_size = len(self.ranks)

    def get_rank_info(self, rank):
        return self.ranks[rank]


SIZES = [
    *({"dp": 1}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 3}, {"dp": 3, "cp": 2}),
    *({"dp": 2, "tp": 2, "pp": 2, "cp": 2}, {"tp": 2, "pp": 2}),
]
ORDERS = [
    *(("pp", "dp", "cp", "tp"), ("tp", "cp", "dp", "pp")),
    *(("dp", "pp", "tp", "cp"), ("cp", "tp", "pp", "dp")),
]
LAYOUTS = [*((order, False) for order in ORDERS), (ORDERS[0], True)]
GRIDS = [Grid(**sizes, order=order, reverse=turned) for sizes in SIZES for order, turned in LAYOUTS]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
both_dp_modes = pytest.mark.parametrize(
    "dispatch", [dispatch_dp_mp_compute, dispatch_dp_mp_dispatch_first]
)


def batch(rows: int) -> DataProto:
    names = {"name": [f"r{i}" for i in range(rows)]}
    return DataProto.from_dict({"row": torch.arange(rows)}, names, {"step": 1})


def rows(data: DataProto) -> list[int]:
    return [] if data.batch is None else data.batch["row"].tolist()


# Splitting


@grids
def test_peers_of_a_dp_rank_get_the_same_piece_and_pieces_follow_dp_rank(grid):
    (pieces,), kwargs = dispatch_dp_mp_compute(grid, batch(7), ids=list(range(12)))
    expected = [piece.batch["row"].tolist() for piece in batch(7).chunk(grid.dp_size)]
    size = 12 // grid.dp_size
    for rank, at in enumerate(grid.ranks):
        assert rows(pieces[rank]) == expected[at.dp_rank]
        assert kwargs["ids"][rank] == list(range(at.dp_rank * size, (at.dp_rank + 1) * size))
    assert len(pieces) == len(kwargs["ids"]) == grid.world_size


@grids
def test_dispatch_first_sends_rows_to_one_rank_of_each_dp_group(grid):
    (pieces, lists), _ = dispatch_dp_mp_dispatch_first(grid, batch(7), list(range(12)))
    (full, full_lists), _ = dispatch_dp_mp_compute(grid, batch(7), list(range(12)))
    for rank, at in enumerate(grid.ranks):
        first = at.tp_rank == at.pp_rank == at.cp_rank == 0
        assert rows(pieces[rank]) == (rows(full[rank]) if first else [])
        assert (pieces[rank].batch is None) == (not first)
        assert pieces[rank].non_tensor_batch.keys() == ({"name"} if first else set())
        assert pieces[rank].meta_info == {"step": 1}
    assert lists == full_lists  # only batches are held back
    assert sorted(row for piece in pieces for row in rows(piece)) == list(range(7))


def test_one_to_all_repeats_the_same_objects():
    data = batch(1)
    args, kwargs = dispatch_one_to_all(Grid(dp=3), data, None, step=3)
    assert len(args[0]) == 3 and all(value is data for value in args[0])
    assert args[1] == [None] * 3 and kwargs == {"step": [3] * 3}


def test_all_to_all_takes_one_value_per_worker():
    spread = dispatch_all_to_all(Grid(dp=2), ["a", "b"], x=(1, 2))
    assert spread == ((["a", "b"],), {"x": [1, 2]})
    with pytest.raises(
        ValueError, match=r"positional argument 1 has 3 values; .* of the 2 workers"
    ):
        dispatch_all_to_all(Grid(dp=2), ["a", "b"], [1, 2, 3])
    with pytest.raises(TypeError, match=r"'data' is a DataProto; .* list .*Dispatch.ONE_TO_ALL"):
        dispatch_all_to_all(Grid(dp=2), data=batch(2))


@pytest.mark.parametrize("mode", Dispatch)
def test_a_call_without_arguments_has_nothing_to_split(mode):
    assert get_predefined_dispatch_fn(mode)["dispatch_fn"](Grid(dp=2)) == ((), {})


@pytest.mark.parametrize("dp", [1, 2])
def test_pieces_are_views_with_columns_and_meta_of_their_own(dp):
    data = batch(4)
    (pieces,), _ = dispatch_dp_mp_compute(Grid(dp=dp), data)
    assert pieces[0].batch["row"].data_ptr() == data.batch["row"].data_ptr()
    for piece in pieces:
        piece["new"] = torch.zeros(len(piece))
        piece.meta_info["new"] = 1
    assert "new" not in data and data.meta_info == {"step": 1}
    # Peers get one object, so that it can be sent once.
    (pieces,), _ = dispatch_dp_mp_compute(Grid(dp=2, tp=2), data)
    assert pieces[0] is pieces[1] and pieces[2] is pieces[3] and pieces[0] is not pieces[2]


def test_batches_without_rows_reach_every_rank():
    for data in (DataProto(meta_info={"k": 1}), batch(0)):
        (pieces,), _ = dispatch_dp_mp_dispatch_first(Grid(dp=3), data)
        assert [len(piece) for piece in pieces] == [0, 0, 0]
        assert all(piece.meta_info == data.meta_info for piece in pieces)


def test_tuples_and_chunkable_objects_are_split():
    args, _ = dispatch_dp_mp_compute(Grid(dp=2), ("a", "b"), torch.arange(5))
    assert args[0] == [("a",), ("b",)]
    assert [piece.tolist() for piece in args[1]] == [[0, 1, 2], [3, 4]]


@both_dp_modes
@pytest.mark.parametrize(
    "value, error, message",
    [
        ([1, 2, 3], ValueError, "is a list of 3 values, not divisible by dp_size=2; pass 2 or 4"),
        (None, TypeError, "is None, which cannot be split over dp_size=2: .* DataProto, .*meta_"),
        (3, TypeError, "is a int, which cannot be split"),
        ({"a": 1}, TypeError, "is a dict, which cannot be split"),
        (batch(1), ValueError, "is a DataProto of 1 rows, fewer than dp_size=2.* pad_dataproto_to"),
        (torch.arange(1), ValueError, r": Tensor.chunk\(chunks=2\) gave 1 pieces"),
    ],
)
def test_what_cannot_be_split_is_named(dispatch, value, error, message):
    with pytest.raises(error, match=f"argument 'x' ?{message}"):
        dispatch(Grid(dp=2, tp=2), batch(4), x=value)
    with pytest.raises(error, match="positional argument 1"):
        dispatch(Grid(dp=2), batch(4), value)


# Joining


@grids
@both_dp_modes
def test_split_then_joined_is_the_input_in_its_order(grid, dispatch):
    (pieces,), _ = dispatch(grid, batch(9))
    peers = {p.dp_rank: piece for p, piece in zip(grid.ranks, pieces, strict=True) if len(piece)}
    # Every rank has its group's rows, as after the strategy's broadcast; those that do not speak
    # return rubbish.
    speaks = [need_collect_dp_mp_compute(at) for at in grid.ranks]
    output = [peers[at.dp_rank] if s else "?" for at, s in zip(grid.ranks, speaks, strict=True)]
    joined = collect_dp_mp_compute(grid, output)
    assert rows(joined) == list(range(9)) and joined["name"].tolist() == [f"r{i}" for i in range(9)]

    lists = [[at.dp_rank, "x"] if s else None for at, s in zip(grid.ranks, speaks, strict=True)]
    expected = [item for dp in range(grid.dp_size) for item in (dp, "x")]
    assert collect_dp_mp_compute(grid, lists) == expected


@grids
def test_references_are_wrapped_for_all_ranks(grid):
    pieces = batch(9).chunk(grid.dp_size)
    refs = [Future() for _ in grid.ranks]
    wraps = collect_dp_mp_compute(grid, refs)
    assert {id(wrap.obj_ref) for wrap in wraps} == set(map(id, refs))
    assert len(wraps) == grid.world_size
    for ref, at in zip(refs, grid.ranks, strict=True):
        wrap = next(wrap for wrap in wraps if wrap.obj_ref is ref)
        assert wrap.collected == need_collect_dp_mp_compute(at)
        ref.set_result(pieces[at.dp_rank])
    assert rows(DataProto.materialize_concat(wraps)) == list(range(9))


def test_one_speaker_per_dp_group():
    grid = Grid(dp=2, tp=2, pp=2, cp=2)
    speakers = [at for at in grid.ranks if need_collect_dp_mp_compute(at)]
    places = [(at.dp_rank, at.tp_rank, at.cp_rank, at.pp_rank) for at in speakers]
    assert places == [(0, 0, 0, 1), (1, 0, 0, 1)]


def test_outputs_without_rows():
    assert collect_dp_mp_compute(Grid(dp=2, tp=2), [None, batch(1), None, 5]) is None
    outputs = [DataProto(meta_info={"metrics": {"loss": value}}) for value in (1.0, 2.0)]
    joined = collect_dp_mp_compute(Grid(dp=2), outputs)
    assert len(joined) == 0 and joined.meta_info == {"metrics": {"loss": [1.0, 2.0]}}


@pytest.mark.parametrize(
    "outputs, found",
    [
        ([{"a": 1}, {"a": 2}], "rank 0: dict, rank 1: dict"),
        ([None, batch(1)], "rank 0: NoneType, rank 1: DataProto"),
        ([batch(1), [1]], "rank 0: DataProto, rank 1: list"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs, found):
    with pytest.raises(TypeError, match=rf"\({found}\): .* returns a DataProto, a list or None"):
        collect_dp_mp_compute(Grid(dp=2), outputs)


def test_collecting_all_or_one():
    grid, refs = Grid(dp=2), [Future(), Future()]
    assert collect_all_to_all(grid, [1, 2]) == [1, 2] and collect_all_to_one(grid, [1, 2]) == 1
    assert collect_all_to_all(grid, refs) == refs
    wraps = [ObjectRefWrap(refs[0], True), ObjectRefWrap(refs[1], False)]
    assert collect_all_to_one(grid, refs) == wraps
    for collect in (collect_all_to_all, collect_all_to_one, collect_dp_mp_compute):
        with pytest.raises(ValueError, match="got 1 outputs from 2 workers"):
            collect(grid, [None])


def test_an_impossible_grid_is_named():
    grid = Grid(dp=2)
    grid.ranks[1] = grid.ranks[0]
    with pytest.raises(ValueError, match="ranks 0 and 1 both speak for dp_rank 0"):
        collect_dp_mp_compute(grid, [None, None])
    grid.ranks[1] = RankInfo(dp_rank=1, tp_rank=1)
    with pytest.raises(ValueError, match=r"only dp_ranks \[0\] have .* tp_rank=0.* dp_size=2"):
        collect_dp_mp_compute(grid, [None, None])


# The decorator


class Worker:
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def double(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, value, offset=0):
        return value + offset

    @register(execute_mode=Execute.RANK_ZERO)
    def only_zero(self):
        """The default dispatch mode."""

    def plain(self):
        """Not registered."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _private(self):
        """Not for the cluster."""


def test_a_decorated_function_is_the_same_function():
    def method(self, x: int, *, y: int = 2) -> int:
        return x + y

    async def coroutine(self):
        return 5

    decorated = register(dispatch_mode=Dispatch.ONE_TO_ALL)(method)
    assert decorated is method and decorated(None, 1) == 3
    assert register()(coroutine) is coroutine and inspect.iscoroutinefunction(coroutine)
    assert asyncio.run(coroutine(None)) == 5
    register(Dispatch.ONE_TO_ALL, Execute.ALL, True, trace=True, prefetch=True, to_remote=True)


def test_the_spec_can_be_read_as_attributes_and_as_a_dict():
    spec = getattr(Worker.double, BIND_WORKER_METHOD_FLAG)
    assert spec == MethodSpec(Dispatch.DP_MP_COMPUTE, Execute.ALL, clear_cache=False)
    assert spec["dispatch_mode"] is Dispatch.DP_MP_COMPUTE and spec["execute_mode"] is Execute.ALL
    with pytest.raises(KeyError):
        spec["nope"]
    default = MethodSpec(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO, clear_cache=True)
    assert method_spec(Worker, "only_zero") == default


FUNCTIONS = {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all}


@pytest.mark.parametrize(
    "dispatch_mode, execute_mode, error, message",
    [
        ("ONE_TO_ALL", Execute.ALL, TypeError, "dispatch_mode is a str; expected a Dispatch mem"),
        ({"dispatch_fn": print}, Execute.ALL, ValueError, r"collect_fn.*found \['dispatch_fn'\]"),
        (FUNCTIONS | {"collect_fn": 3}, Execute.ALL, TypeError, r"\['collect_fn'\] is a int; exp"),
        (Dispatch.ONE_TO_ALL, "ALL", TypeError, "execute_mode is a str; expected a member of Exec"),
        (Dispatch.DP_MP_COMPUTE, Execute.RANK_ZERO, ValueError, "=DP_MP_COMPUTE has nothing to"),
        (FUNCTIONS, Execute.RANK_ZERO, ValueError, "=a dict of functions has nothing to split"),
    ],
)
def test_bad_arguments_fail_where_the_class_is_written(dispatch_mode, execute_mode, error, message):
    with pytest.raises(error, match=message):
        register(dispatch_mode, execute_mode)


def test_registered_methods_are_the_public_ones_and_overrides_inherit_the_nearest_spec():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Child(Worker):
        double = logged(Worker.double)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
        def add(self, value, offset=0):
            return -1

        only_zero = None

    class GrandChild(Child):
        def add(self, value, offset=0):
            return -2

    assert set(registered_methods(Worker)) == {"double", "add", "only_zero"}
    assert method_spec(Worker, "plain") is None and method_spec(Worker, "absent") is None
    assert method_spec(GrandChild, "double") == method_spec(Worker, "double")
    assert method_spec(GrandChild, "add").dispatch_mode is Dispatch.ONE_TO_ALL_ONE
    assert set(registered_methods(GrandChild)) == {"double", "add"}


def test_rolls_functions():
    class Cluster(Grid):
        def execute_all(self, name, value):
            return [f"{name} {item}" for item in value]

        def gather(self, refs, name):
            return [f"{ref} of {name}" for ref in refs]

    cluster = Cluster(dp=2)
    call = func_generator(
        cluster, "add", dispatch_one_to_all, collect_all_to_all, cluster.execute_all
    )
    assert call(1) == ["add 1 of add"] * 2 and call(1, blocking=False) == ["add 1"] * 2
    expected = {
        Dispatch.DP_MP_DISPATCH_FIRST: (dispatch_dp_mp_dispatch_first, collect_dp_mp_compute),
        Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: (
            dispatch_dp_mp_dispatch_first,
            collect_all_to_all,
        ),
        Dispatch.DP_MP_COMPUTE: (dispatch_dp_mp_compute, collect_dp_mp_compute),
        Dispatch.ONE_TO_ALL_ONE: (dispatch_one_to_all, collect_all_to_one),
    }
    for mode, functions in expected.items():
        assert tuple(get_predefined_dispatch_fn(mode).values()) == functions
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
