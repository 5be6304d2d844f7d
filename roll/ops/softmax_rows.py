"""The two passes that the fused log-prob operators make over a piece of logits, and how large a piece is.

`row_statistics` reads rows of logits and gives normaliser, log-probs and entropy; `row_gradient_` turns a tile of
logits into its own gradient, in place. Both are plain torch on blocks of rows, so that their float32 temporaries stay
small next to the piece itself; a kernel that does either in one pass can take the place of the function's body.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class PieceLimits:
    """How much of the logits may exist at one time on a kind of device."""

    chunk_bytes: int  # one chunk of logits between two matrix products
    block_bytes: int  # one float32 temporary of the passes over that chunk
    min_rows: int  # a chunk with fewer rows would leave the matrix product waiting for the weight
    min_columns: int  # a tile with fewer columns would spend its time on adding up the gradient of the hidden states
    row_multiple: int  # whole tiles of the matrix product


# Smaller blocks would stay in a CPU's cache, but next to the products that saves nothing, and each operation on a block
# ends with all threads waiting for the slowest one, which takes long on a busy machine.
CPU_LIMITS = PieceLimits(64 << 20, 16 << 20, min_rows=32, min_columns=1024, row_multiple=1)
ACCELERATOR_LIMITS = PieceLimits(192 << 20, 64 << 20, min_rows=256, min_columns=8192, row_multiple=128)


# Stands for -inf where p * log p is formed: its exponential is 0, in float64 too, and so is their product. Clamping to
# it lets NaN through.
_LOG_OF_ZERO = -1e4


def piece_limits(device: torch.device) -> PieceLimits:
    return CPU_LIMITS if device.type == "cpu" else ACCELERATOR_LIMITS


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays (gradient checks need it); everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose copy in the accumulation dtype is about `block_bytes`; one empty slice for no rows."""
    step = max(1, piece_limits(device).block_bytes // (num_columns * accumulation_dtype(dtype).itemsize))
    starts = range(0, max(1, num_rows), step)
    return (slice(start, min(start + step, num_rows)) for start in starts)


@dataclass(frozen=True)
class LogitTransform:
    """How a raw product z becomes the logit y of the softmax: y = cap(scale * z) / temperature."""

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                hint = " (greedy decoding has no log-probs to train on: use 1.0)" if name == "temperature" else ""
                raise ValueError(f"{name}={value} must be positive and finite{hint}")

    @property
    def slope(self) -> float:
        """dy/dz, without the factor 1 - tanh^2 that a cap adds."""
        return self.scale / self.temperature

    def unscaled(self, raw: Tensor) -> tuple[Tensor, float]:
        """(x, k) with y = k * x: x is `raw` itself, or a fresh tanh of it in the accumulation dtype."""
        if self.soft_cap is None:
            return raw, self.slope
        squashed = raw.to(accumulation_dtype(raw.dtype), copy=True).mul_(self.scale / self.soft_cap).tanh_()
        return squashed, self.soft_cap / self.temperature


class RowStatistics(NamedTuple):
    """Per row, in the accumulation dtype; None for what was not asked for."""

    log_normalizer: Tensor  # log sum_j exp(y_j)
    log_probs: Tensor | None  # y_label - log_normalizer
    entropy: Tensor | None  # -sum_j p_j log p_j


def concatenate(parts: list[RowStatistics]) -> RowStatistics:
    """The rows of all parts, one after the other."""
    log_normalizers, log_probs, entropies = zip(*parts, strict=True)
    return RowStatistics(
        torch.cat(log_normalizers),
        None if log_probs[0] is None else torch.cat(log_probs),
        None if entropies[0] is None else torch.cat(entropies),
    )


def row_statistics(
    raw: Tensor, labels: Tensor | None, transform: LogitTransform, with_entropy: bool, overwrite: bool = False
) -> RowStatistics:
    """Normaliser, log-probs of `labels` (R,) and entropy of the rows of `raw` (R, V), which stay as they are unless
    they may be overwritten.

    A logit of -inf is a token that cannot occur: it adds nothing, and as a label its log-prob is -inf. A row with
    nothing but -inf gives log-prob -inf and entropy 0. NaN and +inf give NaN: a broken model must not look healthy.
    """
    overwrite = overwrite and raw.dtype == accumulation_dtype(raw.dtype)
    if overwrite and not with_entropy and transform.soft_cap is None:
        return _block_statistics(raw, labels, transform, with_entropy, overwrite)  # needs no temporaries
    return concatenate(
        [
            _block_statistics(raw[block], None if labels is None else labels[block], transform, with_entropy, overwrite)
            for block in row_blocks(raw.shape[0], raw.shape[1], raw.dtype, raw.device)
        ]
    )


def _block_statistics(
    raw: Tensor, labels: Tensor | None, transform: LogitTransform, with_entropy: bool, overwrite: bool
) -> RowStatistics:
    dtype = accumulation_dtype(raw.dtype)
    logits, factor = transform.unscaled(raw)
    top = logits.amax(1, keepdim=True).to(dtype).mul_(factor)
    top.masked_fill_(top == -torch.inf, 0.0)  # -inf - -inf is NaN; any finite reference will do for such a row
    # Promotes low precision to float32 in the same pass.
    below_top = torch.add(-top, logits, alpha=factor, out=logits if overwrite or logits is not raw else None)
    label_below_top = None if labels is None else below_top.gather(1, labels.unsqueeze(1)).squeeze(1)
    mean_below_top = None
    if with_entropy:
        below_top.clamp_(min=_LOG_OF_ZERO)
        weights = below_top.exp()
        total = weights.sum(1)
        mean_below_top = weights.mul_(below_top).sum(1)
    else:
        total = below_top.exp_().sum(1)
    total.masked_fill_(total == 0, 1.0)  # only in a row with nothing but -inf: no mass, normaliser 0
    log_total = total.log()
    return RowStatistics(
        top.squeeze(1) + log_total,
        None if label_below_top is None else label_below_top - log_total,
        None if mean_below_top is None else log_total - mean_below_top / total,
    )


class RowCoefficients(NamedTuple):
    """What turns logits into gradients, per row: dL/dz_j = p_j * (constant + per_log_prob * log p_j), and dL/dz_label.

    The factor 1 - tanh^2 of a cap is in `at_label`, and not in `constant` and `per_log_prob`.
    """

    log_normalizer: Tensor
    constant: Tensor
    per_log_prob: Tensor | None
    labels: Tensor | None
    at_label: Tensor | None

    def rows(self, part: slice) -> RowCoefficients:
        return RowCoefficients(
            self.log_normalizer[part],
            self.constant[part],
            None if self.per_log_prob is None else self.per_log_prob[part],
            None if self.labels is None else self.labels[part],
            None if self.at_label is None else self.at_label[part],
        )


def row_coefficients(
    statistics: RowStatistics,
    labels: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> RowCoefficients:
    """The derivative of log-probs and entropy, solved for what differs by row. With g and e their incoming gradients:

        dL/dy_j = g * (1[j = label] - p_j) - e * p_j * (log p_j + entropy)

    The label's entry comes from its saved log-prob, with -expm1(log p) for 1 - p: in bfloat16, 1 minus a rounded p
    would be 0 for every token that the model is sure of.
    """
    constant = torch.zeros_like(statistics.log_normalizer)
    per_log_prob = at_label = None
    if grad_entropy is not None:
        assert statistics.entropy is not None
        constant = constant - grad_entropy * statistics.entropy
        per_log_prob = grad_entropy * -transform.slope
    if grad_log_probs is not None:
        assert statistics.log_probs is not None and labels is not None
        constant = constant - grad_log_probs
        at_label = -grad_log_probs * torch.expm1(statistics.log_probs)
        if grad_entropy is not None and statistics.entropy is not None:
            log_probs = statistics.log_probs.clamp(min=_LOG_OF_ZERO)
            at_label = at_label - grad_entropy * log_probs.exp() * (log_probs + statistics.entropy)
        if transform.soft_cap is not None:
            squashed = (statistics.log_probs + statistics.log_normalizer) * (transform.temperature / transform.soft_cap)
            at_label = at_label * (1.0 - squashed.square())
        at_label = at_label * transform.slope
    return RowCoefficients(
        log_normalizer=statistics.log_normalizer,
        constant=constant * transform.slope,
        per_log_prob=per_log_prob,
        labels=None if at_label is None else labels,
        at_label=at_label,
    )


def row_gradient_(raw: Tensor, rows: RowCoefficients, transform: LogitTransform, first_column: int = 0) -> None:
    """Overwrites raw logits (R, C), the columns from `first_column` on, with the gradient with respect to them."""
    in_place = raw.dtype == accumulation_dtype(raw.dtype) and transform.soft_cap is None
    blocks = row_blocks(raw.shape[0], raw.shape[1], raw.dtype, raw.device)
    for block in [slice(None)] if in_place and rows.per_log_prob is None else blocks:
        logits, factor = transform.unscaled(raw[block])
        log_probs = torch.add(-rows.log_normalizer[block, None], logits, alpha=factor, out=logits if in_place else None)
        weights = rows.constant[block, None]
        if rows.per_log_prob is not None:
            log_probs.clamp_(min=_LOG_OF_ZERO)
            weights = torch.addcmul(weights, log_probs, rows.per_log_prob[block, None])
        if transform.soft_cap is not None:
            weights = weights * logits.square_().neg_().add_(1.0)  # here `logits` is the tanh, and ours to overwrite
        torch.mul(log_probs.exp_(), weights, out=raw[block])
    if rows.labels is None or rows.at_label is None:
        return
    columns = (rows.labels - first_column).unsqueeze(1)
    inside = (columns >= 0) & (columns < raw.shape[1])
    columns.clamp_(0, raw.shape[1] - 1)
    # Every row writes; one whose label is elsewhere writes what is there already: no host sync to find out which.
    raw.scatter_(1, columns, torch.where(inside, rows.at_label.unsqueeze(1).to(raw.dtype), raw.gather(1, columns)))
