"""What only workers in this process have."""

import asyncio
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_workers import AsyncWorker, EchoWorker

from roll.distributed.executor import backend
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, WorkerError


def local(worker_cls: type, world_size: int = 1, **fields: Any) -> Cluster:
    manager = ResourceManager(num_gpus_per_node=8, num_nodes=2, backend="local")
    return Cluster("role", worker_cls, manager, SimpleNamespace(world_size=world_size, **fields))


class MoreWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clears(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=False)
    def keeps(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clears_on_failure(self) -> None:
        raise ValueError

    def unregistered(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def clears_later(self) -> None: ...

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def call_own_cluster(self, cluster: Cluster) -> Any:
        return cluster.clears_later()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def await_own_cluster(self, cluster: Cluster) -> Any:
        return [await ref for ref in cluster.clears_later(blocking=False)]

    async def exit(self) -> None:
        sys.exit(3)


def test_workers_are_objects_of_this_process() -> None:
    cluster = local(EchoWorker, 2)
    assert [type(worker) for worker in cluster.workers] == [EchoWorker, EchoWorker]
    assert cluster.workers[1].tell("a") == "1:a"  # an ordinary call
    with pytest.raises(TypeError, match="workers in this process cannot be reached from another"):
        pickle.dumps(cluster)


@pytest.mark.slow
def test_no_ray_in_the_process() -> None:
    program = """
import sys
sys.path.insert(0, "tests")
from types import SimpleNamespace
from cluster_workers import EchoWorker
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
cluster = Cluster("role", EchoWorker, ResourceManager(), SimpleNamespace(world_size=2))
print(cluster.tell("a"), "ray" in sys.modules)
"""
    repository = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['0:a', '1:a'] False\n"


def test_async_methods_work_inside_a_running_event_loop() -> None:
    async def caller() -> tuple[Any, Any]:
        cluster = local(AsyncWorker, 2)
        awaited = [await ref for ref in cluster.nap(0.01, blocking=False)]
        blocking = cluster.double(DataProto.from_dict({"x": torch.arange(3)})).batch["y"].tolist()
        cluster.shutdown()
        return awaited, blocking

    assert asyncio.run(caller()) == ([0, 1], [0, 2, 4])


def test_an_async_method_that_waits_for_its_own_cluster_is_told_so() -> None:
    cluster = local(MoreWorker)
    with pytest.raises(WorkerError, match=r"async methods of its own cluster.*blocking=False and"):
        cluster.call_own_cluster(cluster)
    assert cluster.await_own_cluster(cluster) == [[None]]


def test_calls_that_end_in_unusual_ways() -> None:
    cluster = local(AsyncWorker)
    (waiting,) = cluster.wait_to_be_let_through(blocking=False)
    cluster.shutdown()  # ends calls that nobody waits for
    with pytest.raises(WorkerError, match="CancelledError"):
        waiting.result(timeout=200)
    with pytest.raises(WorkerError, match=r"failed in exit\(\): SystemExit: 3"):
        local(MoreWorker).execute_all_sync("exit")
    with pytest.raises(KeyboardInterrupt):  # ctrl-c goes straight through
        local(MoreWorker).execute_all_sync("interrupt")


def test_the_original_exception_keeps_its_traceback() -> None:
    with pytest.raises(WorkerError) as caught:
        local(EchoWorker).fail_on(0)
    functions, frame = [], caught.value.__cause__.__traceback__
    while frame is not None:
        functions.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    assert functions == ["_call", "fail_on", "_deeper"]  # one frame between caller and method


def test_memory_is_freed_after_methods_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(backend, "free_cached_memory", lambda: freed.append(True))
    cluster = local(MoreWorker)
    cluster.clears()
    assert len(freed) == 1
    cluster.clears_later()
    assert len(freed) == 2
    cluster.keeps()
    cluster.execute_all_sync("unregistered")
    with pytest.raises(WorkerError):
        cluster.clears_on_failure()
    cluster.workers[0].clears()  # a direct call is a plain call
    assert len(freed) == 2


def test_system_envs_are_not_applied_and_the_difference_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROLL_TEST_SAME", "1")
    with caplog.at_level(logging.WARNING, logger="roll"):
        cluster = local(EchoWorker, system_envs={"ROLL_TEST_SAME": 1, "ROLL_TEST_NEW": "x"})
    assert cluster.execute_all_sync("environment", "ROLL_TEST_NEW") == [{"ROLL_TEST_NEW": None}]
    assert "its system_envs are not applied: export ROLL_TEST_NEW=x first" in caplog.text
    assert "ROLL_TEST_SAME" not in caplog.text


@pytest.mark.parametrize(
    ("num_gpus", "mapping", "message"),
    [
        (
            1,
            [0, 1, 2, 3],
            "role.device_mapping names GPU 1 to 3, but this machine shows 1 GPU(s). To run it on "
            "what is there: role.device_mapping=[0]; or on CPU: role.device_mapping=null "
            "role.world_size=1",
        ),
        (0, [0], "To run it on CPU: role.device_mapping=null role.world_size=1"),
        (0, [8], "names GPUs of a second machine, but its workers run in this process"),
    ],
)
def test_gpus_that_this_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, mapping: list[int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError) as caught:
        local(EchoWorker, world_size=len(mapping), device_mapping=mapping)
    assert message in str(caught.value)
