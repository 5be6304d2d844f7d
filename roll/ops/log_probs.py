"""Log-probs and entropy of logits that exist, and of the next token from either kind of model output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.ops.linear_log_probs import check_linear_logits, selected_linear_log_probs
from roll.ops.linear_logits import LinearLogits
from roll.ops.selection import Selection, select
from roll.ops.softmax_rows import (
    LogitTransform,
    RowStatistics,
    concatenate,
    row_blocks,
    row_coefficients,
    row_gradient_,
    row_statistics,
)


def next_token_log_probs(
    output: Tensor | LinearLogits,
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every token after the first under the model's output at the token before it, and the entropy there.

    output: logits (B, S, V) or LinearLogits with hidden (B, S, H); input_ids and mask: (B, S). Returns (log_probs,
    entropy), each (B, S-1) and float32 (float64 for a float64 output); entropy is None unless `with_entropy`. Column t
    speaks of token t+1 and is computed where mask[:, t+1] is not zero. Elsewhere, and in the gradients there, zeros,
    even if the output holds NaN at those positions. RL passes the response mask, DPO the attention mask.

        input_ids   [[7, 8, 9, 0]]      log_probs  [[0, log p(9 | 7 8), 0]]
        mask        [[0, 0, 1, 0]]
    """
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, S)")
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected {tuple(input_ids.shape)} like input_ids: "
            "one entry per token, the first one included"
        )
    if len(output.shape) != 3 or output.shape[:2] != input_ids.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}, expected {(*input_ids.shape, 'V')} for these input_ids"
        )
    # Shift labels and mask, not the output: the gradient of a slice of the output would be a second tensor of its size.
    labels, selected = torch.zeros_like(input_ids), torch.zeros_like(mask, dtype=torch.bool)
    labels[:, :-1] = input_ids[:, 1:]
    selected[:, :-1] = mask[:, 1:] != 0
    if isinstance(output, LinearLogits):
        check_linear_logits(output)
    selection = select(
        input_ids.shape, selected, labels, output.shape[-1], output.device, labels_name="input_ids", label_shift=1
    )
    if isinstance(output, LinearLogits):
        log_probs, entropy = selected_linear_log_probs(output, selection, temperature, with_entropy)
    else:
        log_probs, entropy = _selected_log_probs(output, selection, temperature, with_entropy)
    assert log_probs is not None
    return log_probs[:, :-1].contiguous(), None if entropy is None else entropy[:, :-1].contiguous()


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) at `labels`: logits (..., V), labels and mask (...), result (...).

    float32 inside and out (float64 for float64 logits), in blocks of rows: forward makes nothing of the logits' size,
    backward their gradient and nothing else. Zero where the mask is zero, and zero gradient there, whatever the logits
    hold. `logits[:, :-1]` and `logits[..., :v]` are read where they are. There is no second derivative.

    A logit of -inf is a token that cannot occur: as a label its log-prob is -inf (and its gradient that of any other
    label). If every logit of a row is -inf the log-prob is -inf and the entropy 0. Gradients stay finite in both cases.
    """
    selection = _select_rows(logits, mask, labels)
    log_probs, _ = _selected_log_probs(logits, selection, temperature, with_entropy=False)
    assert log_probs is not None
    return log_probs


def entropy_from_logits(logits: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats: logits (..., V), mask and result (...).

    Memory, masks and -inf as in `log_probs_from_logits`.
    """
    selection = _select_rows(logits, mask, None)
    _, entropy = _selected_log_probs(logits, selection, temperature, with_entropy=True)
    assert entropy is not None
    return entropy


def _select_rows(logits: Tensor, mask: Tensor | None, labels: Tensor | None) -> Selection:
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected (..., V) with at least one token")
    return select(logits.shape[:-1], mask, labels, logits.shape[-1], logits.device)


def _selected_log_probs(
    logits: Tensor, selection: Selection, temperature: float, with_entropy: bool
) -> tuple[Tensor | None, Tensor | None]:
    if not logits.is_floating_point():
        raise ValueError(f"logits have dtype {logits.dtype}, expected floating point")
    transform = LogitTransform(temperature=temperature)
    log_probs, entropy = _LogProbsFromLogits.apply(logits, selection, transform, with_entropy)
    return (
        None if log_probs is None else log_probs.view(selection.shape),
        None if entropy is None else entropy.view(selection.shape),
    )


class _LogProbsFromLogits(torch.autograd.Function):
    """logits (..., V) -> log_probs (N,) if the selection has labels, entropy (N,) if asked for; N = all positions."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, selection: Selection, transform: LogitTransform, with_entropy: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, row_numbers = _row_view(logits, selection.index)
        parts: list[RowStatistics] = []
        for block in row_blocks(selection.num_selected, logits.shape[-1], logits.dtype, logits.device):
            labels = None if selection.labels is None else selection.labels[block]
            part, copied = _rows(rows, row_numbers, block), row_numbers is not None
            parts.append(row_statistics(part, labels, transform, with_entropy, overwrite=copied))
        statistics = concatenate(parts)
        ctx.save_for_backward(logits, selection.index, selection.labels, *statistics)
        ctx.shape, ctx.transform = selection.shape, transform
        ctx.set_materialize_grads(False)
        _, log_probs, entropy = statistics
        return (
            None if log_probs is None else selection.put(log_probs),
            None if entropy is None else selection.put(entropy),
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "log_probs_from_logits and entropy_from_logits have no second derivative: call backward without "
                "create_graph=True, or use log_softmax"
            )
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        logits, index, labels, *columns = ctx.saved_tensors
        selection, statistics = Selection(index, labels, ctx.shape), RowStatistics(*columns)
        coefficients = row_coefficients(
            statistics,
            labels,
            None if grad_log_probs is None else selection.take(grad_log_probs),
            None if grad_entropy is None else selection.take(grad_entropy),
            ctx.transform,
        )
        grad = (torch.empty if index is None else torch.zeros)(logits.shape, dtype=logits.dtype, device=logits.device)
        grad_rows = grad.view(-1, logits.shape[-1])
        rows, row_numbers = _row_view(logits, index)
        for block in row_blocks(selection.num_selected, logits.shape[-1], logits.dtype, logits.device):
            part = _rows(rows, row_numbers, block)
            if index is None:
                part = grad_rows[block].copy_(part)
                row_gradient_(part, coefficients.rows(block), ctx.transform)
            else:
                row_gradient_(part, coefficients.rows(block), ctx.transform)
                grad_rows.index_copy_(0, index[block], part)
        return grad, None, None, None


def _rows(rows: Tensor, row_numbers: Tensor | None, block: slice) -> Tensor:
    """Rows of a block: a view if all are selected, otherwise a copy."""
    return rows[block] if row_numbers is None else rows.index_select(0, row_numbers[block])


def _row_view(logits: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The selected positions of logits (..., V) as rows (R, V) of the same memory, and which rows: None for all.

    `logits[:, :-1]` of (B, S, V) does not flatten without a copy, yet its B * (S-1) positions are rows of a view
    (B*S - 1, V): so are those of any leading axes whose strides are multiples of one stride.
    """
    vocab_size = logits.shape[-1]
    axes = list(zip(logits.shape[:-1], logits.stride()[:-1], strict=True))
    unit = min((stride for size, stride in axes if size > 1 and stride > 0), default=0)
    if logits.is_contiguous() or unit == 0 or any(size > 1 and stride % unit for size, stride in axes):
        return logits.reshape(-1, vocab_size), index
    numbers = torch.zeros((), dtype=torch.long, device=logits.device)
    for size, stride in axes:
        numbers = numbers.unsqueeze(-1) + torch.arange(size, device=logits.device) * (stride // unit)
    num_rows = 1 + sum((size - 1) * (stride // unit) for size, stride in axes)
    rows = logits.as_strided((num_rows, vocab_size), (unit, logits.stride(-1)))
    return rows, numbers.flatten() if index is None else numbers.flatten()[index]
