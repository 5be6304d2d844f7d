"""`@register` says how a worker's method is called through its cluster; the method itself stays a plain method.

    class ActorWorker(Worker):
        @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
        def compute_log_probs(self, data: DataProto) -> DataProto: ...

    worker.compute_log_probs(data)         # on a worker: an ordinary call
    cluster.compute_log_probs(data)        # on a cluster: split over its workers, run, joined in the order of `data`

The decorator attaches a `MethodSpec` and returns the function it was given: no wrapper, nothing in a traceback, sync
and async alike. Clusters act on the spec. The split and collect functions of `dispatch.py` are re-exported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import FunctionType
from typing import Any, Protocol, TypedDict, TypeVar, cast

from roll.distributed.scheduler.dispatch import (
    CollectFn,
    DispatchFn,
    DispatchFunctions,
    Grid,
    RankArgs,
    RankPosition,
    collect_all_to_all,
    collect_all_to_one,
    collect_dp_mp_compute,
    dispatch_all_to_all,
    dispatch_dp_mp_compute,
    dispatch_dp_mp_dispatch_first,
    dispatch_one_to_all,
    need_collect_dp_mp_compute,
)

__all__ = [
    "BIND_WORKER_METHOD_FLAG",
    "ClusterLike",
    "CollectFn",
    "Dispatch",
    "DispatchFn",
    "DispatchFunctions",
    "Execute",
    "Grid",
    "MethodSpec",
    "RankArgs",
    "RankPosition",
    "bind_method",
    "collect_all_to_all",
    "collect_all_to_one",
    "collect_dp_mp_compute",
    "dispatch_all_to_all",
    "dispatch_dp_mp_compute",
    "dispatch_dp_mp_dispatch_first",
    "dispatch_one_to_all",
    "func_generator",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "method_spec",
    "need_collect_dp_mp_compute",
    "register",
    "registered_methods",
]

# The attribute of a method under which its MethodSpec is found.
BIND_WORKER_METHOD_FLAG = "_roll_method_spec"


class Dispatch(Enum):
    """How arguments are split over the workers and outputs joined. The names are dispatch rule, then collect rule."""

    ONE_TO_ALL = auto()  # the same arguments to all; a list of all outputs
    ONE_TO_ALL_ONE = auto()  # the same arguments to all; the output of rank 0
    ALL_TO_ALL = auto()  # lists with one value per worker; a list of all outputs
    DP_MP_COMPUTE = (
        auto()
    )  # a piece per DP rank, to all its peers; one joined output in input order
    DP_MP_DISPATCH_FIRST = (
        auto()
    )  # a piece per DP rank, rows only to its first peer; one joined output in input order
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = auto()  # as above; a list of all outputs


class Execute(Enum):
    """Which workers run the method."""

    ALL = auto()
    RANK_ZERO = (
        auto()
    )  # worker 0 alone, with the caller's arguments as they are; its output is the result


@dataclass(frozen=True)
class MethodSpec:
    """How one registered method is called through a cluster. Fields can also be read as `spec["dispatch_mode"]`."""

    dispatch_mode: Dispatch | DispatchFunctions
    execute_mode: Execute
    clear_cache: bool  # whether the executor frees cached device memory after a successful call

    def __getitem__(self, field: str) -> Any:
        if field not in self.__dataclass_fields__:
            raise KeyError(field)
        return getattr(self, field)


class ClusterLike(Grid, Protocol):
    """What a bound method needs of its cluster, beyond the shape."""

    def gather(self, refs: list[Any], method_name: str) -> list[Any]:
        """Wait for the references that an execute function returned; their values, in the same order."""
        ...


class ExecuteFunction(TypedDict):
    """The name of the cluster's method that starts the call on its workers."""

    execute_fn_name: str


F = TypeVar("F", bound=Callable[..., Any])


def register(
    dispatch_mode: Dispatch | DispatchFunctions = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    clear_cache: bool = True,
    *,
    trace: bool = False,
    prefetch: bool = False,
    to_remote: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method as callable through its cluster. Sync and async methods alike; returns the same function.

    Args:
        dispatch_mode: how arguments are split and outputs joined, or a dict with a `dispatch_fn(cluster, *args,
            **kwargs)` and a `collect_fn(cluster, output)` of your own.
        execute_mode: all workers, or worker 0 alone (which leaves nothing to split or join).
        clear_cache: whether the executor frees cached device memory after a successful call on a worker.
        trace, prefetch, to_remote: accepted so that workers written for ROLL import unchanged. They have no effect:
            there is no tracer and no remote batch store here.
    """
    del trace, prefetch, to_remote
    get_predefined_dispatch_fn(dispatch_mode)  # a bad mode fails here, where the class is written
    get_predefined_execute_fn(execute_mode)
    splits = dispatch_mode not in (
        Dispatch.ONE_TO_ALL,
        Dispatch.ONE_TO_ALL_ONE,
        Dispatch.ALL_TO_ALL,
    )
    if execute_mode is Execute.RANK_ZERO and splits:
        name = dispatch_mode.name if isinstance(dispatch_mode, Dispatch) else "a dict of functions"
        raise ValueError(
            f"execute_mode=Execute.RANK_ZERO runs the method on worker 0 alone, so dispatch_mode={name} has nothing to "
            "split; use Dispatch.ONE_TO_ALL_ONE, or Execute.ALL"
        )
    spec = MethodSpec(dispatch_mode, execute_mode, clear_cache)

    def attach(func: F) -> F:
        setattr(func, BIND_WORKER_METHOD_FLAG, spec)
        return func

    return attach


def method_spec(cls: type, name: str) -> MethodSpec | None:
    """How `cls.name` is called through a cluster; None if it is not a registered method.

    A subclass that overrides a registered method without decorating it again inherits the spec of the nearest ancestor
    that has one. (ROLL loses the binding there, silently.)
    """
    for ancestor in cls.__mro__:
        attribute = vars(ancestor).get(name, _ABSENT)
        if attribute is _ABSENT:
            continue
        if not isinstance(attribute, FunctionType | staticmethod | classmethod) and not callable(
            attribute
        ):
            return None  # the name was taken for something else: there is no method any more
        spec = getattr(attribute, BIND_WORKER_METHOD_FLAG, None)
        if spec is not None:
            return spec
    return None


_ABSENT = object()


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The public registered methods of a worker class, inherited ones included, by name."""
    specs = ((name, method_spec(cls, name)) for name in dir(cls) if not name.startswith("_"))
    return {name: spec for name, spec in specs if spec is not None}


_DISPATCH_FUNCTIONS: dict[Dispatch, DispatchFunctions] = {
    Dispatch.ONE_TO_ALL: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all},
    Dispatch.ONE_TO_ALL_ONE: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_one},
    Dispatch.ALL_TO_ALL: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all_to_all},
    Dispatch.DP_MP_COMPUTE: {
        "dispatch_fn": dispatch_dp_mp_compute,
        "collect_fn": collect_dp_mp_compute,
    },
    Dispatch.DP_MP_DISPATCH_FIRST: {
        "dispatch_fn": dispatch_dp_mp_dispatch_first,
        "collect_fn": collect_dp_mp_compute,
    },
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: {
        "dispatch_fn": dispatch_dp_mp_dispatch_first,
        "collect_fn": collect_all_to_all,
    },
}

_EXECUTE_FUNCTIONS: dict[Execute, ExecuteFunction] = {
    Execute.ALL: {"execute_fn_name": "execute_all"},
    Execute.RANK_ZERO: {"execute_fn_name": "execute_rank_zero"},
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | DispatchFunctions) -> DispatchFunctions:
    """`{"dispatch_fn": ..., "collect_fn": ...}` of a mode. A dict of the two comes back as it is, once checked."""
    if isinstance(dispatch_mode, Dispatch):
        return _DISPATCH_FUNCTIONS[dispatch_mode]
    if not isinstance(dispatch_mode, Mapping):
        raise TypeError(
            f"dispatch_mode is a {type(dispatch_mode).__name__}; expected a Dispatch member or a dict with dispatch_fn "
            "and collect_fn"
        )
    if set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
        raise ValueError(
            f"a dispatch_mode dict needs exactly dispatch_fn and collect_fn; found {sorted(dispatch_mode)}"
        )
    for key, value in dispatch_mode.items():
        if not callable(value):
            raise TypeError(
                f"dispatch_mode[{key!r}] is a {type(value).__name__}; expected a function"
            )
    return dispatch_mode


def get_predefined_execute_fn(execute_mode: Execute) -> ExecuteFunction:
    """`{"execute_fn_name": ...}`: which of the cluster's methods starts the call."""
    if not isinstance(execute_mode, Execute):
        raise TypeError(
            f"execute_mode is a {type(execute_mode).__name__}; expected a member of Execute"
        )
    return _EXECUTE_FUNCTIONS[execute_mode]


def func_generator(
    cluster: ClusterLike,
    method_name: str,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn,
    execute_fn: Callable[..., Any],
    execute_mode: Execute = Execute.ALL,
) -> Callable[..., Any]:
    """The cluster's side of a registered method: `call(*args, blocking=True, **kwargs)`.

    `execute_fn(method_name, *args, **kwargs)` starts the method on the workers without waiting and returns their
    references: a list of `world_size`, or, for `Execute.RANK_ZERO`, the one reference of worker 0, whose arguments are
    the caller's as they are. With `blocking=False` the call returns at once: DP modes then give `ObjectRefWrap`s for
    `DataProto.materialize_concat`, the others plain references.
    """

    def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
        if execute_mode is Execute.RANK_ZERO:
            ref = execute_fn(method_name, *args, **kwargs)
            return cluster.gather([ref], method_name)[0] if blocking else ref
        try:
            rank_args, rank_kwargs = dispatch_fn(cluster, *args, **kwargs)
        except (TypeError, ValueError) as error:
            error.add_note(f"while splitting the arguments of {method_name}() over the workers")
            raise
        refs = execute_fn(method_name, *rank_args, **rank_kwargs)
        output = cluster.gather(refs, method_name) if blocking else refs
        try:
            return collect_fn(cluster, output)
        except (TypeError, ValueError) as error:
            error.add_note(f"while joining the outputs of {method_name}()")
            raise

    call.__name__ = call.__qualname__ = method_name
    return call


def bind_method(cluster: ClusterLike, method_name: str, spec: MethodSpec) -> Callable[..., Any]:
    """`func_generator` with everything looked up from the method's spec: what a cluster sets as its own attribute."""
    functions = get_predefined_dispatch_fn(spec.dispatch_mode)
    execute_fn = getattr(cluster, get_predefined_execute_fn(spec.execute_mode)["execute_fn_name"])
    return func_generator(
        cluster,
        method_name,
        functions["dispatch_fn"],
        functions["collect_fn"],
        cast(Callable[..., Any], execute_fn),
        spec.execute_mode,
    )
