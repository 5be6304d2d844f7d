"""Workers as Ray actors, one process per rank. The only module that imports ray.

Each worker sits inside an actor whose public methods are those of the worker class:
`worker.method.remote(...)` works on the handles of a cluster as it does on any Ray actor, and calls
between methods inside the worker stay plain calls. References are Ray's own: `ray.get` works on
what `blocking=False` returns. A class with async methods has an event loop; its sync methods run on
that loop and hold it up meanwhile.

Start-up has two phases. First all processes start at once, each with its environment variables from
the beginning, and rank 0 reserves the port where the ranks will meet; then every worker is
constructed with that knowledge.

Waiting never depends on one process alone. The first failure is raised at once. When a worker
process is gone, the reason is looked up on its machine and the other workers are killed: they may
wait in a collective for it.
"""

import atexit
import contextlib
import logging
import os
import pickle
import re
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from typing import Any

from roll.distributed.executor.backend import (
    RAY_NAMESPACE,
    WorkerSpec,
    after_call,
    failure_message,
    public_methods,
    timeout_message,
)
from roll.distributed.executor.postmortem import (
    ProcessRecord,
    explain_death,
    prepare_this_process,
    stack_of,
)
from roll.distributed.executor.worker import Worker, WorkerContext
from roll.distributed.scheduler.resource_manager import ResourceManager, override_for
from roll.exceptions import (
    ConfigError,
    MissingDependencyError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    install_hint,
)
from roll.utils.logging import LEVEL_VARIABLE, get_logger

try:
    import ray
    from ray import ObjectRef, cloudpickle
    from ray.actor import ActorHandle
    from ray.exceptions import (
        LocalRayletDiedError,
        NodeDiedError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        WorkerCrashedError,
    )
    from ray.util.placement_group import PlacementGroup, placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise MissingDependencyError(
        f"the Ray backend needs ray, which is not installed: {install_hint('ray')}. Without it, "
        "give every role that holds a model one worker and leave backend at 'auto' or 'local'"
    ) from error

logger = get_logger(__name__)

# Errors that mean "the process is gone", as opposed to an exception that a method raised.
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError)
# Workers share the CPUs and GPUs of a machine by agreement (`device_mapping`), so Ray books next to
# nothing for each.
_BOOKED = 0.01
_SECONDS_BETWEEN_START_WARNINGS = 30.0
_SECONDS_FOR_POSTMORTEM = 5.0
_SECONDS_FOR_A_DEATH_TO_SHOW = 5.0
_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# How gloo and nccl say that another rank has gone.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|DistBackendError|DistStoreError", re.I
)

# Backends whose workers may still run; an exit of this process ends them first.
_LIVE_BACKENDS: "weakref.WeakSet[RayBackend]" = weakref.WeakSet()
# GPUs are reserved once for all clusters of a resource manager: the roles of a run may share them.
_GPU_RESERVATIONS: "weakref.WeakKeyDictionary[ResourceManager, PlacementGroup]" = (
    weakref.WeakKeyDictionary()
)


def connect_to_ray() -> None:
    """Join the Ray that `RAY_ADDRESS` names or that runs on this machine; else start one."""
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} is a Ray Client address; run the program on "
            "a machine of the cluster (or with `ray job submit`) and give its host:port, or 'auto'"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray turns on token authentication for a cluster that it starts, which is right, and warns
    # about it every time.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(
        logging.ERROR
    )
    ray.init(namespace=RAY_NAMESPACE, include_dashboard=False, logging_level=logging.WARNING)


@atexit.register  # runs before Ray's own exit handler, which `import ray` above has registered
def _end_all_workers() -> None:
    for backend in list(_LIVE_BACKENDS):
        backend.shutdown()


class RemoteFailure(WorkerError):
    """A worker's failure on its way to the caller: a text, and the exception if it pickles."""

    def __init__(self, message: str, pickled_cause: bytes | None) -> None:
        super().__init__(message)
        self.pickled_cause = pickled_cause

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFailure, (str(self), self.pickled_cause)

    def cause(self) -> BaseException | None:
        if self.pickled_cause is None:
            return None
        try:
            return pickle.loads(self.pickled_cause)
        except Exception:  # noqa: BLE001 - runs the exception's own code; the text remains
            return None


@dataclass(frozen=True)
class _Started:
    """What an actor reports when its process runs."""

    node_id: str
    node_address: str
    process: ProcessRecord


class _Host:
    """The actor around one worker. `_host_class` adds the public methods of the worker class."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._worker: Worker
        self._meeting_point: socket.socket | None = None
        self._process = prepare_this_process()
        if context.devices:
            # Show this process its GPUs alone. The numbers of device_mapping count among those that
            # the machine's Ray itself was shown.
            gpus = [device.gpu_rank for device in context.devices]
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = shown.split(",") if shown else [str(gpu) for gpu in range(max(gpus) + 1)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)

    def __repr__(self) -> str:  # Ray puts this in front of the lines that the worker prints
        return self._context.worker_name

    def _report(self) -> _Started:
        node_id = ray.get_runtime_context().get_node_id()
        return _Started(node_id, ray.util.get_node_ip_address(), self._process)

    def _reserve_port(self) -> tuple[str, int]:
        """Address and port where the ranks can meet.

        The socket stays bound and never listens: no other program is given the port meanwhile, and
        torch, which also sets SO_REUSEADDR, can still listen on it whenever it wants.
        """
        self._meeting_point = socket.socket()
        self._meeting_point.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._meeting_point.bind(("", 0))
        return ray.util.get_node_ip_address(), self._meeting_point.getsockname()[1]

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """The border of a worker: every failure inside becomes one kind of error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            pickled = None
            # User-defined exceptions fail to pickle in any way they like; the text remains.
            with contextlib.suppress(Exception):
                pickled = cloudpickle.dumps(error)
            message = failure_message(self._context, method, error)
            raise RemoteFailure(message, pickled) from None
        after_call(type(self._worker), method)

    def _construct(
        self, payload: bytes, context: WorkerContext, env: Mapping[str, str], import_path: list[str]
    ) -> None:
        """Build the worker from its pickled class and configuration, which need `import_path`."""
        self._context = context
        assert context.master is not None
        host, port = context.master
        os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port), **env})
        sys.path.extend(folder for folder in import_path if folder not in sys.path)
        with self._calling("__init__"):
            worker_cls, worker_config = pickle.loads(payload)
            self._worker = WorkerSpec(worker_cls, worker_config, context).construct()


def _host_class(worker_cls: type[Worker]) -> type[_Host]:
    """An actor class with the public methods of `worker_cls`, run on the worker inside."""

    def forward(method: str) -> Callable[..., Any]:
        def call(self: _Host, *args: Any, **kwargs: Any) -> Any:
            with self._calling(method):
                return getattr(self._worker, method)(*args, **kwargs)

        async def call_async(self: _Host, *args: Any, **kwargs: Any) -> Any:
            with self._calling(method):
                return await getattr(self._worker, method)(*args, **kwargs)

        return call_async if iscoroutinefunction(getattr(worker_cls, method)) else call

    return type(worker_cls.__name__, (_Host,), {m: forward(m) for m in public_methods(worker_cls)})


class RayBackend:
    """The workers of one cluster, as Ray actors. See `LocalBackend` for what the methods do."""

    def __init__(self, resource_manager: ResourceManager) -> None:
        self._resource_manager = resource_manager
        self._handles: list[Any] = []  # actor handles, whose methods no type checker knows
        self._contexts: dict[Any, WorkerContext] = {}  # by actor id
        self._started: dict[Any, _Started] = {}  # by actor id
        self._closed_because = ""
        self._owns_workers = True

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process may call the workers; they end with the original."""
        return {**self.__dict__, "_owns_workers": False}

    def spawn(self, specs: Sequence[WorkerSpec], timeout: float) -> list[ActorHandle]:
        connect_to_ray()
        _LIVE_BACKENDS.add(self)
        try:
            self._start_processes(specs, timeout)
            (master,) = self.gather([self._handles[0]._reserve_port.remote()], "__init__", timeout)
            # Pickled by hand: unpickled once the driver's import path is in place, and a failure is
            # ours to report.
            payload = ray.put(cloudpickle.dumps((specs[0].worker_cls, specs[0].worker_config)))
            import_path = [os.path.abspath(folder) for folder in sys.path]
            refs = []
            for handle, spec in zip(self._handles, specs, strict=True):
                index = 0 if spec.context.devices else None  # the process sees its own devices only
                context = replace(spec.context, master=master, device_index=index)
                refs.append(handle._construct.remote(payload, context, dict(spec.env), import_path))
            self.gather(refs, "__init__", timeout)
        except BaseException:
            self.shutdown()
            raise
        return list(self._handles)

    def starter(self, handle: Any, method: str) -> Callable[..., ObjectRef]:
        if self._closed_because:
            raise WorkerDiedError(f"{method}() cannot be called: {self._closed_because}")
        return getattr(handle, method).remote

    def started(self, handle: Any, method: str, outcome: ObjectRef) -> ObjectRef:
        return outcome

    def failed(self, handle: Any, method: str, error: Exception) -> ObjectRef:
        raise error  # the call was not sent: nothing that a worker did

    def share(self, values: list[Any]) -> list[Any]:
        counts, shared = Counter(map(id, values)), {}
        for value in values:
            small = value is None or isinstance(value, bool | int | float | str)
            if counts[id(value)] > 1 and not small and id(value) not in shared:
                shared[id(value)] = ray.put(value)
        return [shared.get(id(value), value) for value in values]

    def gather(self, refs: Sequence[ObjectRef], method: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        values: dict[ObjectRef, Any] = {}
        pending = list(dict.fromkeys(refs))
        while pending:
            patience = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=patience)
            try:
                if not ready:
                    raise self._timed_out(pending, method, timeout, len(refs))
                values[ready[0]] = ray.get(ready[0])
            except (RayError, WorkerTimeoutError) as error:
                failure = error
                if isinstance(error, RayError):
                    failure = self._failure(*_root_cause(ready[0], error, pending), method)
                # Nobody will ask for the other outcomes; without this, Ray prints every failure
                # among them as unhandled.
                for ref in pending:
                    ref.future().add_done_callback(lambda future: future.exception())
                raise failure from failure.__cause__
        return [values[ref] for ref in refs]

    def node_of(self, handle: Any) -> str:
        return self._started[handle._actor_id].node_address

    def shutdown(self) -> None:
        self._closed_because = self._closed_because or "its cluster was shut down"
        _LIVE_BACKENDS.discard(self)
        if self._owns_workers:
            self._kill_workers()

    def _kill_workers(self) -> None:
        if ray.is_initialized():
            for handle in self._handles:
                ray.kill(handle)
        self._handles = []

    def _start_processes(self, specs: Sequence[WorkerSpec], timeout: float) -> None:
        gpus = _reserve_gpus(self._resource_manager, specs) if specs[0].context.devices else None
        actor_cls = ray.remote(_host_class(specs[0].worker_cls))
        for spec in specs:
            handle: Any = actor_cls.options(**_actor_options(spec, gpus)).remote(spec.context)
            self._handles.append(handle)
            self._contexts[handle._actor_id] = spec.context
        deadline = time.monotonic() + timeout
        refs = [handle._report.remote() for handle in self._handles]
        waiting: list[Any] = refs
        while waiting:
            patience = min(_SECONDS_BETWEEN_START_WARNINGS, max(0.0, deadline - time.monotonic()))
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=patience)
            if waiting:
                names = ", ".join(self._context_of(ref).worker_name for ref in waiting)
                free = f"Ray has {ray.available_resources()} free of {ray.cluster_resources()}"
                if time.monotonic() >= deadline:
                    raise WorkerTimeoutError(
                        f"no process for {names} after rpc_timeout={timeout:g} seconds; {free}"
                    )
                logger.warning("still waiting for the processes of %s; %s", names, free)
        reports = self.gather(refs, "__init__", timeout)
        for handle, report in zip(self._handles, reports, strict=True):
            self._started[handle._actor_id] = report

    def _context_of(self, ref: ObjectRef) -> WorkerContext:
        return self._contexts[ref.task_id().actor_id()]

    def _failure(self, ref: ObjectRef, error: RayError, method: str) -> WorkerError:
        """The one error that the caller sees, from Ray's report of a failed call."""
        context = self._context_of(ref)
        if isinstance(error, _DEATHS):
            return self._died(ref, method, error)
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RemoteFailure):
            failure = WorkerError(str(cause))
            failure.__cause__ = cause.cause()
            return failure
        # The call did not reach the worker's method, or its outcome did not reach us: arguments
        # that do not unpickle there, a full object store ...
        text = _TERMINAL_COLOURS.sub("", str(error))
        failure = WorkerError(f"{context.describe()} failed in {method}(): {text}")
        failure.__cause__ = cause
        return failure

    def _died(self, ref: ObjectRef, method: str, error: RayError) -> WorkerDiedError:
        """Find out why, and end the other workers. Calls that ran elsewhere report the same."""
        if self._closed_because:
            return WorkerDiedError(f"{method}() did not finish: {self._closed_because}")
        context = self._context_of(ref)
        started = self._started.get(ref.task_id().actor_id())
        where, reason = "", " ".join(str(error).split())
        if started is not None:
            where = f", pid {started.process.pid} on {started.node_address}"
            reason = _on_node(started.node_id, explain_death, started.process, str(error)) or reason
        who = f"{context.worker_name} (rank {context.rank} of {context.world_size}{where})"
        self._closed_because = message = f"{who} died during {method}(): {reason}"
        others = len(self._handles) - 1
        self._kill_workers()
        if others:
            message += f"\nThe other {others} worker(s) of {context.cluster_name} were stopped."
        return WorkerDiedError(message)

    def _timed_out(
        self, pending: Sequence[ObjectRef], method: str, timeout: float, num_calls: int
    ) -> WorkerTimeoutError:
        contexts = [self._context_of(ref) for ref in pending]
        message = timeout_message(method, timeout, contexts, num_calls)
        for ref, context in zip(pending, contexts, strict=True):
            started = self._started.get(ref.task_id().actor_id())
            stack = None
            if started is not None:
                stack = _on_node(started.node_id, stack_of, started.process)
            if stack:
                message += f"\n{context.worker_name} is here (most recent call first):\n{stack}"
        return WorkerTimeoutError(message)


def _root_cause(
    ref: ObjectRef, error: RayError, pending: Sequence[ObjectRef]
) -> tuple[ObjectRef, RayError]:
    """The death of another worker, where `error` says that a peer was lost; else `error` itself.

    Peers in a collective notice a closed connection at once, often before Ray notices that a
    process is gone.
    """
    deadline = time.monotonic() + _SECONDS_FOR_A_DEATH_TO_SHOW
    headline = str(getattr(error, "cause", "")).partition("\n")[0]
    waiting = list(pending) if _LOST_PEER.search(headline) else []
    while waiting and time.monotonic() < deadline:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=deadline - time.monotonic())
        for other in ready:
            try:
                ray.get(other)
            except _DEATHS as death:
                return other, death
            except RayError:
                continue  # another that lost the same peer
    return ref, error


def _on_node(node_id: str, function: Callable[..., str], *args: Any) -> str | None:
    """`function(*args)` on that machine; None when the machine does not answer."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    with contextlib.suppress(RayError):  # the machine may be gone as well
        remote = ray.remote(function).options(num_cpus=0, scheduling_strategy=there)
        return ray.get(remote.remote(*args), timeout=_SECONDS_FOR_POSTMORTEM)
    return None


def _actor_options(spec: WorkerSpec, gpus: PlacementGroup | None) -> dict[str, Any]:
    """How Ray starts the process of a worker: its environment from the start, and its place."""
    context = spec.context
    # An equal share of the CPUs. Ray would give every worker one thread, because next to no CPU is
    # booked for it.
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = max(1, min(max(cpus), sum(cpus) // context.world_size))
    env = {
        "WORLD_SIZE": str(context.world_size),
        "RANK": str(context.rank),
        "LOCAL_RANK": "0",
        "CLUSTER_NAME": context.cluster_name,
        "WORKER_NAME": context.worker_name,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
    }
    if LEVEL_VARIABLE in os.environ:
        env[LEVEL_VARIABLE] = os.environ[LEVEL_VARIABLE]
    options: dict[str, Any] = {"num_cpus": _BOOKED, "max_concurrency": spec.max_concurrency}
    if gpus is None:
        options["scheduling_strategy"] = "SPREAD"
    else:
        # We show each process its GPUs ourselves, by the numbers of device_mapping.
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        options["num_gpus"] = _BOOKED
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            gpus, placement_group_bundle_index=context.devices[0].node_rank
        )
    return {**options, "runtime_env": {"env_vars": {**env, **spec.env}}}


def _reserve_gpus(manager: ResourceManager, specs: Sequence[WorkerSpec]) -> PlacementGroup:
    """One bundle per machine, with its GPUs; bundle i is the machine that `node_rank` i means."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
    per_node = found[: manager.num_nodes]
    gpus = min(manager.num_gpus_per_node, per_node[-1])
    role = specs[0].context.cluster_name
    for spec in specs:
        for device in spec.context.devices:
            if device.node_rank >= len(per_node) or device.gpu_rank >= gpus:
                raise ConfigError(
                    f"{role}.device_mapping gives {spec.context.worker_name} GPU {device.gpu_rank} "
                    f"of node {device.node_rank}, but the Ray cluster has {len(found)} node(s) "
                    f"with {found} GPUs. "
                    + override_for(role, len(spec.context.devices), gpus * len(per_node))
                )
    if manager not in _GPU_RESERVATIONS:
        bundles: list[dict[str, float]] = [{"GPU": gpus, "CPU": 1} for _ in per_node]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(_SECONDS_BETWEEN_START_WARNINGS):
            raise WorkerTimeoutError(
                f"{role}: Ray could not reserve {gpus} GPU(s) on {len(per_node)} node(s) within "
                f"{_SECONDS_BETWEEN_START_WARNINGS:g} s; free: {ray.available_resources()}"
            )
        _GPU_RESERVATIONS[manager] = group
    return _GPU_RESERVATIONS[manager]
