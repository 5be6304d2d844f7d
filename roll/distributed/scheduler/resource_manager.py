"""Which node and which GPU each rank of a role gets: worked out from the configuration alone.

`device_mapping` counts GPUs over all machines: with 8 per node, GPU 11 is the fourth of the second
node. Nothing is probed here; the backend that starts the workers checks that the GPUs exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from roll.exceptions import ConfigError

BackendChoice = Literal["auto", "local", "ray"]


def init() -> None:
    """Connect this process to Ray; nothing to do where it already is.

    `RAY_ADDRESS` names the cluster to join, as for any Ray program; without it a cluster that `ray
    start` runs on this machine is joined, and where there is none, one is started for this process
    and stopped with it. Clusters on the Ray backend call this themselves. On several machines:
    `ray start --head` on the first, `ray start --address=...` on the others, then run the program
    on the first alone.
    """
    # The import is here because ray is an optional dependency that only its backend imports.
    from roll.distributed.executor.ray_backend import connect_to_ray

    connect_to_ray()


@dataclass(frozen=True)
class Device:
    """One GPU: the number of the machine, and the number of the GPU among those it shows."""

    node_rank: int
    gpu_rank: int


class ResourceManager:
    """The machines of a run, and the backend that its clusters use.

    Args:
        num_gpus_per_node: GPUs of every machine; 0 for a run on CPU.
        num_nodes: how many machines.
        backend: "local" runs workers in this process, "ray" one process per rank; "auto" takes Ray
            for a role that holds a model and has several workers, and this process for every other.
    """

    def __init__(
        self, num_gpus_per_node: int = 0, num_nodes: int = 1, backend: BackendChoice = "auto"
    ) -> None:
        if num_gpus_per_node < 0 or num_nodes < 1:
            raise ConfigError(
                f"num_gpus_per_node={num_gpus_per_node}, num_nodes={num_nodes}: expected at least "
                "0 GPUs and 1 node"
            )
        if backend not in get_args(BackendChoice):
            choices = ", ".join(get_args(BackendChoice))
            raise ConfigError(f"backend={backend!r} is unknown; use one of {choices}")
        self.num_gpus_per_node = num_gpus_per_node
        self.num_nodes = num_nodes
        self.num_gpus = num_gpus_per_node * num_nodes
        self.backend: BackendChoice = backend

    def allocate_placement_group(
        self, world_size: int, device_mapping: Sequence[int] | None = None, role: str = "role"
    ) -> list[list[Device]]:
        """The devices of each rank, in rank order; empty lists for a role on CPU (no mapping).

        Example: 2 nodes of 4 GPUs, `world_size=2`, `device_mapping=[2, 3, 4, 5]`: rank 0 gets GPUs
        2 and 3 of node 0, rank 1 GPUs 0 and 1 of node 1.
        """
        if world_size < 1:
            raise ConfigError(f"{role}.world_size={world_size}: a role needs at least one worker")
        if not device_mapping:
            return [[] for _ in range(world_size)]
        per_node, per_rank = self.num_gpus_per_node, len(device_mapping) // world_size
        if len(device_mapping) % world_size:
            raise ConfigError(
                f"{role}.device_mapping names {len(device_mapping)} GPUs, which do not divide over "
                f"world_size={world_size} workers"
            )
        twice = sorted({gpu for gpu in device_mapping if list(device_mapping).count(gpu) > 1})
        if twice:
            raise ConfigError(f"{role}.device_mapping names GPU {_numbers(twice)} more than once")
        missing = sorted(gpu for gpu in device_mapping if not 0 <= gpu < self.num_gpus)
        if missing:
            available = "no GPU" if self.num_gpus == 0 else "only GPU 0"
            if self.num_gpus > 1:
                available = f"GPUs 0 to {self.num_gpus - 1}"
            raise ConfigError(
                f"{role}.device_mapping names GPU {_numbers(missing)}, but num_nodes="
                f"{self.num_nodes} with num_gpus_per_node={per_node} gives {available}. "
                + override_for(role, per_rank, self.num_gpus)
            )
        plan: list[list[Device]] = []
        for rank in range(world_size):
            gpus = device_mapping[rank * per_rank : (rank + 1) * per_rank]
            devices = [Device(*divmod(gpu, per_node)) for gpu in gpus]
            if len({device.node_rank for device in devices}) > 1:
                raise ConfigError(
                    f"{role}.device_mapping gives rank {rank} the GPUs {list(gpus)}, which lie on "
                    f"different nodes (num_gpus_per_node={per_node}); a worker's GPUs must be on "
                    "one node"
                )
            plan.append(devices)
        return plan


def missing_gpus(
    role: str,
    devices: Sequence[Device],
    num_workers: int,
    num_gpus: int,
    *,
    num_nodes: int = 1,
    machine: str = "this machine",
    on_ray: bool = False,
) -> None:
    """Raises ConfigError for devices beyond `num_nodes` machines that show `num_gpus` GPUs each."""
    if any(device.node_rank >= num_nodes for device in devices):
        where = f"more than {num_nodes} machines" if num_nodes > 1 else "a second machine"
        why, fix = "its workers run in this process", "use backend='ray'"
        if on_ray:
            why, fix = (
                "there is no Ray cluster (RAY_ADDRESS is not set)",
                "start one with `ray start`",
            )
        if machine != "this machine":
            why, fix = f"{machine} is {num_nodes}", f"compare with {num_nodes + 1}x{machine}"
        raise ConfigError(f"{role}.device_mapping names GPUs of {where}, but {why}; {fix}")
    missing = sorted({device.gpu_rank for device in devices if device.gpu_rank >= num_gpus})
    if missing:
        raise ConfigError(
            f"{role}.device_mapping names GPU {_numbers(missing)}, but {machine} shows {num_gpus} "
            f"GPU(s). {override_for(role, len(devices) // num_workers, num_gpus)}"
        )


def override_for(role: str, gpus_per_worker: int, num_gpus: int) -> str:
    """The end of a missing-GPU error: overrides that run the role on the `num_gpus` that exist."""
    workers = num_gpus // gpus_per_worker
    on_cpu = f"{role}.device_mapping=null {role}.world_size=1"
    if workers == 0:
        return f"To run it on CPU: {on_cpu}"
    gpus = ",".join(str(gpu) for gpu in range(workers * gpus_per_worker))
    return f"To run it on what is there: {role}.device_mapping=[{gpus}]; or on CPU: {on_cpu}"


def _numbers(values: Sequence[int]) -> str:
    """`8 to 15` for a run of numbers, `1, 5` otherwise."""
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    return ", ".join(str(value) for value in values)
