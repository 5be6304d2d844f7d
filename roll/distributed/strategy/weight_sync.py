"""New weights from a role that trains to a role that scores or generates.

Within one process the two roles share one model: an optimizer step is visible at once. Otherwise rank 0 of the
training role broadcasts its weights in buckets to all ranks of the other role, over a process group of their own
(`WeightChannel`), both sides compute a checksum of the same sample of tensors, and they must agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHECKSUM_SAMPLE = 8  # tensors whose bytes are compared after each sync


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that will travel, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SyncPlan:
    """What travels, in which order and in which buckets. Both sides hold the same plan."""

    buckets: tuple[tuple[TensorSpec, ...], ...]

    @property
    def sampled_names(self) -> frozenset[str]:
        """Evenly spaced over the model, first and last included."""
        names = [spec.name for bucket in self.buckets for spec in bucket]
        count = min(CHECKSUM_SAMPLE, len(names))
        return frozenset(
            names[round(i * (len(names) - 1) / max(count - 1, 1))] for i in range(count)
        )

    def buckets_of(
        self, weights: Iterator[tuple[str, Tensor]], sums: dict[str, int]
    ) -> Iterator[dict[str, Tensor]]:
        """`weights`, which come in the plan's order, in its buckets and dtypes; fills `sums` for the sampled names."""
        sampled = self.sampled_names
        for bucket in self.buckets:
            tensors: dict[str, Tensor] = {}
            for spec in bucket:
                name, weight = next(weights)
                assert name == spec.name, f"expected {spec.name}, got {name}"
                tensors[name] = weight.to(spec.dtype)
                if name in sampled:
                    sums[name] = checksum(tensors[name])
            yield tensors


_REMEMBERED_LENGTH = 2**18


def plan_sync(specs: Iterable[TensorSpec], bucket_bytes: int) -> SyncPlan:
    """Consecutive tensors of one dtype in buckets of at most `bucket_bytes`; a larger tensor travels alone."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if buckets and spec.dtype == buckets[-1][0].dtype and size + spec.num_bytes <= bucket_bytes:
            buckets[-1].append(spec)
            size += spec.num_bytes
        else:
            buckets.append([spec])
            size = spec.num_bytes
    return SyncPlan(tuple(tuple(bucket) for bucket in buckets))


def checksum(tensor: Tensor) -> int:
    """A number that changes when any byte of the tensor does: the same on every device, exact, order-sensitive."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = 0
    # In pieces, because the weighted sum is taken in int64, eight times the size.
    for index, piece in enumerate(data.split(2**22)):
        weights = _position_weights(len(piece), piece.device)
        total = (total * 1000003 + int((piece.long() * weights).sum()) + index) % 2**61
    return total


def _position_weights(length: int, device: torch.device) -> Tensor:
    """A number for each byte; those of short tensors, which small models have many of, are made once."""
    if length < _REMEMBERED_LENGTH:
        return _remembered_weights(device)[:length]
    return torch.arange(1, length + 1, device=device) * 2654435761 % 2**31


@functools.cache
def _remembered_weights(device: torch.device) -> Tensor:
    return _position_weights(_REMEMBERED_LENGTH, device)


class WeightChannel:
    """A process group of the sender (rank 0) and all receivers, apart from the groups that the roles train in."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        store = dist.PrefixStore(
            "weight-sync",
            dist.TCPStore(
                host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=True
            ),
        )
        self.rank = rank
        self.device = device
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor into every rank's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def send(self, plan: SyncPlan, weights: Iterator[tuple[str, Tensor]]) -> dict[str, int]:
        """Broadcast `weights`, which come in the plan's order, in buckets. Returns the checksums of the sample."""
        sums: dict[str, int] = {}
        for bucket, tensors in zip(plan.buckets, plan.buckets_of(weights, sums), strict=True):
            flat = torch.empty(_length(bucket), dtype=bucket[0].dtype, device=self.device)
            for view, weight in zip(_views(flat, bucket), tensors.values(), strict=True):
                view.copy_(weight)
            self.broadcast(flat)
        return sums

    def receive(self, plan: SyncPlan) -> Iterator[dict[str, Tensor]]:
        """The weights, one bucket at a time. A bucket's tensors are valid until the next one is asked for."""
        for bucket in plan.buckets:
            flat = torch.empty(_length(bucket), dtype=bucket[0].dtype, device=self.device)
            self.broadcast(flat)
            yield {spec.name: view for spec, view in zip(bucket, _views(flat, bucket), strict=True)}


def compare_checksums(sent: Mapping[str, int], received: Sequence[Mapping[str, int]]) -> None:
    """Raise unless every receiver holds what was sent."""
    for rank, sums in enumerate(received):
        wrong = sorted(name for name in sent if sums.get(name) != sent[name])
        if wrong:
            raise RuntimeError(
                f"weight sync: rank {rank} of the receiving role does not hold the weights that were sent; differing "
                f"tensors: {', '.join(wrong)}. Generation would use stale or damaged weights, so the run stops here."
            )


def _length(bucket: Sequence[TensorSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in bucket)


def _views(flat: Tensor, bucket: Sequence[TensorSpec]) -> list[Tensor]:
    pieces = flat.split([torch.Size(spec.shape).numel() for spec in bucket])
    return [piece.view(spec.shape) for piece, spec in zip(pieces, bucket, strict=True)]
