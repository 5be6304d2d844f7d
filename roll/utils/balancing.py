"""Give every rank about the same amount of work, by the lengths of the rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto

# Tokens cost a linear part (matrix products) and a quadratic one (attention). The two are equal at
# a length of 24576: six times a hidden size of 4096.
LINEAR_COST = 24576


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float] | Tensor, k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Split the indices of `seqlen_list` into `k_partitions` non-empty parts with nearly equal
    sums, sorted inside.

    Largest differencing (Karmarkar and Karp): keep joining the two partial solutions whose parts
    differ most, the heaviest part of one with the lightest of the other. With `equal_size` all
    parts have the same number of items.
    """
    lengths = seqlen_list.tolist() if isinstance(seqlen_list, Tensor) else list(seqlen_list)
    num_items = len(lengths)
    if k_partitions < 1 or num_items < k_partitions:
        raise ValueError(f"cannot split {num_items} rows into {k_partitions} non-empty parts")
    if equal_size and num_items % k_partitions:
        raise ValueError(
            f"{num_items} rows cannot be split into {k_partitions} parts of equal size"
        )
    by_length = sorted(range(num_items), key=lambda i: (lengths[i], i))
    per_solution = k_partitions if equal_size else 1
    # A solution is its parts, heaviest first, as (sum, indices). The heap pops the largest spread;
    # ties by order of creation, so that the result does not depend on anything but the input.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, num_items, per_solution)):
        parts = [(lengths[i], [i]) for i in reversed(by_length[start : start + per_solution])]
        parts += [(0, []) for _ in range(k_partitions - len(parts))]
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        parts = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        parts.sort(key=lambda part: (part[0], len(part[1])), reverse=True)
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))
        number += 1
    partitions = [sorted(indices) for _, indices in heap[0][2]]
    # Rows of length 0 leave parts empty, because they are as good anywhere.
    for empty in [part for part in partitions if not part]:
        empty.append(max(partitions, key=len).pop())
    return partitions


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens of the lightest and the heaviest rank, if rows were dealt out in order and as
    `partitions` says."""
    size = -(-len(seqlen_list) // len(partitions))
    before = [sum(seqlen_list[start : start + size]) for start in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[i] for i in partition) for partition in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / len(partitions),
    }


def batch_balance(
    batch: DataProto,
    dp_size: int,
    minibatch_size: int,
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> dict[str, float]:
    """Reorder the rows of `batch`, in place, so that `dp_size` equal neighbouring parts cost about
    the same to train.

    Whoever needs groups of rows to stay together must group by a column afterwards. With
    `keep_minibatch` each block of `minibatch_size` rows is dealt out evenly to all ranks, and every
    rank keeps the order of the blocks. In a rank's share short rows come first and last, long ones
    in the middle. Returns the metrics of `log_seqlen_unbalance`.
    """
    mask = batch["attention_mask"]
    lengths_B = mask.reshape(len(mask), -1).sum(-1)
    workloads = (LINEAR_COST * lengths_B + lengths_B * lengths_B).tolist()
    step = minibatch_size if keep_minibatch else len(workloads)
    if step < 1 or len(workloads) % step:
        raise ValueError(
            f"minibatch_size={minibatch_size} does not divide the {len(workloads)} rows of the "
            "batch"
        )
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    for start in range(0, len(workloads), step):
        parts = get_seqlen_balanced_partitions(
            workloads[start : start + step], dp_size, equal_size=True
        )
        for partition, part in zip(partitions, parts, strict=True):
            part.sort(key=lambda i: (workloads[start + i], i))
            partition += [start + i for i in part[::2] + part[1::2][::-1]]
    batch.reorder(torch.tensor([i for partition in partitions for i in partition]))
    return log_seqlen_unbalance(lengths_B.tolist(), partitions, logging_prefix)
