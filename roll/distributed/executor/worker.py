"""A worker: one rank of a role (actor, reference, reward), in this process or one of its own.

A worker class is an ordinary class. Its `__init__` takes the configuration of the role and nothing
else; who the worker is (rank, names, devices, where its peers meet) comes from the `WorkerContext`
in which the backend constructs it. Constructed without one, it is a lone worker of world size 1.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from roll.distributed.scheduler.decorator import Dispatch, RankInfo, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import Device
from roll.utils.logging import get_logger

# Minutes that the members of a torch.distributed group wait for each other, unless configured.
DEFAULT_BACKEND_TIMEOUT = 30.0


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is. The backend sets it around the construction of the worker.

    `master` is the address and port, reserved on rank 0's machine, where the ranks can meet; None
    in a shared process. `device_index` is the number under which the worker's own process knows the
    first of its `devices`.
    """

    rank: int = 0
    world_size: int = 1
    cluster_name: str = "worker"
    worker_name: str = "worker-0"
    devices: tuple[Device, ...] = ()
    device_index: int | None = None
    master: tuple[str, int] | None = None

    def describe(self) -> str:
        return f"{self.worker_name} (rank {self.rank} of {self.world_size})"


_CONTEXT: ContextVar[WorkerContext | None] = ContextVar("worker_context", default=None)


@contextmanager
def worker_context(context: WorkerContext) -> Iterator[None]:
    """Workers constructed inside are the one that `context` describes."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


class _WorkerLogger(logging.LoggerAdapter):
    """Puts the worker's name in front of every line."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[{(self.extra or {})['worker']}] {msg}", kwargs


class Worker:
    """Base of every worker. Subclasses add methods, and `@register` those for the cluster.

    context           who this worker is: rank, names, devices, meeting point
    worker_config     the configuration of the role; each subclass reads the fields that it needs
    pipeline_config   the configuration of the whole run, from `initialize` on
    rank_info         data parallel over all ranks, until a strategy lays the ranks out otherwise
    strategy          the model of a role that holds one; None for the others
    device_index      the CUDA device of this worker in its own process; None on CPU
    """

    def __init__(self, worker_config: Any) -> None:
        context = _CONTEXT.get() or WorkerContext()
        self.context = context
        self.rank = context.rank
        self.world_size = context.world_size
        self.cluster_name = context.cluster_name
        self.worker_name = context.worker_name
        self.device_index = context.device_index
        self.worker_config = worker_config
        self.pipeline_config: Any = None
        self.strategy: Any = None
        self.rank_info = RankInfo(
            world_size=self.world_size, dp_size=self.world_size, rank=self.rank, dp_rank=self.rank
        )
        self.logger = _WorkerLogger(get_logger("roll.worker"), {"worker": self.worker_name})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        """Called once on every rank before any work. Subclasses build their strategy here."""
        self.pipeline_config = pipeline_config

    def get_rank_info(self) -> RankInfo:
        return self.rank_info

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Bring the strategy's states (all, or those in `include`) to its device."""
        if self.strategy is not None:
            self.strategy.load_states(include=include, non_blocking=non_blocking)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """Move the strategy's states (all, or those in `include`) to host memory."""
        if self.strategy is not None:
            self.strategy.offload_states(include=include, non_blocking=non_blocking)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_weights_after_loading(self) -> None:
        """Let a generation engine finish weights that were just written into it."""
        if self.strategy is not None:
            self.strategy.process_weights_after_loading()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def get_metrics(self, metric_names: Collection[str] | None = None) -> DataProto:
        """The strategy's own metrics, as `meta_info["metrics"]` of a batch without rows."""
        metrics = {} if self.strategy is None else self.strategy.get_metrics(metric_names)
        return DataProto(meta_info={"metrics": metrics})

    def init_process_group(
        self, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        """Join the default torch.distributed group of this cluster; every rank calls it.

        `backend` is nccl for a worker with devices and gloo for one without, unless given. Ranks
        wait for each other, here and in every collective, for at most `timeout` (default
        `worker_config.backend_timeout` minutes). A lone worker gets a group of one, and may call
        this again: the roles of one process share it.
        """
        context = self.context
        if torch.distributed.is_initialized():
            joined = (torch.distributed.get_rank(), torch.distributed.get_world_size())
            if joined == (context.rank, context.world_size):
                return
            raise RuntimeError(
                f"{context.describe()}: this process is already rank {joined[0]} of a "
                f"torch.distributed group of {joined[1]}; a process can hold one rank only"
            )
        if backend is None:
            backend = "nccl" if context.devices else "gloo"
        if timeout is None:
            minutes = getattr(self.worker_config, "backend_timeout", DEFAULT_BACKEND_TIMEOUT)
            timeout = timedelta(minutes=minutes)
        if context.world_size == 1:
            store: torch.distributed.Store = torch.distributed.HashStore()
        elif context.master is None:
            raise RuntimeError(
                f"{context.describe()}: the {context.world_size} workers of {context.cluster_name} "
                "share one process, and torch.distributed needs a process for every rank; run them "
                "with backend='ray'"
            )
        else:
            host, port = context.master
            store = torch.distributed.TCPStore(
                host, port, context.world_size, is_master=context.rank == 0, timeout=timeout
            )
        torch.distributed.init_process_group(
            backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout
        )
