import math

import float64_losses as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, cuts, padded, poisoned, policy_columns, random_mask, window

from roll.algorithms.aggregation import count_sequences
from roll.algorithms.off_policy import (
    LEVELS,
    RangeFilter,
    TrainInferGap,
    apply_filters,
    gap_statistics,
    importance_weight,
    train_infer_gap,
)

# Log-ratios 0.2, 0.4 | 0.9 in two segments; probabilities e^-1 and so on.
OLD = torch.tensor([[-1.0, -1.0, 5.0, -0.1]])
INFER = torch.tensor([[-1.2, -1.4, -5.0, -1.0]])
MASK = torch.tensor([[1, 1, 0, 1]])


def gap_of(seed: int, mask: torch.Tensor) -> TrainInferGap:
    columns = policy_columns(seed, mask)
    return train_infer_gap(
        old_log_probs_BT=columns["old_log_probs_BT"],
        infer_log_probs_BT=columns["ref_log_probs_BT"],
        mask_BT=mask,
    )


def test_ratios_by_hand() -> None:
    gap = train_infer_gap(old_log_probs_BT=OLD, infer_log_probs_BT=INFER, mask_BT=MASK)
    log_ratio = {
        "token": [0.2, 0.4, 0.9],
        "segment": [0.3, 0.3, 0.9],
        "geometric": [0.5, 0.5, 0.5],
        "sequence": [1.5, 1.5, 1.5],
    }
    for level, values in log_ratio.items():
        torch.testing.assert_close(gap.ratio[level][MASK.bool()], torch.tensor(values).exp())
        assert gap.ratio[level][0, 2] == 0 and gap.diff[level][0, 2] == 0
    d = [
        math.exp(-1) - math.exp(-1.2),
        math.exp(-1) - math.exp(-1.4),
        math.exp(-0.1) - math.exp(-1),
    ]
    torch.testing.assert_close(gap.diff["token"][MASK.bool()], torch.tensor(d))
    torch.testing.assert_close(gap.diff["segment"][0, 0], torch.tensor((d[0] + d[1]) / 2))
    torch.testing.assert_close(gap.diff["geometric"][0, 0], torch.tensor(sum(d) / 3))
    torch.testing.assert_close(gap.diff["sequence"][0, 0], torch.tensor(sum(d)))


@given(seed=st.integers(0, 10_000), empty_row=st.booleans())
@settings(max_examples=30, deadline=None)
def test_matches_plain_loops(seed: int, empty_row: bool) -> None:
    mask = random_mask(seed, empty_row=empty_row)
    columns = policy_columns(seed, mask)
    old, infer = columns["old_log_probs_BT"], columns["ref_log_probs_BT"]
    gap = train_infer_gap(old_log_probs_BT=old, infer_log_probs_BT=infer, mask_BT=mask)
    expected = reference.train_infer_gap(
        old.double().tolist(), infer.double().tolist(), mask.tolist()
    )
    for level in LEVELS:
        torch.testing.assert_close(
            gap.ratio[level], torch.tensor(expected["ratio"][level]), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            gap.diff[level], torch.tensor(expected["diff"][level]), rtol=1e-5, atol=1e-6
        )


def test_weights_are_bounded_from_above_only_and_one_where_masked() -> None:
    gap = train_infer_gap(
        old_log_probs_BT=-OLD.abs(), infer_log_probs_BT=-INFER.abs(), mask_BT=MASK
    )
    weight, clipped = importance_weight(gap, level="token", upper_bound=1.3)
    torch.testing.assert_close(weight, torch.tensor([[math.exp(0.2), 1.3, 1.0, 1.3]]))
    assert clipped.tolist() == [[False, True, False, True]]
    weight, clipped = importance_weight(gap, level="sequence", upper_bound=None)
    torch.testing.assert_close(
        weight, torch.tensor([[math.exp(1.5), math.exp(1.5), 1.0, math.exp(1.5)]])
    )
    assert not clipped.any()
    small = train_infer_gap(
        old_log_probs_BT=torch.tensor([[-3.0]]),
        infer_log_probs_BT=torch.zeros(1, 1),
        mask_BT=torch.ones(1, 1),
    )
    assert importance_weight(small, level="token", upper_bound=1.2)[0].item() == pytest.approx(
        math.exp(-3)
    )


def test_filters_are_inclusive_and_all_must_pass() -> None:
    ratio, diff = (
        torch.tensor([[0.5, 0.8, 1.2, 1.3, 1.0]]),
        torch.tensor([[0.0, 0.1, -0.2, 0.0, 0.3]]),
    )
    mask = torch.tensor([[True, True, True, True, False]])
    gap = TrainInferGap(
        ratio=dict.fromkeys(LEVELS, ratio), diff=dict.fromkeys(LEVELS, diff), mask_BT=mask
    )
    only_ratio = RangeFilter(level="token", ratio_range=(0.8, 1.2))
    keep, passed = apply_filters(gap, [only_ratio])
    assert keep.tolist() == [[False, True, True, False, True]]
    keep, passed = apply_filters(
        gap, [only_ratio, RangeFilter(level="segment", diff_range=(-0.1, 0.1))]
    )
    assert keep.tolist() == [[False, True, False, False, True]]
    assert set(passed) == {"token_ratio", "segment_diff"}
    # Two filters of one level: their common range.
    keep, passed = apply_filters(
        gap, [only_ratio, RangeFilter(level="token", ratio_range=(1.0, 2.0))]
    )
    assert passed["token_ratio"].tolist() == keep.tolist() == [[False, False, True, False, True]]
    keep, passed = apply_filters(gap, [])
    assert keep.all() and passed == {}


def test_statistics_by_hand() -> None:
    gap = train_infer_gap(old_log_probs_BT=OLD, infer_log_probs_BT=INFER, mask_BT=MASK)
    statistics = gap_statistics(gap, num_sequences=2)
    assert set(statistics) == {
        f"{kind}_{level}_mean" for kind in ("ratio", "diff") for level in LEVELS
    }
    token = (math.exp(0.2) + math.exp(0.4) + math.exp(0.9)) / 3
    assert statistics["ratio_token_mean"].item() == pytest.approx(token / 2)
    assert statistics["ratio_sequence_mean"].item() == pytest.approx(math.exp(1.5) / 2)
    assert gap_statistics(gap)["ratio_geometric_mean"].item() == pytest.approx(math.exp(0.5))


@given(seed=st.integers(0, 10_000), garbage=st.sampled_from(GARBAGE))
@settings(max_examples=20, deadline=None)
def test_splits_and_padding(seed: int, garbage: float) -> None:
    mask = random_mask(seed, rows=5, empty_row=True)
    columns = policy_columns(seed, mask)
    old, infer = columns["old_log_probs_BT"], columns["ref_log_probs_BT"]
    num_sequences = count_sequences(mask)
    whole = gap_statistics(gap_of(seed, mask))
    parts = []
    for rows in cuts(len(mask), seed):
        used = window(mask[rows])
        piece = [padded(x[rows][:, used], 1, 2, garbage) for x in (old, infer, mask)]
        gap = train_infer_gap(
            old_log_probs_BT=piece[0], infer_log_probs_BT=piece[1], mask_BT=piece[2]
        )
        parts.append(gap_statistics(gap, num_sequences=num_sequences))
    for key, value in whole.items():
        torch.testing.assert_close(
            sum(part[key] for part in parts), value, rtol=1e-5, atol=1e-6, msg=key
        )


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(garbage: float) -> None:
    mask = random_mask(11, empty_row=True)
    columns = policy_columns(11, mask)
    clean = gap_of(11, mask)
    dirty = train_infer_gap(
        old_log_probs_BT=poisoned(columns["old_log_probs_BT"], mask, garbage),
        infer_log_probs_BT=poisoned(columns["ref_log_probs_BT"], mask, garbage),
        mask_BT=mask,
    )
    for level in LEVELS:
        assert torch.equal(clean.ratio[level], dirty.ratio[level]) and torch.equal(
            clean.diff[level], dirty.diff[level]
        )
        weights = [
            importance_weight(gap, level=level, upper_bound=1.1)[0] for gap in (clean, dirty)
        ]
        assert torch.equal(*weights)
        filters = [RangeFilter(level=level, ratio_range=(0.9, 1.1), diff_range=(-0.1, 0.1))]
        assert torch.equal(apply_filters(clean, filters)[0], apply_filters(dirty, filters)[0])


def test_l5_ratios_saturate_instead_of_overflowing() -> None:
    old, infer = torch.zeros(1, 3), torch.full((1, 3), -60.0)
    gap = train_infer_gap(old_log_probs_BT=old, infer_log_probs_BT=infer, mask_BT=torch.ones(1, 3))
    weight, _ = importance_weight(gap, level="sequence", upper_bound=None)
    torch.testing.assert_close(weight, torch.full((1, 3), math.exp(20)))
    impossible = train_infer_gap(
        old_log_probs_BT=old,
        infer_log_probs_BT=torch.full((1, 3), -math.inf),
        mask_BT=torch.ones(1, 3),
    )
    assert all(value.isfinite() for value in gap_statistics(impossible).values())


def test_an_all_masked_batch_has_statistics_zero_and_weights_one() -> None:
    nan = torch.full((2, 3), math.nan)
    gap = train_infer_gap(old_log_probs_BT=nan, infer_log_probs_BT=nan, mask_BT=torch.zeros(2, 3))
    assert all(value == 0 for value in gap_statistics(gap).values())
    assert torch.equal(
        importance_weight(gap, level="segment", upper_bound=1.2)[0], torch.ones(2, 3)
    )


def test_errors_name_what_is_wrong() -> None:
    gap = gap_of(0, random_mask(0))
    with pytest.raises(
        ValueError, match="unknown importance weight level 'turn'; known: token, segment"
    ):
        importance_weight(gap, level="turn", upper_bound=None)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        importance_weight(gap, level="token", upper_bound=0)
    with pytest.raises(ValueError, match="unknown filter level 'tokens'"):
        RangeFilter(level="tokens")
    with pytest.raises(
        ValueError, match=r"the ratio range of a filter must satisfy low <= high, got \(1.2, 0.8\)"
    ):
        RangeFilter(ratio_range=(1.2, 0.8))
    with pytest.raises(ValueError, match=r"infer_logprobs has shape \(1, 5\)"):
        train_infer_gap(old_log_probs_BT=OLD, infer_log_probs_BT=torch.zeros(1, 5), mask_BT=MASK)
