"""ROLL's distribution of rows over micro-batches that are packed into one sequence, for programs that call it.

The strategies here do not pack: rows share what they begin with, and padding costs nothing (`roll.models.token_tree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.worker_config import SequencePackingConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.balancing import LINEAR_COST, get_seqlen_balanced_partitions


def make_micro_batch_iter_for_sequence_packing(
    mini_batch: DataProto,
    tp_size: int,
    cp_size: int,
    vp_size: int,
    is_train: bool = False,
    dp_group: Any = None,
    micro_batch_size: int | None = None,
    config: SequencePackingConfig | None = None,
) -> Iterator[DataProto]:
    """The micro-batches of a mini-batch, by the algorithm of `config`."""
    return get_sequence_packing_packer(config).make_micro_batch_iter_for_sequence_packing(
        mini_batch, tp_size, cp_size, vp_size, is_train, dp_group, micro_batch_size
    )


def restore_results_order(
    results: dict[str, Tensor],
    partition_indices_list: list[list[int]],
    config: SequencePackingConfig | None = None,
) -> dict[str, Tensor]:
    """Results of all micro-batches, one after the other, in the order of the rows they are about."""
    return get_sequence_packing_packer(config).restore_results_order(
        results, partition_indices_list
    )


def get_sequence_packing_packer(
    config: SequencePackingConfig | None = None,
) -> SequencePackingPacker:
    config = config or SequencePackingConfig()
    return (
        LoadBalancePacker(config)
        if config.algorithm == "load_balance"
        else SequencePackingPacker(config)
    )


class SequencePackingPacker:
    """Equal numbers of neighbouring rows."""

    def __init__(self, config: SequencePackingConfig | None = None) -> None:
        self.config = config or SequencePackingConfig()

    def get_pad_factor(self, cp_size: int, tp_size: int) -> int:
        """What the length of a packed row is rounded up to."""
        return math.lcm(16, 2 * cp_size * tp_size if cp_size > 1 else tp_size)

    @staticmethod
    def calculate_workload(seqlen: int) -> float:
        """The cost of a row: a linear and a quadratic part."""
        return LINEAR_COST * seqlen + seqlen * seqlen

    def make_micro_batch_iter_for_sequence_packing(
        self,
        mini_batch: DataProto,
        tp_size: int,
        cp_size: int,
        vp_size: int,
        is_train: bool = False,
        dp_group: Any = None,
        micro_batch_size: int | None = None,
    ) -> Iterator[DataProto]:
        if micro_batch_size is None:
            raise ValueError("micro_batch_size: found None, expected the rows of a micro-batch")
        num_micro_batches = len(mini_batch) // micro_batch_size
        mini_batch.meta_info |= {
            "partition_indices_list": [],
            "num_micro_batchs": num_micro_batches,
        }
        return iter(mini_batch.chunk(num_micro_batches))

    @staticmethod
    def restore_results_order(
        results: dict[str, Tensor], partition_indices_list: list[list[int]]
    ) -> dict[str, Tensor]:
        return results


class LoadBalancePacker(SequencePackingPacker):
    """Micro-batches of about equal cost that stay within `max_packed_sequence_length` on average; light ones first and
    last. All ranks of `dp_group` make equally many."""

    def make_micro_batch_iter_for_sequence_packing(
        self,
        mini_batch: DataProto,
        tp_size: int,
        cp_size: int,
        vp_size: int,
        is_train: bool = False,
        dp_group: Any = None,
        micro_batch_size: int | None = None,
    ) -> Iterator[DataProto]:
        config, mask = self.config, mini_batch["attention_mask"]
        limit = (
            config.max_packed_sequence_length_train
            if is_train
            else config.max_packed_sequence_length_forward
        )
        fewest = (
            config.min_num_micro_batches_train if is_train else config.min_num_micro_batches_forward
        )
        if dp_group is None:
            raise ValueError("dp_group: found None, expected the group of the data-parallel ranks")
        if limit is None or limit < mask.shape[-1]:
            name = f"max_packed_sequence_length_{'train' if is_train else 'forward'}"
            raise ValueError(
                f"{name}: found {limit}, expected at least the width of the batch, {mask.shape[-1]}"
            )
        factor = self.get_pad_factor(cp_size, tp_size)
        lengths = [-(-length // factor) * factor for length in mask.sum(1).tolist()]
        num_micro_batches = max(fewest, min(len(lengths), max(1, -(-sum(lengths) // limit))))
        if dist.is_initialized():
            device = "cuda" if torch.cuda.is_available() else "cpu"
            most = torch.tensor([num_micro_batches], device=device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dp_group)
            num_micro_batches = int(most.item())
        if vp_size > 1:
            num_micro_batches = -(-num_micro_batches // vp_size) * vp_size
        costs = [self.calculate_workload(length) for length in lengths]
        parts = get_seqlen_balanced_partitions(costs, num_micro_batches)
        parts.sort(key=lambda part: (sum(costs[row] for row in part), part[0]), reverse=True)
        parts = parts[::2][::-1] + parts[1::2]
        mini_batch.meta_info["partition_indices_list"] = list(parts)
        for number, part in enumerate(parts):
            micro_batch = mini_batch.select_idxs(part)
            micro_batch.meta_info = {
                **mini_batch.meta_info,
                "micro_batch_idx": number,
                "is_padding_batch": False,
                "partition_indices": part,
                "num_micro_batchs": num_micro_batches,
                "mini_batch_size": len(mini_batch),
            }
            yield micro_batch

    @staticmethod
    def restore_results_order(
        results: dict[str, Tensor], partition_indices_list: list[list[int]]
    ) -> dict[str, Tensor]:
        rows = [row for part in partition_indices_list for row in part]
        places = torch.tensor(rows).argsort()
        for key, value in results.items():
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) != len(rows):
                raise ValueError(f"{key} has {len(value)} rows, the micro-batches had {len(rows)}")
        return {
            key: value[places.to(value.device)]
            if isinstance(value, Tensor) and value.dim() > 0
            else value
            for key, value in results.items()
        }
