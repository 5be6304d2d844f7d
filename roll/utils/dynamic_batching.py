"""ROLL's cut of a batch into micro-batches by tokens, for programs that call it.

The strategies here cut by themselves (see `roll.distributed.strategy.micro_batches`). What this module does is the same
as in ROLL: rows are dealt to the ranks by length, short ones first, and all ranks cut their shares at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from roll.distributed.scheduler.protocol import DataProto


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

    Rank r gets the rows r, r + dp_size, ... of all rows sorted by length. `meta_info["global_micro_batch_indices"]` has
    [start, end) within a share, `["global_micro_batch_lengths"]` the width of each, a multiple of
    `sequence_length_round`; rows times width stays within `max_tokens_per_microbatch`. With virtual pipeline stages the
    number of micro-batches is made a multiple of the stages by halving the largest.

    Example: lengths 2 4 7 6 3 4 on 2 ranks, 20 tokens, rounded to 2 -> shares (2 4 6) and (3 4 7), cut [0, 2) at width
    4 and [2, 3) at width 8.
    """
    mask = origin_batch["attention_mask"]
    lengths = mask.reshape(len(mask), -1).sum(-1).tolist()
    if len(lengths) % dp_size:
        raise ValueError(
            f"{len(lengths)} rows cannot be dealt to {dp_size} ranks: expected a multiple of {dp_size}"
        )
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])
    # Of the rows that all ranks have at one place, the last is the longest.
    widths = [
        _rounded(lengths[row], sequence_length_round) for row in by_length[dp_size - 1 :: dp_size]
    ]
    if widths and widths[-1] > max_tokens_per_microbatch:
        raise ValueError(
            f"a row of {lengths[by_length[-1]]} tokens, rounded up to {widths[-1]}, does not fit into "
            f"max_tokens_per_microbatch={max_tokens_per_microbatch}"
        )
    cuts: list[list[int]] = [[0, 0]]
    sizes: list[int] = [sequence_length_round]
    for place, width in enumerate(widths):
        start = cuts[-1][0]
        width = max(width, sequence_length_round)
        if (place + 1 - start) * max(width, sizes[-1]) <= max_tokens_per_microbatch:
            cuts[-1][1], sizes[-1] = place + 1, max(width, sizes[-1])
        else:
            cuts.append([place, place + 1])
            sizes.append(width)
    num_tokens = dp_size * sum(
        (end - start) * width for (start, end), width in zip(cuts, sizes, strict=True)
    )
    if pipeline_model_parallel_size > 1 and virtual_pipeline_model_parallel_size:
        cuts, sizes = _halved(cuts, sizes, -len(cuts) % pipeline_model_parallel_size)

    batch = origin_batch.select_idxs(
        [row for rank in range(dp_size) for row in by_length[rank::dp_size]]
    )
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
    metrics = {
        "valid_tokens": sum(lengths),
        "actual_tokens_origin": num_padded,
        "actual_tokens": num_tokens,
        "removed_padding_tokens": num_padded - num_tokens,
        "removed_padding_ratio": (num_padded - num_tokens) / num_padded,
    }
    return batch, {f"{prefix}/{name}": value for name, value in metrics.items()}


def make_mini_batch_iter_for_dynamic_batching(
    data: DataProto, epochs: int, ga_steps: int = 1
) -> Iterator[DataProto]:
    """The share of one rank in pieces of `ga_steps` micro-batches, whose places the shared `meta_info` then has."""
    cuts, sizes = (
        data.meta_info["global_micro_batch_indices"],
        data.meta_info["global_micro_batch_lengths"],
    )
    for _ in range(epochs):
        for first in range(0, len(cuts), ga_steps):
            chosen = cuts[first : first + ga_steps]
            start = chosen[0][0]
            mini_batch = data.slice(start, chosen[-1][1])
            mini_batch.meta_info["micro_batch_indices"] = [
                [low - start, high - start] for low, high in chosen
            ]
            mini_batch.meta_info["micro_batch_lengths"] = sizes[first : first + ga_steps]
            mini_batch.meta_info["mini_batch_size"] = len(mini_batch)
            mini_batch.meta_info["num_micro_batchs"] = len(chosen)
            yield mini_batch


def make_micro_batch_iter_for_dynamic_batching(mini_batch: DataProto) -> Iterator[DataProto]:
    """The micro-batches of a mini-batch, right-padded columns narrowed to their width (width - 1 where they had one
    column less than `input_ids`)."""
    places = zip(
        mini_batch.meta_info["micro_batch_lengths"],
        mini_batch.meta_info["micro_batch_indices"],
        strict=True,
    )
    for width, (start, end) in places:
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


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _halved(
    cuts: list[list[int]], sizes: list[int], num_more: int
) -> tuple[list[list[int]], list[int]]:
    """The `num_more` micro-batches with the most tokens in two halves each."""
    tokens = [(end - start) * width for (start, end), width in zip(cuts, sizes, strict=True)]
    several = [index for index, (start, end) in enumerate(cuts) if end - start > 1]
    chosen = sorted(several, key=lambda index: -tokens[index])[:num_more]
    if len(chosen) < num_more:
        raise ValueError(
            f"{num_more} more micro-batches are needed, and only {len(chosen)} have two rows to part"
        )
    parted: list[tuple[list[int], int]] = []
    for index, ((start, end), width) in enumerate(zip(cuts, sizes, strict=True)):
        middle = start + (end - start) // 2
        halves = [[start, middle], [middle, end]] if index in chosen else [[start, end]]
        parted += [(half, width) for half in halves]
    return [cut for cut, _ in parted], [width for _, width in parted]
