import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from roll.ops.linear_logits import LinearLogits


def test_materialize_is_the_formula() -> None:
    hidden = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])
    output = LinearLogits(
        hidden, weight, bias=torch.tensor([0.5, 0.0, 9.0]), scale=2.0, soft_cap=5.0, vocab_size=2
    )
    # 2 * (1 + 0.5) = 3 and 2 * 2 = 4, then 5 * tanh(x / 5)
    torch.testing.assert_close(output.materialize(), 5 * torch.tanh(torch.tensor([[0.6, 0.8]])))
    assert output.shape == (1, 2)


def test_it_describes_the_tensor_that_it_stands_for() -> None:
    output = LinearLogits(
        torch.zeros(2, 5, 3, dtype=torch.bfloat16), torch.zeros(7, 3, dtype=torch.bfloat16)
    )
    logits = output.materialize()
    assert (output.shape, output.dtype, output.device) == (
        logits.shape,
        logits.dtype,
        logits.device,
    )


@pytest.mark.parametrize(
    "index",
    [
        0,
        slice(1, 3),
        (slice(None), slice(None, -1)),
        torch.tensor([2, 0]),
        torch.tensor([True, False, True]),
        [1, 2],
    ],
)
def test_indexing_selects_positions(index: object) -> None:
    output = LinearLogits(
        torch.randn(3, 4, 2), torch.randn(5, 2), scale=0.5, soft_cap=3.0, vocab_size=4
    )
    part = output[index]
    torch.testing.assert_close(part.materialize(), output.materialize()[index])
    assert part.weight is output.weight


def test_indexing_by_a_mask_over_both_axes() -> None:
    output = LinearLogits(torch.randn(3, 4, 2), torch.randn(5, 2))
    mask = torch.rand(3, 4) > 0.5
    torch.testing.assert_close(output[mask].materialize(), output.materialize()[mask])


@pytest.mark.parametrize(
    "index", [(0, 0, 0), (slice(None), slice(None), slice(0, 1)), ..., (..., 0), None]
)
def test_indexing_the_vocabulary_is_an_error(index: object) -> None:
    output = LinearLogits(torch.randn(3, 4, 2), torch.randn(5, 2))
    with pytest.raises(IndexError, match="LinearLogits"):
        output[index]


def test_gradients_reach_every_part() -> None:
    hidden, weight, bias = (
        torch.randn(shape, requires_grad=True) for shape in ((2, 3), (4, 3), (4,))
    )
    LinearLogits(hidden, weight, bias)[0:1].materialize().sum().backward()
    assert hidden.grad is not None and hidden.grad[1].abs().sum() == 0
    torch.testing.assert_close(hidden.grad[0], weight.detach().sum(0))
    torch.testing.assert_close(weight.grad, hidden.detach()[0].expand(4, 3))
    torch.testing.assert_close(bias.grad, torch.ones(4))


def test_it_is_a_pytree_node_whose_leaves_keep_their_graph() -> None:
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.nn.Parameter(torch.randn(4, 3))
    output = LinearLogits(hidden, weight, scale=2.0, soft_cap=30.0, vocab_size=3)
    leaves, spec = pytree.tree_flatten({"logits": output})
    assert leaves[0] is hidden
    assert any(leaf is weight for leaf in leaves)
    rebuilt = pytree.tree_unflatten(leaves, spec)["logits"]
    assert all(
        getattr(rebuilt, field.name) is getattr(output, field.name)
        for field in dataclasses.fields(LinearLogits)
    )
    doubled = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.double(), output)
    assert doubled.dtype == torch.float64 and doubled.vocab_size == 3
