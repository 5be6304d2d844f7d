"""`@register` says how a worker's method is called through its cluster; the method stays as it is.

    class ActorWorker(Worker):
        @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
        def compute_log_probs(self, data: DataProto) -> DataProto: ...

    worker.compute_log_probs(data)      # on a worker: an ordinary call
    cluster.compute_log_probs(data)     # on a cluster: split, run, joined in the order of `data`

A dispatch function turns the caller's arguments into the same arguments with every value replaced
by a list of `world_size` values, one per rank. A collect function turns the list of `world_size`
outputs into what the caller gets. Both are pure functions of their arguments and of a `Grid`.

Example, 4 ranks as dp=2 x tp=2 (rank = dp_rank * 2 + tp_rank) and a batch of rows a b c d:

    rank                       0        1        2        3
    DP_MP_COMPUTE              a b      a b      c d      c d
    DP_MP_DISPATCH_FIRST       a b      no rows  c d      no rows     (1 and 3 get the meta_info)
    collected                  yes      no       yes      no          -> concatenated to a b c d
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from types import FunctionType
from typing import Any, Protocol, TypedDict, TypeVar

from roll.distributed.scheduler.protocol import DataProto, ObjectRefWrap, is_ref

# The attribute of a method under which its MethodSpec is found.
BIND_WORKER_METHOD_FLAG = "_roll_method_spec"

# One list of `world_size` values for each argument of the call. Arguments and outputs are whatever
# the worker's method takes and returns, hence Any.
RankArgs = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
DispatchFn = Callable[..., RankArgs]
CollectFn = Callable[[Any, list[Any]], Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class RankInfo:
    """Where one rank sits in the grid of data, tensor, pipeline and context parallel ranks."""

    world_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    rank: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


class Grid(Protocol):
    """The shape of a cluster: all that splitting and collecting need to know of it."""

    @property
    def world_size(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    def get_rank_info(self, rank: int) -> RankInfo: ...


class DispatchFunctions(TypedDict):
    """The two halves of a dispatch mode; the form in which a worker method brings its own."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


class Dispatch(Enum):
    """How arguments are split over the workers and outputs joined: dispatch rule, collect rule."""

    ONE_TO_ALL = auto()  # the same arguments to all; a list of all outputs
    ONE_TO_ALL_ONE = auto()  # the same arguments to all; the output of rank 0
    ALL_TO_ALL = auto()  # lists with one value per worker; a list of all outputs
    # A piece for each DP rank, to all its peers; the outputs joined in the order of the input.
    DP_MP_COMPUTE = auto()
    # As above, but the rows go to the first of the peers alone.
    DP_MP_DISPATCH_FIRST = auto()
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = auto()  # as above; a list of all outputs


class Execute(Enum):
    """Which workers run the method."""

    ALL = auto()
    RANK_ZERO = auto()  # worker 0, with the caller's arguments as they are; its output is returned


@dataclass(frozen=True)
class MethodSpec:
    """How one method is called through a cluster; `spec["dispatch_mode"]` also reads a field."""

    dispatch_mode: Dispatch | DispatchFunctions
    execute_mode: Execute
    clear_cache: bool  # whether the executor frees cached device memory after a successful call

    def __getitem__(self, field: str) -> Any:
        return vars(self)[field]


def register(
    dispatch_mode: Dispatch | DispatchFunctions = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    clear_cache: bool = True,
    *,
    trace: bool = False,
    prefetch: bool = False,
    to_remote: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method, sync or async, as callable through its cluster.

    The decorated function is the same function: no wrapper, nothing in a traceback.

    Args:
        dispatch_mode: how arguments are split and outputs joined, or a dict with a
            `dispatch_fn(cluster, *args, **kwargs)` and a `collect_fn(cluster, output)`.
        execute_mode: all workers, or worker 0 alone (which leaves nothing to split or join).
        clear_cache: whether cached device memory is freed after a successful call on a worker.
        trace, prefetch, to_remote: of ROLL, without effect: there is no tracer and no remote batch
            store here.
    """
    del trace, prefetch, to_remote
    get_predefined_dispatch_fn(dispatch_mode)  # a bad mode fails here, where the class is written
    get_predefined_execute_fn(execute_mode)
    unsplit = (Dispatch.ONE_TO_ALL, Dispatch.ONE_TO_ALL_ONE, Dispatch.ALL_TO_ALL)
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in unsplit:
        name = dispatch_mode.name if isinstance(dispatch_mode, Dispatch) else "a dict of functions"
        raise ValueError(
            f"execute_mode=Execute.RANK_ZERO runs the method on worker 0 alone, so dispatch_mode="
            f"{name} has nothing to split; use Dispatch.ONE_TO_ALL_ONE, or Execute.ALL"
        )
    spec = MethodSpec(dispatch_mode, execute_mode, clear_cache)

    def attach(func: F) -> F:
        setattr(func, BIND_WORKER_METHOD_FLAG, spec)
        return func

    return attach


def method_spec(cls: type, name: str) -> MethodSpec | None:
    """How `cls.name` is called through a cluster; None if it is not a registered method.

    A subclass that overrides a registered method without decorating it again inherits the spec of
    the nearest ancestor that has one. (ROLL loses the binding there, silently.)
    """
    for ancestor in cls.__mro__:
        if name not in vars(ancestor):
            continue
        attribute = vars(ancestor)[name]
        is_method = isinstance(attribute, FunctionType | staticmethod | classmethod)
        if not is_method and not callable(attribute):
            return None  # the name was taken for something else: there is no method any more
        spec = getattr(attribute, BIND_WORKER_METHOD_FLAG, None)
        if spec is not None:
            return spec
    return None


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The public registered methods of a worker class, inherited ones included, by name."""
    specs = ((name, method_spec(cls, name)) for name in dir(cls) if not name.startswith("_"))
    return {name: spec for name, spec in specs if spec is not None}


def func_generator(
    cluster: Any,
    method_name: str,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn,
    execute_fn: Callable[..., list[Any]],
) -> Callable[..., Any]:
    """ROLL's form of a registered method, `call(*args, blocking=True, **kwargs)`, for a cluster
    with `execute_fn(method_name, *args, **kwargs)` and `gather(refs, method_name)`."""

    def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
        rank_args, rank_kwargs = dispatch_fn(cluster, *args, **kwargs)
        refs = execute_fn(method_name, *rank_args, **rank_kwargs)
        return collect_fn(cluster, cluster.gather(refs, method_name) if blocking else refs)

    return call


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | DispatchFunctions) -> DispatchFunctions:
    """`{"dispatch_fn": ..., "collect_fn": ...}` of a mode; a dict of the two as it is, checked."""
    if isinstance(dispatch_mode, Dispatch):
        dispatch_fn, collect_fn = _FUNCTIONS[dispatch_mode]
        return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    if not isinstance(dispatch_mode, Mapping):
        raise TypeError(
            f"dispatch_mode is a {type(dispatch_mode).__name__}; expected a Dispatch member or a "
            "dict with dispatch_fn and collect_fn"
        )
    if set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
        raise ValueError(
            "a dispatch_mode dict needs exactly dispatch_fn and collect_fn; found "
            f"{sorted(dispatch_mode)}"
        )
    for key, value in dispatch_mode.items():
        if not callable(value):
            kind = type(value).__name__
            raise TypeError(f"dispatch_mode[{key!r}] is a {kind}; expected a function")
    return dispatch_mode


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """`{"execute_fn_name": ...}`: which of the cluster's methods starts the call."""
    if not isinstance(execute_mode, Execute):
        kind = type(execute_mode).__name__
        raise TypeError(f"execute_mode is a {kind}; expected a member of Execute")
    name = "execute_all" if execute_mode is Execute.ALL else "execute_rank_zero"
    return {"execute_fn_name": name}


# -- splitting arguments ---------------------------------------------------------------------------


def _for_each_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], spread: Callable[[Any, str], list[Any]]
) -> RankArgs:
    """Apply `spread(value, label)` to every argument; the label names the argument in errors."""
    positional = tuple(spread(value, f"positional argument {i}") for i, value in enumerate(args))
    return positional, {name: spread(value, f"argument {name!r}") for name, value in kwargs.items()}


def dispatch_one_to_all(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every rank gets every argument, the same object."""
    return _for_each_argument(args, kwargs, lambda value, _: [value] * cluster.world_size)


def dispatch_all_to_all(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every argument already is a list or tuple with one value per rank."""

    def scatter(value: Any, label: str) -> list[Any]:
        workers = f"one value for each of the {cluster.world_size} workers"
        if not isinstance(value, list | tuple):
            raise TypeError(
                f"{label} is a {type(value).__name__}; ALL_TO_ALL takes a list with {workers} "
                "(to send one value to all of them, register with Dispatch.ONE_TO_ALL)"
            )
        if len(value) != cluster.world_size:
            raise ValueError(f"{label} has {len(value)} values; ALL_TO_ALL needs {workers}")
        return list(value)

    return _for_each_argument(args, kwargs, scatter)


def dispatch_dp_mp_compute(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """Every argument is split over the DP ranks; the TP/PP/CP peers of one get the same piece.

    A DataProto is split by rows as `DataProto.chunk` does (the first pieces are a row longer where
    it does not divide), a list or tuple into contiguous pieces of equal length, any other object by
    its own `chunk(chunks=dp_size)`. The pieces of a DataProto are views: each has its own columns
    and `meta_info` dict, but the tensors share memory with the caller's. Workers in other processes
    never notice; one in this process must not write into them.
    """
    ranks = [cluster.get_rank_info(rank).dp_rank for rank in range(cluster.world_size)]

    def spread(value: Any, label: str) -> list[Any]:
        pieces = _split(value, cluster.dp_size, label)
        return [pieces[dp_rank] for dp_rank in ranks]

    return _for_each_argument(args, kwargs, spread)


def dispatch_dp_mp_dispatch_first(cluster: Grid, *args: Any, **kwargs: Any) -> RankArgs:
    """As `dispatch_dp_mp_compute`, but a DataProto travels once per DP rank.

    Only the rank at tp = pp = cp = 0 gets the rows. Its peers get a DataProto without rows and with
    the same `meta_info`; the strategy broadcasts the rows to them (`strategy.get_data_input`) where
    the interconnect is fast.
    """
    rank_args, rank_kwargs = dispatch_dp_mp_compute(cluster, *args, **kwargs)
    for values in (*rank_args, *rank_kwargs.values()):
        for rank, piece in enumerate(values):
            at = cluster.get_rank_info(rank)
            is_first = at.tp_rank == at.pp_rank == at.cp_rank == 0
            if not is_first and isinstance(piece, DataProto):
                values[rank] = DataProto(meta_info=dict(piece.meta_info))
    return rank_args, rank_kwargs


def _split(value: Any, dp_size: int, label: str) -> list[Any]:
    """`dp_size` pieces of `value`, in order."""
    if isinstance(value, DataProto):
        if 0 < len(value) < dp_size:
            raise ValueError(
                f"{label} is a DataProto of {len(value)} rows, fewer than dp_size={dp_size}: every "
                "rank needs one. Pad it with pad_dataproto_to_divisor(data, dp_size) and drop the "
                "extra rows of the result with unpad_dataproto"
            )
        pieces = value.chunk(dp_size, clone=False)
        for piece in pieces:
            piece.meta_info = dict(value.meta_info)
        return pieces
    if isinstance(value, list | tuple):
        size, remainder = divmod(len(value), dp_size)
        if remainder:
            raise ValueError(
                f"{label} is a {type(value).__name__} of {len(value)} values, not divisible by "
                f"dp_size={dp_size}; pass {size * dp_size} or {(size + 1) * dp_size}"
            )
        return [value[i * size : (i + 1) * size] for i in range(dp_size)]
    if not callable(getattr(value, "chunk", None)):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(
            f"{label} is {kind}, which cannot be split over dp_size={dp_size}: DP dispatch modes "
            "take a DataProto, list, tuple or an object with chunk(chunks=n). Put single values "
            "into DataProto.meta_info, which every rank receives"
        )
    pieces = list(value.chunk(chunks=dp_size))
    if len(pieces) != dp_size:
        kind = type(value).__name__
        raise ValueError(f"{label}: {kind}.chunk(chunks={dp_size}) gave {len(pieces)} pieces")
    return pieces


# -- joining outputs -------------------------------------------------------------------------------


def collect_all_to_all(cluster: Grid, output: list[Any]) -> list[Any]:
    """The outputs of all ranks, in rank order."""
    if len(output) != cluster.world_size:
        raise ValueError(f"got {len(output)} outputs from {cluster.world_size} workers")
    return output


def collect_all_to_one(cluster: Grid, output: list[Any]) -> Any:
    """The output of rank 0; references are all wrapped, so that a failure elsewhere is seen."""
    first = collect_all_to_all(cluster, output)[0]
    if is_ref(first):
        return [ObjectRefWrap(ref, collected=rank == 0) for rank, ref in enumerate(output)]
    return first


def need_collect_dp_mp_compute(rank_info: RankInfo) -> bool:
    """Whether it speaks for its DP group: first TP and CP rank of the last pipeline stage."""
    return rank_info.tp_rank == 0 and rank_info.cp_rank == 0 and rank_info.is_pipeline_last_stage


def collect_dp_mp_compute(cluster: Grid, output: list[Any]) -> Any:
    """One output per DP rank, joined in the order in which the rows were split.

    DataProtos are concatenated, lists flattened; None from every DP rank gives None. References (a
    call that was not waited for) come back as one `ObjectRefWrap` per rank, in the order that
    `DataProto.materialize_concat` needs.
    """
    collect_all_to_all(cluster, output)
    # Ranks and DP ranks need not grow together, so look for the rank that speaks for each DP rank.
    speaker_of: dict[int, int] = {}
    for rank in range(cluster.world_size):
        rank_info = cluster.get_rank_info(rank)
        if need_collect_dp_mp_compute(rank_info):
            other = speaker_of.setdefault(rank_info.dp_rank, rank)
            if other != rank:
                raise ValueError(
                    f"ranks {other} and {rank} both speak for dp_rank {rank_info.dp_rank}: check "
                    "RankInfo"
                )
    if sorted(speaker_of) != list(range(cluster.dp_size)):
        raise ValueError(
            f"only dp_ranks {sorted(speaker_of)} have a rank with tp_rank=0, cp_rank=0 on the last "
            f"pipeline stage, but dp_size={cluster.dp_size}: check RankInfo"
        )
    collected = [speaker_of[dp_rank] for dp_rank in range(cluster.dp_size)]
    if is_ref(output[0]):
        # All ranks are waited for later; those that speak come first, in DP order.
        wraps = [ObjectRefWrap(output[rank], collected=True) for rank in collected]
        for rank, ref in enumerate(output):
            if rank not in collected:
                wraps.append(ObjectRefWrap(ref, collected=False))
        return wraps
    pieces = [output[rank] for rank in collected]
    if all(isinstance(piece, DataProto) for piece in pieces):
        return DataProto.concat(pieces)
    if all(isinstance(piece, list) for piece in pieces):
        return list(chain.from_iterable(pieces))
    if all(piece is None for piece in pieces):
        return None
    found = ", ".join(f"rank {rank}: {type(output[rank]).__name__}" for rank in collected)
    raise TypeError(
        f"cannot join worker outputs ({found}): a method with a DP dispatch mode returns a "
        "DataProto, a list or None, and the same on every DP rank. For other outputs register it "
        "with DP_MP_DISPATCH_FIRST_COLLECT_ALL, or with a dict of dispatch_fn and collect_fn"
    )


_FUNCTIONS: dict[Dispatch, tuple[DispatchFn, CollectFn]] = {
    Dispatch.ONE_TO_ALL: (dispatch_one_to_all, collect_all_to_all),
    Dispatch.ONE_TO_ALL_ONE: (dispatch_one_to_all, collect_all_to_one),
    Dispatch.ALL_TO_ALL: (dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_MP_COMPUTE: (dispatch_dp_mp_compute, collect_dp_mp_compute),
    Dispatch.DP_MP_DISPATCH_FIRST: (dispatch_dp_mp_dispatch_first, collect_dp_mp_compute),
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: (dispatch_dp_mp_dispatch_first, collect_all_to_all),
}
