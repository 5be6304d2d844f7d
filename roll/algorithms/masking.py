"""Reductions over the valid entries of a tensor.

Masked entries are replaced *before* any arithmetic (`select`), never multiplied by zero: `0 * inf`
is NaN, in the value and in the gradient. So a masked entry may hold anything, NaN included, and
changes nothing. Masks may be of any dtype; non-zero means valid. Results are at least float32.
"""

import torch
from torch import Tensor

from roll.ops.scans import segment_mean

WHITEN_EPS = 1e-8


def check_mask(tensor: Tensor, mask: Tensor, name: str = "tensor") -> None:
    """Raise ValueError unless `mask` has the shape of `tensor`."""
    if tensor.shape == mask.shape:
        return
    hint = ""
    if tensor.ndim == mask.ndim == 2 and abs(tensor.shape[1] - mask.shape[1]) == 1:
        hint = "; token-level tensors have S-1 columns and pair with response_mask[:, 1:]"
    raise ValueError(
        f"{name} has shape {tuple(tensor.shape)} but its mask has shape {tuple(mask.shape)}{hint}"
    )


def check_finite(tensor: Tensor, mask: Tensor | None = None, name: str = "tensor") -> None:
    """Raise ValueError with row numbers when a valid entry of `tensor` (first axis: rows) is NaN or
    infinite."""
    if mask is not None:
        check_mask(tensor, mask, name)
    if torch.isfinite(tensor.sum()):  # then so is every entry, masked or not
        return
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask.bool()
    if not bad.any():
        return
    first = tuple(bad.nonzero()[0].tolist())
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    shown = f"{rows[:8]}" + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    raise ValueError(
        f"{name} is not finite at {int(bad.sum())} valid entries in rows {shown}: "
        f"{name}{list(first)} is {tensor[first].item()}; mask these entries or repair what "
        "produced them"
    )


def select(tensor: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`tensor` where `mask` is non-zero, `fill` elsewhere, in float32 or better. Masked entries
    receive no gradient."""
    check_mask(tensor, mask)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.where(mask.bool(), tensor.to(dtype), fill)


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the valid entries, over everything or along `dim`."""
    return select(tensor, mask).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the valid entries, over everything or along `dim`; 0 where there are none."""
    return masked_sum(tensor, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of all valid entries (ddof 1, or 0 when not `unbiased`); 0 for fewer than two."""
    return _mean_var(values, mask, correction=int(unbiased))[1]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale the valid entries to unit variance over all of them, and to zero mean unless
    `shift_mean` is false.

    Fewer than two valid entries have no variance and come back unchanged. Masked entries become 0.
    """
    mean, var = _mean_var(values, mask)
    return _whiten(values, mask, mean, var, shift_mean, num_samples=int(mask.bool().sum()))


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Zero mean, unit variance (ddof 0, floored at `eps`) of the valid entries along `dim`; masked
    entries become 0."""
    centred = select(select(tensor, mask) - masked_mean(tensor, mask, dim).unsqueeze(dim), mask)
    variance = masked_mean(centred.square(), mask, dim).unsqueeze(dim)
    return centred * variance.clamp(min=eps).rsqrt()


def response_level_masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Whiten by the statistics of the rows' means, so that long rows do not count more. (B, T) in,
    (B, T) out.

    The mean and variance (ddof 1) are taken over the rows that have a valid entry; with fewer than
    two such rows the values come back unchanged. Masked entries become 0.
    """
    nonempty_B = mask.bool().any(-1)
    mean, var = _mean_var(masked_mean(values, mask, dim=-1), nonempty_B)
    return _whiten(values, mask, mean, var, shift_mean, num_samples=int(nonempty_B.sum()))


def clip_fraction(values: Tensor, low: float, high: float, mask: Tensor | None = None) -> Tensor:
    """Share of the valid entries that lie strictly outside [low, high]; 0 if there are none."""
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    return masked_mean(((values < low) | (values > high)).float(), mask)


def segment_masked_mean(tensor: Tensor, mask: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean over each contiguous run of `mask` in a row, written on the whole run; 0 outside. (B, T)
    in, (B, T) out.

    `keep` (default: everything) leaves some entries of a run out of its mean without splitting the
    run; a run that keeps nothing is 0. Differentiable: each kept entry receives 1/n of the gradient
    that reaches its run. Example: [[1, 3, 9, 5]] with mask [[1, 1, 0, 1]] -> [[2, 2, 0, 5]].
    """
    check_mask(tensor, mask)
    keep_BT = None
    if keep is not None:
        check_mask(keep, mask, "keep")
        keep_BT = mask.bool() & keep.bool()
    return segment_mean(
        tensor.to(torch.promote_types(tensor.dtype, torch.float32)), mask.bool(), keep_BT
    )


def _mean_var(values: Tensor, mask: Tensor, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and variance of the valid entries, two scalars. They are taken from the packed entries
    in float64, so that neither padding nor gaps can change a bit of them."""
    check_mask(values, mask)
    dtype = torch.promote_types(values.dtype, torch.float32)
    valid = values[mask.bool()].double()
    if valid.numel() < 2:
        return valid.sum().to(dtype), values.new_zeros((), dtype=dtype)
    var, mean = torch.var_mean(valid, correction=correction)
    return mean.to(dtype), var.to(dtype)


def _whiten(
    values: Tensor, mask: Tensor, mean: Tensor, var: Tensor, shift_mean: bool, num_samples: int
) -> Tensor:
    values = select(values, mask)
    if num_samples < 2:
        return values
    whitened = (values - mean) * torch.rsqrt(var + WHITEN_EPS)
    return select(whitened if shift_mean else whitened + mean, mask)
