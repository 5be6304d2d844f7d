"""ROLL's micro-batches, by tokens and for packing. The expected parts are those of ROLL's own
functions."""

import pytest
import torch

from roll.configs.worker_config import SequencePackingConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.dynamic_batching import (
    LoadBalancePacker,
    SequencePackingPacker,
    dynamic_batching_shard,
    make_micro_batch_iter_for_dynamic_batching,
    make_micro_batch_iter_for_sequence_packing,
    make_mini_batch_iter_for_dynamic_batching,
    restore_results_order,
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
        (
            [5, 1, 16, 9, 3, 12, 2, 8],
            16,
            (1, 32, 4, 2, 2),  # one more: the first of the largest is halved
            [1, 6, 4, 0, 7, 3, 5, 2],
            [[0, 2], [2, 4], [4, 6], [6, 8]],
            [8, 8, 12, 16],
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


def balanced(limit: int, **options) -> SequencePackingConfig:
    return SequencePackingConfig(
        algorithm="load_balance", max_packed_sequence_length_forward=limit, **options
    )


@pytest.mark.parametrize(
    ("lengths", "limit", "vp_size", "parts"),
    [
        (
            [512, 1024, 256, 2048, 128, 768, 1536, 384, 896, 640],
            4096,
            1,
            [[2, 3, 4, 5, 8], [0, 1, 6, 7, 9]],
        ),
        ([100, 200, 300, 400, 50, 60], 448, 1, [[2, 4], [3], [0, 1, 5]]),
        ([100, 200, 300, 400, 50, 60], 448, 2, [[0, 4, 5], [3], [2], [1]]),
    ],
)
def test_parts_are_rolls_and_results_come_back_in_order(lengths, limit, vp_size, parts):
    data, config = rows_of(lengths, max(lengths)), balanced(limit)
    found = list(
        make_micro_batch_iter_for_sequence_packing(
            data, 1, 1, vp_size, dp_group=object(), config=config
        )
    )
    assert [batch.meta_info["partition_indices"] for batch in found] == parts
    assert data.meta_info["partition_indices_list"] == parts
    assert found[-1].meta_info["micro_batch_idx"] == len(parts) - 1
    assert found[0].meta_info["num_micro_batchs"] == len(parts)
    assert found[0].meta_info["mini_batch_size"] == len(lengths)
    results = {
        "row": torch.cat([batch["input_ids"][:, 0] for batch in found]),
        "loss": torch.tensor(2.0),
    }
    restored = restore_results_order(results, parts, config)
    assert restored["row"].tolist() == list(range(len(lengths))) and restored["loss"] == 2.0
    with pytest.raises(ValueError, match="row has 1 rows"):
        restore_results_order({"row": torch.zeros(1)}, parts, config)


def test_without_an_algorithm_neighbours_stay_together():
    found = list(
        make_micro_batch_iter_for_sequence_packing(
            rows_of([3, 1, 2, 2], 3), 1, 1, 1, micro_batch_size=2
        )
    )
    assert [batch["input_ids"][:, 0].tolist() for batch in found] == [[0, 1], [2, 3]]
    results = {"row": torch.arange(4)}
    assert restore_results_order(results, []) is results
    with pytest.raises(ValueError, match="micro_batch_size: found None"):
        make_micro_batch_iter_for_sequence_packing(rows_of([1], 1), 1, 1, 1)


def test_numbers_of_the_packer():
    packer = SequencePackingPacker()
    assert [packer.get_pad_factor(cp, tp) for cp, tp in ((1, 1), (1, 3), (2, 1), (4, 3))] == [
        16,
        48,
        16,
        48,
    ]
    assert packer.calculate_workload(10) == 24576 * 10 + 100


def test_what_load_balancing_needs():
    data = rows_of([8, 4], 8)
    with pytest.raises(ValueError, match="dp_group"):
        next(
            LoadBalancePacker(balanced(8)).make_micro_batch_iter_for_sequence_packing(data, 1, 1, 1)
        )
    for config, is_train in ((balanced(4), False), (balanced(8), True)):
        packer = LoadBalancePacker(config)
        with pytest.raises(ValueError, match="expected at least the width of the batch, 8"):
            next(
                packer.make_micro_batch_iter_for_sequence_packing(data, 1, 1, 1, is_train, object())
            )
