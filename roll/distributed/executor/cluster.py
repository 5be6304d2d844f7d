"""`Cluster`: the workers of one role, and the only door to them.

    cluster = Cluster("actor_train", ActorWorker, resource_manager, worker_config)
    cluster.initialize(pipeline_config)
    scored = cluster.compute_log_probs(batch)                      # split, run, joined in order
    scored = cluster.execute_all_sync("compute_log_probs", batch)  # the same call by name

Whether the workers are objects in this process or Ray actors is a detail of the backend; every call
here is the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roll.distributed.executor.backend import (
    DEFAULT_RPC_TIMEOUT,
    LocalBackend,
    WorkerSpec,
    public_methods,
)
from roll.distributed.executor.worker import Worker, WorkerContext
from roll.distributed.scheduler.decorator import (
    CollectFn,
    DispatchFn,
    Execute,
    RankInfo,
    collect_all_to_all,
    dispatch_all_to_all,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    method_spec,
    registered_methods,
)
from roll.distributed.scheduler.resource_manager import Device, ResourceManager
from roll.exceptions import ConfigError, WorkerError
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

if TYPE_CHECKING:
    from roll.distributed.executor.ray_backend import RayBackend

logger = get_logger(__name__)

# Calls that an async worker takes on at a time, unless its configuration says otherwise.
_ASYNC_CONCURRENCY = 1000


class Cluster:
    """The workers of one role.

    Every registered method of the worker class is an attribute of the same name:
    `cluster.method(*args, blocking=True, **kwargs)` splits the arguments by the method's dispatch
    mode, runs it on the workers and joins the outputs. With `blocking=False` it returns references
    at once: DP modes give `ObjectRefWrap`s for `DataProto.materialize_concat`.

    Args:
        name: of the role; workers are called `{name}-{rank}`, with `-G{gpus}` behind for those that
            have GPUs.
        worker_cls: a subclass of Worker, its dotted path, or such a class decorated with
            `ray.remote`.
        resource_manager: the machines, and the choice of backend.
        worker_config: handed to every worker; world_size, device_mapping, num_gpus_per_worker,
            system_envs, max_concurrency, holds_model and rpc_timeout are read here if it has them.
        rpc_timeout: seconds that any call may take. Default: that of the worker config, else that
            of the pipeline config which `initialize` receives, else an hour.
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
        def configured(field: str, default: Any = None) -> Any:
            return getattr(worker_config, field, default)

        self.cluster_name = name
        self.worker_config = worker_config
        mapping, size = configured("device_mapping"), configured("world_size")
        if size is None:  # one worker for every `num_gpus_per_worker` GPUs, or one worker
            size = len(mapping) // max(1, configured("num_gpus_per_worker", 1)) if mapping else 1
        self.world_size = size
        self.placement_groups = resource_manager.allocate_placement_group(size, mapping, role=name)
        self.initialized = False
        if rpc_timeout is None:
            rpc_timeout = configured("rpc_timeout")
        self._timeout_is_given = rpc_timeout is not None
        self._set_timeout(DEFAULT_RPC_TIMEOUT if rpc_timeout is None else rpc_timeout)
        self._closed = False
        self._rank_info: list[RankInfo] | None = None
        self._initialize_refs: list[Any] = []

        self.worker_cls, concurrency = check_worker_class(
            worker_cls, configured("max_concurrency", 1)
        )
        for method in registered_methods(self.worker_cls):
            if hasattr(Cluster, method) or method in Cluster.__annotations__:
                raise ConfigError(
                    f"{self.worker_cls.__name__}.{method} is registered, but Cluster.{method} "
                    "means something else; rename it"
                )
        env = {key: str(value) for key, value in configured("system_envs", {}).items()}
        specs = []
        for rank, devices in enumerate(self.placement_groups):
            worker_name = f"{name}-{rank}"
            if devices:
                per_node = resource_manager.num_gpus_per_node
                gpus = [str(device.node_rank * per_node + device.gpu_rank) for device in devices]
                worker_name += f"-G{''.join(gpus)}"
            context = WorkerContext(
                rank=rank,
                world_size=size,
                cluster_name=name,
                worker_name=worker_name,
                devices=tuple(devices),
                device_index=devices[0].gpu_rank if devices else None,
            )
            specs.append(WorkerSpec(self.worker_cls, worker_config, context, env, concurrency))

        self.backend_name = resource_manager.backend
        if self.backend_name == "auto":
            self.backend_name = "ray" if configured("holds_model", False) and size > 1 else "local"
        logger.debug("%s: %d worker(s) on the %s backend", name, size, self.backend_name)
        self._backend: LocalBackend | RayBackend = LocalBackend()
        if self.backend_name == "ray":
            # Imported here: ray is an optional dependency that only its backend imports.
            from roll.distributed.executor.ray_backend import RayBackend

            self._backend = RayBackend(resource_manager)
        self.workers = self._backend.spawn(specs, self.rpc_timeout)
        self.rank2worker = dict(enumerate(self.workers))
        self.worker2rank = {worker: rank for rank, worker in enumerate(self.workers)}
        self.rank2devices = dict(enumerate(self.placement_groups))
        self.worker2nodes = {worker: self._backend.node_of(worker) for worker in self.workers}

    # -- the shape of the cluster ------------------------------------------------------------------

    @property
    def worker_rank_info(self) -> list[RankInfo]:
        """Where every rank sits in the grid. Asked again until `initialize` has settled it."""
        if self._rank_info is None:
            # A call of initialize that nobody has waited for yet may still be changing it.
            self._backend.gather(self._initialize_refs, "initialize", self.rpc_timeout)
            self._initialize_refs = []
            self._rank_info = self._call(
                "get_rank_info", dispatch_one_to_all, collect_all_to_all, True
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

    # -- calls -------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A registered method, as `call(*args, blocking=True, **kwargs)`."""
        worker_cls = self.__dict__.get("worker_cls")
        if worker_cls is None or name.startswith("_"):  # while it is constructed or unpickled
            raise AttributeError(name)
        spec = method_spec(worker_cls, name)
        if spec is None:
            raise AttributeError(_unknown_method(worker_cls, name))
        functions = get_predefined_dispatch_fn(spec.dispatch_mode)
        if spec.execute_mode is Execute.RANK_ZERO:
            return partial(self._call, name, None, None, None)
        return partial(self._call, name, functions["dispatch_fn"], functions["collect_fn"], None)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on every worker and wait.

        A registered method is dispatched and collected by its mode, exactly as
        `cluster.method_name(...)`: a batch in gives one batch out, in the order of the input. (In
        ROLL this call skips both and returns a list.) Any other method gets the arguments as
        `execute_all_async` hands them out; the result is a list in rank order.
        """
        if method_spec(self.worker_cls, method_name) is not None:
            return getattr(self, method_name)(*args, **kwargs)
        return self.gather(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on every worker; the references, in rank order. No dispatch by mode.

        If every argument is a list with one value per worker, each worker gets its own values;
        otherwise all workers get all arguments as they are.
        """
        values = [*args, *kwargs.values()]
        scatter = all(isinstance(value, list) and len(value) == self.world_size for value in values)
        dispatch_fn = dispatch_all_to_all if scatter else dispatch_one_to_all
        collect_fn = collect_all_to_all
        return self._call(method_name, dispatch_fn, collect_fn, False, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on worker 0 with the arguments as they are; the reference."""
        return self._call(method_name, None, None, False, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on worker 0 with the arguments as they are, and wait for its outcome."""
        return self._call(method_name, None, None, True, *args, **kwargs)

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _call(
        self,
        method: str,
        dispatch_fn: DispatchFn | None,
        collect_fn: CollectFn | None,
        waits: bool | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Split the arguments, start the method on the workers, wait, join the outputs.

        Without a `dispatch_fn` worker 0 alone gets the arguments as they are. With `waits=None` the
        keyword `blocking` says whether to wait; otherwise a keyword of that name is the worker's.
        All in one function, so that the stack of a worker's method in this process is short.
        """
        if waits is None:
            waits = kwargs.pop("blocking", True)
        if self._closed:
            raise WorkerError(
                f"{self.cluster_name} was shut down; {method}() cannot be called any more"
            )
        if method.startswith("_") or not callable(getattr(self.worker_cls, method, None)):
            raise AttributeError(_unknown_method(self.worker_cls, method))
        if not self.initialized:
            self._rank_info = None
        workers = self.workers
        if dispatch_fn is None:
            workers = workers[:1]
            rank_args = tuple([value] for value in args)
            rank_kwargs = {name: [value] for name, value in kwargs.items()}
        else:
            try:
                rank_args, rank_kwargs = dispatch_fn(self, *args, **kwargs)
            except (TypeError, ValueError) as error:
                error.add_note(f"while splitting the arguments of {method}() over the workers")
                raise
        if method == "initialize":
            self.initialized = True
            for value in (*args, *kwargs.values()):
                config = value[0] if isinstance(value, list) else value
                timeout = getattr(config, "rpc_timeout", None)
                if timeout is not None and not self._timeout_is_given:
                    self._set_timeout(timeout)
        backend = self._backend
        rank_args = tuple(backend.share(values) for values in rank_args)
        rank_kwargs = {name: backend.share(values) for name, values in rank_kwargs.items()}
        refs = []
        for rank, worker in enumerate(workers):
            start = backend.starter(worker, method)
            own_args = [values[rank] for values in rank_args]
            own_kwargs = {name: values[rank] for name, values in rank_kwargs.items()}
            try:
                outcome = start(*own_args, **own_kwargs)  # in this process: the whole work
            except Exception as error:  # noqa: BLE001 - every failure becomes one kind of error
                refs.append(backend.failed(worker, method, error))
            else:
                refs.append(backend.started(worker, method, outcome))
        if method == "initialize":
            self._initialize_refs = refs
        output = self.gather(refs, method) if waits else refs
        if collect_fn is None:
            return output[0]
        try:
            return collect_fn(self, output)
        except (TypeError, ValueError) as error:
            error.add_note(f"while joining the outputs of {method}()")
            raise

    def gather(self, refs: list[Any], method_name: str) -> list[Any]:
        """Wait for references of this cluster; their values, in order. The first failure raises."""
        try:
            return self._backend.gather(refs, method_name, self.rpc_timeout)
        except WorkerError:
            if method_name == "initialize":
                self.initialized = False
                self._initialize_refs = []
            raise

    def shutdown(self) -> None:
        """End the workers; safe to call again. `with Cluster(...) as cluster:` does it at the end.

        A cluster on Ray can be pickled: the copy may call the workers, which end with the original.
        """
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

    def __repr__(self) -> str:
        cls = self.worker_cls.__name__
        return f"Cluster({self.cluster_name!r}, {cls}, world_size={self.world_size})"

    def _set_timeout(self, timeout: float) -> None:
        if timeout <= 0:
            raise ConfigError(f"rpc_timeout={timeout}: expected a number of seconds above 0")
        self.rpc_timeout = float(timeout)


def check_worker_class(worker_cls: type | str, max_concurrency: int) -> tuple[type[Worker], int]:
    """The worker class behind a class, a dotted path, or what `ray.remote` makes of a class; and
    the calls that a worker takes on at a time: many for a class with async methods, else one."""
    found = import_class(worker_cls) if isinstance(worker_cls, str) else worker_cls
    actor = getattr(found, "__ray_metadata__", None)
    if actor is not None:  # where ray.remote keeps the class it was given; needs no import of ray
        found = actor.modified_class.__ray_actor_class__
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(
            f"worker_cls={worker_cls!r} is not a subclass of "
            "roll.distributed.executor.worker.Worker"
        )
    if any(iscoroutinefunction(method) for method in public_methods(found).values()):
        return found, max_concurrency if max_concurrency > 1 else _ASYNC_CONCURRENCY
    if max_concurrency != 1:
        raise ConfigError(
            f"max_concurrency={max_concurrency}, but {found.__name__} has no async method and runs "
            "one call at a time; remove max_concurrency, or make its methods async"
        )
    return found, 1


def _unknown_method(worker_cls: type[Worker], name: str) -> str:
    methods, cls = public_methods(worker_cls), worker_cls.__name__
    if name in methods:
        return (
            f"{cls}.{name} is not registered; decorate it with @register, or call "
            f"execute_all_sync({name!r})"
        )
    near = difflib.get_close_matches(name, methods, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(methods))}"
    return f"{cls} has no method {name!r}; {hint}"
