"""Placement as plain data."""

import re

import pytest

from roll.distributed.scheduler.resource_manager import Device, ResourceManager
from roll.exceptions import ConfigError


def test_a_role_on_cpu_gets_no_devices() -> None:
    assert ResourceManager().allocate_placement_group(3) == [[], [], []]
    assert ResourceManager(num_gpus_per_node=8).allocate_placement_group(2, []) == [[], []]


def test_gpus_are_counted_over_all_nodes() -> None:
    manager = ResourceManager(num_gpus_per_node=4, num_nodes=2)
    assert manager.num_gpus == 8
    assert manager.allocate_placement_group(2, [2, 3, 4, 5]) == [
        [Device(0, 2), Device(0, 3)],
        [Device(1, 0), Device(1, 1)],
    ]
    assert manager.allocate_placement_group(2, [7, 0]) == [[Device(1, 3)], [Device(0, 0)]]


@pytest.mark.parametrize(
    ("world_size", "mapping", "message"),
    [
        (0, None, "actor.world_size=0: a role needs at least one worker"),
        (
            2,
            [0, 1, 2],
            "actor.device_mapping names 3 GPUs, which do not divide over world_size=2 workers",
        ),
        (2, [1, 1], "actor.device_mapping names GPU 1 more than once"),
        (
            1,
            [3, 4],
            "actor.device_mapping gives rank 0 the GPUs [3, 4], which lie on different nodes (num_gpus_per_node=4); "
            "a worker's GPUs must be on one node",
        ),
        (
            10,
            list(range(10)),
            "actor.device_mapping names GPU 8, 9, but num_nodes=2 with num_gpus_per_node=4 gives GPUs 0 to 7. To run "
            "it on what is there: actor.device_mapping=[0,1,2,3,4,5,6,7]; or on CPU: actor.device_mapping=null "
            "actor.world_size=1",
        ),
        (1, [-1], "actor.device_mapping names GPU -1, but num_nodes=2"),
        (16, list(range(16)), "actor.device_mapping names GPU 8 to 15, but num_nodes=2"),
    ],
)
def test_mappings_that_cannot_be(world_size: int, mapping: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ResourceManager(num_gpus_per_node=4, num_nodes=2).allocate_placement_group(
            world_size, mapping, role="actor"
        )


def test_a_machine_without_gpus() -> None:
    message = "gives no GPU. To run it on CPU: actor.device_mapping=null actor.world_size=1"
    with pytest.raises(ConfigError, match=re.escape(message)):
        ResourceManager().allocate_placement_group(1, [0], role="actor")


def test_the_arguments_are_checked() -> None:
    with pytest.raises(
        ConfigError, match="num_gpus_per_node=-1, num_nodes=1: expected at least 0 GPUs and 1 node"
    ):
        ResourceManager(num_gpus_per_node=-1)
    with pytest.raises(
        ConfigError, match="backend='slurm' is unknown; use one of auto, local, ray"
    ):
        ResourceManager(backend="slurm")  # pyrefly: ignore
