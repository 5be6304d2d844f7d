"""First-order recurrences over tokens: an associative scan on a GPU, scaled cumulative sums elsewhere, no loop."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.ops.segments import Runs, map_valid_tokens, row_chunks, scan_kernels

# Powers of the decay inside one block stay within this factor: times any float32, and summed up, it fits float64.
MAX_SCALE = 1e250


def reverse_scan(x_BT: Tensor, mask_BT: Tensor, decay: float) -> Tensor:
    """y[t] = x[t] + decay * y[t'] over the valid tokens of each row, t' being the next valid token; 0 where masked.

    `decay` lies in [0, 1]; 0 and 1 are exact. Any content of masked entries is ignored; valid ones are finite.
    Example: x = [[1, 2, 9, 4]], mask = [[1, 1, 0, 1]], decay = 0.5 -> [[3, 4, 0, 4]].
    """
    if kernels := scan_kernels(x_BT):
        return kernels.discounted_sums(x_BT.detach(), None, mask_BT, decay, 1.0)[1]
    scan = DiscountedCumsum(decay, x_BT.shape[1] + 1, x_BT.device)
    return map_valid_tokens(lambda x: (scan(x),), [x_BT], mask_BT)[0]


def advantage_scan(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(A, A + V) with A[t] = r[t] + gamma V[t'] - V[t] + gamma lam A[t']; V and A are 0 after the last valid token."""
    if kernels := scan_kernels(rewards_BT):
        return kernels.discounted_sums(rewards_BT.detach(), values_BT.detach(), mask_BT, gamma, lam)
    scan = DiscountedCumsum(gamma * lam, rewards_BT.shape[1] + 1, rewards_BT.device)

    def over_valid_tokens(r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Columns run backwards in time and column 0 is the end of the row, so t' is the column to the left.
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
    """The same recurrence over contiguous runs of the mask: x is summed over a run, and all its tokens get the run's y.

    Example: x = [[1, 2, 9, 4]], mask = [[1, 1, 0, 1]], decay = 0.5 -> [[5, 5, 0, 4]].
    """
    out_BT = torch.empty(
        x_BT.shape, dtype=torch.promote_types(x_BT.dtype, torch.float32), device=x_BT.device
    )
    if out_BT.numel() == 0:
        return out_BT
    for rows in row_chunks(x_BT):
        runs = Runs.of(mask_BT[rows])
        # Runs are the tokens of a shorter row.
        y = reverse_scan(runs.table(runs.sums(x_BT[rows])), runs.table(runs.valid), decay)
        runs.spread(y[runs.rows, runs.columns], out_BT[rows])
    return out_BT


class DiscountedCumsum:
    """y[:, t] = x[:, t] + decay * y[:, t - 1], from left to right, on float64 tensors of up to `max_width` columns.

    y[t] / decay^t is a cumulative sum of x[t] / decay^t. Both are taken in blocks, because decay^t would underflow; a
    block then needs the last value of the block before it, and anything older has decayed below 1e-150.
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
