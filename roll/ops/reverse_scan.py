"""First-order recurrences over tokens, as scaled cumulative sums instead of a loop."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.ops.segments import map_segments

# Powers of the decay inside one block stay within this factor, far from the limits of float64.
MAX_SCALE = 1e100


def reverse_scan(x_BT: Tensor, mask_BT: Tensor, decay: float, *, runs: bool = False) -> Tensor:
    """y[t] = x[t] + decay * y[t'] over the valid tokens of each row, t' being the next valid token; 0 where masked.

    With `runs` the recurrence goes over contiguous runs of the mask: x is summed over a run, and all its tokens get the
    run's y. `decay` lies in [0, 1]; 0 and 1 are exact. Any content of masked entries is ignored; valid ones are finite.
    Example: x = [[1, 2, 9, 4]], mask = [[1, 1, 0, 1]], decay = 0.5 -> [[3, 4, 0, 4]], with `runs` [[5, 5, 0, 4]].
    """
    return map_segments(lambda x: (discounted_cumsum(x, decay),), [x_BT], mask_BT, runs=runs)[0]


def discounted_cumsum(x_BT: Tensor, decay: float) -> Tensor:
    """y[:, t] = x[:, t] + decay * y[:, t - 1], from left to right, in float64. `decay` lies in [0, 1].

    y[t] / decay^t is a cumulative sum of x[t] / decay^t. Both are taken in blocks, because decay^t would underflow; a
    block then needs the last value of the block before it, and anything older has decayed below 1e-60.
    """
    num_rows, width = x_BT.shape
    if decay == 0.0:
        return x_BT.clone()
    if decay == 1.0:
        return x_BT.cumsum(1)
    block = min(width, max(1, int(math.log(MAX_SCALE) / -math.log(decay))))
    num_blocks = -(-width // block)
    block = -(-width // num_blocks)
    powers = decay ** torch.arange(block + 1, dtype=torch.float64, device=x_BT.device)
    weights = 1.0 / powers[:-1]
    if padding := num_blocks * block - width:
        x_BT = F.pad(x_BT, (0, padding))
    y = (x_BT.view(num_rows, num_blocks, block) * weights).cumsum_(-1).mul_(powers[:-1])
    if num_blocks > 1:
        y[:, 1:].addcmul_(y[:, :-1, -1:].clone(), powers[1:])
    return y.view(num_rows, -1)[:, :width]
