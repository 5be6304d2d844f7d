"""Masked reductions: hand-computed values, empty masks, garbage under the mask, gradients."""

import float64_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, padded, poisoned, random_mask
from torch import Tensor

from roll.algorithms.masking import (
    check_finite,
    check_mask,
    clip_fraction,
    masked_mean,
    masked_normalize,
    masked_sum,
    masked_var,
    masked_whiten,
    response_level_masked_whiten,
    segment_masked_mean,
    select,
)

X = torch.tensor([[1.0, 3.0, 9.0, 5.0], [2.0, 4.0, 8.0, -1.0]])
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
EMPTY = torch.zeros_like(MASK)
KEEP = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 1]])

FUNCTIONS = {
    "select": lambda x, m: select(x, m),
    "masked_sum": lambda x, m: masked_sum(x, m),
    "masked_sum_rows": lambda x, m: masked_sum(x, m, dim=1),
    "masked_mean": lambda x, m: masked_mean(x, m),
    "masked_mean_rows": lambda x, m: masked_mean(x, m, dim=1),
    "masked_var": lambda x, m: masked_var(x, m),
    "masked_whiten": lambda x, m: masked_whiten(x, m),
    "masked_whiten_unshifted": lambda x, m: masked_whiten(x, m, shift_mean=False),
    "masked_normalize": lambda x, m: masked_normalize(x, m),
    "response_level_masked_whiten": lambda x, m: response_level_masked_whiten(x, m),
    "segment_masked_mean": lambda x, m: segment_masked_mean(x, m),
}


def with_grad(fn, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = fn(x, mask)
    # An uneven weight for every entry, so that a gradient in the wrong place shows.
    (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def test_sum_and_mean_by_hand():
    assert masked_sum(X, MASK) == 1 + 3 + 5 + 4 + 8
    assert masked_sum(X, MASK, dim=1).tolist() == [9, 12]
    assert masked_mean(X, MASK).item() == pytest.approx(21 / 5)
    assert masked_mean(X, MASK, dim=1).tolist() == [3, 6]
    assert masked_mean(X, MASK, dim=0).tolist() == [1, 3.5, 8, 5]


def test_var_by_hand():
    # values 1 3 5 4 8, mean 4.2, squared deviations 10.24 1.44 0.64 0.04 14.44
    assert masked_var(X, MASK).item() == pytest.approx(26.8 / 4)
    assert masked_var(X, MASK, unbiased=False).item() == pytest.approx(26.8 / 5)


def test_whiten_by_hand():
    std = (26.8 / 4 + 1e-8) ** 0.5
    expected = torch.tensor([[-3.2, -1.2, 0, 0.8], [0, -0.2, 3.8, 0]]) / std
    torch.testing.assert_close(masked_whiten(X, MASK), expected)
    unshifted = torch.where(MASK.bool(), expected + 4.2, 0.0)
    torch.testing.assert_close(masked_whiten(X, MASK, shift_mean=False), unshifted)


def test_whiten_adds_1e_8_to_the_variance():
    x = torch.tensor([[0.0, 1e-4]], dtype=torch.float64)
    expected = torch.tensor([[-5e-5, 5e-5]], dtype=torch.float64) / (5e-9 + 1e-8) ** 0.5
    torch.testing.assert_close(masked_whiten(x, torch.ones(1, 2)), expected, rtol=1e-9, atol=0)


def test_normalize_is_per_row():
    out = masked_normalize(X, MASK)
    std = (((1 - 3) ** 2 + 0 + (5 - 3) ** 2) / 3) ** 0.5
    torch.testing.assert_close(out, torch.tensor([[-2 / std, 0, 0, 2 / std], [0, -1, 1, 0]]))


def test_normalize_along_the_first_axis():
    out = masked_normalize(X, MASK, dim=0)
    torch.testing.assert_close(out, torch.tensor([[0.0, -1, 0, 0], [0, 1, 0, 0]]))


def test_ad13_response_level_whiten_takes_statistics_over_rows():
    # row means 3 and 6: mean 4.5, variance (ddof 1) 4.5; works for B == T too
    out = response_level_masked_whiten(X, MASK)
    torch.testing.assert_close(out, torch.where(MASK.bool(), (X - 4.5) / (4.5 + 1e-8) ** 0.5, 0.0))
    square = response_level_masked_whiten(X[:, :2], torch.ones(2, 2))
    torch.testing.assert_close(square, (X[:, :2] - 2.5) / (0.5 + 1e-8) ** 0.5)


def test_response_level_whiten_of_one_row_is_unchanged():
    mask = MASK.clone()
    mask[1] = 0
    assert response_level_masked_whiten(X, mask).tolist() == [[1, 3, 0, 5], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_mask_gives_zero(name):
    out, grad = (
        with_grad(FUNCTIONS[name], X, EMPTY)
        if name != "masked_var"
        else (masked_var(X, EMPTY), EMPTY)
    )
    assert torch.equal(out, torch.zeros_like(out)) and not grad.any()


def test_ad14_variance_of_fewer_than_two_entries_is_zero():
    one = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
    assert masked_var(X, one) == 0 and masked_var(X, EMPTY) == 0
    assert masked_whiten(X, one).tolist() == [[0, 3, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_garbage_under_the_mask_changes_no_bit(name, garbage):
    mask = random_mask(3, empty_row=True)
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    clean = with_grad(FUNCTIONS[name], poisoned(x, mask, 0.0), mask)
    dirty = with_grad(FUNCTIONS[name], poisoned(x, mask, garbage), mask)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("name", ["masked_whiten", "segment_masked_mean", "masked_var"])
@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 5),
    right=st.integers(0, 5),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=20, deadline=None)
def test_padding_changes_no_bit(name, seed, left, right, garbage):
    mask = random_mask(seed)
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    out = FUNCTIONS[name](x, mask)
    wide = FUNCTIONS[name](padded(x, left, right, garbage), padded(mask, left, right, 0))
    if out.ndim:
        wide = wide[:, left : left + x.shape[1]]
    assert torch.equal(out, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_results_are_at_least_float32(dtype):
    for fn in FUNCTIONS.values():
        assert fn(X.to(dtype), MASK).dtype == torch.float32
        assert fn(X.double(), MASK).dtype == torch.float64


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_whiten_matches_the_reference(seed):
    mask = random_mask(seed, empty_row=True)
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * 3 + 2
    expected = torch.tensor(reference.whiten(x.tolist(), mask.tolist()), dtype=torch.float64)
    torch.testing.assert_close(masked_whiten(x, mask).double(), expected, atol=1e-5, rtol=1e-5)
    # the order of the rows does not matter
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(masked_whiten(x[order], mask[order]), masked_whiten(x, mask)[order])


def test_segment_mean_by_hand():
    out = segment_masked_mean(X, MASK)
    assert out.tolist() == [[2, 2, 0, 5], [0, 6, 6, 0]]


def test_segment_mean_with_keep_does_not_split_runs():
    # The first run keeps the 1 only, the second row keeps nothing.
    out = segment_masked_mean(X, MASK, KEEP)
    assert out.tolist() == [[1, 1, 0, 5], [0, 0, 0, 0]]


def test_segment_mean_gradient_is_spread_over_the_kept_tokens():
    x = X.clone().requires_grad_()
    (
        segment_masked_mean(x, MASK, KEEP) * torch.tensor([[10.0, 20, 99, 7], [99, 1, 1, 99]])
    ).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[30, 0, 0, 7], [0, 0, 0, 0]]


def test_segment_mean_gradcheck():
    mask, keep = random_mask(5), random_mask(6)
    x = torch.randn(mask.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_masked_mean(x, mask, keep), (x,))


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), width=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_segment_mean_matches_the_reference(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 2, (rows, width), generator=generator)
    keep = torch.randint(0, 2, (rows, width), generator=generator)
    x = torch.randn(rows, width, generator=generator)
    for k in (mask, keep):
        expected = torch.tensor(reference.segment_mean(x.tolist(), mask.tolist(), k.tolist()))
        torch.testing.assert_close(segment_masked_mean(x, mask, None if k is mask else k), expected)


def test_segment_mean_is_exact_for_long_runs():
    x = torch.full((1, 200_000), 0.1)
    assert segment_masked_mean(x, torch.ones_like(x))[0, 0].item() == x[0, 0].item()


def test_bool_and_float_masks_are_the_same():
    for fn in FUNCTIONS.values():
        assert torch.equal(fn(X, MASK), fn(X, MASK.bool())) and torch.equal(
            fn(X, MASK), fn(X, MASK.float())
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_inputs(name):
    x, mask = torch.randn(6, 4), random_mask(1, rows=6, width=4)
    fn = FUNCTIONS[name]
    sliced = fn(
        torch.nn.functional.pad(x, (1, 0))[:, 1:],
        torch.nn.functional.pad(mask.bool(), (1, 0))[:, 1:],
    )
    assert torch.equal(sliced, fn(x, mask))
    transposed = fn(x.t().contiguous().t(), mask.bool().t().contiguous().t())
    torch.testing.assert_close(transposed, fn(x, mask))


def test_clip_fraction_counts_valid_entries_only():
    assert clip_fraction(X, 2, 4, MASK).item() == pytest.approx(3 / 5)  # 1, 5 and 8 of 1 3 5 4 8
    assert clip_fraction(X, 2, 4).item() == pytest.approx(5 / 8)
    assert clip_fraction(X, 2, 4, EMPTY) == 0
    assert clip_fraction(poisoned(X, MASK, float("nan")), 2, 4, MASK).item() == pytest.approx(3 / 5)


def test_shape_mismatch_names_both_shapes():
    with pytest.raises(
        ValueError,
        match=r"values has shape \(2, 4\) but its mask has shape \(2, 5\).*response_mask",
    ):
        check_mask(X, torch.ones(2, 5), "values")
    for fn in FUNCTIONS.values():
        with pytest.raises(ValueError, match="shape"):
            fn(X, torch.ones(2, 5))
    with pytest.raises(ValueError, match="keep has shape"):
        segment_masked_mean(X, MASK, torch.ones(2, 5))


def test_check_finite_names_rows():
    bad = X.clone()
    bad[1, 2] = float("nan")
    with pytest.raises(
        ValueError, match=r"values is not finite at 1 valid .* rows \[1\]: values\[1, 2\] is nan"
    ):
        check_finite(bad, MASK, "values")
    bad[1, 2], bad[0, 2] = 0.0, float("inf")
    check_finite(bad, MASK, "values")
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        check_finite(bad, name="values")
    with pytest.raises(ValueError, match=r"rows \[0, 1, 2, 3, 4, 5, 6, 7\] and 12 more"):
        check_finite(torch.full((20,), float("nan")))
