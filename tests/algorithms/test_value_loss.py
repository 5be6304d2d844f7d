import float64_losses as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, cuts, padded, poisoned, random_mask, window
from torch import Tensor

from roll.algorithms.aggregation import AGGREGATION_MODES, count_sequences, count_tokens
from roll.algorithms.value_loss import ValueLoss, value_loss

PARTS = ("loss", "error", "clip_fraction", "prediction", "old_prediction")


def columns(seed: int, mask: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("values_BT", "returns_BT", "old_values_BT")
    return {
        name: torch.where(mask.bool(), torch.randn(mask.shape, generator=generator), 0.0)
        for name in names
    }


def run(mask: Tensor, tensors: dict[str, Tensor], **options: object) -> tuple[ValueLoss, Tensor]:
    values = tensors["values_BT"].detach().clone().requires_grad_()
    result = value_loss(**{**tensors, "values_BT": values}, mask_BT=mask, **options)
    result.loss.backward()
    return result, values.grad


def test_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    tensors = {
        "values_BT": torch.tensor([[1.0, 2.0, 9.0], [0.0, 9.0, 9.0]]),
        "returns_BT": torch.tensor([[2.0, 4.0, 9.0], [1.0, 9.0, 9.0]]),
    }
    result, gradient = run(mask, tensors)
    assert result.loss.item() == pytest.approx(0.5 * ((1 + 4) / 2 + 1) / 2)
    assert result.error.item() == pytest.approx(((1 + 4) / 2 + 1) / 2)
    assert result.prediction.item() == pytest.approx((1.5 + 0) / 2)
    assert result.clip_fraction.item() == 0 and result.old_prediction is None
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, -0.5, 0.0], [-0.5, 0.0, 0.0]]))


def test_clipping_by_hand() -> None:
    # Predictions moved from 0 to 1 and to -1; the return is 2. With clip 0.5 the first is taken as
    # 0.5, the second as -0.5: the larger error counts, (0.5 - 2)^2 = 2.25 over 1 and (-1 - 2)^2 = 9
    # over 6.25.
    tensors = {"values_BT": torch.tensor([[1.0, -1.0]]), "returns_BT": torch.full((1, 2), 2.0)}
    result, gradient = run(
        torch.ones(1, 2), {**tensors, "old_values_BT": torch.zeros(1, 2)}, clip=0.5
    )
    assert result.loss.item() == pytest.approx(0.5 * (2.25 + 9) / 2)
    assert result.error.item() == pytest.approx((1 + 9) / 2)
    assert result.clip_fraction.item() == 0.5
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.5]]))


@given(seed=st.integers(0, 10_000), clip=st.sampled_from([None, 0.3]))
@settings(max_examples=30, deadline=None)
def test_matches_plain_loops(seed: int, clip: float | None) -> None:
    mask = random_mask(seed, empty_row=seed % 2 == 0)
    tensors = columns(seed, mask)
    result, _ = run(mask, tensors, clip=clip)
    expected = reference.value_loss(
        *(tensors[name].double().tolist() for name in ("values_BT", "returns_BT")),
        mask.tolist(),
        tensors["old_values_BT"].double().tolist(),
        clip,
    )
    for name, value in expected.items():
        assert getattr(result, name).item() == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_ad15_any_split_adds_up_whatever_its_size(mode: str, seed: int) -> None:
    mask = random_mask(seed, rows=6)
    tensors = columns(seed, mask)
    counts = {
        "num_tokens": count_tokens(mask),
        "num_sequences": count_sequences(mask),
        "norm_factor": mask.shape[1],
    }
    whole, whole_gradient = run(mask, tensors, clip=0.3, agg_mode=mode, **counts)
    gradient, parts = torch.zeros(mask.shape), []
    for rows in cuts(len(mask), seed):
        used = window(mask[rows])
        piece = {name: value[rows][:, used] for name, value in tensors.items()}
        result, piece_gradient = run(mask[rows][:, used], piece, clip=0.3, agg_mode=mode, **counts)
        parts.append(result)
        for row, values in zip(rows, piece_gradient, strict=True):
            gradient[row, used] = values
    for name in PARTS:
        torch.testing.assert_close(
            sum(getattr(part, name) for part in parts), getattr(whole, name), rtol=1e-5, atol=1e-6
        )
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(garbage: float) -> None:
    mask = random_mask(4, empty_row=True)
    tensors = columns(4, mask)
    clean, clean_gradient = run(mask, tensors, clip=0.3)
    dirty, gradient = run(
        mask, {name: poisoned(value, mask, garbage) for name, value in tensors.items()}, clip=0.3
    )
    assert all(torch.equal(getattr(clean, name), getattr(dirty, name)) for name in PARTS)
    assert torch.equal(clean_gradient, gradient)
    wide = {name: padded(value, 2, 3, garbage) for name, value in tensors.items()}
    wide_result, wide_gradient = run(padded(mask, 2, 3, garbage), wide, clip=0.3)
    torch.testing.assert_close(wide_result.loss, clean.loss)
    torch.testing.assert_close(wide_gradient, padded(clean_gradient, 2, 3, 0.0))


def test_ad15_without_a_clip_the_clip_fraction_is_zero_and_not_the_error() -> None:
    mask = random_mask(1)
    assert run(mask, columns(1, mask))[0].clip_fraction.item() == 0


def test_an_all_masked_batch_is_a_connected_zero() -> None:
    nan = torch.full((2, 3), float("nan"))
    result, gradient = run(
        torch.zeros(2, 3),
        dict.fromkeys(("values_BT", "returns_BT", "old_values_BT"), nan),
        clip=0.2,
    )
    assert result.loss.item() == 0 and torch.equal(gradient, torch.zeros(2, 3))


def test_errors_name_what_is_wrong() -> None:
    mask = torch.ones(2, 3)
    tensors = columns(0, mask)
    with pytest.raises(ValueError, match=r"the value clip must not be negative, got -0\.2"):
        value_loss(**tensors, mask_BT=mask, clip=-0.2)
    with pytest.raises(ValueError, match="needs the old values"):
        value_loss(**{**tensors, "old_values_BT": None}, mask_BT=mask, clip=0.2)
    with pytest.raises(ValueError, match=r"returns has shape \(2, 4\)"):
        value_loss(**{**tensors, "returns_BT": torch.zeros(2, 4)}, mask_BT=mask)
