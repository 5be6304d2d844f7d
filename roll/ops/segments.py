"""Work on the valid tokens of each row, or on its turns, as if masked tokens did not exist.

A mask has gaps: prompt, observations between turns, padding. Instead of walking over T columns, the segments of a row
are packed into neighbouring columns, a function is applied to the packed tensor, and its result is spread back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Entries of the chunk of rows that is worked on at a time on a CPU, so that its temporaries stay in the cache.
CPU_CHUNK = 2**18


@torch.no_grad()
def map_segments(
    fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], mask_BT: Tensor, *, runs: bool
) -> tuple[Tensor, ...]:
    """Apply `fn` to the segments of each row. Returns one (B, T) tensor for each result of `fn`, 0 where masked.

    A segment is a valid token or, with `runs`, a contiguous run of them, which then holds the sum over its tokens.
    `fn` takes and returns float64 tensors (rows, W). A row holds its segments *from last to first* in columns 1, 2, ...
    and zeros after the first; column 0 holds 0 and stands for whatever follows the last segment. `fn` may work in
    place. Each result is written on all tokens of its segment, in the dtype of `tensors[0]`, float32 at least.

    Masked tokens are never read into arithmetic, and `fn` sees the same packed values whatever padding and gaps lie
    between them. The results carry no gradient. `mask_BT` is boolean.

    Example: mask [[0, 1, 1, 0, 1]], tensor [[9, 1, 2, 9, 4]] -> fn receives [[0, 4, 2, 1]], with runs [[0, 4, 3]].
    """
    num_rows, width = mask_BT.shape
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if mask_BT.numel() == 0:
        results = fn(*(torch.zeros(0, 1, dtype=torch.float64, device=mask_BT.device) for _ in tensors))
        return tuple(torch.zeros(num_rows, width, dtype=dtype, device=mask_BT.device) for _ in results)
    chunk = max(1, CPU_CHUNK // width) if mask_BT.device.type == "cpu" else num_rows
    outputs: list[Tensor] = []
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        slots, packed_width = _reversed_slots(mask_BT[rows], runs)
        packed = [_pack(tensor[rows], slots, packed_width, runs) for tensor in tensors]
        for i, result in enumerate(fn(*packed)):
            if start == 0:
                outputs.append(torch.empty(num_rows, width, dtype=dtype, device=mask_BT.device))
            result[:, 0] = 0.0  # what masked tokens receive
            torch.gather(result.to(dtype), 1, slots, out=outputs[i][rows])
    return tuple(outputs)


def _reversed_slots(mask: Tensor, runs: bool) -> tuple[Tensor, int]:
    """The packed column of every token, 0 for masked ones, and the number of packed columns."""
    begins = mask.long()
    keep_bits = -begins  # all bits set where valid: a bitwise AND is cheaper than a multiplication
    if runs:
        begins[:, 1:] &= ~keep_bits[:, :-1]
    slots = begins.cumsum(1)
    num_slots = slots[:, -1:] + 1
    packed_width = int(num_slots.max())
    return slots.neg_().add_(num_slots).bitwise_and_(keep_bits), packed_width


def _pack(tensor: Tensor, slots: Tensor, width: int, runs: bool) -> Tensor:
    if runs:
        packed = torch.zeros(len(slots), width, dtype=torch.float64, device=tensor.device)
        packed.scatter_add_(1, slots, tensor.double())
    else:
        packed = torch.zeros(len(slots), width, dtype=tensor.dtype, device=tensor.device)
        packed = packed.scatter_(1, slots, tensor).double()
    packed[:, 0] = 0.0  # masked tokens landed here
    return packed
