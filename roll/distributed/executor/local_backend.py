"""Workers as plain objects in this process: the default. No Ray, no sockets; `breakpoint()` works.

A sync method runs when it is submitted, in the caller's thread; its reference is complete when the caller gets it.
Async methods run on an event loop in a thread of their own, one for the backend, so that they also work when the caller
sits inside a running loop (a notebook), and asyncio objects that a worker keeps always meet the same loop.

All workers share the process: its memory, its CUDA devices, its environment. `system_envs` are therefore not applied
here; a warning names those that the process does not already have.
"""

import asyncio
import concurrent.futures
import inspect
import os
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from roll.distributed.executor.backend import (
    ExecutorBackend,
    WorkerSpec,
    clears_cache,
    construct,
    failure_message,
    free_cached_memory,
    timeout_message,
)
from roll.distributed.executor.worker import Worker, WorkerContext
from roll.distributed.scheduler.resource_manager import missing_gpus
from roll.exceptions import WorkerError, WorkerTimeoutError
from roll.utils.logging import get_logger

logger = get_logger(__name__)


class LocalRef(concurrent.futures.Future):
    """The outcome of one call: `result(timeout=)` waits for it, and so does `await`, on any event loop."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        self.context = context

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class LocalBackend(ExecutorBackend):
    """Workers in this process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "workers in this process cannot be reached from another one; use backend='ray'"
        )

    def spawn(self, specs: Sequence[WorkerSpec], timeout: float) -> list[Worker]:
        _check_devices(specs)
        _warn_about_environment(specs[0])
        workers: list[Worker] = []
        for spec in specs:
            try:
                workers.append(construct(spec.worker_cls, spec.worker_config, spec.context))
            except Exception as error:
                raise WorkerError(failure_message(spec.context, "__init__", error)) from error
        return workers

    def submit(
        self, handle: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LocalRef:
        ref = LocalRef(handle.context)
        try:
            outcome = getattr(handle, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the border of a worker: every failure becomes one kind of error
            _fail(ref, method, error)
            return ref
        if inspect.iscoroutine(outcome):
            task = asyncio.run_coroutine_threadsafe(
                _finish(handle, method, outcome, ref), self._running_loop()
            )
            task.add_done_callback(lambda _: _give_up(ref, method, outcome))
        else:
            _succeed(ref, type(handle), method, outcome)
        return ref

    def gather(self, refs: Sequence[LocalRef], method: str, timeout: float) -> list[Any]:
        if not all(ref.done() for ref in refs):
            if threading.current_thread() is self._loop_thread:
                raise WorkerError(
                    f"{method}(): an async method waits for async methods of its own cluster, on the event loop that "
                    "has to run them; call with blocking=False and await the references"
                )
            concurrent.futures.wait(refs, timeout, return_when=concurrent.futures.FIRST_EXCEPTION)
        for ref in refs:
            if ref.done() and (error := ref.exception()) is not None:
                raise error
        late = [ref.context for ref in refs if not ref.done()]
        if late:
            raise WorkerTimeoutError(timeout_message(method, timeout, late, len(refs)))
        return [ref.result() for ref in refs]

    def node_of(self, handle: Worker) -> str:
        return "127.0.0.1"

    def shutdown(self) -> None:
        if self._loop is None or self._loop_thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop = self._loop_thread = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon: an async method that never ends does not keep the program from ending.
            self._loop_thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="roll-async-workers", daemon=True
            )
            self._loop_thread.start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until stopped, then cancel what is unfinished, so that nobody waits for it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    unfinished = asyncio.all_tasks(loop)
    for task in unfinished:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
    loop.close()


async def _finish(
    worker: Worker, method: str, outcome: Coroutine[Any, Any, Any], ref: LocalRef
) -> None:
    try:
        value = await outcome
    except BaseException as error:  # noqa: BLE001 - as in submit; the call also ends when it is cancelled or exits
        _fail(ref, method, error)
    else:
        _succeed(ref, type(worker), method, value)


def _give_up(ref: LocalRef, method: str, outcome: Coroutine[Any, Any, Any]) -> None:
    """A task that is cancelled before its first step never reaches `_finish`."""
    if not ref.done():
        outcome.close()
        _fail(ref, method, asyncio.CancelledError())


def _succeed(ref: LocalRef, worker_cls: type, method: str, value: Any) -> None:
    if clears_cache(worker_cls, method):
        free_cached_memory()
    ref.set_result(value)


def _fail(ref: LocalRef, method: str, error: BaseException) -> None:
    failure = WorkerError(failure_message(ref.context, method, error))
    failure.__cause__ = error
    ref.set_exception(failure)


def _check_devices(specs: Sequence[WorkerSpec]) -> None:
    """The GPUs that are asked for exist in this process."""
    wanted = [device for spec in specs for device in spec.context.devices]
    if wanted:
        missing_gpus(specs[0].context.cluster_name, wanted, len(specs), torch.cuda.device_count())


def _warn_about_environment(spec: WorkerSpec) -> None:
    missing = {name: value for name, value in spec.env.items() if os.environ.get(name) != value}
    if missing:
        logger.warning(
            "%s runs in this process and its system_envs are not applied: export %s first, or use backend=ray",
            spec.context.cluster_name,
            " ".join(f"{name}={value}" for name, value in missing.items()),
        )
