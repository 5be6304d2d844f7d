"""Recurrences over the valid tokens of a row and means over its turns, as if masked tokens did not
exist.

A mask has gaps: prompt, observations between turns, padding. A loop over its T columns is slow. On
a GPU Triton kernels scan them (`triton_scans`). Elsewhere the valid tokens of a row are packed into
neighbouring columns (`map_valid_tokens`), or a row is cut where its mask changes (`Runs`); both
take a few passes over the data, whatever the number of gaps. Masks are boolean. By hand because
torch has neither a scan with a decay on CPUs nor one that knows masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.ops.gpu import triton_module

# Entries of the chunk of rows that a CPU works on at a time, so that temporaries stay in its cache.
CPU_CHUNK = 2**18
# Powers of the decay inside one block stay within this factor: times any float32, and summed up, it
# fits float64.
MAX_SCALE = 1e250


def scan_kernels(tensor: Tensor) -> ModuleType | None:
    """`roll.ops.triton_scans` where it can work on `tensor`: on a GPU."""
    return triton_module("triton_scans") if tensor.is_cuda else None


def reverse_scan(x_BT: Tensor, mask_BT: Tensor, decay: float) -> Tensor:
    """y[t] = x[t] + decay * y[t'] over the valid tokens of each row, t' being the next; 0 where
    masked.

    `decay` lies in [0, 1]; 0 and 1 are exact. Masked entries may hold anything; valid ones are
    finite. Example: x = [[1, 2, 9, 4]], mask = [[1, 1, 0, 1]], decay = 0.5 -> [[3, 4, 0, 4]].
    """
    if kernels := scan_kernels(x_BT):
        return kernels.discounted_sums(x_BT.detach(), None, mask_BT, decay, 1.0)[1]
    scan = DiscountedCumsum(decay, x_BT.shape[1] + 1, x_BT.device)
    return map_valid_tokens(lambda x: (scan(x),), [x_BT], mask_BT)[0]


def advantage_scan(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(A, A + V) with A[t] = r[t] + gamma V[t'] - V[t] + gamma lam A[t'], 0 after the last valid
    token."""
    if kernels := scan_kernels(rewards_BT):
        return kernels.discounted_sums(rewards_BT.detach(), values_BT.detach(), mask_BT, gamma, lam)
    scan = DiscountedCumsum(gamma * lam, rewards_BT.shape[1] + 1, rewards_BT.device)

    def over_valid_tokens(r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Columns run backwards in time and column 0 is the end of the row: t' is the column to the
        # left.
        delta = r.sub_(v)
        delta[:, 1:].add_(v[:, :-1], alpha=gamma)
        advantages = scan(delta)
        return advantages, v.add_(advantages)

    advantages_BT, returns_BT = map_valid_tokens(
        over_valid_tokens, [rewards_BT, values_BT], mask_BT, num_results=2
    )
    return advantages_BT, returns_BT


@torch.no_grad()
def reverse_scan_runs(x_BT: Tensor, mask_BT: Tensor, decay: float) -> Tensor:
    """The recurrence over contiguous runs of the mask: x is summed over a run, whose tokens all get
    its y.

    Example: x = [[1, 2, 9, 4]], mask = [[1, 1, 0, 1]], decay = 0.5 -> [[5, 5, 0, 4]].
    """
    dtype = torch.promote_types(x_BT.dtype, torch.float32)
    out_BT = torch.empty(x_BT.shape, dtype=dtype, device=x_BT.device)
    if out_BT.numel() == 0:
        return out_BT
    for rows in row_chunks(x_BT):
        runs = Runs.of(mask_BT[rows])
        # Runs are the tokens of a shorter row.
        y = reverse_scan(runs.table(runs.sums(x_BT[rows])), runs.table(runs.valid), decay)
        runs.spread(y[runs.rows, runs.columns], out_BT[rows])
    return out_BT


def segment_mean(x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor | None = None) -> Tensor:
    """Replace each entry of a run of `mask_BT` by the mean of the run's kept entries; 0 elsewhere.

    `keep_BT` is a subset of `mask_BT`, by default the same. Sums are taken in float64, the result
    has the dtype of `x_BT`. Differentiable once. Example: x = [[1, 3, 9, 5]], mask = [[1, 1, 0, 1]]
    -> [[2, 2, 0, 5]].
    """
    return _SegmentMean.apply(x_BT, mask_BT, keep_BT)


class _SegmentMean(torch.autograd.Function):
    """The mean and its gradient are the same reduction, so backward needs nothing but the masks."""

    @staticmethod
    def forward(ctx: Any, x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor | None) -> Tensor:
        ctx.save_for_backward(mask_BT, keep_BT)
        if kernels := scan_kernels(x_BT):
            return kernels.segment_means(x_BT, mask_BT, keep_BT, backward=False)
        return _spread_sums(x_BT, mask_BT, keep_BT, sum_over=keep_BT)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the base class declares *grad_outputs)
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None]:
        mask_BT, keep_BT = ctx.saved_tensors
        if kernels := scan_kernels(grad_BT):
            return kernels.segment_means(grad_BT, mask_BT, keep_BT, backward=True), None, None
        grad_BT = _spread_sums(grad_BT, mask_BT, keep_BT, sum_over=None)
        return grad_BT if keep_BT is None else torch.where(keep_BT, grad_BT, 0.0), None, None


def _spread_sums(
    x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor | None, sum_over: Tensor | None
) -> Tensor:
    """For every run: the sum of x over its entries in `sum_over` (None: all) over how many it
    keeps."""
    out_BT = torch.empty_like(x_BT, memory_format=torch.contiguous_format)
    if out_BT.numel() == 0:
        return out_BT
    for rows in row_chunks(x_BT):
        runs = Runs.of(mask_BT[rows])
        counts = runs.lengths if keep_BT is None else runs.sums(keep_BT[rows]).clamp(min=1)
        x = x_BT[rows] if sum_over is None else torch.where(sum_over[rows], x_BT[rows], 0.0)
        runs.spread(runs.sums(x) / counts, out_BT[rows])
    return out_BT


class DiscountedCumsum:
    """y[:, t] = x[:, t] + decay * y[:, t - 1] on float64 tensors of up to `max_width` columns.

    y[t] / decay^t is a cumulative sum of x[t] / decay^t. Both are taken in blocks, because decay^t
    would underflow; a block then needs the last value of the block before it, and anything older
    has decayed below 1e-150.
    """

    def __init__(self, decay: float, max_width: int, device: torch.device) -> None:
        """`decay` lies in [0, 1]; 0 and 1 are exact."""
        self.decay = decay
        self.max_block = max_width
        if 0.0 < decay < 1.0:
            self.max_block = min(max_width, max(1, int(math.log(MAX_SCALE) / -math.log(decay))))
        self.powers = decay ** torch.arange(self.max_block + 1, dtype=torch.float64, device=device)
        self.weights = 1.0 / self.powers

    def __call__(self, x_BT: Tensor) -> Tensor:
        if self.decay == 0.0:
            return x_BT.clone()
        if self.decay == 1.0:
            return x_BT.cumsum(1)
        num_rows, width = x_BT.shape
        num_blocks = -(-width // self.max_block)
        block = -(-width // num_blocks)
        if padding := num_blocks * block - width:
            x_BT = F.pad(x_BT, (0, padding))
        y = x_BT.view(num_rows, num_blocks, block) * self.weights[:block]
        y.cumsum_(-1).mul_(self.powers[:block])
        if num_blocks > 1:
            y[:, 1:].addcmul_(y[:, :-1, -1:].clone(), self.powers[1 : block + 1])
        return y.flatten(1)[:, :width]


def row_chunks(like_BT: Tensor) -> Iterator[slice]:
    """Slices that cover all rows, each small enough for the CPU's cache; one slice elsewhere."""
    num_rows, width = like_BT.shape
    step = max(1, CPU_CHUNK // max(width, 1)) if like_BT.device.type == "cpu" else max(num_rows, 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


@torch.no_grad()
def map_valid_tokens(
    fn: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    mask_BT: Tensor,
    *,
    num_results: int = 1,
) -> tuple[Tensor, ...]:
    """Apply `fn` to the valid tokens of each row. Returns its results as (B, T), 0 where masked.

    `fn` takes and returns float64 tensors (rows, W) and may work in place. A row holds its tokens
    *from last to first* in columns 1, 2, ... and zeros after the first; column 0 holds 0 and stands
    for what follows the last token. Results come in the dtype of `tensors[0]`, float32 at least,
    and carry no gradient. `fn` sees the same values whatever padding and gaps lie between the valid
    ones. Example: mask [[0, 1, 1, 0, 1]], tensor [[9, 1, 2, 9, 4]] -> fn receives [[0, 4, 2, 1]].
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    outputs = tuple(
        torch.empty(mask_BT.shape, dtype=dtype, device=mask_BT.device) for _ in range(num_results)
    )
    if mask_BT.numel() == 0:
        return outputs
    for rows in row_chunks(mask_BT):
        # The packed column of every token, 0 for masked ones. -1 has all bits set: masking is an
        # AND.
        minus_mask = mask_BT[rows].view(torch.int8).neg().long()
        slots = minus_mask.cumsum(1)
        num_slots = 1 - slots[:, -1:]
        slots = slots.add_(num_slots).bitwise_and_(minus_mask)
        shape = len(slots), int(num_slots.max())
        packed = []
        for tensor in tensors:
            part = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
            part = part.scatter_(1, slots, tensor[rows]).double()
            part[:, 0] = 0.0  # masked tokens landed here
            packed.append(part)
        for output, result in zip(outputs, fn(*packed), strict=True):
            result[:, 0] = 0.0  # what masked tokens receive
            torch.gather(result.to(dtype), 1, slots, out=output[rows])
    return outputs


@dataclass(frozen=True)
class Runs:
    """The rows of a mask, cut wherever it changes: N runs of ones and gaps, in reading order.

    Example: mask [[1, 1, 0, 1], [0, 1, 1, 1]] -> lengths [2, 1, 1, 1, 3], valid [1, 0, 1, 0, 1],
    rows [0, 0, 0, 1, 1], columns [0, 1, 2, 0, 1].
    """

    shape: torch.Size
    lengths: Tensor
    valid: Tensor  # whether a piece is a run of ones
    rows: Tensor
    columns: Tensor  # number of the piece in its row

    @classmethod
    def of(cls, mask_BT: Tensor) -> Runs:
        changes_BT = mask_BT.clone()
        changes_BT[:, 1:] ^= mask_BT[:, :-1]
        changes_BT[:, :1] = True
        starts = changes_BT.flatten().nonzero().flatten()
        lengths = torch.diff(starts, append=starts.new_tensor([mask_BT.numel()]))
        rows = starts.div(mask_BT.shape[1], rounding_mode="floor")
        first_of_row = (starts == rows * mask_BT.shape[1]).nonzero().flatten()
        columns = torch.arange(len(starts), device=starts.device) - first_of_row[rows]
        return cls(mask_BT.shape, lengths, mask_BT.flatten()[starts], rows, columns)

    def sums(self, x_BT: Tensor) -> Tensor:
        """Sum over each run in float64, (N,); 0 for gaps, whatever they hold."""
        flat = x_BT.flatten().double()
        sums = torch.segment_reduce(flat, "sum", lengths=self.lengths, unsafe=True)
        return torch.where(self.valid, sums, 0.0)

    def table(self, pieces: Tensor) -> Tensor:
        """Pieces (N,) as one line for each row of the mask, filled up with zeros."""
        width = int(self.columns.max()) + 1
        table = torch.zeros(self.shape[0], width, dtype=pieces.dtype, device=pieces.device)
        table[self.rows, self.columns] = pieces
        return table

    def spread(self, pieces: Tensor, out_BT: Tensor) -> None:
        """Write the value of each piece (N,) on all of its tokens, into contiguous `out_BT`."""
        piece_of_token = torch.repeat_interleave(self.lengths, output_size=out_BT.numel())
        torch.index_select(pieces.to(out_BT.dtype), 0, piece_of_token, out=out_BT.view(-1))
