from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.micro_batches import (
    cut_by_tokens,
    make_micro_batch,
    plan_by_rows,
    plan_by_tokens,
    row_windows,
    split_to,
)


def test_row_windows_of_left_right_and_fully_padded_rows():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    first, stop = row_windows(mask)
    assert first.tolist() == [2, 0, 1, 0]
    assert stop.tolist() == [4, 2, 4, 0]


def test_rows_plan_never_exceeds_the_micro_batch_size():
    # ROLL cuts 6 rows by 4 into one chunk of 6.
    assert plan_by_rows(6, 4) == [[0, 1, 2, 3], [4, 5]]
    assert plan_by_rows(3, 8) == [[0, 1, 2]]
    with pytest.raises(ValueError, match="at least one row"):
        plan_by_rows(3, 0)


def test_token_plan_packs_rows_of_similar_length():
    # Widths 8, 8, 4, 4, 2 within 16 tokens: two rows of 8, then 4+4+2 as three rows of 4.
    assert plan_by_tokens([4, 8, 2, 8, 4], 16) == [[1, 3], [0, 4, 2]]


def test_token_plan_rounds_widths_and_keeps_a_row_that_is_too_long():
    assert plan_by_tokens([5, 5], 10) == [[0, 1]]
    assert plan_by_tokens([5, 5], 10, round_to=4) == [[0], [1]]
    assert plan_by_tokens([50, 2, 2], 10) == [[0], [1, 2]]


def test_token_plan_keeps_pairs_together():
    assert plan_by_tokens([2, 9, 3, 1, 4, 4], 18, unit=2) == [[0, 1], [4, 5, 2, 3]]
    with pytest.raises(ValueError, match="3 rows do not form units of 2"):
        plan_by_tokens([1, 2, 3], 10, unit=2)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    budget=st.integers(1, 100),
    extra=st.integers(0, 5),
    unit=st.sampled_from([1, 2]),
)
def test_plans_hold_every_row_once_within_the_budget(lengths, budget, extra, unit):
    lengths = lengths * unit
    plan = plan_by_tokens(lengths, budget, unit=unit)
    assert sorted(chain.from_iterable(plan)) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) * max(lengths[row] for row in rows) <= budget or len(rows) == unit
    longer = split_to(plan, len(plan) + extra, unit=unit)
    assert len(longer) == len(plan) + extra
    assert sorted(chain.from_iterable(longer)) == list(range(len(lengths)))
    assert all(len(rows) % unit == 0 for rows in longer)


def test_cuts_leave_rows_in_order():
    assert cut_by_tokens([3, 1, 2, 5], 4) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert cut_by_tokens([3, 1, 2, 5], 6, unit=2) == [slice(0, 2), slice(2, 4)]
    assert cut_by_tokens([0, 0, 0], 0) == [slice(0, 3)]


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    most=st.integers(0, 20),
    unit=st.sampled_from([1, 2]),
)
def test_cuts_hold_every_row_once_within_the_budget(tokens, most, unit):
    tokens = [count for count in tokens for _ in range(unit)]
    parts = cut_by_tokens(tokens, most, unit=unit)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(
        range(len(tokens))
    )
    for part in parts:
        assert part.start % unit == part.stop % unit == 0
        assert sum(tokens[part]) <= most or part.stop - part.start == unit


def test_split_cuts_the_largest_and_then_adds_empty_ones():
    assert split_to([[0, 1, 2], [3]], 3) == [[0], [1, 2], [3]]
    assert split_to([[0]], 3) == [[0], [], []]
    assert split_to([[0, 1]], 2, unit=2) == [[0, 1], []]


def padded_batch() -> DataProto:
    attention_mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    return DataProto.from_dict(
        {
            "attention_mask": attention_mask,
            "input_ids": torch.arange(18).view(3, 6),
            "old_log_probs": torch.arange(15.0).view(3, 5),
            "reward": torch.tensor([1.0, 2.0, 3.0]),
        },
        non_tensors={"id": ["a", "b", "c"]},
        meta_info={"global_step": 7},
    )


def test_micro_batch_keeps_the_columns_that_its_rows_attend_to():
    micro = make_micro_batch(padded_batch(), [1, 0])
    assert (micro.start, micro.stop) == (1, 5)
    assert micro.data.batch["input_ids"].tolist() == [[7, 8, 9, 10], [1, 2, 3, 4]]
    # Column t speaks of token t+1, so S-1 columns lose the same start and one column fewer at the
    # end.
    assert micro.data.batch["old_log_probs"].tolist() == [[6, 7, 8], [1, 2, 3]]
    assert micro.data.batch["reward"].tolist() == [2.0, 1.0]
    assert micro.data.non_tensor_batch["id"].tolist() == ["b", "a"]
    assert micro.data.meta_info == {"global_step": 7}


def test_widen_puts_results_back_in_their_columns():
    micro = make_micro_batch(padded_batch(), [0])
    assert (micro.start, micro.stop) == (1, 4)
    assert micro.widen(torch.tensor([[5.0, 6.0]]), 6).tolist() == [[0, 5, 6, 0, 0]]


def test_micro_batch_of_a_fully_padded_row_keeps_two_columns():
    batch = DataProto.from_dict(
        {"attention_mask": torch.zeros(1, 4), "input_ids": torch.ones(1, 4)}
    )
    micro = make_micro_batch(batch, [0])
    assert micro.stop - micro.start == 2
