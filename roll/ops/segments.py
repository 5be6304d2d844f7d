"""Work on the valid tokens of each row, or on its turns, as if masked tokens did not exist.

A mask has gaps: prompt, observations between turns, padding. Walking over its T columns one by one is slow. Here the
valid tokens of a row are packed into neighbouring columns (`map_valid_tokens`), or a row is cut where its mask changes
(`Runs`); both take a few passes over the data, whatever the number of gaps. Masks are boolean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from roll.ops.kernels import triton_module

# Entries of the chunk of rows that is worked on at a time on a CPU, so that its temporaries stay in the cache.
CPU_CHUNK = 2**18


def scan_kernels(tensor: Tensor) -> ModuleType | None:
    """`roll.ops.triton_scans` where it can work on `tensor`: on a GPU."""
    return triton_module("triton_scans") if tensor.is_cuda else None


def row_chunks(like_BT: Tensor) -> Iterator[slice]:
    """Slices that cover all rows, each small enough for the CPU's cache; one slice on other devices."""
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
    """Apply `fn` to the valid tokens of each row. Returns its `num_results` results as (B, T) tensors, 0 where masked.

    `fn` takes and returns float64 tensors (rows, W). A row holds its tokens *from last to first* in columns 1, 2, ...
    and zeros after the first; column 0 holds 0 and stands for what follows the last token. `fn` may work in place.
    Results come in the dtype of `tensors[0]`, float32 at least, and carry no gradient.

    Masked entries are never read into arithmetic, and `fn` sees the same values whatever padding and gaps lie between
    the valid ones. Example: mask [[0, 1, 1, 0, 1]], tensor [[9, 1, 2, 9, 4]] -> fn receives [[0, 4, 2, 1]].
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    outputs = tuple(
        torch.empty(mask_BT.shape, dtype=dtype, device=mask_BT.device) for _ in range(num_results)
    )
    if mask_BT.numel() == 0:
        return outputs
    for rows in row_chunks(mask_BT):
        slots, width = _reversed_slots(mask_BT[rows])
        packed = [_pack(tensor[rows], slots, width) for tensor in tensors]
        for output, result in zip(outputs, fn(*packed), strict=True):
            result[:, 0] = 0.0  # what masked tokens receive
            torch.gather(result.to(dtype), 1, slots, out=output[rows])
    return outputs


def _reversed_slots(mask: Tensor) -> tuple[Tensor, int]:
    """The packed column of every token, 0 for masked ones, and the number of packed columns."""
    minus_mask = (
        mask.view(torch.int8).neg().long()
    )  # -1 has all bits set: masking is then a bitwise AND
    slots = minus_mask.cumsum(1)
    num_slots = 1 - slots[:, -1:]
    return slots.add_(num_slots).bitwise_and_(minus_mask), int(num_slots.max())


def _pack(tensor: Tensor, slots: Tensor, width: int) -> Tensor:
    packed = torch.zeros(len(slots), width, dtype=tensor.dtype, device=tensor.device)
    packed = packed.scatter_(1, slots, tensor).double()
    packed[:, 0] = 0.0  # masked tokens landed here
    return packed


@dataclass(frozen=True)
class Runs:
    """The rows of a mask, cut wherever it changes: N runs of ones and gaps between them, in reading order.

    Example: mask [[1, 1, 0, 1], [0, 1, 1, 1]] -> lengths [2, 1, 1, 1, 3], valid [1, 0, 1, 0, 1], rows [0, 0, 0, 1, 1],
    columns [0, 1, 2, 0, 1].
    """

    shape: torch.Size
    lengths: Tensor
    valid: Tensor
    """Whether a piece is a run of ones."""
    rows: Tensor
    columns: Tensor
    """Number of the piece in its row."""

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
        sums = torch.segment_reduce(
            x_BT.flatten().double(), "sum", lengths=self.lengths, unsafe=True
        )
        return torch.where(self.valid, sums, 0.0)

    def table(self, pieces: Tensor) -> Tensor:
        """Pieces (N,) as one line for each row of the mask, filled up with zeros."""
        width = int(self.columns.max()) + 1
        table = torch.zeros(self.shape[0], width, dtype=pieces.dtype, device=pieces.device)
        table[self.rows, self.columns] = pieces
        return table

    def spread(self, pieces: Tensor, out_BT: Tensor) -> None:
        """Write the value of each piece (N,) on all of its tokens, into `out_BT`, which is contiguous."""
        piece_of_token = torch.repeat_interleave(self.lengths, output_size=out_BT.numel())
        torch.index_select(pieces.to(out_BT.dtype), 0, piece_of_token, out=out_BT.view(-1))
