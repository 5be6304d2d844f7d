"""A worker with two methods, in this process or on Ray: the output is the same for any backend and
number of workers.

python examples/cluster.py
python examples/cluster.py --backend ray --workers 4
"""

import argparse
from types import SimpleNamespace

import torch

from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager


class ScoreWorker(Worker):
    """Scores rows with a weight that every worker holds a copy of."""

    def __init__(self, worker_config: SimpleNamespace) -> None:
        super().__init__(worker_config=worker_config)
        self.weight = 1.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_weight(self, weight: float) -> float:
        """Every worker gets the same argument; the caller gets a list with one answer per
        worker."""
        self.weight = weight
        return self.weight

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def score(self, data: DataProto) -> DataProto:
        """Each worker gets some of the rows; the caller gets all results, in the order of the rows
        it sent."""
        scores_B = self.weight * data.batch["features"].sum(dim=1)
        return DataProto.from_dict(
            {"scores": scores_B}, non_tensors={"name": data.non_tensor_batch["name"]}
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["auto", "local", "ray"], default="auto")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    batch = DataProto.from_dict(
        {"features": torch.arange(20.0).reshape(10, 2)},
        non_tensors={"name": [f"row {i}" for i in range(10)]},
    )
    config = SimpleNamespace(world_size=arguments.workers)
    with Cluster(
        "scorer", ScoreWorker, ResourceManager(backend=arguments.backend), config
    ) as scorer:
        weights = scorer.set_weight(0.5)
        scored = scorer.execute_all_sync("score", batch)  # the same as scorer.score(batch)

    print("every worker has weight 0.5:", weights == [0.5] * arguments.workers)
    for name, score in zip(
        scored.non_tensor_batch["name"], scored.batch["scores"].tolist(), strict=True
    ):
        print(f"{name}: {score:g}")


if __name__ == "__main__":
    main()
