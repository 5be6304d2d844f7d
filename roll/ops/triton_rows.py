"""Triton kernels over rows of logits: the statistics of a softmax in one read, its gradient in one
read and one write.

One program works on one row, or on a slice of the vocabulary of one row. A thread holds
`_LANE_BYTES` of neighbouring logits and keeps its own maximum and sums, so that threads meet only
once, at the end of the row. The torch versions in `softmax_rows` say what is computed; this module
is imported only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roll.ops.softmax_rows import LogitTransform, RowGradients, RowStatistics

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG_2 = tl.constexpr(0.6931471805599453)
# As `softmax_rows.LOG_OF_ZERO`: its exponential, to base 2 or e, is 0, and so is their product.
_LOG_OF_ZERO = tl.constexpr(-1e4)
_MINUS_INF = tl.constexpr(float("-inf"))

_LANE_BYTES = 16  # the widest load of a thread
# Threads of a program: few for a slice of some thousand columns, many for a whole vocabulary.
_WARPS = 4
# How many times a program of the gradient loads. Few: programs that run at the same time then work
# on memory that lies together, as those of a copy do.
_GRADIENT_LOADS = 4


def statistics_(
    state: Tensor,
    results: RowStatistics,
    raw: Tensor,
    labels: Tensor | None,
    row_numbers: Tensor | None,
    first_column: int,
    is_last: bool,
    transform: LogitTransform,
) -> None:
    """Adds columns `first_column` and following, raw (R', C), to the sums of R rows; the last slice
    gives `results`.

    state: (4, R) float32, rows contiguous: maximum, sum, sum of p log p and label's logit of the
    columns so far; not read for the first columns. results: log-normaliser, log-probs, entropy,
    each (R,), written if `is_last`. row_numbers: (R,), which row of `raw` is which, or None for the
    first R.
    """
    num_rows = state.shape[1]
    if num_rows == 0:
        return
    log_normalizer, log_probs, entropy = results
    with torch.cuda.device_of(raw):  # Triton launches on the current device
        launch: Any = _statistics_kernel[(num_rows,)]
        launch(
            *(raw, *raw.stride(), raw if row_numbers is None else row_numbers),
            *(raw if labels is None else labels, state, state.stride(0), log_normalizer),
            *(state if log_probs is None else log_probs, state if entropy is None else entropy),
            *(raw.shape[1], first_column, transform.inner or 0.0, transform.factor),
            HAS_ROW_NUMBERS=row_numbers is not None,
            HAS_LABELS=labels is not None,
            WITH_ENTROPY=entropy is not None,
            HAS_CAP=transform.inner is not None,
            IS_FIRST=first_column == 0,
            IS_LAST=is_last,
            LANES=_WARPS * 32,
            VECTOR=_LANE_BYTES // raw.element_size(),
            num_warps=_WARPS,
        )


@triton.jit
def _squash(raw, inner, HAS_CAP: tl.constexpr):
    """tanh(inner * raw), or raw."""
    if HAS_CAP:
        decay = tl.exp2(tl.abs(raw * inner) * (-2.0 * _LOG2_E))
        size = (1.0 - decay) / (1.0 + decay)
        return tl.where(raw * inner < 0.0, -size, size)
    return raw


@triton.jit
def _join(top, total, moment, new_top, new_total, new_moment, slope, WITH_ENTROPY: tl.constexpr):
    """Two sets of sums, each relative to its own maximum, as one."""
    peak = tl.maximum(top, new_top)
    # -inf - -inf is NaN; any finite reference does for what holds nothing but -inf.
    reference = tl.where(peak == _MINUS_INF, 0.0, peak)
    shift = (top - reference) * slope
    new_shift = (new_top - reference) * slope
    fade = tl.exp2(shift)
    new_fade = tl.exp2(new_shift)
    if WITH_ENTROPY:
        moment = fade * (moment + total * tl.maximum(shift, _LOG_OF_ZERO))
        moment += new_fade * (new_moment + new_total * tl.maximum(new_shift, _LOG_OF_ZERO))
    return peak, total * fade + new_total * new_fade, moment


@triton.jit
def _absorb(x, top, total, moment, slope, WITH_ENTROPY: tl.constexpr):
    """Adds x (LANES, VECTOR) to sums (LANES,): in the threads that hold them, without a word to
    others."""
    peak = tl.maximum(top, tl.max(x, axis=1))
    reference = tl.where(peak == _MINUS_INF, 0.0, peak)
    gap = (x - reference[:, None]) * slope
    p = tl.exp2(gap)
    shift = (top - reference) * slope
    fade = tl.exp2(shift)
    if WITH_ENTROPY:
        moment = fade * (moment + total * tl.maximum(shift, _LOG_OF_ZERO))
        moment += tl.sum(p * tl.maximum(gap, _LOG_OF_ZERO), axis=1)
    return peak, total * fade + tl.sum(p, axis=1), moment


@triton.jit
def _gather_lanes(top, total, moment, slope):
    """The sums of all lanes as those of the row."""
    peak = tl.max(top, axis=0)
    reference = tl.where(peak == _MINUS_INF, 0.0, peak)
    shift = (top - reference) * slope
    fade = tl.exp2(shift)
    row_moment = tl.sum(fade * (moment + total * tl.maximum(shift, _LOG_OF_ZERO)), axis=0)
    return peak, tl.sum(total * fade, axis=0), row_moment


@triton.jit
def _statistics_kernel(
    raw, row_stride, column_stride, row_numbers, labels, state, state_stride,
    log_normalizer, log_probs, entropy, num_columns, first_column, inner, factor,
    HAS_ROW_NUMBERS: tl.constexpr, HAS_LABELS: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if HAS_ROW_NUMBERS:
        source = tl.load(row_numbers + row)
    base = raw + source * row_stride
    slope = factor * _LOG2_E

    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full([LANES], _MINUS_INF, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    # Whole blocks without a mask, which would break the wide loads of an odd number of columns.
    num_whole = num_columns // (2 * BLOCK) * (2 * BLOCK)
    for start in range(0, num_whole, 2 * BLOCK):
        near = tl.load(base + (start + offsets) * column_stride)
        far = tl.load(base + (start + BLOCK + offsets) * column_stride)
        near = _squash(near.to(tl.float32), inner, HAS_CAP)
        far = _squash(far.to(tl.float32), inner, HAS_CAP)
        top, total, moment = _absorb(near, top, total, moment, slope, WITH_ENTROPY)
        top, total, moment = _absorb(far, top, total, moment, slope, WITH_ENTROPY)
    for start in range(num_whole, num_columns, BLOCK):
        inside = start + offsets < num_columns
        x = tl.load(base + (start + offsets) * column_stride, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, _squash(x, inner, HAS_CAP), _MINUS_INF)
        top, total, moment = _absorb(x, top, total, moment, slope, WITH_ENTROPY)

    peak, row_total, row_moment = _gather_lanes(top, total, moment, slope)
    at_label = 0.0
    if HAS_LABELS:
        label = tl.load(labels + row) - first_column
        inside = (label >= 0) & (label < num_columns)
        at_label = tl.load(base + label * column_stride, mask=inside, other=0.0).to(tl.float32)
        at_label = _squash(at_label, inner, HAS_CAP)
        if not IS_FIRST:
            at_label = tl.where(inside, at_label, tl.load(state + 3 * state_stride + row))
    if not IS_FIRST:
        old_peak = tl.load(state + row)
        old_total = tl.load(state + state_stride + row)
        old_moment = tl.load(state + 2 * state_stride + row)
        peak, row_total, row_moment = _join(
            old_peak, old_total, old_moment, peak, row_total, row_moment, slope, WITH_ENTROPY
        )
    if IS_LAST:
        reference = tl.where(peak == _MINUS_INF, 0.0, peak)
        mass = tl.where(row_total == 0.0, 1.0, row_total)
        log_mass = tl.log(mass)
        tl.store(log_normalizer + row, reference * factor + log_mass)
        if HAS_LABELS:
            tl.store(log_probs + row, (at_label - reference) * factor - log_mass)
        if WITH_ENTROPY:
            tl.store(entropy + row, log_mass - row_moment / mass * _LOG_2)
    else:
        tl.store(state + row, peak)
        tl.store(state + state_stride + row, row_total)
        tl.store(state + 2 * state_stride + row, row_moment)
        tl.store(state + 3 * state_stride + row, at_label)


def gradient(
    raw: Tensor,
    out: Tensor,
    rows: RowGradients,
    first_column: int,
    transform: LogitTransform,
    slots: Tensor | None = None,
    row_numbers: Tensor | None = None,
    out_row_numbers: Tensor | None = None,
) -> None:
    """The gradient of `softmax_rows.row_gradient_` with respect to `raw`, into `out`.

    raw and out: (R', C), columns `first_column` and following, perhaps the same memory. For
    position i of R, row_numbers[i] and out_row_numbers[i] are its rows there, and slots[i] its
    entry of `rows`, -1 for a row of zeros; where an argument is None, i itself.
    """
    num_rows = next(
        (len(n) for n in (slots, row_numbers, out_row_numbers) if n is not None), out.shape[0]
    )
    if num_rows == 0 or out.shape[1] == 0:
        return
    statistics = rows.statistics
    unused = statistics.log_normalizer
    has_labels, with_entropy = rows.log_probs is not None, rows.entropy is not None
    lanes, vector = _WARPS * 32, _LANE_BYTES // raw.element_size()
    pieces = triton.cdiv(out.shape[1], _GRADIENT_LOADS * lanes * vector)
    numbers = (unused if part is None else part for part in (slots, row_numbers, out_row_numbers))
    of_labels = (statistics.log_probs, rows.labels, rows.log_probs) if has_labels else (unused,) * 3
    of_entropy = (statistics.entropy, rows.entropy) if with_entropy else (unused,) * 2
    with torch.cuda.device_of(raw):  # Triton launches on the current device
        launch: Any = _gradient_kernel[(num_rows * pieces,)]
        launch(
            *(raw, *raw.stride(), out, *out.stride(), *numbers, statistics.log_normalizer),
            *(*of_labels, *of_entropy, out.shape[1], pieces, first_column),
            *(transform.inner or 0.0, transform.factor, transform.slope),
            HAS_SLOTS=slots is not None,
            HAS_ROW_NUMBERS=row_numbers is not None,
            HAS_OUT_ROW_NUMBERS=out_row_numbers is not None,
            HAS_LABELS=has_labels,
            WITH_ENTROPY=with_entropy,
            HAS_CAP=transform.inner is not None,
            LANES=lanes,
            VECTOR=vector,
            LOADS=_GRADIENT_LOADS,
            num_warps=_WARPS,
        )


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0, without the cancellation near 0."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(x > -0.3, series, tl.exp2(x * _LOG2_E) - 1.0)


@triton.jit
def _label_gradient(
    log_prob, entropy, grad_log_prob, grad_entropy, slope, WITH_ENTROPY: tl.constexpr
):
    """The gradient at the label, from its saved log-prob: see `softmax_rows._row_coefficients`."""
    grad = -grad_log_prob * _expm1(log_prob)
    if WITH_ENTROPY:
        finite = tl.maximum(log_prob, _LOG_OF_ZERO)
        grad -= grad_entropy * tl.exp2(finite * _LOG2_E) * (finite + entropy)
    return grad * slope


@triton.jit
def _entry_gradient(
    raw, is_label, inner, factor, normalizer, constant, per_log_prob, at_label,
    HAS_LABELS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    log_p = (_squash(raw, inner, HAS_CAP) * factor - normalizer) * _LOG2_E
    weight = constant
    if WITH_ENTROPY:
        weight = constant + per_log_prob * tl.maximum(log_p, _LOG_OF_ZERO)
    grad = tl.exp2(log_p) * weight
    if HAS_LABELS:
        grad = tl.where(is_label, at_label, grad)
    if HAS_CAP:
        # 1 - tanh^2, without the cancellation where the cap holds.
        decay = tl.exp2(tl.abs(raw * inner) * (-2.0 * _LOG2_E))
        grad *= 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return grad


@triton.jit
def _gradient_kernel(
    raw, raw_row_stride, raw_column_stride, out, out_row_stride, out_column_stride,
    slots, row_numbers, out_row_numbers, log_normalizer,
    log_probs, labels, grad_log_probs, entropies, grad_entropies,
    num_columns, pieces, first_column, inner, factor, slope,
    HAS_SLOTS: tl.constexpr, HAS_ROW_NUMBERS: tl.constexpr, HAS_OUT_ROW_NUMBERS: tl.constexpr,
    HAS_LABELS: tl.constexpr, WITH_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // pieces
    BLOCK: tl.constexpr = LANES * VECTOR
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    begin = tl.program_id(0) % pieces * (LOADS * BLOCK)
    end = tl.minimum(begin + LOADS * BLOCK, num_columns)
    num_whole = begin + (end - begin) // BLOCK * BLOCK
    destination = row.to(tl.int64)
    if HAS_OUT_ROW_NUMBERS:
        destination = tl.load(out_row_numbers + row)
    target = out + destination * out_row_stride
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots + row)
    if slot < 0:
        zeros = tl.zeros([LANES, VECTOR], out.dtype.element_ty)
        for start in range(begin, num_whole, BLOCK):
            tl.store(target + (start + offsets) * out_column_stride, zeros)
        for start in range(num_whole, end, BLOCK):
            tl.store(
                target + (start + offsets) * out_column_stride, zeros, mask=start + offsets < end
            )
    else:
        source = row.to(tl.int64)
        if HAS_ROW_NUMBERS:
            source = tl.load(row_numbers + row)
        base = raw + source * raw_row_stride
        normalizer = tl.load(log_normalizer + slot)
        constant = 0.0
        per_log_prob = 0.0
        entropy = 0.0
        grad_entropy = 0.0
        if WITH_ENTROPY:
            entropy = tl.load(entropies + slot)
            grad_entropy = tl.load(grad_entropies + slot)
            constant -= grad_entropy * entropy * slope
            per_log_prob -= grad_entropy * slope * _LOG_2
        label = -1
        at_label = 0.0
        if HAS_LABELS:
            label = (tl.load(labels + slot) - first_column).to(tl.int32)
            log_prob = tl.load(log_probs + slot)
            grad_log_prob = tl.load(grad_log_probs + slot)
            constant -= grad_log_prob * slope
            at_label = _label_gradient(
                log_prob, entropy, grad_log_prob, grad_entropy, slope, WITH_ENTROPY
            )
        for start in range(begin, num_whole, BLOCK):
            x = tl.load(base + (start + offsets) * raw_column_stride).to(tl.float32)
            is_label = start + offsets == label
            grad = _entry_gradient(
                x, is_label, inner, factor, normalizer, constant, per_log_prob, at_label,
                HAS_LABELS, HAS_CAP, WITH_ENTROPY,
            )  # fmt: skip
            tl.store(target + (start + offsets) * out_column_stride, grad.to(out.dtype.element_ty))
        for start in range(num_whole, end, BLOCK):
            inside = start + offsets < end
            x = tl.load(base + (start + offsets) * raw_column_stride, mask=inside, other=0.0).to(
                tl.float32
            )
            is_label = start + offsets == label
            grad = _entry_gradient(
                x, is_label, inner, factor, normalizer, constant, per_log_prob, at_label,
                HAS_LABELS, HAS_CAP, WITH_ENTROPY,
            )  # fmt: skip
            tl.store(
                target + (start + offsets) * out_column_stride,
                grad.to(out.dtype.element_ty),
                mask=inside,
            )
