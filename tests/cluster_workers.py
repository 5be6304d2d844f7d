"""Worker classes that the cluster tests share, in a module of their own so that Ray processes can
import them."""

import asyncio
import ctypes
import os
import sys
import time
from dataclasses import dataclass

import torch

from roll.distributed.executor.worker import RankInfo, Worker
from roll.distributed.scheduler.decorator import Dispatch, Execute, register
from roll.distributed.scheduler.protocol import DataProto


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


class UnpicklableError(Exception):
    """Holds something that pickle refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.generator = (i for i in range(3))


class TwoArgumentError(Exception):
    """Pickles, and fails only when it is unpickled: its constructor wants two arguments, its `args`
    holds one."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(f"row {row}, column {column}")


@dataclass
class Payload:
    values: list[int]


class EchoWorker(Worker):
    """Answers with what it was given; holds no state that one test could leave to the next."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def double(self, data: DataProto) -> DataProto:
        rank_B = torch.full((len(data),), self.rank)
        return DataProto.from_dict(
            {"y": data.batch["x"] * 2, "rank": rank_B}, meta_info={"metrics": {"rank": self.rank}}
        )

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def rows_seen(self, data: DataProto) -> list[list[int]]:
        return [data.batch["x"].tolist()]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def cannot_be_joined(self, data: DataProto) -> int:
        return 1

    @register(
        dispatch_mode={
            "dispatch_fn": lambda cluster, text: ((list(text),), {}),
            "collect_fn": lambda cluster, output: "".join(output),
        }
    )
    def shout(self, letter: str) -> str:
        return letter.upper()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell(self, word: str, times: int = 1) -> str:
        return f"{self.rank}:{word * times}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def tell_one(self, word: str) -> str:
        return f"{self.rank}:{word}"

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own_value(self, value: int) -> int:
        return value * 10 + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE, execute_mode=Execute.RANK_ZERO)
    def rank_zero_only(self, value: object) -> tuple[int, object]:
        return self.rank, value

    def plain(
        self, *values: object, **named: object
    ) -> tuple[int, tuple[object, ...], dict[str, object]]:
        return self.rank, values, named

    def lay_out(self, tp_size: int) -> None:
        """Make the ranks a dp x tp grid, as a tensor parallel strategy does."""
        self.rank_info = RankInfo(
            world_size=self.world_size,
            dp_size=self.world_size // tp_size,
            tp_size=tp_size,
            rank=self.rank,
            dp_rank=self.rank // tp_size,
            tp_rank=self.rank % tp_size,
        )

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    def rows_here(self, data: DataProto) -> tuple[int, object]:
        return len(data), data.meta_info.get("step")

    def identity(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "cluster_name": self.cluster_name,
            "worker_name": self.worker_name,
            "device_index": self.device_index,
            "config": self.worker_config.world_size,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, others_wait_for: str = "/") -> str:
        """The others answer when that file is there."""
        if self.rank == rank:
            self._deeper(rank)
        wait_for_file(others_wait_for)
        return "fine"

    def _deeper(self, rank: int) -> None:
        raise ValueError(f"row 3 of rank {rank} is bad")

    def fail_unpicklable(self) -> None:
        raise UnpicklableError("cannot travel")

    def fail_two_arguments(self) -> None:
        raise TwoArgumentError(7, "input_ids")

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def wait_unless(self, rank: int, path: str) -> int:
        if self.rank != rank:
            wait_for_file(path)
        return self.rank

    def pid(self) -> int:
        return os.getpid()

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def threads(self) -> int:
        return torch.get_num_threads()

    def sum_of(self, payload: Payload) -> int:
        return sum(payload.values)


class AsyncWorker(Worker):
    """Async and sync methods side by side."""

    def __init__(self, worker_config: object) -> None:
        super().__init__(worker_config=worker_config)
        self.turnstile = asyncio.Event()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    async def double(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict({"y": data.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_to_be_let_through(self) -> int:
        await self.turnstile.wait()
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def let_through(self) -> None:
        self.turnstile.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("asynchronously bad")

    def sync(self) -> int:
        return self.rank


class SlowToInitialize(EchoWorker):
    """An async class: without care, a question about its ranks would overtake the initialize that
    settles them."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def initialize(self, pipeline_config: object) -> None:
        await asyncio.sleep(0.5)
        self.lay_out(2)


class FailsToInitialize(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: object) -> None:
        raise RuntimeError("no such model")


class FailsToConstruct(Worker):
    def __init__(self, worker_config: object) -> None:
        super().__init__(worker_config=worker_config)
        raise RuntimeError("it cannot be built")


class ForgetsItsBase(Worker):
    def __init__(self, worker_config: object) -> None:
        self.worker_config = worker_config


class GroupWorker(Worker):
    """Joins torch.distributed, and can be made to leave in several ways."""

    def join(self) -> tuple[int, int, str]:
        self.init_process_group()
        group = torch.distributed.group.WORLD
        return (
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
            torch.distributed.get_backend(group),
        )

    def all_reduce(self) -> float:
        value = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce_except(self, rank: int, mark: str | None = None) -> float:
        """The others wait in the collective for one that leaves a mark and sleeps."""
        if self.rank == rank:
            if mark is not None:
                open(mark, "w").close()
            time.sleep(3600)
        return self.all_reduce()

    def leave(self, rank: int, how: str) -> None:
        if self.rank != rank:
            time.sleep(3600)
        if how == "os._exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(9)
        if how == "segfault":
            ctypes.string_at(0)

    def pid(self) -> int:
        return os.getpid()
