"""A loss and the gradients of the head in one pass over the tokens, however many there are.

A loss adds up over rows. So the head is trained part of the rows by part of the rows, as the micro-batches of a step
are: logits of a part, its loss, their gradient in their place, the gradients of hidden states and weight; then the next
part, in the same memory. The logits are made once, which leaves three matrix products of four, and what comes before
the head sees one backward pass over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll.ops.linear_logits import LinearLogits
from roll.ops.softmax_rows import accumulation_dtype

LossOfRows = Callable[[LinearLogits, slice], Tensor]


def loss_in_parts(output: LinearLogits, parts: Sequence[slice], loss_of_rows: LossOfRows) -> Tensor:
    """The sum over `parts` of `loss_of_rows(output[part], part)`, whose gradients are complete when this returns.

    `parts` cover the first axis of `output` in order. Nothing may depend on the losses but their sum: what
    `loss_of_rows` computes with is cut off from the graph behind `output`, and freed before the next part. Gradients of
    weight and bias are summed in float32 (float64 for float64), which takes memory of its own if theirs is another.

        loss = loss_in_parts(output, [slice(0, 4), slice(4, 8)], lambda part, rows: nll(part, ids[rows]) / num_tokens)
        loss.backward()
    """
    borders = [0, *(part.stop for part in parts)]
    if [part.start for part in parts] != borders[:-1] or borders[-1] != output.shape[0]:
        raise ValueError(
            f"parts={list(parts)} must cover the {output.shape[0]} rows of the output in order, once each"
        )
    return _LossInParts.apply(
        output.hidden, output.weight, output.bias, output, parts, loss_of_rows
    )


class _LossInParts(torch.autograd.Function):
    """hidden (R, ..., H), weight (V, H), bias (V,) or None -> the loss, 0-d."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: LinearLogits,
        parts: Sequence[slice],
        loss_of_rows: LossOfRows,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_sum = _sum_of(weight) if needs_weight else None
        bias_sum = _sum_of(bias) if needs_bias and bias is not None else None
        losses = []
        for part in parts:
            leaf = hidden[part].detach().requires_grad_(needs_hidden)
            with torch.enable_grad():
                head = replace(
                    output,
                    hidden=leaf,
                    weight=weight.detach().requires_grad_(needs_weight),
                    bias=None if bias is None else bias.detach().requires_grad_(needs_bias),
                    weight_sum=weight_sum,
                    bias_sum=bias_sum,
                )
                loss = loss_of_rows(head, part)
            losses.append(loss.detach())
            _add_gradients(loss, head, None if hidden_grad is None else hidden_grad[part])
        ctx.save_for_backward(hidden_grad, weight_sum, bias_sum)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    # pyrefly: ignore[bad-override]  (the base class declares *grad_outputs)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = (
            None if sums is None else torch.mul(sums, grad, out=torch.empty_like(sums, dtype=dtype))
            for sums, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *found, None, None, None


def _sum_of(weight: Tensor) -> Tensor:
    return torch.zeros_like(
        weight, dtype=accumulation_dtype(weight.dtype), memory_format=torch.contiguous_format
    )


def _add_gradients(loss: Tensor, head: LinearLogits, hidden_grad: Tensor | None) -> None:
    """Backward through one part. The operators of `roll.ops` add to the head's sums by themselves; a loss that works
    on the logits in another way leaves a gradient."""
    leaves = [head.hidden, head.weight, head.bias]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    grads = dict(
        zip(map(id, wanted), torch.autograd.grad(loss, wanted, allow_unused=True), strict=True)
    )
    if hidden_grad is not None:
        grad = grads[id(head.hidden)]
        hidden_grad.zero_() if grad is None else hidden_grad.copy_(grad)
    for leaf, total in ((head.weight, head.weight_sum), (head.bias, head.bias_sum)):
        grad = None if leaf is None else grads.get(id(leaf))
        if grad is not None and total is not None:
            total.add_(grad)
