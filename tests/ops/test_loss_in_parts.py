import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from log_probs_reference import TensorWatch, relative_error
from torch import Tensor

from roll.ops.linear_log_probs import loss_in_parts
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs

KEEP_ALL = 1 << 40
NAMES = ("hidden", "weight", "bias")


def inputs(
    rows: int = 6, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    return {
        "hidden": draw(rows, width, 8).to(dtype),
        "weight": draw(37, 8).to(dtype),
        "bias": draw(37).to(dtype),
        "ids": torch.randint(0, 29, (rows, width), generator=random),
        "mask": torch.rand(rows, width, generator=random) > 0.4,
        "slopes": draw(rows, width - 1),
    }


def fused_loss(given: dict[str, Tensor], output: LinearLogits, rows: slice) -> Tensor:
    """Something that is not linear in the log-probs, and couples the tokens of a row, but not
    rows."""
    log_probs, entropy = next_token_log_probs(
        output, given["ids"][rows], given["mask"][rows], with_entropy=True, keep_bytes=KEEP_ALL
    )
    assert entropy is not None
    slopes = given["slopes"][rows].to(log_probs.dtype)
    return ((log_probs * slopes).sum(-1).tanh() - 0.1 * (entropy * slopes).sum(-1)).sum()


def plain_loss(given: dict[str, Tensor], output: LinearLogits, rows: slice) -> Tensor:
    logs = output[:, :-1].materialize().log_softmax(-1)
    mask, slopes = given["mask"][rows, 1:], given["slopes"][rows].to(logs.dtype)
    log_probs = logs.gather(-1, given["ids"][rows, 1:].unsqueeze(-1)).squeeze(-1) * mask
    entropy = -(logs.exp() * logs).sum(-1) * mask
    return ((log_probs * slopes).sum(-1).tanh() - 0.1 * (entropy * slopes).sum(-1)).sum()


Loss = Callable[[dict[str, Tensor], LinearLogits, slice], Tensor]


def train(
    given: dict[str, Tensor], parts: list[slice] | None, loss_of: Loss, **options: Any
) -> list[Tensor]:
    """The loss, and three times the gradients of hidden, weight and bias; `parts` None: without
    `loss_in_parts`."""
    leaves = [given[name].detach().requires_grad_() for name in NAMES]
    output = LinearLogits(*leaves, **options)
    whole = slice(0, len(leaves[0]))
    if parts is None:
        loss = loss_of(given, output, whole)
    else:
        loss = loss_in_parts(output, parts, lambda part, rows: loss_of(given, part, rows))
    (3 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@given(
    cuts=st.sets(st.integers(1, 5)),
    seed=st.integers(0, 99),
    loss_of=st.sampled_from([fused_loss, plain_loss]),
)
@settings(max_examples=30, deadline=None)
def test_any_cut_gives_the_loss_and_the_gradients_of_the_whole(
    cuts: set[int], seed: int, loss_of: Loss
) -> None:
    borders = [0, *sorted(cuts), 6]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(borders)]
    values = inputs(seed=seed)
    for options in ({}, {"vocab_size": 29}):
        expected = train(values, None, plain_loss, **options)
        for found, right in zip(train(values, parts, loss_of, **options), expected, strict=True):
            assert relative_error(found, right) < 1e-12


def test_three_products_for_each_part() -> None:
    parts = [slice(0, 2), slice(2, 6)]
    with TensorWatch() as watch:
        train(inputs(), parts, fused_loss)
    assert watch.num_products == 3 * len(parts)


def test_half_precision_is_as_exact_as_the_whole() -> None:
    values = inputs(rows=32, width=9, dtype=torch.bfloat16, seed=3)
    exact = train(
        {name: x.double() if x.is_floating_point() else x for name, x in values.items()},
        None,
        plain_loss,
    )
    parts = [slice(start, start + 4) for start in range(0, 32, 4)]
    whole, cut = train(values, None, fused_loss), train(values, parts, fused_loss)
    for right, one, other in zip(exact[2:], whole[2:], cut[2:], strict=True):
        assert other.dtype == torch.bfloat16
        error_of_whole = float((one.double() - right).norm() / right.norm())
        assert float((other.double() - right).norm() / right.norm()) < 1.05 * error_of_whole


@pytest.mark.parametrize("frozen", NAMES)
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    values = inputs()
    leaves = {name: values[name].detach().requires_grad_(name != frozen) for name in NAMES}
    output = LinearLogits(**leaves)
    parts = [slice(0, 3), slice(3, 6)]
    loss_in_parts(output, parts, lambda part, rows: fused_loss(values, part, rows)).backward()
    expected = dict(zip(NAMES, train(values, None, plain_loss)[1:], strict=True))
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None and relative_error(3 * leaf.grad, expected[name]) < 1e-12


def test_a_part_without_selected_positions_and_poison_where_none_are() -> None:
    values = inputs()
    values["mask"][:2] = False
    expected = train(values, None, fused_loss)
    values["hidden"][:, :-1][~values["mask"][:, 1:]] = torch.nan
    for found, right in zip(
        train(values, [slice(0, 2), slice(2, 6)], fused_loss), expected, strict=True
    ):
        assert relative_error(found, right) < 1e-12


@pytest.mark.parametrize(
    "parts", [[], [slice(0, 3)], [slice(0, 3), slice(4, 6)], [slice(0, 4), slice(3, 6)]], ids=str
)
def test_parts_that_leave_rows_out_or_take_them_twice(parts: list[slice]) -> None:
    with pytest.raises(ValueError, match="must cover the 6 rows of the output in order, once each"):
        train(inputs(), parts, fused_loss)


def test_a_loss_that_uses_no_logits_has_zero_gradients() -> None:
    values = inputs()
    _, *grads = train(
        values, [slice(0, 3), slice(3, 6)], lambda given, part, rows: 0.0 * part.hidden.sum()
    )
    assert all(not grad.any() for grad in grads)
