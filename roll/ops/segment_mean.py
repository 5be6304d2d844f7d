"""Mean over each contiguous run of a mask, without a loop over rows or runs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.ops.segments import map_segments


def segment_mean(x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor) -> Tensor:
    """Replace each entry of a run of `mask_BT` by the mean of the run's kept entries; 0 outside and where none is kept.

    `mask_BT` and `keep_BT` are boolean, `keep_BT` a subset of `mask_BT`. Sums are taken in float64.
    Differentiable once. Example: x = [[1, 3, 9, 5]], mask = [[1, 1, 0, 1]] -> [[2, 2, 0, 5]].
    """
    return _SegmentMean.apply(x_BT, mask_BT, keep_BT)


class _SegmentMean(torch.autograd.Function):
    """The mean and its gradient are the same reduction, so backward needs the two masks and nothing else."""

    @staticmethod
    def forward(ctx: Any, x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor) -> Tensor:
        ctx.save_for_backward(mask_BT, keep_BT)
        return _run_sums_over_kept_counts(torch.where(keep_BT, x_BT, 0.0), mask_BT, keep_BT)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the base class declares *grad_outputs)
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None]:
        mask_BT, keep_BT = ctx.saved_tensors
        return torch.where(keep_BT, _run_sums_over_kept_counts(grad_BT, mask_BT, keep_BT), 0.0), None, None


def _run_sums_over_kept_counts(x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor) -> Tensor:
    return map_segments(lambda sums, counts: (sums / counts.clamp(min=1),), [x_BT, keep_BT], mask_BT, runs=True)[0]
