"""ROLL's micro-batches by tokens. The expected cuts are those of ROLL's own functions."""

import pytest
import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.dynamic_batching import (
    dynamic_batching_shard,
    make_micro_batch_iter_for_dynamic_batching,
    make_mini_batch_iter_for_dynamic_batching,
)


def rows_of(lengths: list[int], width: int) -> DataProto:
    ids = torch.arange(len(lengths))[:, None].repeat(1, width)
    attended = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    tensors = {
        "input_ids": ids,
        "attention_mask": attended,
        "log_probs": ids[:, 1:].float(),
        "score": ids[:, 0],
    }
    return DataProto.from_dict(tensors, meta_info={"step": 3})


@pytest.mark.parametrize(
    ("lengths", "width", "options", "order", "cuts", "widths", "tokens"),
    [
        ([2, 4, 7, 6, 3, 4], 20, (2, 20, 2), [0, 1, 3, 4, 5, 2], [[0, 2], [2, 3]], [4, 8], 32),
        (
            [5, 1, 16, 9, 3, 12, 2, 8],
            16,
            (2, 32, 4),
            [1, 4, 7, 5, 6, 0, 3, 2],
            [[0, 2], [2, 4]],
            [8, 16],
            96,
        ),
        (
            [5, 1, 16, 9, 3, 12, 2, 8],
            16,
            (1, 48, 4, 4, 2),  # four stages, twice: four micro-batches instead of two
            [1, 6, 4, 0, 7, 3, 5, 2],
            [[0, 2], [2, 5], [5, 6], [6, 8]],
            [8, 8, 16, 16],
            88,
        ),
        ([3, 3, 3, 3], 16, (4, 8, 8), [0, 1, 2, 3], [[0, 1]], [8], 32),
    ],
)
def test_cuts_are_rolls(lengths, width, options, order, cuts, widths, tokens):
    data = rows_of(lengths, width)
    batch, metrics = dynamic_batching_shard(data, *options, log_prefix="train")
    assert batch["score"].tolist() == order
    assert (
        batch.meta_info["global_micro_batch_indices"]
        == batch.meta_info["micro_batch_indices"]
        == cuts
    )
    assert batch.meta_info["global_micro_batch_lengths"] == widths and batch.meta_info["step"] == 3
    assert batch.meta_info["num_micro_batchs"] == len(cuts)
    padded = len(lengths) * width
    assert metrics == {
        "dynamic_batching/train/valid_tokens": sum(lengths),
        "dynamic_batching/train/actual_tokens_origin": padded,
        "dynamic_batching/train/actual_tokens": tokens,
        "dynamic_batching/train/removed_padding_tokens": padded - tokens,
        "dynamic_batching/train/removed_padding_ratio": (padded - tokens) / padded,
    }
    assert data.meta_info == {"step": 3} and data["score"].tolist() == list(range(len(lengths)))


def test_mini_batches_and_their_micro_batches():
    batch, _ = dynamic_batching_shard(rows_of([5, 1, 16, 9, 3, 12, 2, 8], 16), 1, 32, 4)
    assert batch.meta_info["global_micro_batch_indices"] == [[0, 4], [4, 6], [6, 8]]
    seen = []
    for mini_batch in make_mini_batch_iter_for_dynamic_batching(batch, epochs=2, ga_steps=2):
        assert mini_batch.meta_info["mini_batch_size"] == len(mini_batch)
        for micro_batch in make_micro_batch_iter_for_dynamic_batching(mini_batch):
            assert micro_batch["log_probs"].shape[1] == micro_batch["input_ids"].shape[1] - 1
            seen.append((micro_batch["score"].tolist(), micro_batch["input_ids"].shape[1]))
    assert seen == [([1, 6, 4, 0], 8), ([7, 3], 12), ([5, 2], 16)] * 2


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match="3 rows cannot be dealt to 2 ranks"):
        dynamic_batching_shard(rows_of([1, 2, 3], 4), 2, 8, 1)
    with pytest.raises(ValueError, match="a row of 3 tokens, rounded up to 4, does not fit"):
        dynamic_batching_shard(rows_of([1, 3], 4), 1, 3, 4)
    with pytest.raises(
        ValueError, match="3 more micro-batches are needed, and only 1 have two rows"
    ):
        dynamic_batching_shard(rows_of([1, 2], 4), 1, 8, 1, 4, 2)
