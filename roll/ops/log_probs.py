"""Log-probs and entropy of logits that exist, and of the next token from either kind of output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roll.ops.linear_log_probs import check_linear_logits, selected_linear_log_probs
from roll.ops.linear_logits import LinearLogits
from roll.ops.softmax_rows import (
    LOG_OF_ZERO,
    LabelCheck,
    LogitTransform,
    RowGradients,
    RunningStatistics,
    Selection,
    kernels_for,
    row_blocks,
    row_gradient_,
    select,
)

SMALL_NUMBER_OF_LOGITS = 1 << 20  # 4 MiB in float32, a sixteenth of a tile


def next_token_log_probs(
    output: Tensor | LinearLogits,
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every token after the first under the model's output at the token before it, and
    the entropy there.

    output: logits (B, S, V) or LinearLogits with hidden (B, S, H); input_ids and mask: (B, S).
    Returns (log_probs, entropy), each (B, S-1) and float32 (float64 for a float64 output); entropy
    is None unless `with_entropy`. Column t speaks of token t+1 and is computed where mask[:, t+1]
    is not zero. Elsewhere, and in the gradients there, zeros, even if the output holds NaN at those
    positions. RL passes the response mask, DPO the attention mask. `keep_bytes` is that of
    `linear_log_probs`; it changes nothing for logits that exist.

        input_ids   [[7, 8, 9, 0]]      log_probs  [[0, log p(9 | 7 8), 0]]
        mask        [[0, 0, 1, 0]]
    """
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, S)")
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected {tuple(input_ids.shape)} like "
            "input_ids: one entry per token, the first one included"
        )
    if len(output.shape) != 3 or output.shape[:2] != input_ids.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}, expected {(*input_ids.shape, 'V')} for these "
            "input_ids"
        )
    # Shift labels and mask, not the output: the gradient of a slice of the output would be a second
    # tensor of its size.
    labels, selected = torch.zeros_like(input_ids), torch.zeros_like(mask, dtype=torch.bool)
    labels[:, :-1] = input_ids[:, 1:]
    selected[:, :-1] = mask[:, 1:] != 0
    if isinstance(output, LinearLogits):
        check_linear_logits(output)
    selection = select(
        input_ids.shape,
        selected,
        labels,
        output.shape[-1],
        output.device,
        labels_name="input_ids",
        label_shift=1,
    )
    if not isinstance(output, LinearLogits):
        log_probs, entropy = _selected_log_probs(output, selection, temperature, with_entropy)
    elif (
        # The logits of all selected positions are less than one operation of the tiled version
        # costs.
        selection.num_selected * output.shape[-1] <= SMALL_NUMBER_OF_LOGITS
        and output.hidden.device.type == "cpu"
        and output.hidden.dtype in (torch.float32, torch.float64)
        and output.soft_cap is None
        and not torch.is_autocast_enabled("cpu")
    ):
        log_probs, entropy = _small_log_probs(output, selection, temperature, with_entropy)
    else:
        log_probs, entropy = selected_linear_log_probs(
            output, selection, temperature, with_entropy, keep_bytes=keep_bytes
        )
    assert log_probs is not None
    return log_probs[:, :-1].contiguous(), None if entropy is None else entropy[:, :-1].contiguous()


def _small_log_probs(
    output: LinearLogits, selection: Selection, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """`selected_linear_log_probs` by plain operations, the gradient by autograd."""
    assert selection.labels is not None
    slope = LogitTransform(output.scale, None, temperature).slope
    rows_NH = output.hidden.reshape(-1, output.hidden.shape[-1])
    if selection.index is not None:
        rows_NH = F.embedding(selection.index, rows_NH)  # as indexing, with a faster backward
    logits_NV = F.linear(rows_NH, output.weight, output.bias)[:, : output.shape[-1]]
    log_probs_NV = (logits_NV if slope == 1 else logits_NV * slope).log_softmax(-1)
    found_N = log_probs_NV.gather(1, selection.labels[:, None])[:, 0]
    log_probs = selection.put(found_N, copy=False).view(selection.shape)
    if not with_entropy:
        return log_probs, None
    entropy_N = -(log_probs_NV.exp() * log_probs_NV.clamp(min=LOG_OF_ZERO)).sum(-1)
    return log_probs, selection.put(entropy_N, copy=False).view(selection.shape)


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `labels`, and the entropy of that softmax in nats.

    logits (..., V), labels and mask (...), results (...); entropy is None unless `with_entropy`.
    float32 inside and out (float64 for float64 logits): forward makes nothing of the logits' size,
    backward their gradient and nothing else. Zero where the mask is zero, and zero gradient there,
    whatever the logits hold. `logits[:, :-1]` and `logits[..., :v]` are read where they are. There
    is no second derivative.

    With `overwrite_logits` the caller promises that nobody reads the logits after this call, and
    backward writes their gradient into their memory. A broken promise by autograd (two results of
    the same logits, an operation that saved them) is an error of autograd's; so is a second
    backward.

    A logit of -inf is a token that cannot occur: as a label its log-prob is -inf (and its gradient
    that of any other label). If every logit of a row is -inf the log-prob is -inf and the entropy
    0. Gradients stay finite in both cases.
    """
    _check_logits(logits)
    # The kernels skip a label that is not there, so it can be found while they run; an index
    # operation cannot.
    check_later = mask is None and kernels_for(logits) is not None
    selection = select(
        logits.shape[:-1], mask, labels, logits.shape[-1], logits.device, check=not check_later
    )
    check = LabelCheck(selection, logits.shape[-1]) if check_later else None
    log_probs, entropy = _selected_log_probs(
        logits, selection, temperature, with_entropy, overwrite_logits
    )
    if check is not None:
        check.wait()
    assert log_probs is not None
    return log_probs, entropy


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """The first result of `log_probs_and_entropy`."""
    options = {"temperature": temperature, "overwrite_logits": overwrite_logits}
    return log_probs_and_entropy(logits, labels, mask=mask, with_entropy=False, **options)[0]


def entropy_from_logits(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """The second result of `log_probs_and_entropy`, which needs no labels."""
    _check_logits(logits)
    selection = select(logits.shape[:-1], mask, None, logits.shape[-1], logits.device)
    _, entropy = _selected_log_probs(logits, selection, temperature, True, overwrite_logits)
    assert entropy is not None
    return entropy


def _check_logits(logits: Tensor) -> None:
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, expected (..., V) with at least one token"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits have dtype {logits.dtype}, expected floating point")


def _selected_log_probs(
    logits: Tensor,
    selection: Selection,
    temperature: float,
    with_entropy: bool,
    overwrite_logits: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    transform = LogitTransform(temperature=temperature)
    log_probs, entropy = _LogProbsFromLogits.apply(
        logits, selection, transform, with_entropy, overwrite_logits
    )
    return (
        None if log_probs is None else log_probs.view(selection.shape),
        None if entropy is None else entropy.view(selection.shape),
    )


class _LogProbsFromLogits(torch.autograd.Function):
    """logits (..., V) -> log_probs (N,) if there are labels, entropy (N,) if asked for; N
    positions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        selection: Selection,
        transform: LogitTransform,
        with_entropy: bool,
        overwrite_logits: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        num_rows = selection.num_selected
        running = RunningStatistics(
            num_rows, logits.shape[-1], selection.labels, transform, with_entropy, like=logits
        )
        rows, row_numbers = _row_view(logits, selection.index)
        running.add(rows, slice(0, num_rows), row_numbers=row_numbers)
        statistics = running.statistics
        ctx.save_for_backward(logits, selection.index, selection.labels, *statistics)
        ctx.shape, ctx.transform, ctx.overwrite = selection.shape, transform, overwrite_logits
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
                "log_probs_from_logits and entropy_from_logits have no second derivative: call "
                "backward without create_graph=True, or use log_softmax"
            )
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        logits, index, labels, *statistics = ctx.saved_tensors
        selection = Selection(index, labels, ctx.shape)
        arrived = RowGradients.of(selection, statistics, grad_log_probs, grad_entropy)
        # An expanded tensor has entries that share their memory.
        axes = zip(logits.shape, logits.stride(), strict=True)
        if ctx.overwrite and all(size == 1 or stride > 0 for size, stride in axes):
            grad = logits.detach()
            _write_gradient(logits, grad, selection, arrived, ctx.transform)
            # Autograd then notices whoever reads the logits now.
            torch.autograd.graph.increment_version(logits)
        else:
            grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            _write_gradient(logits, grad, selection, arrived, ctx.transform)
        return grad, None, None, None, None


def _write_gradient(
    logits: Tensor,
    grad: Tensor,
    selection: Selection,
    gradients: RowGradients,
    transform: LogitTransform,
) -> None:
    """The gradient of all positions, into `grad`, which may be `logits`."""
    index, num_positions, device = selection.index, selection.shape.numel(), logits.device
    grad_rows, grad_numbers = _row_view(grad, None)
    if (kernels := kernels_for(logits)) is not None:
        rows, row_numbers = _row_view(logits, None)
        slots = None
        if index is not None:
            slots = torch.full((num_positions,), -1, dtype=torch.int32, device=device)
            slots[index] = torch.arange(index.shape[0], dtype=torch.int32, device=device)
        kernels.gradient(rows, grad_rows, gradients, 0, transform, slots, row_numbers, grad_numbers)
        return
    if index is not None:
        passed_over = torch.ones(num_positions, dtype=torch.bool, device=device)
        passed_over[index] = False
        grad.masked_fill_(passed_over.view(*selection.shape, 1), 0.0)
    rows, row_numbers = _row_view(logits, index)
    _, targets = _row_view(grad, index)
    for block in row_blocks(selection.num_selected, logits.shape[-1], logits.dtype, device):
        part = rows[block] if row_numbers is None else rows.index_select(0, row_numbers[block])
        if targets is None:
            part = grad_rows[block].copy_(part)
            row_gradient_(part, gradients.rows(block), transform)
        else:
            row_gradient_(part, gradients.rows(block), transform)
            grad_rows.index_copy_(0, targets[block], part)


def _row_view(logits: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The selected positions of logits (..., V) as rows (R, V) of the same memory, and which rows
    (None for all).

    `logits[:, :-1]` of (B, S, V) does not flatten without a copy, yet its B * (S-1) positions are
    rows of a view (B*S - 1, V): so are those of any leading axes whose strides are multiples of one
    stride.
    """
    vocab_size = logits.shape[-1]
    axes = list(zip(logits.shape[:-1], logits.stride()[:-1], strict=True))
    unit = min((stride for size, stride in axes if size > 1 and stride > 0), default=0)
    fits = unit > 0 and not any(size > 1 and stride % unit for size, stride in axes)
    if logits.is_contiguous() or not fits:
        return logits.reshape(-1, vocab_size), index
    numbers = torch.zeros((), dtype=torch.long, device=logits.device)
    for size, stride in axes:
        steps = torch.arange(size, device=logits.device) * (stride // unit)
        numbers = numbers.unsqueeze(-1) + steps
    num_rows = 1 + sum((size - 1) * (stride // unit) for size, stride in axes)
    rows = logits.as_strided((num_rows, vocab_size), (unit, logits.stride(-1)))
    return rows, numbers.flatten() if index is None else numbers.flatten()[index]
