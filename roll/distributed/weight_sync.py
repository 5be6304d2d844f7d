"""New weights from a role that trains to a role that scores or generates: the whole of it.

    updates = ModelUpdateGroup(actor_train, actor_infer, bucket_megabytes=1024)
    metrics = updates.model_update(global_step)

Roles of one process share one model, so an optimizer step is visible at once; where they cannot (an
engine with a layout of its own, another precision), the target copies the weights. Otherwise rank 0
of the source broadcasts them in buckets to all ranks of the target, over a process group of their
own. Every time, the checksums of a sample of tensors are compared on every target rank.

What a strategy adds is how its weights are read (`named_weights`) and written (`receive_weights`),
whether it can take another's model (`share_model`), and what it holds (`weight_checksums`).
torch has no collective between the groups of two roles, and no check that weights have arrived.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from roll.distributed.executor.cluster import Cluster
    from roll.distributed.executor.worker import Worker

CHECKSUM_SAMPLE = 8  # tensors whose bytes are compared after each sync
REMEMBERED_LENGTH = 2**18


class ModelUpdateGroup:
    """Weights of `src_cluster` -> `tgt_cluster`, every `frequency` steps."""

    def __init__(
        self,
        src_cluster: Cluster,
        tgt_cluster: Cluster,
        *,
        frequency: int = 1,
        bucket_megabytes: int = 1024,
        timeout: float = 600.0,
    ) -> None:
        self.src_cluster = src_cluster
        self.tgt_cluster = tgt_cluster
        self.frequency = frequency
        self.is_local = all(
            cluster.backend_name == "local" and cluster.world_size == 1
            for cluster in (src_cluster, tgt_cluster)
        )
        self.is_shared = False
        if self.is_local:
            target, source = tgt_cluster.workers[0].strategy, src_cluster.workers[0].strategy
            self.is_shared = target.share_model(source)
        specs: list[TensorSpec] = _on_all(src_cluster, weight_specs)[0]
        if not self.is_shared:
            wanted = _on_all(tgt_cluster, weight_specs)[0]
            dtypes = {spec.name: spec.dtype for spec in wanted}
            specs = [
                TensorSpec(spec.name, spec.shape, dtypes.get(spec.name, spec.dtype))
                for spec in specs
            ]
        self.plan = plan_sync(specs, bucket_megabytes * 2**20)
        if not self.is_local:
            host, port = src_cluster.execute_rank_zero_sync("call", free_address)
            address = {
                "host": host,
                "port": port,
                "size": 1 + tgt_cluster.world_size,
                "timeout": timedelta(seconds=timeout),
                "plan": self.plan,
            }
            # Both sides wait for each other, so both are started before either is waited for.
            targets = tgt_cluster.execute_all_async("call", join_channel, first_rank=1, **address)
            sources = src_cluster.execute_all_async("call", join_channel, first_rank=0, **address)
            src_cluster.gather(sources, "setup_model_update")
            tgt_cluster.gather(targets, "setup_model_update")

    def model_update(self, global_step: int) -> dict[str, Any]:
        """Bring the target up to date. Metrics: the time it took, the checksum of the sample."""
        if global_step % self.frequency:
            return {}
        started = time.monotonic()
        received: list[Mapping[str, int]] = []
        if self.is_shared:  # one model, so there is nothing to compare
            names = self.plan.sampled_names
            sent = self.src_cluster.execute_rank_zero_sync("call", weight_checksums, names)
        elif self.is_local:
            source = self.src_cluster.workers[0]
            sent, held = self.tgt_cluster.execute_rank_zero_sync(
                "call", copy_weights, source, self.plan
            )
            received = [held]
        else:
            targets = self.tgt_cluster.execute_all_async("call", send_or_receive)
            sources = self.src_cluster.execute_all_async("call", send_or_receive)
            sent = self.src_cluster.gather(sources, "model_update")[0]
            received = self.tgt_cluster.gather(targets, "model_update")
        for rank, sums in enumerate(received):
            wrong = sorted(name for name in sent if sums.get(name) != sent[name])
            if wrong:
                raise RuntimeError(
                    f"weight sync: rank {rank} of the receiving role does not hold the weights "
                    f"that were sent; differing tensors: {', '.join(wrong)}. Generation would use "
                    "stale or damaged weights, so the run stops here."
                )
        self.tgt_cluster.process_weights_after_loading()
        _on_all(self.tgt_cluster, set_policy_version, global_step)
        return {
            f"time/{self.src_cluster.cluster_name}/model_update/total": time.monotonic() - started,
            # 32 bits of it: a float holds them exactly, so that runs can be compared by it.
            "system/weight_checksum": float(sum(sent.values()) % 2**32),
        }


def _on_all(cluster: Cluster, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(worker, ...)` on every worker; timeouts and deaths name the function."""
    refs = cluster.execute_all_async("call", function, *args)
    return cluster.gather(refs, function.__name__)


# -- what runs on the workers, through `ModelWorker.call` ------------------------------------------


def weight_checksums(worker: Worker, names: Iterable[str]) -> dict[str, int]:
    return worker.strategy.weight_checksums(names)


def copy_weights(
    worker: Worker, source: Worker, plan: SyncPlan
) -> tuple[dict[str, int], dict[str, int]]:
    """From another worker of this process; the checksums of the sample, as sent and as held."""
    sent: dict[str, int] = {}
    worker.strategy.sync_plan = plan
    worker.strategy.receive_weights(plan.buckets_of(source.strategy.named_weights(), sent))
    return sent, worker.strategy.weight_checksums(plan.sampled_names)


def weight_specs(worker: Worker) -> list[TensorSpec]:
    """Names, shapes and dtypes of the weights that a role can send or takes. All ranks call it."""
    weights = worker.strategy.named_weights()
    return [TensorSpec(name, tuple(weight.shape), weight.dtype) for name, weight in weights]


def set_policy_version(worker: Worker, version: int) -> None:
    """Say which weights the model holds now: generated tokens carry this number."""
    worker.strategy.policy_version = version


def free_address(worker: Worker) -> tuple[str, int]:
    """An address of this machine that the other side of a weight channel can connect to."""
    host = worker.context.master[0] if worker.context.master else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return host, probe.getsockname()[1]


def join_channel(
    worker: Worker,
    *,
    first_rank: int,
    host: str,
    port: int,
    size: int,
    timeout: timedelta,
    plan: SyncPlan,
) -> None:
    """Join the channel that weights travel in: rank 0 of the source, all ranks of the target."""
    worker.strategy.sync_plan = plan
    # The other ranks of a source take no part in the channel, but help to gather its shards.
    if first_rank > 0 or worker.rank == 0:
        worker.strategy.weight_channel = WeightChannel(
            host, port, first_rank + worker.rank, size, worker.strategy.device, timeout
        )


def send_or_receive(worker: Worker) -> dict[str, int]:
    """All weights, according to the role in the channel. Returns the checksums of the sample."""
    strategy = worker.strategy
    channel: WeightChannel | None = strategy.weight_channel
    plan: SyncPlan = strategy.sync_plan
    if channel is not None and channel.rank > 0:
        strategy.receive_weights(channel.receive(plan))
        return strategy.weight_checksums(plan.sampled_names)
    sums: dict[str, int] = {}
    if channel is not None:
        channel.send(plan, plan.buckets_of(strategy.named_weights(), sums))
    else:
        for _ in strategy.named_weights():  # gathering a sharded tensor takes all ranks
            pass
    return sums


# -- buckets and checksums -------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that will travel, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SyncPlan:
    """What travels, in which order and in which buckets. Both sides hold the same plan."""

    buckets: tuple[tuple[TensorSpec, ...], ...]

    @functools.cached_property
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
        """`weights`, which come in the plan's order, in its buckets and dtypes; fills `sums` with
        the checksums of the sampled names."""
        for bucket in self.buckets:
            tensors: dict[str, Tensor] = {}
            for spec in bucket:
                name, weight = next(weights)
                assert name == spec.name, f"expected {spec.name}, got {name}"
                tensors[name] = weight.to(spec.dtype)
                if name in self.sampled_names:
                    sums[name] = checksum(tensors[name])
            yield tensors


def plan_sync(specs: Iterable[TensorSpec], bucket_bytes: int) -> SyncPlan:
    """Consecutive tensors of one dtype in buckets of at most `bucket_bytes`; a larger one alone."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        num_bytes = spec.dtype.itemsize * spec.numel
        if buckets and spec.dtype == buckets[-1][0].dtype and size + num_bytes <= bucket_bytes:
            buckets[-1].append(spec)
            size += num_bytes
        else:
            buckets.append([spec])
            size = num_bytes
    return SyncPlan(tuple(map(tuple, buckets)))


def checksum(tensor: Tensor) -> int:
    """Changes when any byte of the tensor does, or their order; the same on every device."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = 0
    # In pieces, because the weighted sum is taken in int64, eight times the size.
    for index, piece in enumerate(data.split(2**22)):
        weights = _position_weights(len(piece), piece.device)
        total = (total * 1000003 + int((piece.long() * weights).sum()) + index) % 2**61
    return total


def _position_weights(length: int, device: torch.device) -> Tensor:
    """A number for each byte; those of short tensors, of which small models have many, once."""
    if length < REMEMBERED_LENGTH:
        return _remembered_weights(device)[:length]
    return torch.arange(1, length + 1, device=device) * 2654435761 % 2**31


@functools.cache
def _remembered_weights(device: torch.device) -> Tensor:
    return _position_weights(REMEMBERED_LENGTH, device)


class WeightChannel:
    """A process group of the sender (rank 0) and all receivers, apart from the roles' own
    groups."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        store = dist.TCPStore(
            host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=True
        )
        prefixed = dist.PrefixStore("weight-sync", store)
        self.rank = rank
        self.device = device
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, timeout)

    def send(self, plan: SyncPlan, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        for bucket, tensors in zip(plan.buckets, buckets, strict=True):
            flat, views = self._flat(bucket)
            for view, weight in zip(views, tensors.values(), strict=True):
                view.copy_(weight)
            self._broadcast(flat)

    def receive(self, plan: SyncPlan) -> Iterator[dict[str, Tensor]]:
        """A bucket at a time; its tensors are valid until the next one is asked for."""
        for bucket in plan.buckets:
            flat, views = self._flat(bucket)
            self._broadcast(flat)
            yield {spec.name: view for spec, view in zip(bucket, views, strict=True)}

    def _flat(self, bucket: Sequence[TensorSpec]) -> tuple[Tensor, list[Tensor]]:
        """One tensor for a bucket, and views of it in the shapes of the bucket's tensors."""
        lengths = [spec.numel for spec in bucket]
        flat = torch.empty(sum(lengths), dtype=bucket[0].dtype, device=self.device)
        pieces = flat.split(lengths)
        return flat, [piece.view(spec.shape) for piece, spec in zip(pieces, bucket, strict=True)]

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()
