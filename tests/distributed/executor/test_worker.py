"""A worker alone, and the context in which a backend constructs it."""

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.distributed.executor.worker import RankInfo, Worker, WorkerContext, worker_context
from roll.distributed.scheduler.decorator import Dispatch, method_spec

CONFIG = SimpleNamespace(backend_timeout=1)


def worker_in(**context: Any) -> Worker:
    with worker_context(WorkerContext(**context)):
        return Worker(worker_config=CONFIG)


def test_a_worker_constructed_alone_is_a_world_of_one() -> None:
    worker = Worker(CONFIG)
    assert (worker.rank, worker.world_size, worker.worker_name) == (0, 1, "worker-0")
    assert worker.device_index is None and worker.worker_config is CONFIG
    assert worker.rank_info == RankInfo() and worker.get_rank_info().is_pipeline_last_stage
    assert worker.pipeline_config is None and worker.strategy is None
    assert not RankInfo(pp_size=2, pp_rank=0).is_pipeline_last_stage
    assert RankInfo(pp_size=2, pp_rank=1).is_pipeline_last_stage
    worker.initialize(pipeline_config := SimpleNamespace())
    assert worker.pipeline_config is pipeline_config


def test_the_context_says_who_a_worker_is() -> None:
    worker = worker_in(rank=2, world_size=4, cluster_name="actor", worker_name="actor-2")
    assert (worker.rank, worker.world_size) == (2, 4)
    assert (worker.cluster_name, worker.worker_name) == ("actor", "actor-2")
    assert worker.rank_info == RankInfo(world_size=4, dp_size=4, rank=2, dp_rank=2)
    assert Worker(CONFIG).world_size == 1  # outside again


def test_base_methods_and_how_they_are_registered() -> None:
    modes = {
        "initialize": Dispatch.ONE_TO_ALL,
        "load_states": Dispatch.ONE_TO_ALL,
        "offload_states": Dispatch.ONE_TO_ALL,
        "process_weights_after_loading": Dispatch.ONE_TO_ALL,
        "get_metrics": Dispatch.DP_MP_COMPUTE,
        "get_rank_info": None,
    }
    for name, mode in modes.items():
        spec = method_spec(Worker, name)
        assert (spec and spec.dispatch_mode) == mode, name


def test_states_and_metrics_are_those_of_the_strategy() -> None:
    worker = Worker(CONFIG)
    worker.load_states()  # without a model there is nothing to move
    worker.offload_states(include=["model_params"])
    worker.process_weights_after_loading()
    assert worker.get_metrics().meta_info == {"metrics": {}}

    calls: list[Any] = []
    worker.strategy = SimpleNamespace(
        load_states=lambda **kwargs: calls.append(("load", kwargs)),
        offload_states=lambda **kwargs: calls.append(("offload", kwargs)),
        process_weights_after_loading=lambda: calls.append("process"),
        get_metrics=lambda names: {"tokens": 3, "asked": names},
    )
    worker.load_states(include=["model_params"], non_blocking=True)
    worker.offload_states()
    worker.process_weights_after_loading()
    loaded = {"include": ["model_params"], "non_blocking": True}
    offloaded = {"include": None, "non_blocking": False}
    assert calls == [("load", loaded), ("offload", offloaded), "process"]
    assert worker.get_metrics().meta_info == {"metrics": {"tokens": 3, "asked": None}}


def test_log_lines_carry_the_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="roll"):
        Worker(CONFIG).logger.info("hello %d", 3)
    assert caplog.messages == ["[worker-0] hello 3"]


@pytest.fixture
def no_group() -> Any:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_lone_worker_gets_a_group_of_one(no_group: None) -> None:
    Worker(CONFIG).init_process_group()
    assert (torch.distributed.get_backend(), torch.distributed.get_world_size()) == ("gloo", 1)
    value = torch.tensor([2.0])
    torch.distributed.all_reduce(value)
    assert value.item() == 2.0
    Worker(CONFIG).init_process_group()  # another role in this process shares it
    other = worker_in(rank=1, world_size=2, worker_name="actor-1", master=("127.0.0.1", 1))
    with pytest.raises(RuntimeError, match=r"actor-1 .* already rank 0 of a torch.distributed gr"):
        other.init_process_group()


def test_workers_in_one_process_cannot_form_a_group() -> None:
    worker = worker_in(rank=1, world_size=2, cluster_name="actor", worker_name="actor-1")
    with pytest.raises(RuntimeError, match=r"2 workers of actor share one process.*backend='ray'"):
        worker.init_process_group()


def test_ranks_that_do_not_come_are_not_waited_for_forever(no_group: None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = worker_in(rank=0, world_size=2, worker_name="actor-0", master=("127.0.0.1", port))
    with pytest.raises(torch.distributed.DistStoreError, match="Timed out"):
        worker.init_process_group(timeout=timedelta(seconds=1))
