"""The Triton kernels over rows of logits, in Triton's interpreter (`test_in_interpreter` sets it
up)."""

import math
import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs inside test_in_interpreter", allow_module_level=True)

from kernel_checks import (
    TRANSFORMS,
    assert_near,
    check_rows,
    exact,
    kernel_statistics,
    poisoned,
    random_gradients,
    random_logits,
)
from log_probs_reference import relative_error

from roll.ops import log_probs, softmax_rows, triton_rows
from roll.ops.linear_log_probs import linear_log_probs
from roll.ops.softmax_rows import LogitTransform, RowGradients

SHAPES = [(1, 1), (3, 7), (2, 1024), (1, 1031), (2, 2049), (3, 4500)]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_passes(shape: tuple[int, int], transform: LogitTransform) -> None:
    check_rows(
        random_logits(*shape, dtype=torch.float32, device="cpu", seed=shape[1]),
        transform,
        seed=shape[1],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_of_the_vocabulary(dtype: torch.dtype) -> None:
    raw = random_logits(3, 2600, dtype=dtype, device="cpu", seed=1)
    check_rows(raw, TRANSFORMS[2], seed=2, cuts=(1, 1100, 2300), in_place=True)


@pytest.mark.parametrize("kind", ["transposed", "every second column", "rows of a wider tensor"])
def test_strides(kind: str) -> None:
    if kind == "transposed":
        raw = random_logits(1500, 3, dtype=torch.bfloat16, device="cpu", seed=3).t()
    elif kind == "every second column":
        raw = random_logits(3, 3000, dtype=torch.bfloat16, device="cpu", seed=4)[:, ::2]
    else:
        raw = random_logits(3, 1507, dtype=torch.bfloat16, device="cpu", seed=5)[:, 3:1500]
    check_rows(raw, LogitTransform(), seed=6)


def test_no_rows() -> None:
    raw = torch.empty(0, 5)
    found = kernel_statistics(raw, torch.empty(0, dtype=torch.long), LogitTransform())
    assert [tuple(result.shape) for result in found if result is not None] == [(0,)] * 3
    triton_rows.gradient(
        raw, raw, RowGradients(found, None, None, torch.empty(0)), 0, LogitTransform()
    )


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_results(which: int) -> None:
    raw = random_logits(2, 1100, dtype=torch.float32, device="cpu", seed=7)
    labels = torch.tensor([0, 1099]) if which == 0 else None
    grads = [None, None]
    grads[which] = random_gradients(2, "cpu", seed=8)[which]
    expected, expected_grad = exact(raw, labels, LogitTransform(), (grads[0], grads[1]))
    found = kernel_statistics(raw, labels, LogitTransform(), with_entropy=which == 1)
    assert (found.log_probs is None) == (which == 1) and (found.entropy is None) == (which == 0)
    out = poisoned(2, 1100, like=raw)
    triton_rows.gradient(raw, out, RowGradients(found, labels, *grads), 0, LogitTransform())
    assert_near(out, expected_grad, torch.float32, "gradient")
    assert expected[which + 1] is not None


def test_rows_elsewhere_and_rows_of_zeros() -> None:
    raw = random_logits(6, 1030, dtype=torch.float32, device="cpu", seed=9)
    numbers = torch.tensor([5, 0, 3])
    labels, grads = torch.tensor([4, 1029, 0]), random_gradients(3, "cpu", seed=10)
    expected_grad = exact(raw[numbers], labels, LogitTransform(), grads)[1]
    found = kernel_statistics(raw, labels, LogitTransform(), row_numbers=numbers)
    out = poisoned(6, 1030, like=raw)
    slots = torch.tensor([1, -1, -1, 2, -1, 0], dtype=torch.int32)
    triton_rows.gradient(raw, out, RowGradients(found, labels, *grads), 0, LogitTransform(), slots)
    assert_near(out[numbers], expected_grad, torch.float32, "gradient")
    assert (out[[1, 2, 4]] == 0).all()


def test_impossible_tokens_and_broken_models() -> None:
    raw = torch.zeros(5, 3)
    raw[0, 1] = raw[1] = -math.inf
    raw[2, 2], raw[3, 0] = math.nan, math.inf
    raw[4] = torch.tensor([3e38, -3e38, 0.0])
    found = kernel_statistics(raw, torch.tensor([1, 2, 0, 1, 0]), LogitTransform())
    assert found.log_probs is not None and found.entropy is not None
    assert (
        found.log_probs[:2].tolist() == [-math.inf, -math.inf]
        and found.log_probs[2:4].isnan().all()
    )
    torch.testing.assert_close(found.entropy[:2], torch.tensor([math.log(2.0), 0.0]))
    assert found.entropy[2:4].isnan().all()
    assert found.log_probs[4] == 0 and found.entropy[4] == 0
    out = poisoned(2, 3, like=raw)
    rows = RowGradients(
        found.rows(slice(0, 2)), torch.tensor([1, 2]), torch.ones(2), torch.full((2,), 5.0)
    )
    triton_rows.gradient(raw[:2], out, rows, 0, LogitTransform())
    torch.testing.assert_close(out, torch.tensor([[-0.5, 1.0, -0.5], [0.0, 0.0, 1.0]]))


def test_a_sure_token_keeps_its_digits() -> None:
    for logit in (0.5, 1.5, 4.0, 9.0):
        raw = torch.tensor([[logit, 0.0]])
        found = kernel_statistics(raw, torch.tensor([0]), LogitTransform(), with_entropy=False)
        out = poisoned(1, 2, like=raw)
        triton_rows.gradient(
            raw,
            out,
            RowGradients(found, torch.tensor([0]), torch.ones(1), None),
            0,
            LogitTransform(),
        )
        missing = 1.0 / (1.0 + math.exp(logit))
        torch.testing.assert_close(out, torch.tensor([[missing, -missing]]), rtol=1e-3, atol=0)


# The operators on the kernels, against themselves on torch.


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in (softmax_rows, log_probs, sys.modules["roll.ops.linear_log_probs"]):
        monkeypatch.setattr(
            module, "kernels_for", lambda raw: triton_rows if request.param else None
        )
    monkeypatch.setattr(softmax_rows, "CPU_LIMITS", softmax_rows.PieceLimits(6000, 1 << 20, 64, 64))
    return request.param


def linear_case(dtype: torch.dtype, **options: Any) -> None:
    random = torch.Generator().manual_seed(11)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)  # noqa: E731
    parts = [draw(7, 16), draw(1301, 16), draw(1301)]
    labels, mask = (
        torch.randint(0, 1290, (7,), generator=random),
        torch.tensor([1, 1, 0, 1, 1, 1, 1]),
    )
    grads = torch.randn(2, 7, generator=random)
    results = []
    for precise in (False, True):
        leaves = [(part.double() if precise else part).detach().requires_grad_() for part in parts]
        log_probs, entropy = linear_log_probs(
            leaves[0], leaves[1], labels, bias=leaves[2], mask=mask, with_entropy=True, **options
        )
        assert entropy is not None
        torch.autograd.backward([log_probs, entropy], [grad.to(log_probs.dtype) for grad in grads])
        results.append([log_probs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)])
        softmax_rows.kernels_for = lambda raw: (
            None
        )  # float64 has no kernels; monkeypatch puts the old one back
    for found, expected in zip(*results, strict=True):
        assert found is not None and expected is not None
        assert relative_error(found, expected) < {torch.float32: 3e-6, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5, "soft_cap": 3.0, "temperature": 0.7, "vocab_size": 1299},
        {"keep_bytes": 1 << 30},
    ],
    ids=str,
)
def test_linear_log_probs(both_ways: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    linear_case(dtype, **options)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_logits_that_exist(both_ways: bool, with_mask: bool, overwrite: bool) -> None:
    whole = random_logits(3, 4, 1301, dtype=torch.float32, device="cpu", seed=12).requires_grad_()
    labels = torch.randint(0, 1301, (3, 3), generator=torch.Generator().manual_seed(13))
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]) if with_mask else None
    found, found_entropy = log_probs.log_probs_and_entropy(
        (whole * 1.0)[:, :-1], labels, mask=mask, overwrite_logits=overwrite
    )
    assert found_entropy is not None
    (
        2.0 * found + 0.3 * found_entropy
    ).sum().backward()  # a sum's gradient arrives expanded, with stride 0
    exact_logits = whole.detach().double().requires_grad_()
    table = torch.log_softmax(exact_logits[:, :-1], -1)
    chosen = torch.ones(3, 3) if mask is None else mask
    expected = table.gather(-1, labels[..., None])[..., 0] * chosen
    expected_entropy = -(table.exp() * table).sum(-1) * chosen
    (2.0 * expected + 0.3 * expected_entropy).sum().backward()
    assert relative_error(found.detach(), expected.detach()) < 1e-6
    assert relative_error(found_entropy.detach(), expected_entropy.detach()) < 1e-6
    assert whole.grad is not None and exact_logits.grad is not None
    assert relative_error(whole.grad, exact_logits.grad) < 1e-6


def test_a_label_outside_the_vocabulary_is_found(both_ways: bool) -> None:
    with pytest.raises(IndexError, match=r"labels\[1\] = 9 is not in the vocabulary of 5 tokens"):
        log_probs.log_probs_from_logits(torch.zeros(2, 5), torch.tensor([0, 9]))
