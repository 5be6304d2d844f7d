"""Which positions an operator works on: the ones that the mask selects, with labels that the vocabulary has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from roll.ops.streams import second_stream


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
        """The inverse of `take`, with zeros at the positions that were not selected; a new tensor, unless all are
        selected and no copy is asked for."""
        if self.index is None:
            return values.clone() if copy else values
        return values.new_zeros(self.shape.numel(), *values.shape[1:]).index_copy_(
            0, self.index, values
        )


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
    """Finds the selected positions and checks their labels; labels elsewhere may hold anything, -100 included.

    On an accelerator the whole of it costs one host sync, for the number of positions and of bad labels together.
    `label_shift` is how far right of its position a label stands in the tensor that the caller knows as `labels_name`.
    Without a mask and with `check` False there is none: the caller runs a `LabelCheck` while the device works.
    """
    for name, tensor in (("mask", mask), (labels_name, labels)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}: one entry per position"
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

    It runs on a second stream, so that the host waits for what came before the work and not for the work itself.
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
