"""What a cluster asks of the place where its workers run. Two places exist: this process, and Ray.

A backend starts workers, starts calls on them and waits for the outcome. It knows nothing of batches or dispatch modes.
Failures look the same from every backend: a `WorkerError` whose message names worker, rank and method and carries the
worker's own traceback, with the original exception as its `__cause__`.
"""

import gc
import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roll.distributed.executor.worker import Worker, WorkerContext, worker_context
from roll.distributed.scheduler.decorator import method_spec


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start."""

    worker_cls: type[Worker]
    worker_config: Any  # whatever the worker class takes: a WorkerConfig or a stand-in
    context: WorkerContext
    env: Mapping[str, str] = field(default_factory=dict)  # `system_envs` of the role
    max_concurrency: int = 1


class ExecutorBackend(ABC):
    """Starts and calls the workers of one cluster.

    Handles and references are the backend's own kind: worker objects and futures in process, actor handles and object
    references on Ray. Callers pass them back as they are.
    """

    @abstractmethod
    def spawn(self, specs: Sequence[WorkerSpec], timeout: float) -> list[Any]:
        """Start the workers, rank by rank in `specs`, and return their handles once all are constructed."""

    @abstractmethod
    def submit(
        self, handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Start `method` on one worker and return a reference to its outcome; never raises what the method raises."""

    @abstractmethod
    def gather(self, refs: Sequence[Any], method: str, timeout: float) -> list[Any]:
        """Wait for all outcomes, at most `timeout` seconds, and return the values in the order of `refs`.

        The first failure is raised as soon as it is known, without waiting for slower workers.
        """

    @abstractmethod
    def node_of(self, handle: Any) -> str:
        """The address of the machine that the worker runs on."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. Safe to call again."""

    def share(self, value: Any) -> Any:
        """A stand-in for an argument that several workers get, so that it is sent or stored once; by default itself."""
        return value


def construct(worker_cls: type[Worker], worker_config: Any, context: WorkerContext) -> Worker:
    """The worker that `context` describes."""
    with worker_context(context):
        worker = worker_cls(worker_config)
    if getattr(worker, "context", None) is not context:
        raise TypeError(
            f"{worker_cls.__name__}.__init__ does not call super().__init__(worker_config)"
        )
    return worker


def public_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of a worker class that can be called from outside, by name."""
    return {
        name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")
    }


def clears_cache(cls: type, method: str) -> bool:
    """Whether cached device memory is freed after a successful call of `method`."""
    spec = method_spec(cls, method)
    return spec is not None and spec.clear_cache


def free_cached_memory() -> None:
    """Give cached device memory back to the processes that share the GPU. Costs nothing where CUDA is unused."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def failure_message(context: WorkerContext, method: str, error: BaseException) -> str:
    """`actor-1 (rank 1 of 2) failed in train_step(): ValueError: ...`, then the traceback below the backend."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").endswith("_backend"):
        frames = frames.tb_next
    headline = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return f"{context.describe()} failed in {method}(): {headline}\n\nOn {context.worker_name}:\n{trace}"


def timeout_message(
    method: str, timeout: float, late: Sequence[WorkerContext], num_calls: int
) -> str:
    names = ", ".join(
        context.describe() for context in sorted(late, key=lambda context: context.rank)
    )
    return (
        f"{method}(): {len(late)} of {num_calls} workers had not answered after rpc_timeout={timeout:g} seconds: "
        f"{names}. Raise rpc_timeout if the work takes that long"
    )
