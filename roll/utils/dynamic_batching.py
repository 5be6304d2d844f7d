"""ROLL's own cuts of a batch into micro-batches, by tokens and for packing, for its programs.

The strategies here cut by themselves (`roll.distributed.strategy.micro_batches`) and do not pack:
rows share what they begin with, and padding costs nothing (`roll.models.token_tree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.worker_config import SequencePackingConfig as SequencePackingConfig  # ROLL's path
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.balancing import LINEAR_COST, get_seqlen_balanced_partitions

# -- by tokens: short rows first, all ranks cut their shares at the same places --------------------


def dynamic_batching_shard(
    origin_batch: DataProto,
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    log_prefix: str | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Rows in the order of the ranks, rank after rank, and where each rank cuts its share.

    Rank r gets the rows r, r + dp_size, ... of all rows sorted by length.
    `meta_info["global_micro_batch_indices"]` has [start, end) within a share,
    `["global_micro_batch_lengths"]` the width of each, a multiple of `sequence_length_round`; rows
    times width stays within `max_tokens_per_microbatch`. With virtual pipeline stages the number of
    micro-batches is made a multiple of the stages by halving the largest.

    Example: lengths 2 4 7 6 3 4 on 2 ranks, 20 tokens, rounded to 2 -> shares (2 4 6) and (3 4 7),
    cut [0, 2) at width 4 and [2, 3) at width 8.
    """
    mask = origin_batch["attention_mask"]
    lengths = mask.reshape(len(mask), -1).sum(-1).tolist()
    if len(lengths) % dp_size:
        raise ValueError(
            f"{len(lengths)} rows cannot be dealt to {dp_size} ranks: expected a multiple"
        )
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    multiple = sequence_length_round
    # Of the rows that all ranks have at one place, the last is the longest.
    longest = [lengths[row] for row in by_length[dp_size - 1 :: dp_size]]
    widths = [-(-length // multiple) * multiple for length in longest]
    if widths and widths[-1] > max_tokens_per_microbatch:
        raise ValueError(
            f"a row of {longest[-1]} tokens, rounded up to {widths[-1]}, does not fit into "
            f"max_tokens_per_microbatch={max_tokens_per_microbatch}"
        )
    cuts: list[list[int]] = [[0, 0]]
    sizes: list[int] = [multiple]
    for place, width in enumerate(widths):
        start, width = cuts[-1][0], max(width, multiple)
        if (place + 1 - start) * max(width, sizes[-1]) <= max_tokens_per_microbatch:
            cuts[-1][1], sizes[-1] = place + 1, max(width, sizes[-1])
        else:
            cuts.append([place, place + 1])
            sizes.append(width)
    tokens = [(end - start) * width for (start, end), width in zip(cuts, sizes, strict=True)]
    num_tokens = dp_size * sum(tokens)
    if pipeline_model_parallel_size > 1 and virtual_pipeline_model_parallel_size:
        num_more = -len(cuts) % pipeline_model_parallel_size
        several = [index for index, (start, end) in enumerate(cuts) if end - start > 1]
        halved = sorted(several, key=lambda index: -tokens[index])[:num_more]
        if len(halved) < num_more:
            raise ValueError(
                f"{num_more} more micro-batches are needed, and only {len(halved)} have two rows "
                "to part"
            )
        for index in sorted(halved, reverse=True):
            start, end = cuts[index]
            middle = start + (end - start) // 2
            cuts[index : index + 1] = [[start, middle], [middle, end]]
            sizes.insert(index, sizes[index])

    order = [row for rank in range(dp_size) for row in by_length[rank::dp_size]]
    batch = origin_batch.select_idxs(order)
    batch.meta_info = {
        **origin_batch.meta_info,
        "global_micro_batch_indices": cuts,
        "global_micro_batch_lengths": sizes,
        "micro_batch_indices": cuts,
        "micro_batch_lengths": sizes,
        "num_micro_batchs": len(cuts),  # ROLL's spelling
    }
    num_padded = mask.shape[0] * mask.shape[-1]
    prefix = f"dynamic_batching/{log_prefix}" if log_prefix else "dynamic_batching"
    return batch, {
        f"{prefix}/valid_tokens": sum(lengths),
        f"{prefix}/actual_tokens_origin": num_padded,
        f"{prefix}/actual_tokens": num_tokens,
        f"{prefix}/removed_padding_tokens": num_padded - num_tokens,
        f"{prefix}/removed_padding_ratio": (num_padded - num_tokens) / num_padded,
    }


def make_mini_batch_iter_for_dynamic_batching(
    data: DataProto, epochs: int, ga_steps: int = 1
) -> Iterator[DataProto]:
    """A rank's share in pieces of `ga_steps` micro-batches, whose places `meta_info` then has."""
    cuts = data.meta_info["global_micro_batch_indices"]
    sizes = data.meta_info["global_micro_batch_lengths"]
    for _ in range(epochs):
        for first in range(0, len(cuts), ga_steps):
            chosen = cuts[first : first + ga_steps]
            start = chosen[0][0]
            mini_batch = data.slice(start, chosen[-1][1])
            mini_batch.meta_info |= {
                "micro_batch_indices": [[low - start, high - start] for low, high in chosen],
                "micro_batch_lengths": sizes[first : first + ga_steps],
                "mini_batch_size": len(mini_batch),
                "num_micro_batchs": len(chosen),
            }
            yield mini_batch


def make_micro_batch_iter_for_dynamic_batching(mini_batch: DataProto) -> Iterator[DataProto]:
    """The micro-batches, right-padded columns narrowed to their width (width - 1 where they had one
    column less than `input_ids`)."""
    widths = mini_batch.meta_info["micro_batch_lengths"]
    cuts = mini_batch.meta_info["micro_batch_indices"]
    for width, (start, end) in zip(widths, cuts, strict=True):
        micro_batch = mini_batch.slice(start, end)
        assert micro_batch.batch is not None
        ids = micro_batch["input_ids"]
        width = min(width, ids.shape[-1])  # the batch need not be as wide as its rows are rounded
        for key in list(micro_batch.batch.keys()):
            value = micro_batch[key]
            missing = ids.shape[-1] - value.shape[-1] if value.dim() > 1 else -1
            if (value.dim() == ids.dim() or key == "position_ids") and missing in (0, 1):
                micro_batch.batch[key] = torch.narrow(value, -1, 0, width - missing)
        yield micro_batch


# -- for packing: micro-batches that are one sequence each -----------------------------------------


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
    """Results of all micro-batches, one after the other, in the order of their rows."""
    packer = get_sequence_packing_packer(config)
    return packer.restore_results_order(results, partition_indices_list)


def get_sequence_packing_packer(
    config: SequencePackingConfig | None = None,
) -> SequencePackingPacker:
    config = config or SequencePackingConfig()
    balances = config.algorithm == "load_balance"
    return LoadBalancePacker(config) if balances else SequencePackingPacker(config)


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
        count = len(mini_batch) // micro_batch_size
        mini_batch.meta_info |= {"partition_indices_list": [], "num_micro_batchs": count}
        return iter(mini_batch.chunk(count))

    @staticmethod
    def restore_results_order(
        results: dict[str, Tensor], partition_indices_list: list[list[int]]
    ) -> dict[str, Tensor]:
        return results


class LoadBalancePacker(SequencePackingPacker):
    """Micro-batches of about equal cost that stay within `max_packed_sequence_length` on average;
    light ones first and last. All ranks of `dp_group` make equally many."""

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
        kind = "train" if is_train else "forward"
        limit = getattr(config, f"max_packed_sequence_length_{kind}")
        fewest = getattr(config, f"min_num_micro_batches_{kind}")
        if dp_group is None:
            raise ValueError("dp_group: found None, expected the group of the data-parallel ranks")
        if limit is None or limit < mask.shape[-1]:
            raise ValueError(
                f"max_packed_sequence_length_{kind}: found {limit}, expected at least the width of "
                f"the batch, {mask.shape[-1]}"
            )
        factor = self.get_pad_factor(cp_size, tp_size)
        lengths = [-(-length // factor) * factor for length in mask.sum(1).tolist()]
        count = max(fewest, min(len(lengths), max(1, -(-sum(lengths) // limit))))
        if dist.is_initialized():
            device = "cuda" if torch.cuda.is_available() else "cpu"
            most = torch.tensor([count], device=device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dp_group)
            count = int(most.item())
        if vp_size > 1:
            count = -(-count // vp_size) * vp_size
        costs = [self.calculate_workload(length) for length in lengths]
        parts = get_seqlen_balanced_partitions(costs, count)
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
                "num_micro_batchs": count,
                "mini_batch_size": len(mini_batch),
            }
            yield micro_batch

    @staticmethod
    def restore_results_order(
        results: dict[str, Tensor], partition_indices_list: list[list[int]]
    ) -> dict[str, Tensor]:
        rows = [row for part in partition_indices_list for row in part]
        places = torch.tensor(rows).argsort()
        restored = dict(results)
        for key, value in results.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if len(value) != len(rows):
                    raise ValueError(
                        f"{key} has {len(value)} rows, the micro-batches had {len(rows)}"
                    )
                restored[key] = value[places.to(value.device)]
        return restored
