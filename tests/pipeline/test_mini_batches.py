from itertools import chain

import pytest
import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.model_worker import ROW_NUMBER, balance_ranks, local_rows_of_steps


def steps_of(numbers_per_rank, **options):
    """The global rows of each step, whichever rank holds them."""
    defaults = {"num_global": 12, "rows_per_step": 4, "epochs": 2, "seed": 5, "unit": 2}
    per_rank = [
        list(local_rows_of_steps(numbers, **{**defaults, **options}))
        for numbers in numbers_per_rank
    ]
    return [
        sorted(
            numbers[row]
            for numbers, rows in zip(numbers_per_rank, step, strict=True)
            for row in rows
        )
        for step in zip(*per_rank, strict=True)
    ]


def test_steps_do_not_depend_on_the_number_of_ranks():
    rows = list(range(12))
    alone = steps_of([rows])
    assert alone == steps_of([rows[:6], rows[6:]]) == steps_of([rows[:2], rows[2:10], rows[10:]])
    assert alone == steps_of([[4, 5, 0, 1, 10, 11], [2, 3, 8, 9, 6, 7]])
    assert len(alone) == 6
    assert sorted(chain.from_iterable(alone[:3])) == rows
    assert alone[:3] != alone[3:], "every epoch has a permutation of its own"
    assert all(row + 1 in step for step in alone for row in step if row % 2 == 0), (
        "pairs stay together"
    )


def test_one_step_of_all_rows_keeps_their_order():
    assert list(
        local_rows_of_steps([0, 1, 2], num_global=3, rows_per_step=8, epochs=1, seed=0)
    ) == [[0, 1, 2]]


def test_pairs_that_are_cut_apart_are_refused():
    with pytest.raises(ValueError, match="3 of 6 rows: rows come in units of 2"):
        list(
            local_rows_of_steps([0, 1, 2], num_global=6, rows_per_step=2, epochs=1, seed=0, unit=2)
        )


def batch_of(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict({"attention_mask": mask}, non_tensors={"length": lengths})


def test_every_rank_gets_long_and_short_rows():
    batch = batch_of([8, 8, 1, 1])
    balanced = balance_ranks(batch, 2)
    assert [sorted(piece.non_tensor_batch["length"].tolist()) for piece in balanced.chunk(2)] == [
        [1, 8],
        [1, 8],
    ]
    assert [int(n) for n in batch.non_tensor_batch["length"][balanced[ROW_NUMBER].numpy()]] == list(
        balanced.non_tensor_batch["length"]
    )
    assert ROW_NUMBER not in batch


def test_pairs_go_to_the_same_rank():
    balanced = balance_ranks(batch_of([9, 1, 2, 2, 1, 1, 5, 5]), 2, unit=2)
    numbers = balanced[ROW_NUMBER].tolist()
    assert all(numbers[i] % 2 == 0 and numbers[i + 1] == numbers[i] + 1 for i in range(0, 8, 2))
    tokens = [int(piece["attention_mask"].sum()) for piece in balanced.chunk(2)]
    assert tokens == [12, 14] or tokens == [14, 12]


def test_ranks_that_do_not_divide_the_rows_get_one_row_more_or_less():
    balanced = balance_ranks(batch_of([9, 1, 1, 5, 5, 1]), 4)
    pieces = balanced.chunk(4)
    assert [len(piece) for piece in pieces] == [2, 2, 1, 1]
    assert sorted(balanced[ROW_NUMBER].tolist()) == list(range(6))
    # The longest row is alone, and no rank has more than it.
    assert sorted(int(piece["attention_mask"].sum()) for piece in pieces)[-1] == 9


def test_rows_that_cannot_be_dealt_are_refused():
    with pytest.raises(ValueError, match="3 rows cannot be dealt to 4 ranks"):
        balance_ranks(batch_of([1, 2, 3]), 4)
    with pytest.raises(ValueError, match="6 rows cannot be dealt to 2 ranks in units of 2"):
        balance_ranks(batch_of([1, 2, 3, 1, 2, 3]), 2, unit=2)
