"""Workers as plain objects in this process: the default. No Ray, no sockets; `breakpoint()` works.

`LocalBackend` and `RayBackend` (ray_backend.py) have the same methods: they start the workers of a
cluster, start calls on them and wait for the outcome. They know nothing of batches and dispatch.
Failures look the same from both: a `WorkerError` whose message names worker, rank and method and
carries the worker's own traceback, with the original exception as its `__cause__`.

A sync method runs when it is called, in the caller's thread. Async methods run on an event loop in
a thread of their own, one for the backend, so that they also work when the caller sits inside a
running loop (a notebook), and asyncio objects that a worker keeps always meet the same loop.
"""

import asyncio
import concurrent.futures
import gc
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from roll.distributed.executor.worker import Worker, WorkerContext, worker_context
from roll.distributed.scheduler.decorator import method_spec
from roll.distributed.scheduler.resource_manager import missing_gpus
from roll.exceptions import WorkerError, WorkerTimeoutError
from roll.utils.logging import get_logger

logger = get_logger(__name__)

RAY_NAMESPACE = "roll"
# Seconds that a caller waits for its workers when neither the call nor the config says otherwise.
DEFAULT_RPC_TIMEOUT = 3600.0
# Modules between the caller and the worker's method, which no traceback of a failure shows.
_MACHINERY = {f"roll.distributed.executor.{name}" for name in ("backend", "cluster", "ray_backend")}


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start."""

    worker_cls: type[Worker]
    worker_config: Any  # whatever the worker class takes: a WorkerConfig or a stand-in
    context: WorkerContext
    env: Mapping[str, str] = field(default_factory=dict)  # `system_envs` of the role
    max_concurrency: int = 1

    def construct(self) -> Worker:
        with worker_context(self.context):
            worker = self.worker_cls(self.worker_config)
        if getattr(worker, "context", None) is not self.context:
            name = self.worker_cls.__name__
            raise TypeError(f"{name}.__init__ does not call super().__init__(worker_config)")
        return worker


def public_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of a worker class that can be called from outside, by name."""
    members = inspect.getmembers(cls, callable)
    return {name: value for name, value in members if not name.startswith("_")}


def free_cached_memory() -> None:
    """Give cached device memory back to the processes that share the GPU."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def after_call(cls: type, method: str) -> None:
    """What follows every successful call of a worker's method."""
    spec = method_spec(cls, method)
    if spec is not None and spec.clear_cache:
        free_cached_memory()


def failure_message(context: WorkerContext, method: str, error: BaseException) -> str:
    """`actor-1 (rank 1 of 2) failed in train_step(): ValueError: ...`, then the traceback."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _MACHINERY:
        frames = frames.tb_next
    headline = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    who = f"{context.describe()} failed in {method}(): {headline}"
    return f"{who}\n\nOn {context.worker_name}:\n{trace}"


def timeout_message(
    method: str, timeout: float, late: Sequence[WorkerContext], num_calls: int
) -> str:
    contexts = sorted(late, key=lambda context: context.rank)
    return (
        f"{method}(): {len(late)} of {num_calls} workers had not answered after rpc_timeout="
        f"{timeout:g} seconds: {', '.join(context.describe() for context in contexts)}. Raise "
        "rpc_timeout if the work takes that long"
    )


class LocalRef(concurrent.futures.Future):
    """The outcome of one call: `result(timeout=)` waits for it, and so does `await`."""

    def __init__(self, worker: Worker, method: str) -> None:
        super().__init__()
        self.worker, self.method = worker, method

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def succeed(self, value: Any) -> None:
        after_call(type(self.worker), self.method)
        self.set_result(value)

    def fail(self, error: BaseException) -> None:
        failure = WorkerError(failure_message(self.worker.context, self.method, error))
        failure.__cause__ = error
        self.set_exception(failure)


class LocalBackend:
    """The workers of one cluster, which share this process with its devices and environment.

    `system_envs` are therefore not applied; a warning names those that the process does not have.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "workers in this process cannot be reached from another one; use backend='ray'"
        )

    def spawn(self, specs: Sequence[WorkerSpec], timeout: float) -> list[Any]:
        """Start the workers, in rank order, and return their handles once all are constructed."""
        role, env = specs[0].context.cluster_name, specs[0].env
        wanted = [device for spec in specs for device in spec.context.devices]
        if wanted:
            missing_gpus(role, wanted, len(specs), torch.cuda.device_count())
        missing = [f"{key}={env[key]}" for key in env if os.environ.get(key) != env[key]]
        if missing:
            logger.warning(
                "%s runs in this process and its system_envs are not applied: export %s first, or "
                "use backend=ray",
                role,
                " ".join(missing),
            )
        workers: list[Worker] = []
        for spec in specs:
            try:
                workers.append(spec.construct())
            except Exception as error:
                raise WorkerError(failure_message(spec.context, "__init__", error)) from error
        return workers

    def starter(self, handle: Any, method: str) -> Callable[..., Any]:
        """What the cluster calls to start the method: here the method itself, which runs then."""
        return getattr(handle, method)

    def started(self, handle: Any, method: str, outcome: Any) -> Any:
        """The reference to the outcome of a call that the starter returned."""
        ref = LocalRef(handle, method)
        if inspect.iscoroutine(outcome):
            self._run(outcome, ref)
        else:
            ref.succeed(outcome)
        return ref

    def failed(self, handle: Any, method: str, error: Exception) -> Any:
        """The reference to the outcome of a call whose starter raised."""
        ref = LocalRef(handle, method)
        ref.fail(error)
        return ref

    def share(self, values: list[Any]) -> list[Any]:
        """The values of one argument for all ranks, each stored once however many ranks get it."""
        return values

    def gather(self, refs: Sequence[Any], method: str, timeout: float) -> list[Any]:
        """Wait for all outcomes, at most `timeout` seconds; the values in the order of `refs`.

        The first failure is raised as soon as it is known, without waiting for slower workers.
        """
        if not all(ref.done() for ref in refs):
            if threading.current_thread() is self._loop_thread:
                raise WorkerError(
                    f"{method}(): an async method waits for async methods of its own cluster, on "
                    "the event loop that has to run them; call with blocking=False and await the "
                    "references"
                )
            concurrent.futures.wait(refs, timeout, return_when=concurrent.futures.FIRST_EXCEPTION)
        for ref in refs:
            if ref.done() and (error := ref.exception()) is not None:
                raise error
        late = [ref.worker.context for ref in refs if not ref.done()]
        if late:
            raise WorkerTimeoutError(timeout_message(method, timeout, late, len(refs)))
        return [ref.result() for ref in refs]

    def node_of(self, handle: Any) -> str:
        """The address of the machine that the worker runs on."""
        return "127.0.0.1"

    def shutdown(self) -> None:
        """End the workers. Safe to call again."""
        if self._loop is None or self._loop_thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop = self._loop_thread = None

    def _run(self, outcome: Coroutine[Any, Any, Any], ref: LocalRef) -> None:
        """Run an async method on the loop, which starts with the first of them."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()

            def run_loop() -> None:
                asyncio.set_event_loop(loop)
                loop.run_forever()
                # It was stopped: cancel what is unfinished, so that nobody waits for it.
                unfinished = asyncio.all_tasks(loop)
                for task in unfinished:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
                loop.close()

            # A daemon: an async method that never ends does not keep the program from ending.
            self._loop_thread = threading.Thread(
                target=run_loop, name="roll-async-workers", daemon=True
            )
            self._loop_thread.start()

        async def finish() -> None:
            try:
                value = await outcome
            except BaseException as error:  # noqa: BLE001 - also cancelled, also sys.exit
                ref.fail(error)
            else:
                ref.succeed(value)

        def give_up(_: Any) -> None:
            # A task that is cancelled before its first step never reaches `finish`.
            if not ref.done():
                outcome.close()
                ref.fail(asyncio.CancelledError())

        asyncio.run_coroutine_threadsafe(finish(), self._loop).add_done_callback(give_up)
