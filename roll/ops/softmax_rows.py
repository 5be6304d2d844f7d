"""Which positions the log-prob operators work on, and the two passes that they make over logits.

`select` finds the positions that a mask selects and checks their labels. `RunningStatistics` reads
rows of logits, at once or slice by slice of the vocabulary, and gives normaliser, log-probs and
entropy; `row_gradient_` turns a tile of logits into its own gradient, in place. On a GPU both are
one Triton kernel (`triton_rows`). Without one, and as the reference, they are plain torch on blocks
of rows, so that their float32 temporaries stay small next to the piece itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from roll.ops.gpu import second_stream, triton_module


@dataclass(frozen=True)
class PieceLimits:
    """How much of the logits may exist at one time on a kind of device."""

    tile_bytes: int  # one tile of logits between two matrix products
    block_bytes: int  # one float32 temporary of the torch passes over that tile
    min_columns: int  # with fewer, adding up the gradient of the hidden states takes the time
    column_multiple: int  # whole tiles of the matrix product


# Smaller blocks would stay in a CPU's cache, but next to the products that saves nothing, and each
# operation on a block ends with all threads waiting for the slowest one.
CPU_LIMITS = PieceLimits(64 << 20, 16 << 20, min_columns=1024, column_multiple=64)
# 132 MiB are 16 output tiles of 128 x 256 in 16-bit precision for each of 132 multiprocessors: no
# last wave that most of them sit out, and adding up the hidden states' gradient is a small part.
ACCELERATOR_LIMITS = PieceLimits(132 << 20, 64 << 20, min_columns=8192, column_multiple=256)

# Stands for -inf where p * log p is formed: its exponential is 0, in float64 too, and so is their
# product. Clamping to it lets NaN through.
LOG_OF_ZERO = -1e4


def piece_limits(device: torch.device) -> PieceLimits:
    return CPU_LIMITS if device.type == "cpu" else ACCELERATOR_LIMITS


def kernels_for(raw: Tensor) -> ModuleType | None:
    """The Triton kernels if they can work on `raw`: on a GPU, in any precision but float64."""
    return triton_module("triton_rows") if raw.is_cuda and raw.dtype != torch.float64 else None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays (gradient checks need it); everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> Iterator[slice]:
    """Slices of rows whose copy in the accumulation dtype is about `block_bytes`; one empty slice
    for no rows."""
    row_bytes = num_columns * accumulation_dtype(dtype).itemsize
    step = max(1, piece_limits(device).block_bytes // row_bytes)
    starts = range(0, max(1, num_rows), step)
    return (slice(start, min(start + step, num_rows)) for start in starts)


class Selection(NamedTuple):
    """Positions of a tensor of any shape, seen flat."""

    index: Tensor | None  # (N,) flat positions in order; None when every position is selected
    labels: Tensor | None  # (N,) int64, the labels there; None for an operator without labels
    shape: torch.Size  # the shape that was flattened

    @property
    def num_selected(self) -> int:
        return self.shape.numel() if self.index is None else self.index.shape[0]

    def take(self, values: Tensor) -> Tensor:
        """The selected ones of `values`, which has one entry, or one row, per flat position."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, values: Tensor, copy: bool = True) -> Tensor:
        """The inverse of `take`, with zeros where nothing was selected; a new tensor, unless all is
        selected and no copy is asked for."""
        if self.index is None:
            return values.clone() if copy else values
        zeros = values.new_zeros(self.shape.numel(), *values.shape[1:])
        return zeros.index_copy_(0, self.index, values)


def select(
    shape: torch.Size,
    mask: Tensor | None,
    labels: Tensor | None,
    vocab_size: int,
    device: torch.device,
    labels_name: str = "labels",
    label_shift: int = 0,
    check: bool = True,
) -> Selection:
    """Finds the selected positions and checks their labels; labels elsewhere may hold anything.

    On an accelerator it costs one host sync, for the number of positions and of bad labels
    together. `label_shift` is how far right of its position a label stands in the tensor that the
    caller knows as `labels_name`. Without a mask and with `check` False there is no sync: the
    caller runs a `LabelCheck` while the device works.
    """
    for name, tensor in (("mask", mask), (labels_name, labels)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}: one entry per "
                "position"
            )
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, the model's output is on {device}: move one of them"
            )
    if labels is not None and (
        labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex()
    ):
        raise ValueError(f"{labels_name} has dtype {labels.dtype}, expected integers")

    labels = None if labels is None else labels.reshape(-1).long().contiguous()
    if mask is None and not check:
        return Selection(None, labels, shape)
    chosen = None if mask is None else mask.reshape(-1) != 0
    bad = None if labels is None else (labels < 0) | (labels >= vocab_size)
    if bad is not None and chosen is not None:
        bad &= chosen
    counted = [flags for flags in (bad, chosen) if flags is not None]
    counts = torch.stack([flags.sum() for flags in counted]).tolist() if counted else []
    if labels is not None and bad is not None and counts[0]:
        raise _label_error(bad, labels, shape, vocab_size, labels_name, label_shift)
    if chosen is None or counts[-1] == shape.numel():
        return Selection(None, labels, shape)
    index = torch.nonzero_static(chosen, size=counts[-1]).squeeze(1)
    return Selection(index, None if labels is None else labels.index_select(0, index), shape)


class LabelCheck:
    """The check that `select` left to its caller: begun before work is launched, asked for after.

    It runs on a second stream, so that the host waits for what came before the work and not for the
    work itself.
    """

    def __init__(self, selection: Selection, vocab_size: int) -> None:
        assert selection.labels is not None and selection.index is None
        self.selection, self.vocab_size = selection, vocab_size
        self.labels = selection.labels
        self.done: torch.cuda.Event | None = None
        if self.labels.numel() == 0:
            self.extremes = torch.zeros(2, dtype=torch.long)
        elif not self.labels.is_cuda:
            self.extremes = torch.stack(torch.aminmax(self.labels))
        else:
            self.extremes = torch.empty(2, dtype=torch.long, pin_memory=True)
            side = second_stream(self.labels.device)
            side.wait_stream(torch.cuda.current_stream(self.labels.device))
            with torch.cuda.stream(side):
                self.extremes.copy_(torch.stack(torch.aminmax(self.labels)), non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record(side)

    def wait(self) -> None:
        """IndexError if a label is outside the vocabulary."""
        if self.done is not None:
            self.done.synchronize()
        lowest, highest = self.extremes.tolist()
        if lowest < 0 or highest >= self.vocab_size:
            bad = (self.labels < 0) | (self.labels >= self.vocab_size)
            raise _label_error(bad, self.labels, self.selection.shape, self.vocab_size, "labels", 0)


def _label_error(
    bad: Tensor,
    labels: Tensor,
    shape: torch.Size,
    vocab_size: int,
    labels_name: str,
    label_shift: int,
) -> IndexError:
    positions = bad.nonzero().squeeze(1).tolist()
    coordinates = [int(i) for i in torch.unravel_index(torch.tensor(positions[0]), shape)]
    if coordinates:
        coordinates[-1] += label_shift
    found = f"{labels_name}{coordinates} = {int(labels[positions[0]])}"
    more = f" ({len(positions) - 1} more like it)" if len(positions) > 1 else ""
    return IndexError(
        f"{found} is not in the vocabulary of {vocab_size} tokens{more}; "
        "mask the position out, or check that the tokenizer belongs to the model"
    )


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
                hint = ""
                if name == "temperature":
                    hint = " (greedy decoding has no log-probs to train on: use 1.0)"
                raise ValueError(f"{name}={value} must be positive and finite{hint}")

    @property
    def slope(self) -> float:
        """dy/dz, without the factor 1 - tanh^2 that a cap adds."""
        return self.scale / self.temperature

    @property
    def inner(self) -> float | None:
        """With a cap, y = factor * tanh(inner * z); without one it is None, and y = factor * z."""
        return None if self.soft_cap is None else self.scale / self.soft_cap

    @property
    def factor(self) -> float:
        return self.slope if self.soft_cap is None else self.soft_cap / self.temperature

    def unscaled(self, raw: Tensor) -> tuple[Tensor, float]:
        """(x, k) with y = k * x: x is `raw` itself, or a fresh tanh of it in the accumulation
        dtype."""
        if self.inner is None:
            return raw, self.factor
        fresh = raw.to(accumulation_dtype(raw.dtype), copy=True)
        return fresh.mul_(self.inner).tanh_(), self.factor


class RowStatistics(NamedTuple):
    """Per row, in the accumulation dtype; None for what was not asked for."""

    log_normalizer: Tensor  # log sum_j exp(y_j)
    log_probs: Tensor | None  # y_label - log_normalizer
    entropy: Tensor | None  # -sum_j p_j log p_j

    def rows(self, part: slice) -> RowStatistics:
        return RowStatistics(
            self.log_normalizer[part],
            None if self.log_probs is None else self.log_probs[part],
            None if self.entropy is None else self.entropy[part],
        )


class RunningStatistics:
    """The statistics of `num_rows` rows of `num_columns` logits, which arrive in slices of the
    vocabulary.

    A logit of -inf is a token that cannot occur: it adds nothing, and as a label its log-prob is
    -inf. A row with nothing but -inf gives log-prob -inf and entropy 0. NaN and +inf give NaN: a
    broken model must not look healthy.

    Sums are relative to the maximum so far, x being the logit before its factor: `total` of
    exp(y - top), `moment` of exp(y - top) * (y - top).
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        labels: Tensor | None,
        transform: LogitTransform,
        with_entropy: bool,
        like: Tensor,
    ) -> None:
        """labels: (num_rows,) or None; `like` has the dtype and the device of the logits."""
        self.num_columns, self.labels = num_columns, labels
        self.transform, self.with_entropy = transform, with_entropy
        self.kernels = kernels_for(like)
        dtype = accumulation_dtype(like.dtype)
        new = functools.partial(torch.empty, dtype=dtype, device=like.device)
        self.state = new(4, num_rows)  # top, total, moment, label's x; written by the first slice
        self.statistics = RowStatistics(
            new(num_rows),
            None if labels is None else new(num_rows),
            new(num_rows) if with_entropy else None,
        )

    def add(
        self,
        raw: Tensor,
        rows: slice,
        first_column: int = 0,
        row_numbers: Tensor | None = None,
        overwrite: bool = False,
    ) -> None:
        """Columns `first_column` and following of some rows; slices of a row come in order.

        raw: (R, C), or with `row_numbers` (R,) any rows among which those are the ones; it stays as
        it is unless it may be overwritten.
        """
        labels = None if self.labels is None else self.labels[rows]
        state = self.state[:, rows]
        results = self.statistics.rows(rows)
        is_last = first_column + raw.shape[1] == self.num_columns
        if self.kernels is not None:
            self.kernels.statistics_(
                state, results, raw, labels, row_numbers, first_column, is_last, self.transform
            )
            return
        overwrite = overwrite and raw.dtype == accumulation_dtype(raw.dtype)
        blocks = row_blocks(state.shape[1], raw.shape[1], raw.dtype, raw.device)
        needs_temporaries = (
            not overwrite or self.with_entropy or self.transform.soft_cap is not None
        )
        for block in blocks if needs_temporaries or row_numbers is not None else [slice(None)]:
            part = raw[block] if row_numbers is None else raw.index_select(0, row_numbers[block])
            part_labels = None if labels is None else labels[block]
            self._add_block(part, part_labels, state[:, block], first_column, overwrite)
        if not is_last:
            return
        top, total, moment, at_label = state
        reference, factor = _finite(top), self.transform.factor
        # A total of 0 means a row with nothing but -inf: no mass, normaliser 0.
        mass = total.masked_fill(total == 0, 1.0)
        log_mass = mass.log()
        torch.add(log_mass, reference, alpha=factor, out=results.log_normalizer)
        if results.log_probs is not None:
            torch.add(-log_mass, at_label - reference, alpha=factor, out=results.log_probs)
        if results.entropy is not None:
            torch.sub(log_mass, moment / mass, out=results.entropy)

    def _add_block(
        self, raw: Tensor, labels: Tensor | None, state: Tensor, first_column: int, overwrite: bool
    ) -> None:
        top, total, moment, at_label = state
        logits, factor = self.transform.unscaled(raw)
        if labels is not None:
            columns = (labels - first_column).unsqueeze(1)
            inside = (columns >= 0) & (columns < raw.shape[1])
            found = logits.gather(1, columns.clamp(0, raw.shape[1] - 1)).to(state.dtype)
            if first_column > 0:  # where the label is in another slice, what that one wrote stays
                found = torch.where(inside, found, at_label[:, None])
            at_label.copy_(found[:, 0])
        peak = logits.amax(1).to(state.dtype)
        if first_column > 0:
            peak = torch.maximum(peak, top)
        reference = _finite(peak)
        # Promotes low precision to float32 in the same pass.
        out = logits if overwrite or logits is not raw else None
        below = torch.add(-reference.mul(factor)[:, None], logits, alpha=factor, out=out)
        moments = None
        if self.with_entropy:
            below.clamp_(min=LOG_OF_ZERO)
            weights = below.exp()
            sums, moments = weights.sum(1), weights.mul_(below).sum(1)
        else:
            sums = below.exp_().sum(1)
        if first_column > 0:
            shift = top.sub(reference).mul_(factor).clamp_(min=LOG_OF_ZERO)
            fade = shift.exp()
            moments = None if moments is None else moments + fade * (moment + total * shift)
            sums = sums + total * fade
        top.copy_(peak)
        total.copy_(sums)
        if moments is not None:
            moment.copy_(moments)


def _finite(top: Tensor) -> Tensor:
    """A number to measure logits from: -inf - -inf is NaN, and any finite one does for such a
    row."""
    return top.masked_fill(top == -torch.inf, 0.0)


class RowGradients(NamedTuple):
    """What arrives at the results of rows in backward, with the statistics that it goes into; each
    (R,)."""

    statistics: RowStatistics
    labels: Tensor | None
    log_probs: Tensor | None  # dL / d log-probs, None for zeros
    entropy: Tensor | None  # dL / d entropy, None for zeros

    @classmethod
    def of(
        cls,
        selection: Selection,
        statistics: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> RowGradients:
        """From the saved statistics of selected rows and the gradients of all positions."""
        arrived = [
            None if grad is None else selection.take(grad).contiguous()
            for grad in (grad_log_probs, grad_entropy)
        ]
        return cls(RowStatistics(*statistics), selection.labels, *arrived)

    def rows(self, part: slice) -> RowGradients:
        return RowGradients(
            self.statistics.rows(part),
            None if self.labels is None else self.labels[part],
            None if self.log_probs is None else self.log_probs[part],
            None if self.entropy is None else self.entropy[part],
        )


def row_gradient_(
    raw: Tensor, rows: RowGradients, transform: LogitTransform, first_column: int = 0
) -> None:
    """Overwrites raw logits (R, C), the columns from `first_column` on, with their gradient.

    With g and e the gradients that arrive at log-prob and entropy, and y the logits of the softmax:

        dL/dy_j = g * (1[j = label] - p_j) - e * p_j * (log p_j + entropy)
    """
    if (kernels := kernels_for(raw)) is not None:
        kernels.gradient(raw, raw, rows, first_column, transform)
        return
    constant, per_log_prob, at_label = _row_coefficients(rows, transform)
    log_normalizer = rows.statistics.log_normalizer
    in_place = raw.dtype == accumulation_dtype(raw.dtype) and transform.soft_cap is None
    blocks = row_blocks(raw.shape[0], raw.shape[1], raw.dtype, raw.device)
    for block in [slice(None)] if in_place and per_log_prob is None else blocks:
        logits, factor = transform.unscaled(raw[block])
        log_probs = torch.add(
            -log_normalizer[block, None], logits, alpha=factor, out=logits if in_place else None
        )
        weights = constant[block, None]
        if per_log_prob is not None:
            log_probs.clamp_(min=LOG_OF_ZERO)
            weights = torch.addcmul(weights, log_probs, per_log_prob[block, None])
        if transform.soft_cap is not None:
            # Here `logits` is the tanh, and ours to overwrite.
            weights = weights * logits.square_().neg_().add_(1.0)
        torch.mul(log_probs.exp_(), weights, out=raw[block])
    if rows.labels is None or at_label is None:
        return
    columns = (rows.labels - first_column).unsqueeze(1)
    inside = (columns >= 0) & (columns < raw.shape[1])
    columns.clamp_(0, raw.shape[1] - 1)
    # Every row writes; one whose label is elsewhere writes what is there: no host sync to find out.
    there = raw.gather(1, columns)
    raw.scatter_(1, columns, torch.where(inside, at_label.unsqueeze(1).to(raw.dtype), there))


def _row_coefficients(
    rows: RowGradients, transform: LogitTransform
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(a, b, c) with dL/dz_j = p_j * (a + b * log p_j), times 1 - tanh^2 under a cap, and
    dL/dz_label = c.

    The label's entry comes from its saved log-prob, with -expm1(log p) for 1 - p: in bfloat16, 1
    minus a rounded p would be 0 for every token that the model is sure of.
    """
    statistics = rows.statistics
    constant = torch.zeros_like(statistics.log_normalizer)
    per_log_prob = at_label = None
    if rows.entropy is not None:
        assert statistics.entropy is not None
        constant = constant - rows.entropy * statistics.entropy
        per_log_prob = rows.entropy * -transform.slope
    if rows.log_probs is not None:
        assert statistics.log_probs is not None
        constant = constant - rows.log_probs
        at_label = -rows.log_probs * torch.expm1(statistics.log_probs)
        if rows.entropy is not None and statistics.entropy is not None:
            log_probs = statistics.log_probs.clamp(min=LOG_OF_ZERO)
            at_label = at_label - rows.entropy * log_probs.exp() * (log_probs + statistics.entropy)
        if transform.soft_cap is not None:
            unscale = transform.temperature / transform.soft_cap
            squashed = (statistics.log_probs + statistics.log_normalizer) * unscale
            at_label = at_label * (1.0 - squashed.square())
        at_label = at_label * transform.slope
    return constant * transform.slope, per_log_prob, at_label
