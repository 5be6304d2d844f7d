"""What a cluster promises, on both backends."""

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_workers import (
    AsyncWorker,
    EchoWorker,
    FailsToConstruct,
    FailsToInitialize,
    ForgetsItsBase,
    Payload,
    SlowToInitialize,
)

from roll.distributed.executor.cluster import Cluster, check_worker_class
from roll.distributed.executor.worker import RankInfo, Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, WorkerError, WorkerTimeoutError

MakeCluster = Callable[..., Cluster]


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, meta_info={"step": 5})


# Registered methods


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_batch_comes_back_as_one_batch_in_input_order(
    cluster_of: MakeCluster, world_size: int
) -> None:
    cluster = cluster_of(EchoWorker, world_size)
    out = cluster.double(rows(7))
    assert out.batch["y"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    expected_ranks = {2: [0, 0, 0, 0, 1, 1, 1], 4: [0, 0, 1, 1, 2, 2, 3]}
    assert out.batch["rank"].tolist() == expected_ranks[world_size]
    assert out.meta_info["metrics"]["rank"] == list(range(world_size))


def test_the_other_modes(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    out = cluster.execute_all_sync("double", rows(5))  # the same call by name
    assert isinstance(out, DataProto) and out.batch["y"].tolist() == [0, 2, 4, 6, 8]
    assert cluster.rows_seen(rows(4)) == [[0, 1], [2, 3]]
    assert cluster.tell("ab", times=2) == ["0:abab", "1:abab"]
    assert cluster.tell_one("ab") == "0:ab"
    assert cluster.shout("ab") == "AB"  # functions of its own


def test_all_to_all(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    assert cluster.own_value([3, 4]) == [30, 41]
    with pytest.raises(
        ValueError, match="3 values; ALL_TO_ALL needs one value for each of the 2 workers"
    ):
        cluster.own_value([1, 2, 3])


def test_rank_zero(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    assert cluster.rank_zero_only([1, 2]) == (0, [1, 2])
    assert cluster.execute_rank_zero_sync("plain", [1, 2], b=3) == (0, ([1, 2],), {"b": 3})
    assert cluster.gather([cluster.execute_rank_zero_async("plain")], "plain") == [(0, (), {})]


# Methods by name


def test_an_unregistered_method_is_broadcast_or_scattered(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    call = cluster.execute_all_sync
    assert call("plain", 1, b="x") == [(0, (1,), {"b": "x"}), (1, (1,), {"b": "x"})]
    assert call("plain", [1, 2], b=[3, 4]) == [(0, (1,), {"b": 3}), (1, (2,), {"b": 4})]
    # One argument that is not a list of two: all of them are broadcast.
    assert call("plain", [1, 2], b=3)[1] == (1, ([1, 2],), {"b": 3})
    assert call("plain", [1, 2, 3])[1] == (1, ([1, 2, 3],), {})
    assert call("plain") == [(0, (), {}), (1, (), {})]
    assert call("sum_of", Payload([1, 2, 3])) == [6, 6]


def test_calls_that_are_not_waited_for_return_references(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    assert cluster.execute_rank_zero_sync("plain", blocking=False) == (0, (), {"blocking": False})
    refs = cluster.execute_all_async("plain", 7)
    assert cluster.gather(refs, "plain") == [(0, (7,), {}), (1, (7,), {})]
    assert cluster.gather(refs[::-1], "plain")[0][0] == 1
    assert cluster.gather(cluster.execute_all("plain", 7), "plain")[0] == (0, (7,), {})
    cluster = cluster_of(EchoWorker, 4)
    out = DataProto.materialize_concat(cluster.double(rows(6), blocking=False))
    assert out.batch["y"].tolist() == [0, 2, 4, 6, 8, 10]
    assert cluster.gather(cluster.tell("a", blocking=False), "tell") == ["0:a", "1:a", "2:a", "3:a"]


# Async workers


def test_async_methods(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(AsyncWorker, 2)
    assert cluster.double(rows(5)).batch["y"].tolist() == [0, 2, 4, 6, 8]
    assert cluster.execute_all_sync("sync") == [0, 1]
    with pytest.raises(
        WorkerError,
        match=r"echo-[01] \(rank [01] of 2\) failed in fail\(\): ValueError: async.* bad",
    ):
        cluster.fail()


def test_calls_of_an_async_worker_overlap(cluster_of: MakeCluster) -> None:
    """A call that is waiting on a worker is released by a later call on the same worker."""
    cluster = cluster_of(AsyncWorker, 2)
    waiting = cluster.wait_to_be_let_through(blocking=False)
    cluster.let_through()
    assert cluster.gather(waiting, "wait_to_be_let_through") == [0, 1]


def test_rpc_timeout_names_the_workers_that_have_not_answered(
    cluster_of: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of(AsyncWorker, 2)
    monkeypatch.setattr(cluster, "rpc_timeout", 0.3)
    with pytest.raises(WorkerTimeoutError) as caught:
        cluster.nap(30)
    message = str(caught.value)
    assert message.startswith(
        "nap(): 2 of 2 workers had not answered after rpc_timeout=0.3 seconds: "
    )
    assert "echo-0 (rank 0 of 2), echo-1 (rank 1 of 2)" in message
    assert isinstance(caught.value, TimeoutError)


# Shape and names


def test_names_and_shape(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    same = {"world_size": 2, "cluster_name": "echo", "device_index": None, "config": 2}
    assert cluster.execute_all_sync("identity") == [
        {"rank": rank, "worker_name": f"echo-{rank}", **same} for rank in (0, 1)
    ]
    assert (cluster.world_size, cluster.dp_size, cluster.tp_size) == (2, 2, 1)
    assert (cluster.pp_size, cluster.cp_size) == (1, 1)
    assert cluster.get_rank_info(1) == RankInfo(world_size=2, dp_size=2, rank=1, dp_rank=1)
    with pytest.raises(ValueError, match="echo has ranks 0 to 1; there is no rank 2"):
        cluster.get_rank_info(2)
    assert cluster.rank2worker == dict(enumerate(cluster.workers))
    assert [cluster.worker2rank[worker] for worker in cluster.workers] == [0, 1]
    assert cluster.rank2devices == {0: [], 1: []}
    assert len(set(cluster.worker2nodes.values())) == 1
    assert repr(cluster) == "Cluster('echo', EchoWorker, world_size=2)"


def test_vp_size() -> None:
    def vp_size(**fields: Any) -> int:
        return new_local(EchoWorker, **fields).vp_size

    config = {"virtual_pipeline_model_parallel_size": 3}
    assert vp_size() == 1
    assert vp_size(strategy_args=None) == 1
    assert vp_size(strategy_args=SimpleNamespace(strategy_config={})) == 1
    assert vp_size(strategy_args=SimpleNamespace(strategy_config=config)) == 3


def test_dispatch_follows_the_ranks(cluster_of: MakeCluster) -> None:
    """Before `initialize`, where the ranks sit is asked again for every call."""
    cluster = cluster_of(EchoWorker, 4)
    assert (cluster.dp_size, cluster.tp_size) == (4, 1)
    cluster.execute_all_sync("lay_out", 2)
    assert (cluster.dp_size, cluster.tp_size) == (2, 2)
    assert cluster.double(rows(5)).batch["rank"].tolist() == [0, 0, 0, 2, 2]
    # Rows go to the first of the tensor parallel peers; meta_info to all.
    assert cluster.rows_here(rows(5)) == [(3, 5), (0, 5), (2, 5), (0, 5)]
    cluster.execute_all_sync("lay_out", 1)
    assert cluster.dp_size == 4


def test_initialize_settles_the_ranks() -> None:
    cluster = new_local(EchoWorker, world_size=2)
    assert (cluster.dp_size, cluster.initialized) == (2, False)
    cluster.initialize(None)
    assert cluster.initialized
    assert cluster.dp_size == 2
    cluster.execute_all_sync("lay_out", 2)
    assert cluster.dp_size == 2


def test_rank_info_waits_for_an_initialize_that_nobody_waited_for(own_cluster: MakeCluster) -> None:
    cluster = own_cluster(SlowToInitialize, 2)
    assert cluster.dp_size == 2
    cluster.initialize(None, blocking=False)
    assert (cluster.dp_size, cluster.tp_size) == (1, 2)


def test_a_failed_initialize_is_no_initialize() -> None:
    cluster = new_local(FailsToInitialize)
    with pytest.raises(WorkerError, match="no such model"):
        cluster.initialize(None)
    assert not cluster.initialized
    assert cluster.dp_size == 1


# Failures


def test_a_failure_is_one_exception_with_the_original_traceback(cluster_of: MakeCluster) -> None:
    with pytest.raises(WorkerError) as caught:
        cluster_of(EchoWorker, 2).fail_on(1)
    error = caught.value
    assert type(error) is WorkerError
    assert (
        str(error).splitlines()[0]
        == "echo-1 (rank 1 of 2) failed in fail_on(): ValueError: row 3 of rank 1 is bad"
    )
    assert re.search(
        r'cluster_workers\.py", line \d+, in fail_on\n    self\._deeper\(rank\)', str(error)
    )
    assert re.search(r'cluster_workers\.py", line \d+, in _deeper\n', str(error))
    assert "_backend.py" not in str(error)  # the traceback starts at the method
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("row 3 of rank 1 is bad",)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fail_unpicklable", "UnpicklableError: cannot travel"),
        ("fail_two_arguments", "row 7, column input_ids"),
    ],
)
def test_exceptions_that_do_not_pickle_arrive_as_text(
    cluster_of: MakeCluster, method: str, text: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        cluster_of(EchoWorker, 2).execute_all_sync(method)
    assert text in str(caught.value)
    assert f"in {method}\n" in str(caught.value)


def test_a_wrong_argument_is_a_failure_of_the_call(cluster_of: MakeCluster) -> None:
    with pytest.raises(
        WorkerError,
        match=r"failed in sleep\(\): TypeError: .*missing 1 required positional argument",
    ):
        cluster_of(EchoWorker, 2).execute_all_sync("sleep")


def test_a_cluster_works_on_after_a_failure(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    with pytest.raises(WorkerError):
        cluster.fail_on(0)
    assert cluster.tell("a") == ["0:a", "1:a"]


def test_a_failed_constructor(backend: str) -> None:
    manager = ResourceManager(backend=backend)
    with pytest.raises(
        WorkerError,
        match=r"bad-0 \(rank 0 of 1\) failed in __init__\(\): RuntimeError: it cannot be",
    ):
        Cluster("bad", FailsToConstruct, manager, SimpleNamespace())


def test_a_constructor_that_forgets_its_base() -> None:
    with pytest.raises(
        WorkerError,
        match=r"ForgetsItsBase.__init__ does not call super\(\).__init__\(worker_config\)",
    ):
        new_local(ForgetsItsBase)


def test_unknown_methods(cluster_of: MakeCluster) -> None:
    cluster = cluster_of(EchoWorker, 2)
    with pytest.raises(
        AttributeError, match=r"EchoWorker has no method 'dubble'; did you mean 'double'\?"
    ):
        cluster.dubble(rows(2))
    with pytest.raises(AttributeError, match="EchoWorker has no method 'dubble'"):
        cluster.execute_all_sync("dubble")
    with pytest.raises(
        AttributeError, match=r"EchoWorker\.plain is not registered; .* execute_all_sync\('plain'\)"
    ):
        cluster.plain()
    with pytest.raises(AttributeError, match="has no method '_deeper'"):
        cluster.execute_rank_zero_sync("_deeper", 1)


def test_a_cluster_that_was_shut_down_says_so() -> None:
    with new_local(EchoWorker) as cluster:
        assert cluster.tell("a") == ["0:a"]
    cluster.shutdown()
    with pytest.raises(
        WorkerError, match=r"echo was shut down; tell\(\) cannot be called any more"
    ):
        cluster.tell("a")


# Construction


def new_local(
    worker_cls: Any, world_size: int = 1, rpc_timeout: float | None = None, **fields: Any
) -> Cluster:
    config = SimpleNamespace(world_size=world_size, **fields)
    return Cluster(
        "echo", worker_cls, ResourceManager(backend="local"), config, rpc_timeout=rpc_timeout
    )


def test_worker_cls_may_be_a_dotted_path() -> None:
    assert new_local("cluster_workers.EchoWorker").tell("a") == ["0:a"]


def test_worker_cls_may_be_a_ray_actor_class() -> None:
    ray = pytest.importorskip("ray")
    cluster = new_local(ray.remote(EchoWorker))
    assert cluster.worker_cls is EchoWorker
    assert cluster.tell("a") == ["0:a"]


@pytest.mark.parametrize(
    ("worker_cls", "message"),
    [
        (
            "EchoWorker",
            "'EchoWorker' is not a dotted path to a class; expected 'package.module.Class'",
        ),
        ("no_such_module.EchoWorker", "there is no module 'no_such_module'"),
        ("cluster_workers.NoSuchWorker", "module cluster_workers has no 'NoSuchWorker'"),
        ("cluster_workers.Payload", "is not a subclass of roll.distributed.executor.worker.Worker"),
        (dict, "is not a subclass of roll.distributed.executor.worker.Worker"),
    ],
)
def test_a_wrong_worker_cls(worker_cls: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        new_local(worker_cls)


@pytest.mark.parametrize("name", ["shutdown", "workers", "dp_size"])
def test_a_registered_method_must_not_hide_the_cluster(name: str) -> None:
    def method(self: Worker) -> None: ...

    taken = type("Taken", (Worker,), {name: register(dispatch_mode=Dispatch.ONE_TO_ALL)(method)})
    with pytest.raises(
        ConfigError, match=f"Taken.{name} is registered, but Cluster.{name} means something else"
    ):
        new_local(taken)


def test_world_size_follows_from_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = SimpleNamespace(world_size=None, device_mapping=[0, 1, 2, 3], num_gpus_per_worker=2)
    cluster = Cluster("infer", EchoWorker, ResourceManager(num_gpus_per_node=4), config)
    assert cluster.execute_all_sync("identity")[1]["worker_name"] == "infer-1-G23"
    assert cluster.workers[1].device_index == 2
    assert [(d.node_rank, d.gpu_rank) for d in cluster.rank2devices[1]] == [(0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("choice", "holds_model", "world_size", "expected"),
    [
        ("auto", True, 1, "local"),
        ("auto", True, 2, "ray"),
        ("auto", False, 4, "local"),
        ("local", True, 2, "local"),
        ("ray", False, 1, "ray"),
    ],
)
def test_the_choice_of_backend(
    monkeypatch: pytest.MonkeyPatch, choice: Any, holds_model: bool, world_size: int, expected: str
) -> None:
    ray_backend = pytest.importorskip("roll.distributed.executor.ray_backend")

    def refuse(_: ResourceManager) -> None:
        raise InterruptedError

    monkeypatch.setattr(ray_backend, "RayBackend", refuse)
    config = SimpleNamespace(world_size=world_size, holds_model=holds_model)
    try:
        cluster = Cluster("role", EchoWorker, ResourceManager(backend=choice), config)
    except InterruptedError:
        assert expected == "ray"
    else:
        assert cluster.backend_name == expected == "local"


def test_where_rpc_timeout_comes_from() -> None:
    def timeout(given: float | None, pipeline: float | None, **config: Any) -> float:
        manager = ResourceManager()
        cluster = Cluster("echo", EchoWorker, manager, SimpleNamespace(**config), rpc_timeout=given)
        cluster.initialize(pipeline_config=SimpleNamespace(rpc_timeout=pipeline))
        return cluster.rpc_timeout

    assert timeout(None, None) == 3600 and timeout(None, 7) == 7
    assert timeout(None, 7, rpc_timeout=6) == 6 and timeout(5, 7, rpc_timeout=6) == 5
    with pytest.raises(ConfigError, match="rpc_timeout=0: expected a number of seconds above 0"):
        new_local(EchoWorker, rpc_timeout=0)


def test_max_concurrency() -> None:
    assert check_worker_class(EchoWorker, 1) == (EchoWorker, 1)
    assert check_worker_class(AsyncWorker, 1) == (AsyncWorker, 1000)
    assert check_worker_class("cluster_workers.AsyncWorker", 8) == (AsyncWorker, 8)
    with pytest.raises(ConfigError, match="max_concurrency=8, but EchoWorker has no async method"):
        new_local(EchoWorker, max_concurrency=8)


def test_errors_of_splitting_and_joining_say_which_method() -> None:
    cluster = new_local(EchoWorker, world_size=3)
    with pytest.raises(ValueError, match="positional argument 0 is a DataProto of 2") as caught:
        cluster.double(rows(2))
    assert caught.value.__notes__ == ["while splitting the arguments of double() over the workers"]
    with pytest.raises(TypeError, match="cannot join worker outputs") as caught:
        cluster.cannot_be_joined(rows(3))
    assert caught.value.__notes__ == ["while joining the outputs of cannot_be_joined()"]


def test_a_call_is_quick() -> None:
    """The promise is 100 microseconds for a local call; ten times that leaves room for a slow
    machine."""
    cluster = new_local(EchoWorker)
    cluster.tell("a")
    start = time.process_time()  # of this process alone: others on the machine do not count
    for _ in range(100):
        cluster.tell("a")
    assert (time.process_time() - start) / 100 < 1e-3
