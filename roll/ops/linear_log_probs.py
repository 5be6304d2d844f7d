"""Log-probs and entropy straight from hidden states and the head's weight, without a logits tensor.

The logits are made in tiles that span the selected rows and a slice of the vocabulary, each of
which the next one overwrites. Forward: a tile is added to the running statistics of its rows.
Backward: once the normalisers are known every logit stands alone, so the tiles are made a second
time and turned into their own gradient, in place. The gradient of a slice of the weight is then
complete after one matrix product and is written once, in its own dtype; only the gradient of the
hidden states, V / N times smaller, is summed over tiles, in float32. Four matrix products in all,
against three with a logits tensor; three here as well for tiles that may be kept from forward to
backward, and in `loss_in_parts`.

By hand because torch's own chunked cross-entropy has no entropy, no temperature or soft cap, and no
gradient in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roll.ops.gpu import Beside
from roll.ops.linear_logits import LinearLogits
from roll.ops.softmax_rows import (
    LabelCheck,
    LogitTransform,
    RowGradients,
    RunningStatistics,
    Selection,
    accumulation_dtype,
    kernels_for,
    piece_limits,
    row_gradient_,
    select,
)

_ROW_ALIGNMENT = 64  # logits


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
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(cap(scale * (hidden @ weight.T + bias)) / temperature) at `labels`, and its
    entropy.

    hidden: (..., H), weight: (V, H), bias: (V,), labels and mask: (...). Returns (log_probs,
    entropy), each (...), float32 (float64 for float64 inputs); entropy is None unless
    `with_entropy`. `LinearLogits` explains `scale`, `soft_cap` and `vocab_size`.

    Only positions with a non-zero mask are computed. Everywhere else the results and the gradients
    are exactly zero whatever `hidden` and `labels` hold there, NaN included; with an empty mask
    they are zeros that still carry a graph. A selected label outside the vocabulary is an
    IndexError.

    Matrix products run in the dtype of the inputs (in autocast's dtype inside its context),
    everything after them in float32. Gradients flow to hidden, weight and bias, from both results;
    there is no second derivative. At most `chunk_rows` x V logits exist at one time (in forward on
    a GPU twice as many: one tile is read while the next is made); the default is a tile of about 64
    MB on a CPU and of 132 MB on an accelerator. On an accelerator each call waits once for the work
    before it, to learn how many positions are selected.

    Up to `keep_bytes` of logits are kept for backward, which then does not make them again: one
    matrix product of four less where all fit (2 bytes x selected positions x V in bfloat16).

        >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> linear_log_probs(hidden, weight, torch.tensor([1, 0]), mask=torch.tensor([1, 0]))[0]
        tensor([-0.5514,  0.0000])
    """
    output = LinearLogits(hidden, weight, bias, scale, soft_cap, vocab_size)
    check_linear_logits(output)
    # The kernels skip a label that is not there, so it can be found while they run; an index
    # operation cannot.
    check_later = mask is None and kernels_for(hidden) is not None
    selection = select(
        hidden.shape[:-1], mask, labels, output.shape[-1], hidden.device, check=not check_later
    )
    check = LabelCheck(selection, output.shape[-1]) if check_later else None
    results = selected_linear_log_probs(
        output, selection, temperature, with_entropy, chunk_rows, keep_bytes
    )
    if check is not None:
        check.wait()
    return results


def check_linear_logits(output: LinearLogits) -> None:
    """Raises ValueError, with the shapes, for parts that do not fit together."""
    hidden, weight, bias = output.hidden, output.weight, output.bias
    if hasattr(weight, "placements"):
        raise ValueError(
            "weight is a sharded DTensor: use the output while the head is unsharded (FSDP2 keeps "
            "the root module's parameters after forward unless reshard_after_forward=True is set)"
        )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: expected "
            "(..., H) and (V, H)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])} for weight's "
            "rows"
        )
    if not 1 <= output.shape[-1] <= weight.shape[0]:
        raise ValueError(
            f"vocab_size={output.shape[-1]} must lie between 1 and the {weight.shape[0]} rows of "
            "weight"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device}, hidden is on {hidden.device}: move one of them"
            )
        if tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(
                f"{name} is {tensor.dtype}, hidden is {hidden.dtype}: convert one of them, or use "
                "autocast"
            )
    if not hidden.is_floating_point():
        raise ValueError(f"hidden has dtype {hidden.dtype}, expected floating point")


def selected_linear_log_probs(
    output: LinearLogits,
    selection: Selection,
    temperature: float,
    with_entropy: bool,
    chunk_rows: int | None = None,
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`linear_log_probs` after its checks: for a caller that found the selected positions
    itself."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")
    hidden, device_type = output.hidden, output.hidden.device.type
    dtype = hidden.dtype
    # Autocast leaves float64 alone, and so do we.
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    options = _Options(
        transform=LogitTransform(output.scale, output.soft_cap, temperature),
        with_entropy=with_entropy,
        dtype=dtype,
        num_columns=output.shape[-1],
        chunk_rows=chunk_rows,
        keep_bytes=keep_bytes if torch.is_grad_enabled() else 0,
    )
    rows, sums = hidden.reshape(-1, hidden.shape[-1]), (output.weight_sum, output.bias_sum)
    log_probs, entropy = _LinearLogProbs.apply(
        rows, output.weight, output.bias, selection, options, sums
    )
    if entropy is not None:
        entropy = entropy.view(selection.shape)
    return log_probs.view(selection.shape), entropy


@dataclass(frozen=True)
class _Options:
    transform: LogitTransform
    with_entropy: bool
    dtype: torch.dtype  # of the matrix products
    num_columns: int  # of the vocabulary without padding
    chunk_rows: int | None
    keep_bytes: int

    def tile_shape(self, num_rows: int, device: torch.device) -> tuple[int, int]:
        """Rows and columns of a tile: all rows if enough columns remain, and tiles of equal
        size."""
        if num_rows * self.num_columns * self.dtype.itemsize <= self.keep_bytes:
            return num_rows, self.num_columns
        limits = piece_limits(device)
        if self.chunk_rows is None:
            num_logits = limits.tile_bytes // self.dtype.itemsize
        else:
            num_logits = self.chunk_rows * self.num_columns
        columns = max(num_logits // max(num_rows, 1), limits.min_columns)
        multiple = limits.column_multiple
        if columns >= self.num_columns:
            columns = self.num_columns
        elif columns > multiple:
            num_tiles = math.ceil(self.num_columns / (columns - columns % multiple))
            columns = math.ceil(self.num_columns / num_tiles / multiple) * multiple
        return min(num_rows, max(1, num_logits // columns)), columns


class _LinearLogProbs(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None -> log_probs (N,), entropy (N,) or None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        selection: Selection,
        options: _Options,
        sums: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        if not any(ctx.needs_input_grad):
            options = replace(options, keep_bytes=0)
        with torch.autocast(hidden.device.type, enabled=False):
            num_buffers = 1 if kernels_for(hidden) is None else 2
            tiles = _Tiles(hidden, weight, bias, selection, options, num_buffers=num_buffers)
            running = RunningStatistics(
                selection.num_selected,
                options.num_columns,
                selection.labels,
                options.transform,
                options.with_entropy,
                like=tiles.rows,
            )
            beside = Beside(hidden.device, num_buffers)
            for band in tiles.bands:
                for part in tiles.parts:
                    tile = tiles.make_to_keep(band, part)
                    is_kept = tile is not None
                    if tile is None:
                        beside.wait_for_a_buffer()
                        tile = tiles.take(band, part)
                    with beside.run(reads_buffer=not is_kept):
                        running.add(tile, band, first_column=part.start, overwrite=not is_kept)
            beside.join()
            statistics = running.statistics
        ctx.save_for_backward(hidden, weight, bias, selection.index, selection.labels, *statistics)
        ctx.shape, ctx.options, ctx.sums, ctx.kept = selection.shape, options, sums, tiles.kept
        ctx.set_materialize_grads(False)
        assert statistics.log_probs is not None
        entropy = None if statistics.entropy is None else selection.put(statistics.entropy)
        return selection.put(statistics.log_probs), entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_log_probs has no second derivative: call backward without "
                "create_graph=True, or use LinearLogits.materialize() and log_softmax"
            )
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        hidden, weight, bias, index, labels, *statistics = ctx.saved_tensors
        selection = Selection(index, labels, ctx.shape)
        # Kept tiles become gradients, so they serve one backward; a second one through the same
        # graph finds none.
        kept, ctx.kept = ctx.kept, {}
        with torch.autocast(hidden.device.type, enabled=False):
            arrived = RowGradients.of(selection, statistics, grad_log_probs, grad_entropy)
            tiles = _Tiles(hidden, weight, bias, selection, ctx.options, kept=kept)
            grad_rows, grad_weight, grad_bias = _backward(
                tiles, arrived, ctx.options, ctx.needs_input_grad, ctx.sums
            )
        grad_hidden = None
        if grad_rows is not None:
            grad_hidden = selection.put(grad_rows.to(hidden.dtype), copy=False)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Tiles:
    """The raw logits of the selected rows, tile by tile: a band of rows and a slice of the
    vocabulary.

    `kept` holds tiles for backward, as many as `options.keep_bytes` has room for; the others share
    `num_buffers`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        selection: Selection,
        options: _Options,
        *,
        num_buffers: int = 1,
        kept: dict[tuple[int, int], Tensor] | None = None,
    ) -> None:
        self.rows = selection.take(hidden).to(options.dtype)
        self.weight, self.bias, self.dtype = weight, bias, options.dtype
        num_rows, num_columns = self.rows.shape[0], options.num_columns
        self.height, self.width = options.tile_shape(num_rows, hidden.device)
        self.bands = [
            slice(top, min(top + self.height, num_rows))
            for top in range(0, num_rows, max(1, self.height))
        ]
        self.parts = [
            slice(left, min(left + self.width, num_columns))
            for left in range(0, num_columns, self.width)
        ]
        self.num_buffers, self.keep_bytes = num_buffers, options.keep_bytes
        self.kept = {} if kept is None else kept
        self.buffers: deque[Tensor] = deque()  # the one whose turn is next comes first

    def weight_of(self, part: slice) -> Tensor:
        return self.weight[part].to(self.dtype)

    def take(self, band: slice, part: slice) -> Tensor:
        """A tile for the caller to write into: one that was kept, or one that is made now."""
        kept = self.kept.pop((band.start, part.start), None)
        if kept is not None:
            return kept
        if len(self.buffers) < self.num_buffers:
            self.buffers.appendleft(self._new_buffer())
        tile = self.buffers[0][: band.stop - band.start, : part.stop - part.start]
        self.buffers.rotate(-1)
        return self._make(tile, band, part)

    def make_to_keep(self, band: slice, part: slice) -> Tensor | None:
        """A tile that stays as it is until it is taken; None if there is no room left."""
        num_bytes = self.height * self.width * self.dtype.itemsize
        if num_bytes > self.keep_bytes:
            return None
        self.keep_bytes -= num_bytes
        tile = self._new_buffer()[: band.stop - band.start, : part.stop - part.start]
        self.kept[(band.start, part.start)] = tile
        return self._make(tile, band, part)

    def _new_buffer(self) -> Tensor:
        # Rows start at multiples of this, so that an odd vocabulary costs the products nothing.
        width = math.ceil(self.width / _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        return torch.empty(self.height, width, dtype=self.dtype, device=self.rows.device)

    def _make(self, tile: Tensor, band: slice, part: slice) -> Tensor:
        if self.bias is None:
            return torch.mm(self.rows[band], self.weight_of(part).t(), out=tile)
        bias = self.bias[part].to(self.dtype)
        return torch.addmm(bias, self.rows[band], self.weight_of(part).t(), out=tile)


def _backward(
    tiles: _Tiles,
    arrived: RowGradients,
    options: _Options,
    needs_grad: tuple[bool, ...],
    sums: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the selected rows, of weight and of bias; the latter None if they go into
    `sums`."""
    rows, sum_dtype = tiles.rows, accumulation_dtype(options.dtype)
    weight_total, bias_total = sums
    grad_weight = grad_bias = None
    if needs_grad[1] and weight_total is None:
        grad_weight = torch.empty_like(tiles.weight, memory_format=torch.contiguous_format)
    if tiles.bias is not None and needs_grad[2] and bias_total is None:
        grad_bias = torch.empty_like(tiles.bias)
    for grad in (grad_weight, grad_bias):
        if grad is not None:
            # What pads the vocabulary is not written below; with no rows nothing is.
            grad[options.num_columns if tiles.bands else 0 :].zero_()
    grad_rows = None
    if needs_grad[0]:
        grad_rows = torch.empty_like(rows, dtype=rows.dtype if len(tiles.parts) == 1 else sum_dtype)
    for part in tiles.parts if tiles.bands else ():
        weight_sum = None if weight_total is None else weight_total[part]
        wide_sum = None
        if grad_weight is not None:
            weight_sum, wide = grad_weight[part], accumulation_dtype(grad_weight.dtype)
            if len(tiles.bands) > 1 and grad_weight.dtype != wide:
                # Each of several products would be rounded to low precision.
                weight_sum = wide_sum = torch.empty_like(weight_sum, dtype=wide)
        bias_sum = None if bias_total is None else bias_total[part]
        if grad_bias is not None:
            bias_sum = torch.zeros_like(grad_bias[part], dtype=sum_dtype)
        for band in tiles.bands:
            tile = tiles.take(band, part)
            row_gradient_(tile, arrived.rows(band), options.transform, first_column=part.start)
            if grad_rows is not None:
                _add_product(grad_rows[band], tile, tiles.weight_of(part), first=part.start == 0)
            if weight_sum is not None:
                is_first = grad_weight is not None and band.start == 0
                _add_product(weight_sum, tile.t(), rows[band], first=is_first)
            if bias_sum is not None:
                bias_sum += tile.sum(0, dtype=sum_dtype)
        if wide_sum is not None and grad_weight is not None:
            grad_weight[part] = wide_sum
        if grad_bias is not None and bias_sum is not None:
            grad_bias[part] = bias_sum
    return grad_rows, grad_weight, grad_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right; the first time whatever `total` holds is overwritten."""
    beta = 0.0 if first else 1.0  # 0 ignores even NaN
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif left.is_cuda:  # cuBLAS adds its float32 sums where they belong
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif first:
        total.copy_(torch.mm(left, right))
    else:
        total.add_(torch.mm(left, right))


LossOfRows = Callable[[LinearLogits, slice], Tensor]


def loss_in_parts(output: LinearLogits, parts: Sequence[slice], loss_of_rows: LossOfRows) -> Tensor:
    """The sum over `parts` of `loss_of_rows(output[part], part)`, with complete gradients on
    return.

    A loss adds up over rows, so the head is trained part by part: logits of a part, its loss, their
    gradient in their place, the gradients of hidden states and weight; then the next part, in the
    same memory. The logits are made once, and what comes before the head sees one backward over all
    rows.

    `parts` cover the first axis of `output` in order. Nothing may depend on the losses but their
    sum: what `loss_of_rows` computes with is cut off from the graph behind `output`, and freed
    before the next part. Gradients of weight and bias are summed in float32 (float64 for float64),
    which takes memory of its own if theirs is another.

        parts = [slice(0, 4), slice(4, 8)]
        loss = loss_in_parts(output, parts, lambda part, rows: nll(part, ids[rows]))
        loss.backward()
    """
    borders = [0, *(part.stop for part in parts)]
    if [part.start for part in parts] != borders[:-1] or borders[-1] != output.shape[0]:
        raise ValueError(
            f"parts={list(parts)} must cover the {output.shape[0]} rows of the output in order, "
            "once each"
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
        sums: list[Tensor | None] = []
        for tensor, is_needed in ((weight, needs_weight), (bias, needs_bias)):
            total = None
            if is_needed and tensor is not None:
                dtype, layout = accumulation_dtype(tensor.dtype), torch.contiguous_format
                total = torch.zeros_like(tensor, dtype=dtype, memory_format=layout)
            sums.append(total)
        losses = []
        for part in parts:
            with torch.enable_grad():
                head = replace(
                    output,
                    hidden=hidden[part].detach().requires_grad_(needs_hidden),
                    weight=weight.detach().requires_grad_(needs_weight),
                    bias=None if bias is None else bias.detach().requires_grad_(needs_bias),
                    weight_sum=sums[0],
                    bias_sum=sums[1],
                )
                loss = loss_of_rows(head, part)
            leaves = [head.hidden, head.weight, head.bias]
            wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            losses.append(loss.detach())
            # The operators of this module add to the head's sums by themselves; a loss that works
            # on the logits in another way leaves a gradient.
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            grads = dict(zip(map(id, wanted), found, strict=True))
            if hidden_grad is not None:
                grad = grads[id(head.hidden)]
                hidden_grad[part].zero_() if grad is None else hidden_grad[part].copy_(grad)
            for leaf, total in zip(leaves[1:], sums, strict=True):
                grad = grads.get(id(leaf))
                if grad is not None and total is not None:
                    total.add_(grad)
            grad = None
            del found, grads  # they must not live while the next part is computed
        ctx.save_for_backward(hidden_grad, *sums)
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
