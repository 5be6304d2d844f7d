"""The order of rows: fixed by seed and epoch, and continued exactly where it was left."""

from __future__ import annotations

import json
import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.datasets.sampler import BatchStratifiedSampler, EpochSampler
from roll.exceptions import DataError


def test_every_row_once_an_epoch() -> None:
    sampler = EpochSampler(10, 4, seed=1, drop_last=False)
    for epoch in range(3):
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(chain(*batches)) == list(range(10))
        assert sampler.epoch == epoch + 1
    assert sampler.batches_per_epoch == 3


def test_an_incomplete_last_batch_can_be_dropped() -> None:
    sampler = EpochSampler(10, 4, seed=1)
    assert [len(batch) for batch in sampler] == [4, 4]
    assert (sampler.epoch, sampler.index, sampler.batches_per_epoch) == (1, 0, 2)
    assert [len(batch) for batch in EpochSampler(8, 4, seed=1)] == [4, 4]


def test_without_shuffling_rows_come_in_order() -> None:
    sampler = EpochSampler(5, 2, seed=1, shuffle=False, drop_last=False)
    assert list(sampler) == list(sampler) == [[0, 1], [2, 3], [4]]


def test_orders_differ_between_seeds_and_between_epochs() -> None:
    orders = set()
    for seed in range(5):
        sampler = EpochSampler(50, 50, seed=seed)
        orders |= {tuple(sampler.next_batch()) for _ in range(5)}
    assert len(orders) == 25  # also (seed 0, epoch 1) and (seed 1, epoch 0): they are not added up


def test_the_order_is_the_same_for_ever() -> None:
    # Written down once: a run of today is continued by a version of tomorrow.
    sampler = EpochSampler(8, 8, seed=42)
    assert [sampler.next_batch(), sampler.next_batch()] == [
        [4, 1, 3, 6, 0, 7, 2, 5],
        [1, 2, 5, 3, 6, 0, 4, 7],
    ]


def test_other_random_numbers_have_no_part_in_it() -> None:
    expected = list(EpochSampler(20, 3, seed=5))
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    assert list(EpochSampler(20, 3, seed=5)) == expected
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])
    random.setstate(states[0])


def test_rows_are_spread_evenly() -> None:
    # Every row should come first about equally often: 4,000 epochs of 8 rows, expected 500 each.
    sampler = EpochSampler(8, 8, seed=0)
    firsts = np.bincount([sampler.next_batch()[0] for _ in range(4000)], minlength=8)
    assert firsts.min() > 420 and firsts.max() < 580


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    seed=st.integers(0, 2**40),
    drop_last=st.booleans(),
    taken=st.integers(0, 40),
)
def test_resuming_gives_exactly_the_batches_that_were_left(
    num_rows: int, batch_size: int, seed: int, drop_last: bool, taken: int
) -> None:
    if drop_last and num_rows < batch_size:
        return
    sampler = EpochSampler(num_rows, batch_size, seed, drop_last=drop_last)
    for _ in range(taken):
        sampler.next_batch()
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = EpochSampler(num_rows, batch_size, seed, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.index) == (sampler.epoch, sampler.index)
    assert list(resumed) == list(sampler)
    assert [resumed.next_batch() for _ in range(5)] == [sampler.next_batch() for _ in range(5)]


def test_a_state_saved_inside_the_loop_continues_with_the_next_batch() -> None:
    sampler = EpochSampler(6, 2, seed=3)
    whole = list(EpochSampler(6, 2, seed=3))
    states = []
    for _ in sampler:
        states.append(sampler.state_dict())
    resumed = EpochSampler(6, 2, seed=3)
    resumed.load_state_dict(states[0])
    assert list(resumed) == whole[1:]
    resumed.load_state_dict(states[-1])  # after the last batch: the next epoch begins
    assert (resumed.epoch, resumed.index) == (1, 0)
    assert len(list(resumed)) == 3


def test_loading_forgets_the_order_of_another_epoch() -> None:
    sampler = EpochSampler(10, 5, seed=3)
    first = sampler.next_batch()
    state = {**sampler.state_dict(), "epoch": 0, "index": 0}
    for _ in range(3):
        sampler.next_batch()
    sampler.load_state_dict(state)
    assert sampler.next_batch() == first


def test_another_batch_size_goes_on_with_the_rows_that_were_not_seen() -> None:
    sampler = EpochSampler(10, 4, seed=3, drop_last=False)
    seen = sampler.next_batch() + sampler.next_batch()
    resumed = EpochSampler(10, 1, seed=3, drop_last=False)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(chain(seen, *resumed)) == list(range(10))
    wide = EpochSampler(10, 4, seed=3)  # the 2 rows that are left do not fill its batch
    wide.load_state_dict(sampler.state_dict())
    assert (wide.epoch, wide.index) == (1, 0)


def test_positions_in_other_data_are_refused() -> None:
    state = EpochSampler(10, 4, seed=3).state_dict()
    with pytest.raises(
        DataError, match=r"made with num_rows=10, this run has 11: it says nothing about these rows"
    ):
        EpochSampler(11, 4, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="made with seed=3, this run has 4"):
        EpochSampler(10, 4, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="made with shuffle=True, this run has False"):
        EpochSampler(10, 4, seed=3, shuffle=False).load_state_dict(state)
    with pytest.raises(DataError, match="epoch=0, index=10 is no position in 10 rows"):
        EpochSampler(10, 4, seed=3).load_state_dict({**state, "index": 10})


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(
        DataError, match="3 rows do not fill one batch of 4: use a smaller batch or more rows"
    ):
        EpochSampler(3, 4, seed=0)
    with pytest.raises(DataError, match="there are no rows"):
        EpochSampler(0, 4, seed=0, drop_last=False)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        EpochSampler(3, 0, seed=0)
    with pytest.raises(ValueError, match="seed=-1 must not be negative"):
        EpochSampler(3, 1, seed=-1)


ROWS = [
    {"domain": domain} for domain, count in (("a", 10), ("b", 6), ("c", 4)) for _ in range(count)
]
SHARES = {"a": 5, "b": 3, "c": 2}


def test_stratified_batches_have_their_shares() -> None:
    sampler = BatchStratifiedSampler(ROWS, SHARES, 10)
    assert sampler.domain_ratios == {"a": 0.5, "b": 0.3, "c": 0.2} and len(sampler) == 2
    batches = list(sampler)
    for batch in batches:
        assert [sum(ROWS[row]["domain"] == domain for row in batch) for domain in "abc"] == [
            5,
            3,
            2,
        ]
    assert sorted(chain.from_iterable(batches)) == list(range(20))


def test_domains_that_run_out_begin_again() -> None:
    sampler = BatchStratifiedSampler(ROWS, SHARES, 7, drop_last=False)
    assert sampler.domain_batch_num == {"a": 3, "b": 2, "c": 2} and len(sampler) == 4
    drawn = list(chain.from_iterable(sampler))
    assert len(drawn) == 28 and set(drawn) == set(range(20))


def test_stratified_order_is_that_of_the_process() -> None:
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        random.seed(seed)
        orders.append(list(BatchStratifiedSampler(ROWS, SHARES, 10)))
    assert orders[0] == orders[1] != orders[2]


def test_shares_that_do_not_fit_the_rows() -> None:
    with pytest.raises(AssertionError):
        BatchStratifiedSampler([], SHARES, 10)
    with pytest.raises(
        DataError, match=r"without a share: \['c'\]; domains with a share and no row: \['d'\]"
    ):
        BatchStratifiedSampler(ROWS, {"a": 1, "b": 1, "d": 1}, 10)
    with pytest.raises(DataError, match="a batch of 2 rows has none of b: use a larger"):
        BatchStratifiedSampler(ROWS, SHARES, 2)
