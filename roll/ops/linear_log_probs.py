"""Log-probs and entropy straight from hidden states and the head's weight, without a logits tensor.

Forward: chunks of rows times the whole vocabulary; each is reduced to one normaliser, log-prob and entropy per row, and
the next one overwrites it. Backward: once the normalisers are known every logit stands alone, so the logits are made a
second time in tiles that span the selected rows and a slice of the vocabulary. The gradient of a slice of the weight is
then complete after one matrix product and is written once, in its own dtype; only the gradient of the hidden states,
V / N times smaller, is summed over tiles, in float32. Four matrix products in all, against three with a logits tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.ops.linear_logits import LinearLogits
from roll.ops.selection import Selection, select
from roll.ops.softmax_rows import (
    LogitTransform,
    RowCoefficients,
    RowStatistics,
    accumulation_dtype,
    concatenate,
    piece_limits,
    row_coefficients,
    row_gradient_,
    row_statistics,
)

# Rows of a buffer start at multiples of this, so that an odd vocabulary costs the matrix products nothing.
_ROW_ALIGNMENT = 64


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(cap(scale * (hidden @ weight.T + bias)) / temperature) at `labels`, and the entropy of that softmax.

    hidden: (..., H), weight: (V, H), bias: (V,), labels and mask: (...). Returns (log_probs, entropy), each (...),
    float32 (float64 for float64 inputs); entropy is None unless `with_entropy`. `LinearLogits` explains `scale`,
    `soft_cap` and `vocab_size`.

    Only positions with a non-zero mask are computed. Everywhere else the results and the gradients are exactly zero
    whatever `hidden` and `labels` hold there, NaN included; with an empty mask they are zeros that still carry a graph.
    A selected label outside the vocabulary is an IndexError.

    Matrix products run in the dtype of the inputs (in autocast's dtype inside its context), everything after them in
    float32. Gradients flow to hidden, weight and bias, from both results; only what is required is computed. There is
    no second derivative. At most `chunk_rows` x V logits exist at one time, in forward and in backward; the default
    keeps them at 64 MB on a CPU and 192 MB on an accelerator. The selected rows of `hidden` are copied when the mask
    leaves rows out. On an accelerator each call waits once for the device, to learn how many positions are selected.

        >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> linear_log_probs(hidden, weight, torch.tensor([1, 0]), mask=torch.tensor([1, 0]))[0]
        tensor([-0.5514,  0.0000])
    """
    output = LinearLogits(hidden, weight, bias, scale, soft_cap, vocab_size)
    check_linear_logits(output)
    selection = select(hidden.shape[:-1], mask, labels, output.shape[-1], hidden.device)
    return selected_linear_log_probs(output, selection, temperature, with_entropy, chunk_rows)


def check_linear_logits(output: LinearLogits) -> None:
    """Raises ValueError, with the shapes, for parts that do not fit together."""
    hidden, weight, bias = output.hidden, output.weight, output.bias
    if hasattr(weight, "placements"):
        raise ValueError(
            "weight is a sharded DTensor: use the output while the head is unsharded "
            "(FSDP2 keeps the root module's parameters after forward unless reshard_after_forward=True is set for it)"
        )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: expected (..., H) and (V, H)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])} for weight's rows")
    if not 1 <= output.shape[-1] <= weight.shape[0]:
        raise ValueError(f"vocab_size={output.shape[-1]} must lie between 1 and the {weight.shape[0]} rows of weight")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden is on {hidden.device}: move one of them")
        if tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(
                f"{name} is {tensor.dtype}, hidden is {hidden.dtype}: convert one of them, or use autocast"
            )
    if not hidden.is_floating_point():
        raise ValueError(f"hidden has dtype {hidden.dtype}, expected floating point")


def selected_linear_log_probs(
    output: LinearLogits,
    selection: Selection,
    temperature: float,
    with_entropy: bool,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`linear_log_probs` after its checks: for a caller that found the selected positions itself."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")
    options = _Options(
        transform=LogitTransform(output.scale, output.soft_cap, temperature),
        with_entropy=with_entropy,
        dtype=_product_dtype(output.hidden),
        num_columns=output.shape[-1],
        chunk_rows=chunk_rows,
    )
    hidden = output.hidden.reshape(-1, output.hidden.shape[-1])
    log_probs, entropy = _LinearLogProbs.apply(hidden, output.weight, output.bias, selection, options)
    return log_probs.view(selection.shape), None if entropy is None else entropy.view(selection.shape)


@dataclass(frozen=True)
class _Options:
    transform: LogitTransform
    with_entropy: bool
    dtype: torch.dtype  # of the matrix products
    num_columns: int  # of the vocabulary without padding
    chunk_rows: int | None

    def rows_at_once(self, device: torch.device) -> int:
        """How many whole rows of logits may exist at one time."""
        if self.chunk_rows is not None:
            return self.chunk_rows
        limits = piece_limits(device)
        rows = limits.chunk_bytes // (self.num_columns * self.dtype.itemsize)
        return max(limits.min_rows, rows - rows % limits.row_multiple)

    def forward_rows(self, num_rows: int, device: torch.device) -> int:
        """Rows of a chunk: at most `rows_at_once`, and equal chunks rather than a small last one."""
        most = self.rows_at_once(device)
        num_chunks = max(1, math.ceil(num_rows / most))
        multiple = piece_limits(device).row_multiple
        return min(most, max(1, math.ceil(num_rows / num_chunks / multiple) * multiple))

    def backward_tile(self, num_rows: int, device: torch.device) -> tuple[int, int]:
        """Rows and columns of a tile with no more logits than a forward chunk: all rows, if enough columns remain."""
        num_logits = self.rows_at_once(device) * self.num_columns
        columns = max(num_logits // num_rows, piece_limits(device).min_columns)
        if columns >= self.num_columns:
            columns = self.num_columns
        elif columns > _ROW_ALIGNMENT:
            columns -= columns % _ROW_ALIGNMENT
        return min(num_rows, num_logits // columns), columns


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device_type = hidden.device.type
    # Autocast leaves float64 alone, and so do we.
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


class _LinearLogProbs(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None -> log_probs (N,), entropy (N,) or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, selection: Selection, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            statistics = _forward(hidden, weight, bias, selection, options)
        ctx.save_for_backward(hidden, weight, bias, selection.index, selection.labels, *statistics)
        ctx.shape, ctx.options = selection.shape, options
        ctx.set_materialize_grads(False)
        assert statistics.log_probs is not None
        entropy = None if statistics.entropy is None else selection.put(statistics.entropy)
        return selection.put(statistics.log_probs), entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_log_probs has no second derivative: call backward without create_graph=True, or use "
                "LinearLogits.materialize() and log_softmax"
            )
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, bias, index, labels, *statistics = ctx.saved_tensors
        selection = Selection(index, labels, ctx.shape)
        with torch.autocast(hidden.device.type, enabled=False):
            coefficients = row_coefficients(
                RowStatistics(*statistics),
                labels,
                None if grad_log_probs is None else selection.take(grad_log_probs),
                None if grad_entropy is None else selection.take(grad_entropy),
                ctx.options.transform,
            )
            grads = _backward(hidden, weight, bias, selection, coefficients, ctx.options, ctx.needs_input_grad)
        return *grads, None, None


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, selection: Selection, options: _Options
) -> RowStatistics:
    assert selection.labels is not None
    num_rows, columns = selection.num_selected, options.num_columns
    weight = weight[:columns].to(options.dtype)
    bias = None if bias is None else bias[:columns].to(options.dtype)
    step = options.forward_rows(num_rows, hidden.device)
    buffer = _aligned_buffer(step, columns, options.dtype, hidden.device)
    parts: list[RowStatistics] = []
    for start in range(0, max(1, num_rows), step):
        stop = min(start + step, num_rows)
        rows = hidden[start:stop] if selection.index is None else hidden[selection.index[start:stop]]
        chunk = buffer[: stop - start, :columns]
        _linear(rows.to(options.dtype), weight, bias, out=chunk)
        labels = selection.labels[start:stop]
        parts.append(row_statistics(chunk, labels, options.transform, options.with_entropy, overwrite=True))
    return concatenate(parts)


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection: Selection,
    coefficients: RowCoefficients,
    options: _Options,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    columns, num_rows = options.num_columns, selection.num_selected
    sum_dtype = accumulation_dtype(options.dtype)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_grad[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_grad[2] else None
    for grad in (grad_weight, grad_bias):
        if grad is not None:  # what pads the vocabulary is not written below; with no rows nothing is
            grad[columns if num_rows else 0 :].zero_()
    if num_rows == 0:
        return torch.zeros_like(hidden) if needs_grad[0] else None, grad_weight, grad_bias

    rows = selection.take(hidden).to(options.dtype)
    grad_rows = torch.empty_like(rows, dtype=sum_dtype) if needs_grad[0] else None
    tile_rows, tile_columns = options.backward_tile(num_rows, hidden.device)
    buffer = _aligned_buffer(tile_rows, tile_columns, options.dtype, hidden.device)
    for left in range(0, columns, tile_columns):
        part = slice(left, min(left + tile_columns, columns))
        part_weight = weight[part].to(options.dtype)
        part_bias = None if bias is None else bias[part].to(options.dtype)
        weight_sum = None if grad_weight is None else _sum_buffer(grad_weight[part], tile_rows < num_rows)
        bias_sum = None if grad_bias is None else torch.zeros_like(grad_bias[part], dtype=sum_dtype)
        for top in range(0, num_rows, tile_rows):
            band = slice(top, min(top + tile_rows, num_rows))
            tile = buffer[: band.stop - band.start, : part.stop - part.start]
            _linear(rows[band], part_weight, part_bias, out=tile)
            row_gradient_(tile, coefficients.rows(band), options.transform, first_column=left)
            if grad_rows is not None:
                _add_product(grad_rows[band], tile, part_weight, first=left == 0)
            if weight_sum is not None:
                _add_product(weight_sum, tile.t(), rows[band], first=top == 0)
            if bias_sum is not None:
                bias_sum += tile.sum(0, dtype=sum_dtype)
        if grad_weight is not None and weight_sum is not None and weight_sum.dtype != grad_weight.dtype:
            grad_weight[part] = weight_sum
        if grad_bias is not None and bias_sum is not None:
            grad_bias[part] = bias_sum
    grad_hidden = None if grad_rows is None else grad_rows.to(hidden.dtype)
    if grad_hidden is not None and selection.index is not None:
        grad_hidden = selection.put(grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def _aligned_buffer(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    width = math.ceil(num_columns / _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return torch.empty(num_rows, width, dtype=dtype, device=device)


def _sum_buffer(grad: Tensor, several_products: bool) -> Tensor:
    """Where products for `grad` are summed: there, or in float32 if it would round each of several in low precision."""
    sum_dtype = accumulation_dtype(grad.dtype)
    return torch.empty_like(grad, dtype=sum_dtype) if several_products and grad.dtype != sum_dtype else grad


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = rows @ weight.T + bias."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right; the first time whatever `total` holds is overwritten."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0.0 if first else 1.0)  # beta 0 ignores even NaN
        return
    # cuBLAS can hand over its float32 sums unrounded; elsewhere each product is rounded once to the low precision.
    product = torch.mm(left, right, out_dtype=total.dtype) if left.is_cuda else torch.mm(left, right)
    if first:
        total.copy_(product)
    else:
        total.add_(product)
