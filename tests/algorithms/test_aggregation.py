import float64_losses as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, cuts, padded, poisoned, random_mask, window

from roll.algorithms.aggregation import (
    AGGREGATION_MODES,
    aggregate_loss,
    count_sequences,
    count_tokens,
    mean_one_sample_weights,
)

LOSS = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "local", "global_counts"),
    [
        ("token-mean", 6 / 3, 6 / 12),
        ("seq-mean-token-sum", 6 / 2, 6 / 4),
        ("seq-mean-token-mean", 4.5 / 2, 4.5 / 4),
        ("seq-mean-token-sum-norm", 6 / 3, 6 / 10),
    ],
)
def test_hand_computed(mode: str, local: float, global_counts: float) -> None:
    assert aggregate_loss(LOSS, MASK, mode).item() == pytest.approx(local)
    counts = {"num_tokens": 12, "num_sequences": torch.tensor(4), "norm_factor": 10.0}
    assert aggregate_loss(LOSS, MASK, mode, **counts).item() == pytest.approx(global_counts)


def test_weights_multiply_rows() -> None:
    weights = torch.tensor([2.0, 0.5, float("nan")])  # the weight of an empty row does not exist
    assert aggregate_loss(LOSS, MASK, "token-mean", weights_B=weights).item() == pytest.approx(
        (2 * 3 + 0.5 * 3) / 3
    )
    assert aggregate_loss(
        LOSS, MASK, "seq-mean-token-mean", weights_B=weights
    ).item() == pytest.approx(4.5 / 2)


def test_half_precision_is_summed_in_float32() -> None:
    loss = torch.full((1, 4096), 1.001, dtype=torch.bfloat16)
    result = aggregate_loss(loss, torch.ones(1, 4096), "seq-mean-token-sum")
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(4096 * loss[0, 0].item())
    assert aggregate_loss(LOSS.double(), MASK, "token-mean").dtype == torch.float64


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000), empty_row=st.booleans())
@settings(max_examples=25, deadline=None)
def test_matches_plain_loops(mode: str, seed: int, empty_row: bool) -> None:
    mask = random_mask(seed, empty_row=empty_row)
    loss, weights = torch.randn(mask.shape), torch.rand(len(mask))
    expected = reference.aggregate(
        {c: loss.tolist()[c[0]][c[1]] for c in reference.cells(mask.tolist())},
        mask.tolist(),
        mode,
        num_tokens=11,
        num_sequences=5,
        weights=weights.tolist(),
        norm_factor=7,
    )
    actual = aggregate_loss(
        loss, mask, mode, num_tokens=11, num_sequences=5, weights_B=weights, norm_factor=7
    )
    assert actual.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_any_split_adds_up_to_the_whole(mode: str, seed: int) -> None:
    mask = random_mask(seed, rows=6, empty_row=True)
    loss = torch.randn(mask.shape)
    counts = {
        "num_tokens": count_tokens(mask),
        "num_sequences": count_sequences(mask),
        "norm_factor": mask.shape[1],
    }
    whole = aggregate_loss(loss, mask, mode)
    parts = [
        aggregate_loss(
            loss[rows][:, window(mask[rows])], mask[rows][:, window(mask[rows])], mode, **counts
        )
        for rows in cuts(len(mask), seed)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_entries_do_not_exist(mode: str, garbage: float) -> None:
    mask = random_mask(3, empty_row=True)
    clean = torch.randn(mask.shape).requires_grad_()
    dirty = poisoned(clean.detach(), mask, garbage).requires_grad_()
    for loss in (clean, dirty):
        aggregate_loss(loss, mask, mode).backward()
    assert torch.equal(aggregate_loss(clean, mask, mode), aggregate_loss(dirty, mask, mode))
    assert torch.equal(clean.grad, dirty.grad)
    wide = aggregate_loss(
        padded(clean, 3, 2, garbage), padded(mask, 3, 2, garbage), mode, norm_factor=9
    )
    torch.testing.assert_close(wide, aggregate_loss(clean, mask, mode, norm_factor=9))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_an_empty_mask_gives_a_connected_zero(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    result = aggregate_loss(
        loss, torch.zeros(2, 3), mode, num_tokens=0, num_sequences=torch.tensor(0)
    )
    result.backward()
    assert result.item() == 0
    assert torch.equal(loss.grad, torch.zeros(2, 3))
    assert aggregate_loss(torch.zeros(0, 3), torch.zeros(0, 3), mode).item() == 0


def test_l1_token_mean_applies_the_mask() -> None:
    loss, mask = torch.tensor([[1.0, 100.0]]), torch.tensor([[1, 0]])
    assert aggregate_loss(loss, mask, "token-mean").item() == 1.0


def test_l9_sum_norm_with_a_factor_survives_trimming() -> None:
    loss, mask = torch.tensor([[0.5, 0.9, 9.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0, 0, 0]])
    whole = aggregate_loss(loss, mask, "seq-mean-token-sum-norm", norm_factor=5)
    trimmed = aggregate_loss(loss[:, :3], mask[:, :3], "seq-mean-token-sum-norm", norm_factor=5)
    assert whole.item() == trimmed.item() == pytest.approx(1.4 / 5)


def test_l10_empty_rows_are_not_sequences() -> None:
    assert count_sequences(MASK).item() == 2
    assert count_tokens(MASK).item() == 3
    assert count_sequences(torch.zeros(2, 2)).item() == count_tokens(torch.zeros(2, 2)).item() == 1


def test_l17_zero_counts_are_taken_as_one() -> None:
    assert aggregate_loss(LOSS, MASK, "token-mean", num_tokens=0).item() == 6
    assert (
        aggregate_loss(LOSS, MASK, "seq-mean-token-sum", num_sequences=torch.tensor(0.0)).item()
        == 6
    )


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"unknown aggregation mode 'mean'; known: token-mean"):
        aggregate_loss(LOSS, MASK, "mean")
    with pytest.raises(
        ValueError, match=r"loss has shape \(3, 3\) but its mask has shape \(3, 4\)"
    ):
        aggregate_loss(LOSS, torch.ones(3, 4), "token-mean")
    with pytest.raises(ValueError, match=r"one entry per row, \(3,\), got \(2,\)"):
        aggregate_loss(LOSS, MASK, "token-mean", weights_B=torch.ones(2))
    with pytest.raises(ValueError, match="norm_factor must be positive, got 0"):
        aggregate_loss(LOSS, MASK, "seq-mean-token-sum-norm", norm_factor=0)


def test_sample_weights_by_hand() -> None:
    valid = torch.tensor([True, True, True, False])
    difficulty = torch.tensor([0.0, 1.0, 5.0, float("nan")])  # clamped to [0, 1]
    lengths = torch.tensor([10, 20, 30, 999])
    # difficulty: 0.5, 2, 2; length: 1.5, 1, 0.5; product 0.75, 2, 1 with mean 1.25
    weights = mean_one_sample_weights(valid_B=valid, difficulty_B=difficulty, lengths_B=lengths)
    torch.testing.assert_close(weights, torch.tensor([0.6, 1.6, 0.8, 0.0]))
    same = mean_one_sample_weights(valid_B=valid, lengths_B=torch.tensor([7, 7, 7, 0]))
    torch.testing.assert_close(same, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    nothing = mean_one_sample_weights(
        valid_B=torch.zeros(2, dtype=torch.bool), lengths_B=torch.tensor([1, 2])
    )
    assert nothing.tolist() == [0.0, 0.0]
