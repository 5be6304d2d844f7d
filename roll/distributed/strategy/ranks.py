"""The ranks that train or score together, seen as a few small collectives; alone, each of them is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """`size` processes joined in torch.distributed's default group (or one process without any group)."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        return cls(0, 1, device)

    @classmethod
    def of_default_group(cls, device: torch.device) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over ranks, in float64: exact for counts up to 2**53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, value: float) -> list[float]:
        """The value of every rank, in rank order."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            self.sum([0.0])

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()
