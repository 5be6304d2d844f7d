"""One Ray for all tests that need it, and clusters that several tests share: starting processes is
the slow part."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.resource_manager import ResourceManager

NUM_GPUS = 4  # Ray believes in any number of GPUs; nothing here touches one


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=NUM_GPUS,
        object_store_memory=300_000_000,
        include_dashboard=False,
        namespace="roll",
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[dict[Any, Cluster]]:
    clusters: dict[Any, Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.shutdown()


@pytest.fixture
def cluster_of(backend: str, shared_clusters: dict[Any, Cluster]) -> Callable[..., Cluster]:
    """`cluster_of(worker_cls, world_size)` on the backend of the test; the same cluster again for
    the next test."""

    def get(worker_cls: type[Worker], world_size: int) -> Cluster:
        key = (backend, worker_cls, world_size)
        if key not in shared_clusters:
            shared_clusters[key] = new_cluster(backend, worker_cls, world_size)
        return shared_clusters[key]

    return get


@pytest.fixture
def own_cluster(backend: str) -> Iterator[Callable[..., Cluster]]:
    """`own_cluster(worker_cls, world_size, **config)`: a cluster that this test may break."""
    clusters: list[Cluster] = []

    def make(worker_cls: type[Worker], world_size: int, **config: Any) -> Cluster:
        clusters.append(new_cluster(backend, worker_cls, world_size, **config))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.shutdown()


def new_cluster(backend: str, worker_cls: Any, world_size: int, **config: Any) -> Cluster:
    manager = ResourceManager(num_gpus_per_node=NUM_GPUS, backend=backend)
    return Cluster("echo", worker_cls, manager, SimpleNamespace(world_size=world_size, **config))
