import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from log_probs_reference import TensorWatch, reference, relative_error
from torch import Tensor

from roll.ops import log_probs as log_probs_module
from roll.ops import softmax_rows
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import (
    entropy_from_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
    next_token_log_probs,
)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def both_from_logits(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> list[Tensor]:
    """log_probs, entropy, and the gradient of each, with 1, 2, 3 ... coming in."""
    results = []
    for entropy in (False, True):
        leaf = logits.detach().requires_grad_()
        if entropy:
            result = entropy_from_logits(leaf, mask=mask, temperature=temperature)
        else:
            result = log_probs_from_logits(leaf, labels, mask=mask, temperature=temperature)
        result.backward(
            torch.arange(1.0, 1.0 + result.numel(), dtype=result.dtype).view(result.shape)
        )
        results += [result.detach(), leaf.grad]
    return results


def both_plainly(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> list[Tensor]:
    results = []
    for which in (0, 1):
        leaf = logits.detach().double().requires_grad_()
        result = reference(leaf, labels, mask, temperature)[which]
        assert result is not None
        result.backward(
            torch.arange(1.0, 1.0 + result.numel(), dtype=result.dtype).view(result.shape)
        )
        results += [result.detach(), leaf.grad]
    return results


def test_numbers_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    torch.testing.assert_close(
        log_probs_from_logits(logits, torch.tensor([1, 0])),
        torch.tensor([math.log(0.75), math.log(0.5)]),
    )
    expected = [-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2.0)]
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor(expected))
    # Temperature 0.5 doubles the logits: odds of 9 to 1.
    found = log_probs_from_logits(
        logits, torch.tensor([1, 0]), mask=torch.tensor([1, 0]), temperature=0.5
    )
    torch.testing.assert_close(found, torch.tensor([math.log(0.9), 0.0]))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "grad_tolerance"),
    [
        (torch.float64, 1e-13, 1e-13),
        (torch.float32, 1e-6, 3e-6),
        (torch.bfloat16, 1e-6, 4e-3),  # the gradient is rounded once, to the dtype of the logits
        (torch.float16, 1e-6, 5e-4),
    ],
)
def test_results_and_gradients_equal_the_plain_way(
    dtype: torch.dtype, tolerance: float, grad_tolerance: float, masked: bool, temperature: float
) -> None:
    logits, labels = random(4, 5, 33, dtype=dtype), torch.randint(0, 33, (4, 5))
    mask = random(4, 5) > 0 if masked else None
    found = both_from_logits(logits, labels, mask, temperature)
    expected = both_plainly(logits, labels, mask, temperature)
    for ours, plain, limit in zip(found, expected, [tolerance, grad_tolerance] * 2, strict=True):
        assert relative_error(ours, plain) < limit
    assert (
        found[0].dtype
        == found[2].dtype
        == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    assert found[1].dtype == found[3].dtype == dtype


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    vocab=st.integers(1, 30),
    step=st.integers(1, 2),
    cut=st.integers(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_stride(shape: list[int], vocab: int, step: int, cut: int, seed: int) -> None:
    """Cut off the end of every axis, the vocabulary too, and take every second entry of the last
    leading one."""
    whole = random(*(size * step + cut for size in shape), vocab + cut, seed=seed)
    index = (*(slice(0, size * step, step) for size in shape), slice(0, vocab))
    logits = whole[index]
    labels = torch.randint(
        0, vocab, logits.shape[:-1], generator=torch.Generator().manual_seed(seed)
    )
    mask = random(*labels.shape, seed=seed + 1) > 0
    for found, expected in zip(
        both_from_logits(logits, labels, mask), both_plainly(logits, labels, mask), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "logits",
    [
        random(3, 4, 6).transpose(0, 1),
        random(6, 3, 4).permute(1, 2, 0),
        random(4, 6).expand(3, 4, 6),
        random(1, 1, 6).expand(3, 4, 6),
        random(3, 5 * 6 + 1)[:, : 4 * 6].unflatten(1, (4, 6)),
    ],
    ids=["transposed", "vocabulary first", "expanded", "one row", "rows that do not line up"],
)
def test_strides_that_a_model_may_return(logits: Tensor) -> None:
    labels = torch.randint(0, 6, logits.shape[:-1])
    for found, expected in zip(
        both_from_logits(logits, labels), both_plainly(logits, labels), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_gradcheck() -> None:
    logits, labels, mask = (
        random(2, 3, 4).requires_grad_(),
        torch.tensor([[0, 3, 1], [2, 2, 0]]),
        torch.eye(2, 3),
    )
    assert torch.autograd.gradcheck(
        lambda x: (
            log_probs_from_logits(x[:, :-1], labels[:, 1:], mask=mask[:, 1:], temperature=0.7),
            entropy_from_logits(x[..., :3], mask=mask, temperature=1.4),
            *next_token_log_probs(x, labels, mask, with_entropy=True),
        ),
        (logits,),
    )


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, mask = (
        random(50, 64, dtype=torch.float32),
        torch.randint(0, 64, (50,)),
        random(50) > 0,
    )
    whole, masked = both_from_logits(logits, labels), both_from_logits(logits, labels, mask)
    monkeypatch.setattr(softmax_rows, "CPU_LIMITS", softmax_rows.PieceLimits(1, 7 * 64 * 4, 1, 1))
    for found, expected in zip(both_from_logits(logits, labels), whole, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(both_from_logits(logits, labels, mask), masked, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_out_may_hold_anything(poison: float) -> None:
    logits, labels = random(4, 5, 7, dtype=torch.float32), torch.randint(0, 7, (4, 5))
    mask = random(4, 5) > 0
    clean = both_from_logits(logits, labels, mask)
    poisoned = both_from_logits(
        logits.masked_fill(~mask.unsqueeze(-1), poison), labels.masked_fill(~mask, -100), mask
    )
    for found, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(found, expected)
    assert (clean[1][~mask] == 0).all() and (clean[1][mask] != 0).any()


def test_tokens_that_cannot_occur() -> None:
    logits = random(2, 5).requires_grad_()
    forbidden = torch.tensor([True, False, False, True, False])
    masked = logits.masked_fill(forbidden, -math.inf)
    log_probs, entropy = (
        log_probs_from_logits(masked, torch.tensor([1, 4])),
        entropy_from_logits(masked),
    )
    (log_probs * 3 + entropy * 2).sum().backward()
    small = logits.detach()[:, ~forbidden].requires_grad_()
    expected = reference(small, torch.tensor([0, 2]))
    assert expected[0] is not None
    (expected[0] * 3 + expected[1] * 2).sum().backward()
    torch.testing.assert_close(log_probs, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    torch.testing.assert_close(logits.grad[:, ~forbidden], small.grad)
    assert (logits.grad[:, forbidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_label_that_cannot_occur(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]], dtype=dtype, requires_grad=True)
    log_probs, entropy = next_token_log_probs(
        torch.stack([logits, logits], 1),
        torch.tensor([[0, 1]]),
        torch.ones(1, 2),
        with_entropy=True,
    )
    assert entropy is not None
    assert log_probs.tolist() == [[-math.inf]]
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(2.0)))
    (log_probs + 5 * entropy).sum().backward()
    # d log p = 1[j = label] - p_j, as for any label; the entropy of equal odds is at its maximum,
    # gradient 0.
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 1.0, -0.5]], dtype=dtype))


def test_a_row_without_any_possible_token() -> None:
    logits = torch.full((1, 4), -math.inf, requires_grad=True)
    log_probs, entropy = (
        log_probs_from_logits(logits, torch.tensor([2])),
        entropy_from_logits(logits),
    )
    assert log_probs.tolist() == [-math.inf] and entropy.tolist() == [0.0]
    (log_probs + entropy).sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_does_not_look_healthy(value: float) -> None:
    logits = torch.zeros(2, 3)
    logits[0, 1] = value
    assert log_probs_from_logits(logits, torch.tensor([0, 0])).isnan().tolist() == [True, False]
    assert entropy_from_logits(logits).isnan().tolist() == [True, False]


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0], [-1e4, -2e4], [3e38, -3e38]])
    torch.testing.assert_close(
        log_probs_from_logits(logits, torch.tensor([1, 0, 0])), torch.tensor([-1e4, 0.0, 0.0])
    )
    assert entropy_from_logits(logits).tolist() == [0.0, 0.0, 0.0]


def test_backward_makes_one_tensor_of_the_size_of_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softmax_rows, "CPU_LIMITS", softmax_rows.PieceLimits(1, 8000, 1, 1))
    output, ids = (
        random(4, 20, 500, dtype=torch.bfloat16).requires_grad_(),
        torch.randint(0, 500, (4, 20)),
    )
    size = output.numel()
    mask = (torch.rand(4, 20, generator=torch.Generator().manual_seed(0)) > 0.3).long()
    with TensorWatch() as forward:
        log_probs, entropy = next_token_log_probs(output, ids, mask, with_entropy=True)
        sliced = log_probs_from_logits(output[:, :-1].detach(), ids[:, 1:])
    views = [number for number in forward.sizes if number > 10_000]
    assert len(views) <= 4 and sliced.shape == (4, 19)  # flattening and slicing the logits, no copy
    assert entropy is not None
    with TensorWatch() as backward:
        (log_probs + entropy).sum().backward()
    made = [number for number in backward.sizes if number > 10_000]
    # zeros, its view as rows, and what index_copy_ and the engine hand on: all one gradient
    assert set(made) == {size}
    assert output.grad is not None and output.grad.shape == output.shape


@pytest.mark.parametrize("view", ["whole", "shifted", "columns"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_gradient_may_overwrite_the_logits(view: str, with_mask: bool) -> None:
    weight, mask = random(5, 7, dtype=torch.float32), torch.tensor([[1, 0, 1], [1, 1, 0]])
    results = []
    for overwrite in (False, True):
        hidden = random(2, 4, 5, dtype=torch.float32, seed=1).requires_grad_()
        whole = hidden @ weight
        logits = {
            "whole": whole[:, :3].contiguous(),
            "shifted": whole[:, :-1],
            "columns": whole[:, 1:, :6],
        }[view]
        before = logits.detach().clone()
        log_probs, entropy = log_probs_and_entropy(
            logits,
            torch.tensor([[0, 5, 2], [3, 1, 4]]),
            mask=mask if with_mask else None,
            overwrite_logits=overwrite,
        )
        assert entropy is not None
        (log_probs.square() + 0.1 * entropy).sum().backward()
        assert torch.equal(logits.detach(), before) != overwrite
        results.append(hidden.grad)
    assert torch.equal(*results)


def test_an_expanded_tensor_is_not_overwritten() -> None:
    logits = random(1, 4).requires_grad_()
    log_probs_from_logits(
        logits.expand(3, 4), torch.tensor([0, 1, 2]), overwrite_logits=True
    ).sum().backward()
    expected = log_probs_from_logits(
        logits.detach().repeat(3, 1).requires_grad_(), torch.tensor([0, 1, 2])
    )
    assert logits.grad is not None and expected.shape == (3,)
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(
        logits.grad, torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64) - 3 * p
    )


def test_a_broken_promise_about_the_logits_is_noticed() -> None:
    logits = random(2, 3).requires_grad_() * 1.0
    entropy = entropy_from_logits(logits)  # its backward comes after that of what was made later
    log_probs = log_probs_from_logits(logits, torch.tensor([0, 1]), overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (entropy + log_probs).sum().backward()


def test_a_second_derivative_is_refused() -> None:
    logits = random(2, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(entropy_from_logits(logits).sum(), logits, create_graph=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"labels": torch.zeros(2, 2, dtype=torch.long)},
            ValueError,
            r"labels has shape \(2, 2\), expected \(2, 3\)",
        ),
        ({"mask": torch.zeros(2, 4)}, ValueError, r"mask has shape \(2, 4\), expected \(2, 3\)"),
        (
            {"labels": torch.full((2, 3), 9)},
            IndexError,
            r"labels\[0, 0\] = 9 is not in the vocabulary of 5 tokens \(5 m",
        ),
        ({"logits": torch.zeros(2, 3, 0)}, ValueError, r"logits have shape \(2, 3, 0\)"),
        (
            {"logits": torch.zeros(2, 3, 5, dtype=torch.long)},
            ValueError,
            r"logits have dtype torch.int64",
        ),
        ({"temperature": -1.0}, ValueError, r"temperature=-1.0 must be positive"),
    ],
)
def test_bad_input_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {
        "logits": torch.zeros(2, 3, 5),
        "labels": torch.zeros(2, 3, dtype=torch.long),
    }
    with pytest.raises(error, match=message):
        log_probs_from_logits(**{**good, **arguments})


# next_token_log_probs


def sequence_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (3, 6, 4), weight (11, 4), input_ids and mask (3, 6); the last row is padding only."""
    ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    return random(3, 6, 4, dtype=dtype), random(11, 4, dtype=dtype, seed=1), ids, mask


def test_column_t_speaks_of_token_t_plus_one() -> None:
    hidden, weight, ids, mask = sequence_batch()
    expected = torch.zeros(3, 5, dtype=torch.float64)
    table = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    for row in range(3):
        for t in range(5):
            if mask[row, t + 1]:
                expected[row, t] = table[row, t, ids[row, t + 1]]
    for output in (hidden @ weight.T, LinearLogits(hidden, weight)):
        log_probs, entropy = next_token_log_probs(output, ids, mask, temperature=0.7)
        assert entropy is None and log_probs.is_contiguous()
        torch.testing.assert_close(log_probs, expected)


def test_both_kinds_of_output_have_the_same_gradients() -> None:
    hidden, weight, ids, mask = sequence_batch()
    grads = []
    for lazy in (False, True):
        parts = [
            hidden.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            random(11, seed=2).requires_grad_(),
        ]
        output = LinearLogits(*parts, scale=1.5, soft_cap=4.0)
        log_probs, entropy = next_token_log_probs(
            output if lazy else output.materialize(), ids, mask, temperature=0.7, with_entropy=True
        )
        assert entropy is not None
        (log_probs.square() + 0.3 * entropy).sum().backward()
        grads.append([part.grad for part in parts])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lazy", [False, True])
def test_padding_may_hold_nan(lazy: bool) -> None:
    hidden, weight, ids, mask = sequence_batch(torch.float32)
    used = torch.zeros(3, 6, dtype=torch.bool)
    used[:, :-1] = mask[:, 1:] != 0
    results = []
    for poison in (0.0, math.nan):
        values = (
            (hidden if lazy else hidden @ weight.T)
            .masked_fill(~used.unsqueeze(-1), poison)
            .requires_grad_()
        )
        tokens = ids.masked_fill(mask == 0, -7) if poison else ids
        output = LinearLogits(values, weight) if lazy else values
        log_probs, entropy = next_token_log_probs(output, tokens, mask, with_entropy=True)
        assert entropy is not None
        (log_probs + entropy).sum().backward()
        results.append((log_probs, entropy, values.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert (results[0][2][~used] == 0).all()


@pytest.mark.parametrize("lazy", [False, True])
def test_degenerate_batches(lazy: bool) -> None:
    hidden, weight, ids, mask = sequence_batch()
    for rows, length, chosen in (
        (3, 6, mask * 0),
        (2, 1, mask[:2, :1]),
        (0, 6, mask[:0]),
        (2, 0, mask[:2, :0]),
    ):
        part = hidden[:rows, :length].clone().requires_grad_()
        output = LinearLogits(part, weight) if lazy else part @ weight.T
        log_probs, entropy = next_token_log_probs(
            output, ids[:rows, :length], chosen, with_entropy=True
        )
        assert entropy is not None and log_probs.shape == entropy.shape == (
            rows,
            max(length - 1, 0),
        )
        (log_probs + entropy).sum().backward()
        assert (log_probs == 0).all() and part.grad is not None and (part.grad == 0).all()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_token_outside_the_vocabulary_is_named_by_its_own_column(lazy: bool) -> None:
    hidden, weight, ids, mask = sequence_batch()
    output = LinearLogits(hidden, weight) if lazy else hidden @ weight.T
    ids[1, 4] = 11
    with pytest.raises(
        IndexError, match=r"input_ids\[1, 4\] = 11 is not in the vocabulary of 11 tokens; mask"
    ):
        next_token_log_probs(output, ids, mask)
    mask[1, 4] = 0
    next_token_log_probs(output, ids, mask)


def test_vocabulary_padding_never_enters() -> None:
    hidden, weight, ids, mask = sequence_batch()
    padded = torch.cat([weight, torch.full((5, 4), 100.0, dtype=torch.float64)]).requires_grad_()
    log_probs, _ = next_token_log_probs(LinearLogits(hidden, padded, vocab_size=11), ids, mask)
    expected, _ = next_token_log_probs(hidden @ weight.T, ids, mask)
    torch.testing.assert_close(log_probs, expected)
    log_probs.sum().backward()
    assert (
        padded.grad is not None and (padded.grad[11:] == 0).all() and (padded.grad[:11] != 0).any()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mask": torch.ones(2, 3)},
            r"mask has shape \(2, 3\), expected \(2, 4\) like input_ids.*first one included",
        ),
        ({"output": torch.zeros(2, 3, 5)}, r"output has shape \(2, 3, 5\), expected \(2, 4, 'V'\)"),
        (
            {"output": LinearLogits(torch.zeros(2, 5, 3), torch.zeros(5, 3))},
            r"output has shape \(2, 5, 5\)",
        ),
        (
            {"output": LinearLogits(torch.zeros(2, 4, 3), torch.zeros(5, 2))},
            r"hidden \(2, 4, 3\) and weight \(5, 2\)",
        ),
        (
            {"input_ids": torch.zeros(4, dtype=torch.long)},
            r"input_ids has shape \(4,\), expected \(B, S\)",
        ),
        ({"input_ids": torch.zeros(2, 4)}, r"input_ids has dtype torch.float32"),
    ],
)
def test_next_token_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "output": torch.zeros(2, 4, 5), "input_ids": torch.zeros(2, 4, dtype=torch.long), "mask": torch.ones(2, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        next_token_log_probs(**{**good, **change})


@pytest.mark.parametrize("size", [1.0, 60.0])
def test_few_logits_and_many_are_computed_alike(
    monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    """The plain operations for few logits against the tiles for many, also where probabilities
    vanish."""
    hidden, weight, ids, mask = sequence_batch()
    results = []
    for limit in (1 << 20, 0):
        monkeypatch.setattr(log_probs_module, "SMALL_NUMBER_OF_LOGITS", limit)
        bias = random(11, seed=2).requires_grad_()
        parts = [hidden.mul(size).requires_grad_(), weight.clone().requires_grad_(), bias]
        output = LinearLogits(*parts, scale=1.5)
        log_probs, entropy = next_token_log_probs(
            output, ids, mask, temperature=0.7, with_entropy=True
        )
        assert entropy is not None
        (log_probs.square() + 0.3 * entropy).sum().backward()
        results.append([log_probs, entropy, *(part.grad for part in parts)])
    for few, many in zip(*results, strict=True):
        assert few.isfinite().all()
        torch.testing.assert_close(few, many)
