"""Balancing work over ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.balancing import batch_balance, get_seqlen_balanced_partitions, log_seqlen_unbalance


def batch_of_lengths(lengths: list[int]) -> DataProto:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return DataProto.from_dict({"attention_mask": mask.long(), "row": torch.arange(len(lengths))})


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=24), k=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_parts_cover_all_rows_and_are_not_empty(lengths, k):
    if len(lengths) < k:
        with pytest.raises(ValueError, match="non-empty"):
            get_seqlen_balanced_partitions(lengths, k)
        return
    parts = get_seqlen_balanced_partitions(lengths, k)
    assert len(parts) == k and all(part == sorted(part) and part for part in parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    # No worse than a part's fair share plus one item.
    assert max(sum(lengths[i] for i in part) for part in parts) <= sum(lengths) / k + max(lengths)


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=6), k=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_equal_sizes(lengths, k):
    lengths = lengths * k
    parts = get_seqlen_balanced_partitions(torch.tensor(lengths), k, equal_size=True)
    assert {len(part) for part in parts} == {len(lengths) // k}
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))


def test_largest_differencing_by_hand():
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    parts = get_seqlen_balanced_partitions([10, 9, 2, 1], 2, equal_size=True)
    assert sorted(sorted(part) for part in parts) == [[0, 3], [1, 2]]


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="5 rows cannot be split into 2 parts of equal size"):
        get_seqlen_balanced_partitions([1] * 5, 2, equal_size=True)


def test_log_seqlen_unbalance_by_hand():
    metrics = log_seqlen_unbalance([10, 9, 2, 1], [[0, 3], [1, 2]], "p")
    assert metrics == {
        "p/min": 3, "p/max": 19, "p/minmax_diff": 16, "p/balanced_min": 11, "p/balanced_max": 11, "p/mean": 11,
    }  # fmt: skip


def test_batch_balance_reorders_in_place():
    batch = batch_of_lengths([10, 9, 2, 1])
    metrics = batch_balance(batch, dp_size=2, minibatch_size=4)
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    assert sum(lengths[:2]) == sum(lengths[2:]) == 11 and sorted(batch.batch["row"].tolist()) == [
        0,
        1,
        2,
        3,
    ]
    assert (
        metrics["global_seqlen/minmax_diff"] == 16 and metrics["global_seqlen/balanced_max"] == 11
    )


def test_batch_balance_puts_short_rows_at_both_ends_of_a_rank():
    batch = batch_of_lengths([5, 1, 4, 2, 3])
    batch_balance(batch, dp_size=1, minibatch_size=5)
    assert batch.batch["attention_mask"].sum(-1).tolist() == [1, 3, 5, 4, 2]


def test_batch_balance_can_keep_minibatches():
    batch = batch_of_lengths([9, 1, 8, 2, 3, 3, 7, 7])
    batch_balance(batch, dp_size=2, minibatch_size=4, keep_minibatch=True)
    rows = batch.batch["row"].tolist()
    # Each rank: two rows of the first minibatch, then two of the second.
    assert [row // 4 for row in rows] == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="minibatch_size=3 does not divide the 8 rows"):
        batch_balance(batch, dp_size=1, minibatch_size=3, keep_minibatch=True)
