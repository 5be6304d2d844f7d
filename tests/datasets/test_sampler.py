"""The order of rows: fixed by seed and epoch, and continued exactly where it was left."""

import json
import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from roll.datasets.encoding import encode_prompts
from roll.datasets.sampler import (
    BatchStratifiedSampler,
    EpochSampler,
    PromptSampler,
    domain_sizes,
)
from roll.datasets.tables import Table
from roll.exceptions import DataError


def test_every_row_once_an_epoch():
    sampler = EpochSampler(10, 4, seed=1, drop_last=False)
    for epoch in range(3):
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(chain(*batches)) == list(range(10))
        assert sampler.epoch == epoch + 1
    assert sampler.batches_per_epoch == 3


def test_an_incomplete_last_batch_can_be_dropped():
    sampler = EpochSampler(10, 4, seed=1)
    assert [len(batch) for batch in sampler] == [4, 4]
    assert (sampler.epoch, sampler.index, sampler.batches_per_epoch) == (1, 0, 2)
    assert [len(batch) for batch in EpochSampler(8, 4, seed=1)] == [4, 4]


def test_without_shuffling_rows_come_in_order():
    sampler = EpochSampler(5, 2, seed=1, shuffle=False, drop_last=False)
    assert list(sampler) == list(sampler) == [[0, 1], [2, 3], [4]]


def test_orders_differ_between_seeds_and_between_epochs():
    orders = set()
    for seed in range(5):
        sampler = EpochSampler(50, 50, seed=seed)
        orders |= {tuple(sampler.next_batch()) for _ in range(5)}
    assert len(orders) == 25  # also (seed 0, epoch 1) and (seed 1, epoch 0): they are not added up


def test_the_order_is_the_same_for_ever():
    # Written down once: a run of today is continued by a version of tomorrow.
    sampler = EpochSampler(8, 8, seed=42)
    assert [sampler.next_batch(), sampler.next_batch()] == [
        [4, 1, 3, 6, 0, 7, 2, 5],
        [1, 2, 5, 3, 6, 0, 4, 7],
    ]


def test_other_random_numbers_have_no_part_in_it():
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


def test_rows_are_spread_evenly():
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
    num_rows, batch_size, seed, drop_last, taken
):
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


def test_a_state_saved_inside_the_loop_continues_with_the_next_batch():
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


def test_loading_forgets_the_order_of_another_epoch():
    sampler = EpochSampler(10, 5, seed=3)
    first = sampler.next_batch()
    state = {**sampler.state_dict(), "epoch": 0, "index": 0}
    for _ in range(3):
        sampler.next_batch()
    sampler.load_state_dict(state)
    assert sampler.next_batch() == first


def test_another_batch_size_goes_on_with_the_rows_that_were_not_seen():
    sampler = EpochSampler(10, 4, seed=3, drop_last=False)
    seen = sampler.next_batch() + sampler.next_batch()
    resumed = EpochSampler(10, 1, seed=3, drop_last=False)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(chain(seen, *resumed)) == list(range(10))
    wide = EpochSampler(10, 4, seed=3)  # the 2 rows that are left do not fill its batch
    wide.load_state_dict(sampler.state_dict())
    assert (wide.epoch, wide.index) == (1, 0)


@pytest.mark.parametrize(
    ("num_rows", "seed", "shuffle", "change", "expected"),
    [
        (11, 3, True, {}, "made with num_rows=10, this run has 11: it says nothing about these"),
        (10, 4, True, {}, "made with seed=3, this run has 4"),
        (10, 3, False, {}, "made with shuffle=True, this run has False"),
        (10, 3, True, {"index": 10}, "epoch=0, index=10 is no position in 10 rows"),
    ],
)
def test_positions_in_other_data_are_refused(num_rows, seed, shuffle, change, expected):
    state = {**EpochSampler(10, 4, seed=3).state_dict(), **change}
    with pytest.raises(DataError, match=expected):
        EpochSampler(num_rows, 4, seed=seed, shuffle=shuffle).load_state_dict(state)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "seed", "expected"),
    [
        (3, 4, 0, "3 rows do not fill one batch of 4: use a smaller batch or more rows"),
        (0, 4, 0, "there are no rows"),
        (3, 0, 0, "batch_size=0 must be at least 1"),
        (3, 1, -1, "seed=-1 must not be negative"),
    ],
)
def test_numbers_that_cannot_be(num_rows, batch_size, seed, expected):
    with pytest.raises(ValueError, match=expected):  # DataError is one
        EpochSampler(num_rows, batch_size, seed)


# --- prompts by domain ----------------------------------------------------------------------------


def two_domains(num: int = 10):
    rows = [{"prompt": f"q{i}", "domain": "math" if i % 2 else "code"} for i in range(num)]
    table = Table("data.jsonl", rows)
    return encode_prompts(
        table, tiny_tokenizer(), max_length=9, template="base", domain_of=lambda row: row["domain"]
    )


@pytest.mark.parametrize(
    ("num", "shares", "sizes"),
    [
        (64, {"a": 0.7, "b": 0.3}, {"a": 44, "b": 20}),
        (100, {"a": 0.29, "b": 0.71}, {"a": 29, "b": 71}),  # int(0.29 * 100) is 28
        (10, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 3, "b": 3, "c": 4}),
        (7, {"a": 1.0}, {"a": 7}),
    ],
)
def test_shares_become_whole_prompts(num, shares, sizes):
    assert domain_sizes(num, shares) == sizes


@given(num=st.integers(1, 500), parts=st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_all_prompts_are_dealt(num, parts):
    shares = {str(i): part / sum(parts) for i, part in enumerate(parts)}
    sizes = domain_sizes(num, shares)
    assert sum(sizes.values()) == num
    assert all(abs(sizes[name] - num * share) < len(parts) for name, share in shares.items())


def test_domains_come_by_their_shares_and_each_in_its_own_order():
    shares = {"math": 0.75, "code": 0.25}
    batch = PromptSampler(two_domains(), seed=0, shares=shares).batch(4)
    assert [prompt.domain for prompt in batch] == ["math"] * 3 + ["code"]
    other = PromptSampler(two_domains(), seed=0, shares=shares)
    other.take("code", 3)
    assert [p.index for p in other.take("math", 3)] == [p.index for p in batch[:3]]
    with pytest.raises(
        DataError, match=r"'law' of domain_interleave_probs has no prompt; the prompts are of code"
    ):
        PromptSampler(two_domains(), seed=0, shares={"law": 0.5, "math": 0.5})


def test_every_prompt_comes_once_an_epoch():
    draw = PromptSampler(two_domains(10), seed=1)
    seen = [prompt.index for _ in range(5) for prompt in draw.batch(4)]
    assert Counter(seen) == dict.fromkeys(range(10), 2) and draw.epoch == 2


def test_a_saved_position_of_domains_goes_on_exactly():
    shares = {"math": 0.5, "code": 0.5}
    draw = PromptSampler(two_domains(), seed=5, shares=shares)
    draw.batch(6)
    draw.take("math", 1)
    state = draw.state_dict()
    following = [prompt.index for _ in range(4) for prompt in draw.batch(4)]
    resumed = PromptSampler(two_domains(), seed=5, shares=shares)
    resumed.load_state_dict(state)
    assert [prompt.index for _ in range(4) for prompt in resumed.batch(4)] == following
    with pytest.raises(DataError, match="made with seed=5, this run has 6"):
        PromptSampler(two_domains(), seed=6, shares=shares).load_state_dict(state)
    with pytest.raises(DataError, match="of the domains math, code, this run has all"):
        PromptSampler(two_domains(), seed=5).load_state_dict(state)


# --- ROLL's sampler -------------------------------------------------------------------------------

ROWS = [
    {"domain": domain} for domain, count in (("a", 10), ("b", 6), ("c", 4)) for _ in range(count)
]
SHARES = {"a": 5, "b": 3, "c": 2}


def test_stratified_batches_have_their_shares():
    sampler = BatchStratifiedSampler(ROWS, SHARES, 10)
    assert sampler.domain_ratios == {"a": 0.5, "b": 0.3, "c": 0.2} and len(sampler) == 2
    batches = list(sampler)
    for batch in batches:
        assert Counter(ROWS[row]["domain"] for row in batch) == {"a": 5, "b": 3, "c": 2}
    assert sorted(chain.from_iterable(batches)) == list(range(20))


def test_domains_that_run_out_begin_again():
    sampler = BatchStratifiedSampler(ROWS, SHARES, 7, drop_last=False)
    assert sampler.domain_batch_num == {"a": 3, "b": 2, "c": 2} and len(sampler) == 4
    drawn = list(chain.from_iterable(sampler))
    assert len(drawn) == 28 and set(drawn) == set(range(20))


def test_stratified_order_is_that_of_the_process():
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        random.seed(seed)
        orders.append(list(BatchStratifiedSampler(ROWS, SHARES, 10)))
    assert orders[0] == orders[1] != orders[2]


def test_shares_that_do_not_fit_the_rows():
    with pytest.raises(AssertionError):
        BatchStratifiedSampler([], SHARES, 10)
    with pytest.raises(
        DataError, match=r"without a share: \['c'\]; domains with a share and no row: \['d'\]"
    ):
        BatchStratifiedSampler(ROWS, {"a": 1, "b": 1, "d": 1}, 10)
    with pytest.raises(DataError, match="a batch of 2 rows has none of b: use a larger"):
        BatchStratifiedSampler(ROWS, SHARES, 2)
