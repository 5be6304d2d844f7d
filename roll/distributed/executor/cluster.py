"""`Cluster`: the workers of one role, and the only door to them.

    cluster = Cluster("actor_train", ActorWorker, resource_manager, worker_config)
    cluster.initialize(pipeline_config)
    scored = cluster.compute_log_probs(batch)                          # registered: split, run, joined in input order
    scored = cluster.execute_all_sync("compute_log_probs", batch)      # the same call by name

Whether the workers are objects in this process or Ray actors is a detail of the backend; every call here is the same.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from roll.distributed.executor.backend import ExecutorBackend, WorkerSpec, public_methods
from roll.distributed.executor.local_backend import LocalBackend
from roll.distributed.executor.worker import RankInfo, Worker, WorkerContext
from roll.distributed.scheduler.decorator import bind_method, registered_methods
from roll.distributed.scheduler.resource_manager import Device, ResourceManager
from roll.exceptions import ConfigError, WorkerError
from roll.utils.constants import DEFAULT_RPC_TIMEOUT
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

# Calls that an async worker takes on at a time, unless its configuration says otherwise.
_ASYNC_CONCURRENCY = 1000


@dataclass(frozen=True)
class _Role:
    """What a cluster reads of its worker config. Any object will do; a field that it lacks takes the default."""

    world_size: int | None = (
        None  # None: one worker for every `num_gpus_per_worker` GPUs, or one worker
    )
    device_mapping: Sequence[int] | None = None
    num_gpus_per_worker: int = 1
    system_envs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrency: int = 1
    holds_model: bool = False
    rpc_timeout: float | None = None

    @classmethod
    def read(cls, config: Any) -> _Role:
        present = {name for name in cls.__dataclass_fields__ if hasattr(config, name)}
        return cls(**{name: getattr(config, name) for name in present})

    def num_workers(self) -> int:
        if self.world_size is not None:
            return self.world_size
        return (
            len(self.device_mapping) // max(1, self.num_gpus_per_worker)
            if self.device_mapping
            else 1
        )


class Cluster:
    """The workers of one role.

    Every registered method of the worker class is an attribute of the same name: `cluster.method(*args, blocking=True,
    **kwargs)` splits the arguments by the method's dispatch mode, runs it on the workers and joins the outputs. With
    `blocking=False` it returns references at once.

    Args:
        name: of the role; workers are called `{name}-{rank}`, with `-G{gpus}` behind for those that have GPUs.
        worker_cls: a subclass of Worker, its dotted path, or such a class decorated with `ray.remote`.
        resource_manager: the machines, and the choice of backend.
        worker_config: handed to every worker; world_size, device_mapping, num_gpus_per_worker, system_envs,
            max_concurrency, holds_model and rpc_timeout are read here if it has them.
        rpc_timeout: seconds that any call may take. Default: that of the worker config, else that of the pipeline
            config which `initialize` receives, else an hour.
    """

    cluster_name: str
    worker_cls: type[Worker]
    worker_config: Any
    world_size: int
    workers: list[Any]  # worker objects in process, actor handles on Ray
    backend_name: str  # "local" or "ray"
    initialized: bool  # whether initialize() was called
    rpc_timeout: float
    rank2worker: dict[int, Any]
    worker2rank: dict[Any, int]
    placement_groups: list[list[Device]]  # the devices of each rank; empty lists on CPU
    rank2devices: dict[int, list[Device]]
    worker2nodes: dict[Any, str]  # the address of each worker's machine

    def __init__(
        self,
        name: str,
        worker_cls: type | str,
        resource_manager: ResourceManager,
        worker_config: Any,
        *,
        rpc_timeout: float | None = None,
    ) -> None:
        role = _Role.read(worker_config)
        self.cluster_name = name
        self.worker_cls = _resolve(worker_cls)
        self.worker_config = worker_config
        self.world_size = role.num_workers()
        self.placement_groups = resource_manager.allocate_placement_group(
            self.world_size, role.device_mapping, role=name
        )
        self.initialized = False
        given = [timeout for timeout in (rpc_timeout, role.rpc_timeout) if timeout is not None]
        self._timeout_is_given = bool(given)
        self.rpc_timeout = _positive(given[0] if given else DEFAULT_RPC_TIMEOUT)
        self._closed = False
        self._rank_info: list[RankInfo] | None = None
        self._initialize_refs: list[Any] = []
        self._bound = self._bind_registered_methods()

        self.backend_name = _choose_backend(resource_manager, role, self.world_size)
        logger.debug("%s: %d worker(s) on the %s backend", name, self.world_size, self.backend_name)
        self._backend = _make_backend(self.backend_name, resource_manager)
        self.workers = self._backend.spawn(self._specs(role, resource_manager), self.rpc_timeout)
        self.rank2worker = dict(enumerate(self.workers))
        self.worker2rank = {worker: rank for rank, worker in enumerate(self.workers)}
        self.rank2devices = dict(enumerate(self.placement_groups))
        self.worker2nodes = {worker: self._backend.node_of(worker) for worker in self.workers}

    # -- the shape of the cluster --------------------------------------------------------------------------------------

    @property
    def worker_rank_info(self) -> list[RankInfo]:
        """Where every rank sits in the parallel grid. Asked again until `initialize` has settled it."""
        if self._rank_info is None:
            # A call of initialize that nobody has waited for yet may still be changing it.
            self._backend.gather(self._initialize_refs, "initialize", self.rpc_timeout)
            self._initialize_refs = []
            refs = [
                self._backend.submit(worker, "get_rank_info", (), {}) for worker in self.workers
            ]
            self._rank_info = cast(
                list[RankInfo], self._backend.gather(refs, "get_rank_info", self.rpc_timeout)
            )
        return self._rank_info

    def get_rank_info(self, rank: int) -> RankInfo:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{self.cluster_name} has ranks 0 to {self.world_size - 1}; there is no rank {rank}"
            )
        return self.worker_rank_info[rank]

    @property
    def dp_size(self) -> int:
        return self.worker_rank_info[0].dp_size

    @property
    def tp_size(self) -> int:
        return self.worker_rank_info[0].tp_size

    @property
    def pp_size(self) -> int:
        return self.worker_rank_info[0].pp_size

    @property
    def cp_size(self) -> int:
        return self.worker_rank_info[0].cp_size

    @property
    def vp_size(self) -> int:
        """Virtual pipeline stages per rank, from the strategy's configuration; 1 without."""
        strategy_args = getattr(self.worker_config, "strategy_args", None)
        config = {} if strategy_args is None else strategy_args.strategy_config
        return config.get("virtual_pipeline_model_parallel_size") or 1

    # -- calls ---------------------------------------------------------------------------------------------------------

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on every worker and wait.

        A registered method is dispatched and collected by its mode, exactly as `cluster.method_name(...)`: a batch in
        gives one batch out, in the order of the input. (In ROLL this call skips both and returns a list.)
        Any other method gets the arguments as `execute_all_async` hands them out; the result is a list in rank order.
        """
        if method_name in self._bound:
            return self._bound[method_name](*args, **kwargs)
        return self.gather(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on every worker; the references of the outcomes, in rank order. Nothing is dispatched by mode.

        If every argument is a list with one value per worker, each worker gets its own values; otherwise all workers
        get all arguments as they are.
        """
        self._before_call(method_name, args, kwargs)
        values = [*args, *kwargs.values()]
        scatter = all(isinstance(value, list) and len(value) == self.world_size for value in values)
        if not scatter:
            args = tuple([value] * self.world_size for value in args)
            kwargs = {name: [value] * self.world_size for name, value in kwargs.items()}
        args = tuple(self._share_repeated(value) for value in args)
        kwargs = {name: self._share_repeated(value) for name, value in kwargs.items()}
        refs = [
            self._backend.submit(
                worker,
                method_name,
                [value[rank] for value in args],
                {name: value[rank] for name, value in kwargs.items()},
            )
            for rank, worker in enumerate(self.workers)
        ]
        if method_name == "initialize":
            self._initialize_refs = refs
        return refs

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on worker 0 with the arguments as they are; the reference of its outcome."""
        self._before_call(method_name, args, kwargs)
        return self._backend.submit(self.workers[0], method_name, args, kwargs)

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on worker 0 with the arguments as they are, and wait for its outcome."""
        return self.gather(
            [self.execute_rank_zero_async(method_name, *args, **kwargs)], method_name
        )[0]

    def gather(self, refs: list[Any], method_name: str) -> list[Any]:
        """Wait for references of this cluster; their values, in the same order. The first failure is raised at once."""
        try:
            return self._backend.gather(refs, method_name, self.rpc_timeout)
        except WorkerError:
            if method_name == "initialize":
                self.initialized = False
                self._initialize_refs = []
            raise

    def shutdown(self) -> None:
        """End the workers. Safe to call again; `with Cluster(...) as cluster:` calls it at the end."""
        self._closed = True
        self._backend.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """A cluster on Ray can be sent to other processes, which may call its workers; it ends with the original."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in (*self._bound, "_bound")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bound = self._bind_registered_methods()

    def __repr__(self) -> str:
        return f"Cluster({self.cluster_name!r}, {self.worker_cls.__name__}, world_size={self.world_size})"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Reached only for names that are neither attributes nor registered methods.
        raise AttributeError(_unknown_method(self.__dict__.get("worker_cls"), name))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _bind_registered_methods(self) -> dict[str, Callable[..., Any]]:
        bound: dict[str, Callable[..., Any]] = {}
        for name, spec in registered_methods(self.worker_cls).items():
            if hasattr(Cluster, name) or name in Cluster.__annotations__:
                raise ConfigError(
                    f"{self.worker_cls.__name__}.{name} is registered, but Cluster.{name} means something else; "
                    "rename it"
                )
            bound[name] = bind_method(self, name, spec)
            setattr(self, name, bound[name])
        return bound

    def _specs(self, role: _Role, resource_manager: ResourceManager) -> list[WorkerSpec]:
        env = {name: str(value) for name, value in role.system_envs.items()}
        concurrency = _concurrency(self.worker_cls, role.max_concurrency)
        specs = []
        for rank, devices in enumerate(self.placement_groups):
            gpus = "".join(
                str(d.node_rank * resource_manager.num_gpus_per_node + d.gpu_rank) for d in devices
            )
            context = WorkerContext(
                rank=rank,
                world_size=self.world_size,
                cluster_name=self.cluster_name,
                worker_name=f"{self.cluster_name}-{rank}" + (f"-G{gpus}" if gpus else ""),
                devices=tuple(devices),
                device_index=devices[0].gpu_rank if devices else None,
            )
            specs.append(WorkerSpec(self.worker_cls, self.worker_config, context, env, concurrency))
        return specs

    def _before_call(
        self, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._closed:
            raise WorkerError(
                f"{self.cluster_name} was shut down; {method_name}() cannot be called any more"
            )
        if not callable(getattr(self.worker_cls, method_name, None)) or method_name.startswith("_"):
            raise AttributeError(_unknown_method(self.worker_cls, method_name))
        if not self.initialized:
            self._rank_info = None
        if method_name == "initialize":
            self.initialized = True
            self._adopt_timeout([*args, *kwargs.values()])

    def _adopt_timeout(self, values: Sequence[Any]) -> None:
        """Take `rpc_timeout` of the pipeline config that initialize is called with, unless one was set before."""
        for value in values:
            config = value[0] if isinstance(value, list) else value
            timeout = getattr(config, "rpc_timeout", None)
            if timeout is not None and not self._timeout_is_given:
                self.rpc_timeout = _positive(timeout)

    def _share_repeated(self, values: list[Any]) -> list[Any]:
        """The values of one argument for all ranks, with an object that several ranks get stored once."""
        counts = Counter(map(id, values))
        repeated = {id(value): value for value in values if counts[id(value)] > 1}
        if not repeated:
            return values
        shared = {key: self._backend.share(value) for key, value in repeated.items()}
        return [shared.get(id(value), value) for value in values]


def _resolve(worker_cls: type | str) -> type[Worker]:
    """The worker class behind a class, a dotted path, or a class that `ray.remote` has decorated."""
    found = import_class(worker_cls) if isinstance(worker_cls, str) else worker_cls
    actor = getattr(found, "__ray_metadata__", None)
    if (
        actor is not None
    ):  # ray.remote keeps the class it was given here; ray itself need not be imported to look
        found = actor.modified_class.__ray_actor_class__
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(
            f"worker_cls={worker_cls!r} is not a subclass of roll.distributed.executor.worker.Worker"
        )
    return found


def check_worker_class(worker_cls: type | str, max_concurrency: int) -> None:
    """Raises ConfigError for what is no worker class, or one that cannot take so many calls at a time."""
    _concurrency(_resolve(worker_cls), max_concurrency)


def _choose_backend(resource_manager: ResourceManager, role: _Role, world_size: int) -> str:
    if resource_manager.backend != "auto":
        return resource_manager.backend
    return "ray" if role.holds_model and world_size > 1 else "local"


def _make_backend(name: str, resource_manager: ResourceManager) -> ExecutorBackend:
    if name == "local":
        return LocalBackend()
    # The import is here because ray is an optional dependency that only its backend imports.
    from roll.distributed.executor.ray_backend import RayBackend

    return RayBackend(resource_manager)


def _concurrency(worker_cls: type[Worker], configured: int) -> int:
    """Calls that one worker takes on at a time: many for a class with async methods, one for any other."""
    has_async = any(iscoroutinefunction(method) for method in public_methods(worker_cls).values())
    if has_async:
        return configured if configured > 1 else _ASYNC_CONCURRENCY
    if configured != 1:
        raise ConfigError(
            f"max_concurrency={configured}, but {worker_cls.__name__} has no async method and runs one call at a time; "
            "remove max_concurrency, or make its methods async"
        )
    return 1


def _positive(timeout: float) -> float:
    if timeout <= 0:
        raise ConfigError(f"rpc_timeout={timeout}: expected a number of seconds above 0")
    return float(timeout)


def _unknown_method(worker_cls: type[Worker] | None, name: str) -> str:
    if worker_cls is None:  # not constructed yet
        return name
    methods = public_methods(worker_cls)
    if name in methods:
        there = f"{worker_cls.__name__}.{name} is not registered"
        return f"{there}; decorate it with @register, or call execute_all_sync({name!r})"
    near = difflib.get_close_matches(name, methods, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(methods))}"
    return f"{worker_cls.__name__} has no method {name!r}{hint}"
