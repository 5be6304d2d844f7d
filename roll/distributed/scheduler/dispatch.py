"""How the arguments of one call are split over the workers of a cluster, and how their outputs become one result.

Everything here is a pure function of its arguments and of a `Grid`: how many ranks there are and where each of them
sits in the data/tensor/pipeline/context parallel grid. A `Cluster` is a grid; so is the ten-line class in the tests.

A dispatch function turns the caller's `*args, **kwargs` into the same arguments with every value replaced by a list of
`world_size` values, one per rank. A collect function turns the list of `world_size` outputs into what the caller gets.

Example, 4 ranks as dp=2 x tp=2 (rank = dp_rank * 2 + tp_rank) and a batch of rows a b c d:

    rank                       0        1        2        3
    DP_MP_COMPUTE              a b      a b      c d      c d
    DP_MP_DISPATCH_FIRST       a b      no rows  c d      no rows     (rank 1 and 3 still get the meta_info)
    collected                  yes      no       yes      no          -> concatenated to a b c d
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, TypedDict

from roll.distributed.scheduler.protocol import DataProto, ObjectRefWrap, is_ref

# One list of `world_size` values for each argument of the call. Arguments and outputs are whatever the worker's method
# takes and returns, hence Any.
RankArgs = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
DispatchFn = Callable[..., RankArgs]
CollectFn = Callable[[Any, list[Any]], Any]


class DispatchFunctions(TypedDict):
    """The two halves of a dispatch mode; the form in which a worker method brings its own."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


class RankPosition(Protocol):
    """Where one rank sits in the parallel grid. `RankInfo` is one."""

    @property
    def dp_rank(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def cp_rank(self) -> int: ...
    @property
    def is_pipeline_last_stage(self) -> bool: ...


class Grid(Protocol):
    """The shape of a cluster: all that splitting and collecting need to know of it."""

    @property
    def world_size(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    def get_rank_info(self, rank: int) -> RankPosition: ...


def dispatch_one_to_all(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every rank gets every argument, the same object."""
    return _for_each_argument(args, kwargs, lambda value, _: [value] * cluster.world_size)


def dispatch_all_to_all(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every argument already is a list or tuple with one value per rank."""

    def scatter(value: Any, label: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError(
                f"{label} is a {type(value).__name__}; ALL_TO_ALL takes a list with one value for each of the "
                f"{cluster.world_size} workers (to send one value to all of them, register with Dispatch.ONE_TO_ALL)"
            )
        if len(value) != cluster.world_size:
            raise ValueError(
                f"{label} has {len(value)} values; ALL_TO_ALL needs one for each of the {cluster.world_size} workers"
            )
        return list(value)

    return _for_each_argument(args, kwargs, scatter)


def dispatch_dp_mp_compute(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every argument is split over the DP ranks; the TP/PP/CP peers of one DP rank get the same piece.

    A DataProto is split by rows as `DataProto.chunk` does (the first pieces are a row longer where it does not divide),
    a list or tuple into contiguous pieces of equal length, any other object by its own `chunk(chunks=dp_size)`.
    The pieces of a DataProto are views: each has its own columns and `meta_info` dict, but the tensors share memory
    with the caller's. Workers in other processes never notice; one in this process must not write into them.
    """
    return _dispatch_dp(cluster, args, kwargs, first_rank_only=False)


def dispatch_dp_mp_dispatch_first(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """As `dispatch_dp_mp_compute`, but a DataProto travels once per DP rank.

    Only the rank at tp = pp = cp = 0 gets the rows. Its peers get a DataProto without rows and with the same
    `meta_info`; the strategy broadcasts the rows to them (`strategy.get_data_input`) where the interconnect is fast.
    """
    return _dispatch_dp(cluster, args, kwargs, first_rank_only=True)


def collect_all_to_all(cluster: Grid, output: list[Any]) -> list[Any]:
    """The outputs of all ranks, in rank order."""
    _check_output_count(cluster, output)
    return output


def collect_all_to_one(cluster: Grid, output: list[Any]) -> Any:
    """The output of rank 0. For references: all of them wrapped, so that a failure elsewhere is still seen; rank 0 is
    marked as collected."""
    _check_output_count(cluster, output)
    if is_ref(output[0]):
        return [ObjectRefWrap(ref, collected=rank == 0) for rank, ref in enumerate(output)]
    return output[0]


def need_collect_dp_mp_compute(rank_info: RankPosition) -> bool:
    """Whether this rank speaks for its DP group: the first TP and CP rank of the last pipeline stage."""
    return rank_info.tp_rank == 0 and rank_info.cp_rank == 0 and rank_info.is_pipeline_last_stage


def collect_dp_mp_compute(cluster: Grid, output: list[Any]) -> Any:
    """One output per DP rank, joined in the order in which the rows were split, however ranks are laid out on the grid.

    DataProtos are concatenated, lists flattened; None from every DP rank gives None. References (a call that was not
    waited for) come back as one `ObjectRefWrap` per rank, in the order that `DataProto.materialize_concat` needs.
    """
    _check_output_count(cluster, output)
    collected = _collected_ranks(cluster)
    if is_ref(output[0]):
        # All ranks are waited for later; those that speak come first, in DP order.
        others = [rank for rank in range(cluster.world_size) if rank not in set(collected)]
        speaking = [ObjectRefWrap(output[rank], collected=True) for rank in collected]
        return speaking + [ObjectRefWrap(output[rank], collected=False) for rank in others]

    pieces = [output[rank] for rank in collected]
    if all(isinstance(piece, DataProto) for piece in pieces):
        return DataProto.concat(pieces)
    if all(isinstance(piece, list) for piece in pieces):
        return list(chain.from_iterable(pieces))
    if all(piece is None for piece in pieces):
        return None
    found = ", ".join(f"rank {rank}: {type(output[rank]).__name__}" for rank in collected)
    raise TypeError(
        f"cannot join worker outputs ({found}): a method with a DP dispatch mode returns a DataProto, a list or None, "
        "and the same on every DP rank. For other outputs register it with DP_MP_DISPATCH_FIRST_COLLECT_ALL, or "
        "with a dict of dispatch_fn and collect_fn"
    )


def _for_each_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], spread: Callable[[Any, str], list[Any]]
) -> RankArgs:
    """Apply `spread(value, label)` to every argument; the label names the argument in error messages."""
    positional = tuple(spread(value, f"positional argument {i}") for i, value in enumerate(args))
    return positional, {name: spread(value, f"argument {name!r}") for name, value in kwargs.items()}


def _dispatch_dp(
    cluster: Grid, args: tuple[Any, ...], kwargs: dict[str, Any], *, first_rank_only: bool
) -> RankArgs:
    ranks = [cluster.get_rank_info(rank) for rank in range(cluster.world_size)]

    def spread(value: Any, label: str) -> list[Any]:
        pieces = _split(value, cluster.dp_size, label)
        if not (first_rank_only and isinstance(value, DataProto)):
            return [pieces[rank.dp_rank] for rank in ranks]
        return [
            piece
            if rank.tp_rank == rank.pp_rank == rank.cp_rank == 0
            else DataProto(meta_info=dict(piece.meta_info))
            for rank, piece in ((rank, pieces[rank.dp_rank]) for rank in ranks)
        ]

    return _for_each_argument(args, kwargs, spread)


def _split(value: Any, dp_size: int, label: str) -> list[Any]:
    """`dp_size` pieces of `value`, in order."""
    if isinstance(value, DataProto):
        if 0 < len(value) < dp_size:
            raise ValueError(
                f"{label} is a DataProto of {len(value)} rows, fewer than dp_size={dp_size}: every rank needs one. "
                "Pad it with pad_dataproto_to_divisor(data, dp_size) and drop the extra rows of the result with "
                "unpad_dataproto"
            )
        pieces = value.chunk(dp_size, clone=False)
        for piece in pieces:
            piece.meta_info = dict(value.meta_info)
        return pieces
    if isinstance(value, list | tuple):
        size, remainder = divmod(len(value), dp_size)
        if remainder:
            raise ValueError(
                f"{label} is a {type(value).__name__} of {len(value)} values, not divisible by dp_size={dp_size}; "
                f"pass {size * dp_size} or {(size + 1) * dp_size}"
            )
        return [value[i * size : (i + 1) * size] for i in range(dp_size)]
    chunk = getattr(value, "chunk", None)
    if not callable(chunk):
        raise TypeError(
            f"{label} is {'None' if value is None else f'a {type(value).__name__}'}, which cannot be split over "
            f"dp_size={dp_size}: DP dispatch modes take a DataProto, list, tuple or an object with chunk(chunks=n). "
            "Put single values into DataProto.meta_info, which every rank receives"
        )
    pieces = list(chunk(chunks=dp_size))
    if len(pieces) != dp_size:
        raise ValueError(
            f"{label}: {type(value).__name__}.chunk(chunks={dp_size}) gave {len(pieces)} pieces, not one per DP rank"
        )
    return pieces


def _collected_ranks(cluster: Grid) -> list[int]:
    """The rank that speaks for each DP rank, ordered by DP rank."""
    speaker_of: dict[int, int] = {}
    for rank in range(cluster.world_size):
        rank_info = cluster.get_rank_info(rank)
        if need_collect_dp_mp_compute(rank_info):
            other = speaker_of.setdefault(rank_info.dp_rank, rank)
            if other != rank:
                raise ValueError(
                    f"ranks {other} and {rank} both speak for dp_rank {rank_info.dp_rank}: check RankInfo"
                )
    if sorted(speaker_of) != list(range(cluster.dp_size)):
        raise ValueError(
            f"only dp_ranks {sorted(speaker_of)} have a rank with tp_rank=0, cp_rank=0 on the last pipeline stage, but "
            f"dp_size={cluster.dp_size}: check RankInfo"
        )
    return [speaker_of[dp_rank] for dp_rank in range(cluster.dp_size)]


def _check_output_count(cluster: Grid, output: list[Any]) -> None:
    if len(output) != cluster.world_size:
        raise ValueError(f"got {len(output)} outputs from {cluster.world_size} workers")
