"""Response-level rewards: normalisation in every combination of scopes, running moments, clipping,
placing, masks."""

import itertools
import json
import math

import float64_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import random_mask

from roll.algorithms.rewards import (
    RunningMoments,
    check_clip,
    clip_symmetric,
    difficulty_mask,
    group_index,
    max_length_mask,
    normalize_rewards,
    overlong_mask,
    place_at_last_token,
    row_mean,
    zero_std_group_frac,
)

SCOPES = (None, "batch", "group", "running")
R = torch.tensor([1.0, 0.0, 2.0, 5.0])
PAIRS = torch.tensor([0, 0, 1, 1])

values = st.floats(-100, 100, width=32)
groups_of = st.lists(st.tuples(values, st.integers(0, 3)), min_size=1, max_size=12)


# normalisation


def test_group_mean_and_std_by_hand():
    out = normalize_rewards(R, mean="group", std="group", groups=PAIRS)
    half, wide = 0.5**0.5 + 1e-6, 4.5**0.5 + 1e-6
    torch.testing.assert_close(
        out, torch.tensor([0.5 / half, -0.5 / half, -1.5 / wide, 1.5 / wide])
    )


def test_rp3_batch_mean_with_group_std_is_one_reward_per_row():
    out = normalize_rewards(R, mean="batch", std="group", groups=PAIRS)
    half, wide = 0.5**0.5 + 1e-6, 4.5**0.5 + 1e-6
    torch.testing.assert_close(out, torch.tensor([-1 / half, -2 / half, 0 / wide, 3 / wide]))
    singles = normalize_rewards(R, mean="batch", std="group", groups=torch.arange(4))
    assert singles.tolist() == [-1, -2, 0, 3]


@pytest.mark.parametrize("std", SCOPES)
@pytest.mark.parametrize("mean", (*SCOPES, "leave_one_out"))
def test_a_group_of_one_or_of_equal_rewards(mean, std):
    """Exactly 0 where the mean of the group is subtracted, itself where nothing is done to it."""
    rewards, groups = torch.tensor([0.7, 0.3, 0.3, 0.3, 5.0, 1.0]), torch.tensor([0, 1, 1, 1, 2, 2])
    running = RunningMoments()
    running.update(rewards)
    out = normalize_rewards(rewards, mean=mean, std=std, groups=groups, running=running)[:4]
    if mean in ("group", "leave_one_out"):
        assert out.tolist() == [0, 0, 0, 0]
    elif mean is None and std in (None, "group"):
        assert torch.equal(out, rewards[:4])
    else:
        assert (out != 0).all() and out[1:].unique().numel() == 1


def test_rloo_by_hand():
    groups = torch.tensor([0, 0, 0, 1])
    out = normalize_rewards(R, mean="leave_one_out", groups=groups)
    torch.testing.assert_close(out, torch.tensor([1 - 1.0, 0 - 1.5, 2 - 0.5, 0.0]))


@pytest.mark.parametrize(("mean", "std"), [*itertools.product((*SCOPES, "leave_one_out"), SCOPES)])
@given(rows=groups_of, earlier=st.lists(values, max_size=5))
@settings(max_examples=12, deadline=None)
def test_every_combination_matches_the_reference(mean, std, rows, earlier):
    rewards, ids = [r for r, _ in rows], [g for _, g in rows]
    running = RunningMoments()
    running.update(torch.tensor(earlier))
    running.update(torch.tensor(rewards, dtype=torch.float64))
    out = normalize_rewards(
        torch.tensor(rewards),
        mean=mean,
        std=std,
        groups=group_index(len(ids), ids=ids),
        running=running,
    )
    expected = torch.tensor(
        reference.normalize_rewards(rewards, ids, mean, std, seen=[*earlier, *rewards])
    )
    # A standard deviation near 1e-6 divides or does not by a hair; keep away from that.
    if expected.abs().max() < 1e4:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_rp2_batch_of_one_is_zero():
    assert normalize_rewards(torch.tensor([3.0]), mean="batch", std="batch").tolist() == [0]
    assert normalize_rewards(torch.tensor([3.0]), std="batch").tolist() == [3]


def test_the_divisor_is_the_deviation_plus_1e_6_or_exactly_one():
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64)
    out = normalize_rewards(rewards, std="batch")
    torch.testing.assert_close(out, rewards / (0.5**0.5 + 1e-6), rtol=1e-12, atol=0)
    # one value so far: its deviation of 1 is a convention and not worth dividing by
    assert normalize_rewards(
        rewards, std="running", running=RunningMoments(1, 3.0, 0.0)
    ).tolist() == [1, 2]


def test_rp5_constant_groups_are_exactly_zero():
    for size, value in itertools.product((2, 3, 4, 5, 7, 8), (0.1, 0.3, 0.7, 1 / 3)):
        rewards = torch.full((2 * size,), value)
        out = normalize_rewards(
            rewards, mean="group", std="group", groups=group_index(2 * size, size=size)
        )
        assert not out.any(), (size, value)


def test_rp11_group_of_one_with_batch_statistics_keeps_its_signal():
    out = normalize_rewards(
        torch.tensor([1.0, 3.0]), mean="batch", std="batch", groups=torch.arange(2)
    )
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-6))
    # a constant group without a mean to subtract stays what it is
    assert normalize_rewards(
        torch.tensor([2.0, 2.0]), std="group", groups=torch.zeros(2).long()
    ).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16])
def test_rp6_rp12_rewards_of_any_dtype_become_float32(dtype):
    out = normalize_rewards(torch.tensor([1, 0, 3]).to(dtype), mean="batch", std="batch")
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.tensor([-1 / 3, -4 / 3, 5 / 3]) / ((7 / 3) ** 0.5 + 1e-6))


@given(rows=groups_of, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_permutation_of_rows(rows, seed):
    rewards, ids = torch.tensor([r for r, _ in rows]), [g for _, g in rows]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for mean, std in (("group", "group"), ("batch", "group"), ("leave_one_out", None)):
        out = normalize_rewards(rewards, mean=mean, std=std, groups=group_index(len(ids), ids=ids))
        permuted_ids = [ids[i] for i in order.tolist()]
        permuted = normalize_rewards(
            rewards[order], mean=mean, std=std, groups=group_index(len(ids), ids=permuted_ids)
        )
        torch.testing.assert_close(permuted, out[order])


@given(shift=st.floats(-50, 50), scale=st.floats(0.1, 10), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_shift_and_scale_invariance(shift, scale, seed):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    groups = group_index(12, size=4)
    for mean, std in itertools.product(("batch", "group"), (None, "batch", "group")):
        base = normalize_rewards(rewards, mean=mean, std=std, groups=groups)
        torch.testing.assert_close(
            normalize_rewards(rewards + shift, mean=mean, std=std, groups=groups), base
        )
        if std is not None:
            scaled = normalize_rewards(rewards * scale, mean=mean, std=std, groups=groups)
            # Up to the 1e-6 in the divisor, which weighs more the smaller the deviation is.
            deviation = min(float(part.std()) for part in (rewards, *rewards.split(4)))
            error = 1e-6 * (1 + 1 / scale) / deviation + 1e-9
            torch.testing.assert_close(scaled, base, rtol=2 * error, atol=1e-12)


def test_rp7_a_dropped_row_does_not_shift_groups_that_have_ids():
    out = normalize_rewards(
        torch.tensor([1.0, 4.0, 6.0]), mean="group", groups=group_index(3, ids=[7, 9, 9])
    )
    assert out.tolist() == [0, -1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rp9_a_reward_that_is_not_finite_names_its_row(bad):
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        normalize_rewards(torch.tensor([1.0, 2.0, bad, 4.0]), mean="batch")


def test_rp6_unknown_scopes_list_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown norm_mean_type 'foo'; known: None, batch, group, running"
    ):
        normalize_rewards(R, mean="foo")
    with pytest.raises(
        ValueError, match=r"unknown norm_std_type 'leave_one_out'; known: None, batch"
    ):
        normalize_rewards(R, std="leave_one_out")


def test_missing_groups_and_moments_are_errors():
    with pytest.raises(ValueError, match="group"):
        normalize_rewards(R, mean="group")
    with pytest.raises(ValueError, match="RunningMoments"):
        normalize_rewards(R, std="running")
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        normalize_rewards(R, mean="group", groups=torch.arange(3))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        normalize_rewards(R.view(2, 2), mean="batch")


def test_normalize_does_not_change_its_inputs():
    rewards, running = R.clone(), RunningMoments(3, 1.0, 2.0)
    normalize_rewards(rewards, mean="running", std="running", running=running)
    assert torch.equal(rewards, R) and running == RunningMoments(3, 1.0, 2.0)


# groups


def test_group_index():
    assert group_index(4, size=2).tolist() == [0, 0, 1, 1]
    for ids in (
        ["b", "a", "b"],
        np.array(["b", "a", "b"], dtype=object),
        torch.tensor([5, 3, 5]),
        [("x", 1), 2, ("x", 1)],
    ):
        assert group_index(3, ids=ids).tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", [0, -1, 3])
def test_rp6_group_sizes_that_do_not_fit(size):
    with pytest.raises(ValueError, match=f"group size {size} does not divide the 4 rows"):
        group_index(4, size=size)


def test_one_id_for_each_row():
    with pytest.raises(ValueError, match="2 group ids for 3 rows"):
        group_index(3, ids=["a", "b"])


def test_zero_std_group_frac():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 3.0])
    assert zero_std_group_frac(rewards, torch.tensor([0, 0, 1, 1, 2])) == pytest.approx(2 / 3)
    assert zero_std_group_frac(torch.zeros(0), torch.zeros(0).long()) == 0


# running moments


def test_running_moments_by_hand():
    running = RunningMoments()
    assert (running.mean, running.std, running.count) == (0, 1, 0)
    assert running.update(torch.tensor([1.0, 3.0])) == (2.0, pytest.approx(2**0.5))
    running.update(torch.tensor([5.0, 0.0, 1.0]))
    assert (running.count, running.mean, running.m2, running.std) == (5, 2.0, 16.0, 2.0)


def test_rp10_a_single_value_has_standard_deviation_one():
    running = RunningMoments()
    assert running.update(torch.tensor([3.0])) == (3.0, 1.0)
    assert (running.mean, running.std) == (3, 1)
    running.update(torch.zeros(0))
    assert running.count == 1


@given(parts=st.lists(st.lists(values, max_size=6), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_running_moments_do_not_depend_on_how_values_arrive(parts):
    running, merged = RunningMoments(), RunningMoments()
    for part in parts:
        tensor = torch.tensor(part, dtype=torch.float64)
        running.update(tensor)
        other = RunningMoments()
        other.update(tensor)
        merged.merge(other)
    everything = [v for part in parts for v in part]
    assert running.count == merged.count == len(everything)
    if everything:
        mean, std = reference.mean_std(everything)
        for moments in (running, merged):
            assert moments.mean == pytest.approx(mean, abs=1e-9)
            assert moments.std == pytest.approx(std if len(everything) > 1 else 1.0, abs=1e-6)


def test_running_moments_keep_their_digits():
    running = RunningMoments()
    for _ in range(100):
        running.update(torch.tensor([1e6, 1e6 + 1.0]))
    assert running.std == pytest.approx((100 * 0.5 / 199) ** 0.5, rel=1e-6)


def test_running_moments_survive_a_checkpoint():
    running, restored = RunningMoments(), RunningMoments()
    running.update(torch.tensor([0.1, 0.7, 0.2]))
    restored.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert restored == running


def test_running_moments_refuse_nan():
    running = RunningMoments(2, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        running.update(torch.tensor([1.0, math.nan]))
    assert running == RunningMoments(2, 1.0, 1.0)


# clipping


def test_clip_symmetric():
    clipped, frac = clip_symmetric(torch.tensor([-3.0, 0.5, 1.0, 2.0]), 1.0)
    assert clipped.tolist() == [-1, 0.5, 1, 1] and frac == 0.5
    _, frac = clip_symmetric(torch.tensor([-3.0, 0.5, math.nan]), 1.0, torch.tensor([1, 1, 0]))
    assert frac == 0.5
    same, frac = clip_symmetric(R, None)
    assert same is R and frac == 0


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_rp8_negative_clips_are_errors(bad):
    with pytest.raises(ValueError, match="reward_clip="):
        check_clip(bad, "reward_clip")
    check_clip(0.0, "reward_clip")
    check_clip(None, "reward_clip")


# placing


def test_tr1_the_reward_lands_on_the_last_response_token():
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    out = place_at_last_token(torch.tensor([5.0, 7.0, 9.0]), mask)
    assert out.tolist() == [[0, 0, 0, 5, 0], [7, 0, 0, 0, 0], [0, 0, 0, 0, 9]]


def test_tr2_an_empty_row_gets_nothing():
    assert not place_at_last_token(torch.tensor([5.0, 7.0]), torch.zeros(2, 3)).any()
    assert place_at_last_token(torch.tensor([5.0]), torch.zeros(1, 0)).shape == (1, 0)


def test_place_checks_the_number_of_rows():
    with pytest.raises(ValueError, match=r"\(2,\).*3 rows"):
        place_at_last_token(torch.ones(2), torch.ones(3, 2))


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_placing_keeps_the_sum(seed):
    mask = random_mask(seed)
    rewards = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
    out = place_at_last_token(rewards, mask)
    assert torch.equal(out.sum(1), rewards) and torch.equal(out, out * mask)


# masks of rows


def test_difficulty_mask_is_strict_and_keeps_groups_of_one():
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    assert difficulty_mask(scores, groups, 0.0, 1.0).tolist() == [False] * 4 + [True] * 3
    assert difficulty_mask(scores, groups, 0.5, 1.0).tolist() == [False] * 6 + [True]


def test_length_and_overlong_masks():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    assert max_length_mask(mask, 3).tolist() == [False, True, False, True]
    scores = torch.tensor([1.0, 0.0, 0.0, 0.5])
    assert overlong_mask(scores, mask, 3).tolist() == [True, True, False, False]


def test_row_mean_leaves_out_empty_rows():
    x = torch.tensor([[1.0, 3.0], [5.0, math.nan], [math.nan, math.nan]])
    assert row_mean(x, torch.tensor([[1, 1], [1, 0], [0, 0]])) == 3.5
    assert row_mean(x, torch.zeros(3, 2)) == 0
