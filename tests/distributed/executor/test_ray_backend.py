"""What only Ray workers have: processes, environments, devices, groups, and ways to die."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cluster_workers import EchoWorker, GroupWorker, Payload, TwoArgumentError
from process_checks import eventually

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import (
    ConfigError,
    MissingDependencyError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    install_hint,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

REPOSITORY = Path(__file__).parents[3]


def start(worker_cls: type, world_size: int, name: str = "echo", **config: Any) -> Cluster:
    return Cluster(
        name,
        worker_cls,
        ResourceManager(num_gpus_per_node=4, backend="ray"),
        SimpleNamespace(world_size=world_size, **config),
    )


@pytest.fixture(scope="module")
def echo() -> Iterator[Cluster]:
    with start(
        EchoWorker, 2, system_envs={"ROLL_TEST_COLOUR": "green", "LOCAL_RANK": 5}
    ) as cluster:
        yield cluster


class BreaksOnTheWay:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise ValueError('it broke on the way')",)


def are_gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def raised(call: Callable[[], Any], kind: type[WorkerError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- processes and their environment
# -----------------------------------------------------------------------------------


def test_every_worker_is_a_process_with_its_environment(echo: Cluster) -> None:
    names = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "CLUSTER_NAME", "WORKER_NAME", "ROLL_TEST_COLOUR"]
    first, second = echo.execute_all_sync("environment", *names)
    assert first == {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "5",  # system_envs have the last word
        "CLUSTER_NAME": "echo",
        "WORKER_NAME": "echo-0",
        "ROLL_TEST_COLOUR": "green",
    }
    assert (second["RANK"], second["WORKER_NAME"]) == ("1", "echo-1")
    pids = echo.execute_all_sync("pid")
    assert len({os.getpid(), *pids}) == 3
    assert "ROLL_TEST_COLOUR" not in os.environ

    meeting_points = echo.execute_all_sync("environment", "MASTER_ADDR", "MASTER_PORT")
    assert meeting_points[0] == meeting_points[1]
    assert int(meeting_points[0]["MASTER_PORT"]) > 0


def test_handles_and_references_are_rays_own(echo: Cluster) -> None:
    import ray

    assert ray.get([worker.plain.remote(1) for worker in echo.workers]) == [
        (0, (1,), {}),
        (1, (1,), {}),
    ]
    assert ray.get(echo.tell("a", blocking=False)) == ["0:a", "1:a"]
    with pytest.raises(WorkerError, match="row 3 of rank 0 is bad"):
        ray.get(echo.fail_on(0, blocking=False)[0])


def test_an_exception_of_two_arguments_arrives_as_text(echo: Cluster) -> None:
    with pytest.raises(WorkerError, match="TwoArgumentError: row 7, column input_ids") as caught:
        echo.execute_all_sync("fail_two_arguments")
    assert not isinstance(caught.value.__cause__, TwoArgumentError)


def test_an_argument_that_does_not_arrive(echo: Cluster) -> None:
    with pytest.raises(
        WorkerError,
        match=r"echo-[01] \(rank [01] of 2\) failed in plain\(\): [^\x1b]*it broke on the way",
    ):
        echo.execute_all_sync("plain", BreaksOnTheWay())


def test_what_several_workers_get_is_stored_once(
    echo: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    stored: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (stored.append(value), put(value))[1])
    payload = Payload([1, 2, 3])
    assert echo.execute_all_sync("sum_of", payload) == [6, 6]
    assert stored == [payload]
    echo.tell("a")  # small values travel with the call
    echo.execute_all_sync(
        "sum_of", [Payload([1]), Payload([2])]
    )  # so does what only one worker gets
    assert stored == [payload]


def test_a_cluster_can_be_sent_to_another_process(echo: Cluster) -> None:
    import ray

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY / "tests")}})
    def elsewhere(cluster: Cluster) -> Any:
        with cluster:  # ending the copy does not end the workers
            return cluster.tell("b"), cluster.dp_size

    assert ray.get(elsewhere.remote(echo)) == (["0:b", "1:b"], 2)
    assert echo.tell("c") == ["0:c", "1:c"]


def test_a_failure_is_known_before_slow_workers_answer(echo: Cluster, tmp_path: Path) -> None:
    message = raised(lambda: echo.fail_on(0, others_wait_for=str(tmp_path / "now")), WorkerError)
    assert message.startswith("echo-0 (rank 0 of 2) failed in fail_on()")
    (tmp_path / "now").touch()
    echo.execute_all_sync("pid")  # returns once the slow one is free again


def test_a_timeout_says_where_the_workers_are(
    echo: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "rpc_timeout", 5)
    message = raised(
        lambda: echo.execute_all_sync("wait_unless", 0, str(tmp_path / "now")), WorkerTimeoutError
    )
    assert (
        "wait_unless(): 1 of 2 workers had not answered after rpc_timeout=5 seconds: echo-1 (rank 1 of 2)"
        in message
    )
    assert "echo-1 is here (most recent call first):\n" in message
    assert 'cluster_workers.py", line' in message and "in wait_unless" in message
    monkeypatch.undo()
    (tmp_path / "now").touch()
    echo.execute_all_sync("pid")


# -- torch.distributed, and death inside a collective
# ------------------------------------------------------------------


def test_a_group_of_four_and_the_death_of_one(tmp_path: Path) -> None:
    with start(GroupWorker, 4, name="group") as cluster:
        assert cluster.execute_all_sync("join") == [(rank, 4, "gloo") for rank in range(4)]
        assert cluster.execute_all_sync("all_reduce") == [10.0] * 4  # 1 + 2 + 3 + 4

        pids = cluster.execute_all_sync("pid")
        refs = cluster.all_reduce_except(2, str(tmp_path / "asleep"), blocking=False)
        under_way = cluster.execute_all_async("pid")  # behind it in the queue of every worker
        assert eventually((tmp_path / "asleep").exists)
        os.kill(pids[2], signal.SIGKILL)
        message = raised(lambda: cluster.gather(refs, "all_reduce_except"), WorkerDiedError)
        first = message.splitlines()[0]
        assert first.startswith(f"group-2 (rank 2 of 4, pid {pids[2]} on ")
        assert first.endswith(
            "died during all_reduce_except(): it was killed with SIGKILL (kill -9), or ended without a word"
        )
        assert "The other 3 worker(s) of group were stopped." in message
        assert are_gone(pids)

        with pytest.raises(
            WorkerDiedError, match=r"all_reduce_except\(\) cannot be called: group-2 .*SIGKILL"
        ):
            cluster.all_reduce_except(2)
        with pytest.raises(WorkerDiedError, match=r"pid\(\) did not finish: group-2 .*SIGKILL"):
            cluster.gather(under_way, "pid")


def test_a_group_of_two_and_an_exit_code() -> None:
    with start(GroupWorker, 2, name="group") as cluster:
        cluster.execute_all_sync("join")
        assert cluster.execute_all_sync("all_reduce") == [3.0, 3.0]
        pids = cluster.execute_all_sync("pid")
        message = raised(lambda: cluster.execute_all_sync("leave", 1, "os._exit"), WorkerDiedError)
        assert "group-1 (rank 1 of 2" in message
        assert "died during leave(): it exited with exit code 7" in message
        assert are_gone(pids)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("sys.exit", "it exited with exit code 9"), ("segfault", "it crashed with SIGSEGV in\n")],
)
def test_other_ways_to_die(how: str, reason: str) -> None:
    with start(GroupWorker, 1, name="group") as cluster:
        message = raised(lambda: cluster.execute_all_sync("leave", 0, how), WorkerDiedError)
    assert f"died during leave(): {reason}" in message
    if how == "segfault":
        assert 'cluster_workers.py", line' in message and "in leave" in message
        assert "default_worker.py" not in message


# -- devices
# -----------------------------------------------------------------------------------------------------------


def test_gpus_are_shown_by_the_numbers_of_device_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    manager = ResourceManager(num_gpus_per_node=4, backend="ray")
    with Cluster(
        "infer", EchoWorker, manager, SimpleNamespace(world_size=2, device_mapping=[3, 1])
    ) as cluster:
        shown = cluster.execute_all_sync("environment", "CUDA_VISIBLE_DEVICES")
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in shown] == ["3", "1"]
        identities = cluster.execute_all_sync("identity")
        assert [identity["worker_name"] for identity in identities] == ["infer-0-G3", "infer-1-G1"]
        assert [identity["device_index"] for identity in identities] == [0, 0]
        # Another role on the same GPUs: the reservation is shared.
        with Cluster(
            "train",
            EchoWorker,
            manager,
            SimpleNamespace(device_mapping=[2, 3], num_gpus_per_worker=2),
        ) as other:
            assert other.execute_all_sync("environment", "CUDA_VISIBLE_DEVICES") == [
                {"CUDA_VISIBLE_DEVICES": "2,3"}
            ]
            # The CPUs are shared out: Ray alone would give a worker one thread, however many CPUs
            # there are.
            assert (cluster.execute_all_sync("threads"), other.execute_all_sync("threads")) == (
                [1, 1],
                [2],
            )


def test_gpus_that_the_cluster_does_not_have() -> None:
    manager = ResourceManager(num_gpus_per_node=8, backend="ray")
    with pytest.raises(ConfigError) as caught:
        Cluster(
            "actor_train",
            EchoWorker,
            manager,
            SimpleNamespace(world_size=6, device_mapping=[0, 1, 2, 3, 4, 5]),
        )
    message = str(caught.value)
    assert "actor_train.device_mapping gives actor_train-4-G4 GPU 4 of node 0" in message
    assert "the Ray cluster has 1 node(s) with [4] GPUs" in message
    assert "actor_train.device_mapping=[0,1,2,3]" in message
    assert "actor_train.device_mapping=null actor_train.world_size=1" in message


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.distributed.executor.ray_backend._BOOKED", 1000)
    with pytest.raises(
        WorkerTimeoutError,
        match=r"no process for echo-0 after rpc_timeout=1 seconds; Ray has .*CPU",
    ):
        start(EchoWorker, 1, rpc_timeout=1)


# -- a whole program
# ---------------------------------------------------------------------------------------------------

INTERRUPTED_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
sys.path.insert(0, "tests")
from types import SimpleNamespace
from cluster_workers import GroupWorker
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import init
from roll.distributed.scheduler.resource_manager import ResourceManager

init()
cluster = Cluster("group", GroupWorker, ResourceManager(backend="ray"), SimpleNamespace(world_size=2))
cluster.execute_all_sync("join")
print("READY", flush=True)
cluster.all_reduce_except(1)
"""


def test_ctrl_c_leaves_no_process_behind() -> None:
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONUNBUFFERED": "1"}
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_PROGRAM],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a process group of its own, which Ctrl-C in a terminal reaches as a whole
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        printed = [next(program.stdout)]
        while "READY" not in printed[-1]:
            printed.append(next(program.stdout))
        # Nothing but the program's own line: no banner, and no warning but that a busy machine
        # takes its time.
        assert [line for line in printed if "still waiting for the processes of" not in line] == [
            "READY\n"
        ]
        children = psutil.Process(program.pid).children(recursive=True)
        assert len([child for child in children if "GroupWorker" in child.name()]) == 2
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait() != 0
        assert "KeyboardInterrupt" in program.stdout.read()
        assert are_gone([child.pid for child in children])
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_example_prints_the_same_in_process_and_on_ray(workers: int) -> None:
    """The Ray run joins the cluster of this test session through RAY_ADDRESS."""
    import ray

    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def printed(backend: str, count: int) -> str:
        command = [
            sys.executable,
            "examples/cluster.py",
            "--backend",
            backend,
            "--workers",
            str(count),
        ]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    expected = "every worker has weight 0.5: True\n" + "".join(
        f"row {i}: {2 * i + 0.5:g}\n" for i in range(10)
    )
    assert printed("local", workers) == expected
    assert printed("ray", workers) == expected


def test_ray_client_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from roll.distributed.executor.ray_backend import connect_to_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=ray://head:10001 is a Ray Client address"):
        connect_to_ray()


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "roll.distributed.executor.ray_backend", raising=False)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("ray"))):
        start(EchoWorker, 1)
