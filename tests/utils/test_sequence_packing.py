"""ROLL's distribution of rows for packing. The expected parts are those of ROLL's own functions."""

import pytest
import torch

from roll.configs.worker_config import SequencePackingConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.sequence_packing import (
    LoadBalancePacker,
    SequencePackingPacker,
    make_micro_batch_iter_for_sequence_packing,
    restore_results_order,
)


def rows_of(lengths: list[int]) -> DataProto:
    width = max(lengths)
    ids = torch.arange(len(lengths))[:, None].repeat(1, width)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
        }
    )


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
    data, config = rows_of(lengths), balanced(limit)
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
            rows_of([3, 1, 2, 2]), 1, 1, 1, micro_batch_size=2
        )
    )
    assert [batch["input_ids"][:, 0].tolist() for batch in found] == [[0, 1], [2, 3]]
    results = {"row": torch.arange(4)}
    assert restore_results_order(results, []) is results
    with pytest.raises(ValueError, match="micro_batch_size: found None"):
        make_micro_batch_iter_for_sequence_packing(rows_of([1]), 1, 1, 1)


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
    data = rows_of([8, 4])
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
