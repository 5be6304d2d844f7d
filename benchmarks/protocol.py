"""What it costs to cut, join and send a batch. Prints one table; exits with 1 if a promised limit
is not kept.

    python benchmarks/protocol.py

The batch is 512 rows of 8,192 tokens in five int64 columns (160 MiB). A time is the best of several
runs that take turns with their baseline, so that a busy machine slows down both.
"""

import importlib.util
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import BackendChoice, ResourceManager
from roll.exceptions import install_hint

ROWS, TOKENS, COLUMNS = 512, 8192, 5


@dataclass(frozen=True)
class Row:
    """One line of the table. `limit` bounds `value`, which is a ratio to the baseline unless `unit`
    says otherwise."""

    name: str
    value: float
    limit: float | None
    detail: str  # what was measured against what
    unit: str = "x"


def make_batch() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_dict(
        {
            f"column{i}": torch.randint(0, 1 << 40, (ROWS, TOKENS), generator=generator)
            for i in range(COLUMNS)
        }
    )


def best_of(runs: int, *functions: Callable[[], object]) -> list[float]:
    """The shortest time of each function in seconds; they take turns."""
    times = [[] for _ in functions]
    for _ in range(runs):
        for function, durations in zip(functions, times, strict=True):
            start = time.perf_counter()
            result = function()
            durations.append(time.perf_counter() - start)
            del result  # freeing is not part of it
    return [min(durations) for durations in times]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def chunk_and_concat() -> list[Row]:
    """Against the faster of torch's and numpy's plain copy of the same bytes."""
    batch = make_batch()
    tensors = [batch.batch[key] for key in batch.batch.keys()]
    rows = []
    for pieces, limit in ((2, 3.0), (8, 3.0), (256, None)):
        cost, torch_copy, numpy_copy = best_of(
            7,
            lambda pieces=pieces: DataProto.concat(batch.chunk(pieces)),
            lambda: [tensor.clone() for tensor in tensors],
            lambda: [tensor.numpy().copy() for tensor in tensors],
        )
        copy = min(torch_copy, numpy_copy)
        detail = f"{milliseconds(cost)} / plain copy {milliseconds(copy)} (torch {milliseconds(torch_copy)})"
        rows.append(Row(f"chunk({pieces}) + concat", cost / copy, limit, detail))
    return rows


def pickle_round_trip() -> list[Row]:
    """As Ray does it: buffers out of band, copied once into shared memory, read back from read-only
    memory.

    Reading `batch` is part of it: that copies the columns out of the read-only memory.
    """
    batch = make_batch()
    arrays = [batch.batch[key].numpy() for key in batch.batch.keys()]

    def round_trip(value: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        shared = [np.frombuffer(buffer.raw(), dtype=np.uint8).copy() for buffer in buffers]
        for block in shared:
            block.flags.writeable = False
        return pickle.loads(stream, buffers=shared)

    cost, bare = best_of(5, lambda: round_trip(batch).batch, lambda: round_trip(arrays))
    detail = f"{milliseconds(cost)}, tensors writable / bare numpy arrays {milliseconds(bare)}, read-only"
    return [Row("pickle round trip", cost / bare, None, detail)]


class EchoWorker(Worker):
    """Gives back what it gets: all that is measured is the way there and back."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def read_and_echo(self, data: DataProto) -> DataProto:
        """As a method that computes something does: reading `batch` copies what Ray has lent."""
        return data if data.batch is not None else DataProto()


def echo_cluster(backend: BackendChoice, workers: int) -> Cluster:
    cluster = Cluster(
        "echo", EchoWorker, ResourceManager(backend=backend), SimpleNamespace(world_size=workers)
    )
    cluster.initialize(None)
    return cluster


def local_registered_call() -> list[Row]:
    """What a call through the cluster costs beyond the method itself."""
    calls = 200
    batch = DataProto.from_dict({"input_ids": torch.zeros(8, 16, dtype=torch.int64)})
    rows = []
    for workers, limit in ((1, 100.0), (8, None)):
        cluster = echo_cluster("local", workers)
        through, direct = best_of(
            7,
            lambda cluster=cluster: [cluster.echo(batch) for _ in range(calls)],
            lambda cluster=cluster: [
                worker.echo(batch) for worker in cluster.workers for _ in range(calls)
            ],
        )
        microseconds = (through - direct) / calls * 1e6
        detail = f"cluster.echo(batch) less {workers} x worker.echo(batch)"
        rows.append(
            Row(
                f"local registered call, {workers} worker(s)",
                microseconds,
                limit,
                detail,
                unit="us",
            )
        )
    return rows


def ray_round_trip() -> list[Row]:
    """A registered call over two workers, against the least that Ray itself takes for the same
    arrays."""
    if importlib.util.find_spec("ray") is None:
        print(
            f"ray is not installed: the Ray round trip is left out ({install_hint('ray')})",
            file=sys.stderr,
        )
        return []
    import ray  # after the backend has started it

    batch = make_batch()
    arrays = {key: batch.batch[key].numpy() for key in batch.batch.keys()}
    with echo_cluster("ray", workers=2) as cluster:
        bare_echo = ray.remote(lambda arrays: {key: array.copy() for key, array in arrays.items()})

        def bare() -> object:
            return ray.get(bare_echo.remote(ray.put(arrays)))

        def registered() -> object:
            return cluster.echo(batch)

        def registered_and_read() -> object:
            return cluster.read_and_echo(batch)

        best_of(3, bare, registered)  # the first rounds pay for the pages of Ray's shared memory
        cost, cost_read, echo = best_of(15, registered, registered_and_read, bare)
    against = f"joined and writable / bare put, task, get {milliseconds(echo)}"
    return [
        Row("ray round trip, 2 workers", cost / echo, 2.5, f"{milliseconds(cost)}, {against}"),
        Row(
            "ray round trip, read there",
            cost_read / echo,
            2.5,
            f"{milliseconds(cost_read)}, {against}",
        ),
    ]


BENCHMARKS: list[Callable[[], list[Row]]] = [
    chunk_and_concat,
    pickle_round_trip,
    local_registered_call,
    ray_round_trip,
]


def main() -> int:
    rows = [row for benchmark in BENCHMARKS for row in benchmark()]
    width = max(len(row.name) for row in rows)
    print(f"{'measured':<{width}}  {'value':>9}  {'limit':>9}        how")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
        verdict = "" if row.limit is None else ("ok" if row.value <= row.limit else "MISSED")
        print(
            f"{row.name:<{width}}  {f'{row.value:.2f} {row.unit}':>9}  {limit:>9}  {verdict:<6}{row.detail}"
        )
    return int(any(row.limit is not None and row.value > row.limit for row in rows))


if __name__ == "__main__":
    sys.exit(main())
