"""`init()`: start Ray on this machine, or join the Ray that spans several."""


def init() -> None:
    """Connect this process to Ray; nothing to do where it already is.

    `RAY_ADDRESS` names the cluster to join, as for any Ray program; without it a cluster that `ray start` runs on this
    machine is joined, and where there is none, one is started for this process and stopped with it. Clusters on the Ray
    backend call this themselves. On several machines: `ray start --head` on the first, `ray start --address=...` on the
    others, then run the program on the first alone.
    """
    # The import is here because ray is an optional dependency that only its backend imports.
    from roll.distributed.executor.ray_backend import connect_to_ray

    connect_to_ray()
