"""Mean over each contiguous run of a mask, without a loop over rows or runs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.ops.segments import Runs, row_chunks, scan_kernels


def segment_mean(x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor | None = None) -> Tensor:
    """Replace each entry of a run of `mask_BT` by the mean of the run's kept entries; 0 outside and where none is kept.

    The masks are boolean, `keep_BT` a subset of `mask_BT` and by default the same. Sums are taken in float64, the
    result has the dtype of `x_BT`. Differentiable once. Example: x = [[1, 3, 9, 5]], mask = [[1, 1, 0, 1]] ->
    [[2, 2, 0, 5]].
    """
    return _SegmentMean.apply(x_BT, mask_BT, keep_BT)


class _SegmentMean(torch.autograd.Function):
    """The mean and its gradient are the same reduction, so backward needs the two masks and nothing else."""

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
    """For every run: the sum of x over its entries in `sum_over` (all, if None), divided by how many it keeps."""
    out_BT = torch.empty_like(x_BT, memory_format=torch.contiguous_format)
    if out_BT.numel() == 0:
        return out_BT
    for rows in row_chunks(x_BT):
        runs = Runs.of(mask_BT[rows])
        counts = runs.lengths if keep_BT is None else runs.sums(keep_BT[rows]).clamp(min=1)
        sums = runs.sums(
            x_BT[rows] if sum_over is None else torch.where(sum_over[rows], x_BT[rows], 0.0)
        )
        runs.spread(sums / counts, out_BT[rows])
    return out_BT
