"""How the rows of one step are cut into micro-batches, each trimmed to its own longest row.

A row occupies a window of columns, from its first attended token to its last. A micro-batch keeps
the columns of the union of its rows' windows, so padding outside of it costs nothing. Everything
here is index arithmetic on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.distributed.scheduler.protocol import DataProto

Rows = list[int]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, narrowed to the columns [start, stop) of the full width."""

    data: DataProto
    rows: Rows
    start: int
    stop: int

    def widen(self, token_values: Tensor, full_width: int) -> Tensor:
        """Per-token results, (rows, stop-start-1, ...), put back into full_width - 1 columns."""
        shape = (token_values.shape[0], full_width - 1, *token_values.shape[2:])
        wide = token_values.new_zeros(shape)
        wide[:, self.start : self.stop - 1] = token_values
        return wide


def row_windows(attention_mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """First attended column of each row and one past the last; (0, 0) for a row without any."""
    attended = attention_mask_BS != 0
    any_attended = attended.any(dim=1)
    first = attended.to(torch.int8).argmax(dim=1)
    stop = attended.shape[1] - attended.flip(1).to(torch.int8).argmax(dim=1)
    zero = torch.zeros_like(first)
    return torch.where(any_attended, first, zero), torch.where(any_attended, stop, zero)


def plan_by_rows(num_rows: int, rows_per_micro_batch: int) -> list[Rows]:
    """Consecutive micro-batches. Example: 5 rows by 2 -> [0,1] [2,3] [4]."""
    if rows_per_micro_batch < 1:
        raise ValueError(f"a micro-batch needs at least one row, got {rows_per_micro_batch}")
    starts = range(0, num_rows, rows_per_micro_batch)
    return [list(range(start, min(start + rows_per_micro_batch, num_rows))) for start in starts]


def plan_by_tokens(
    lengths: Sequence[int], max_tokens: int, *, round_to: int = 1, unit: int = 1
) -> list[Rows]:
    """Micro-batches of rows of similar length; rows x longest row stays within `max_tokens`.

    `unit` consecutive rows are never separated (2 for chosen/rejected pairs). A unit that alone
    exceeds the budget gets a micro-batch of its own: leaving it out would change the gradient.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens_per_microbatch must be positive, got {max_tokens}")
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows do not form units of {unit} rows")
    units = [max(lengths[i : i + unit]) for i in range(0, len(lengths), unit)]
    plan: list[Rows] = []
    width = 0
    # From long to short, so that the first row of a micro-batch sets its width.
    for index in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        rows = list(range(index * unit, (index + 1) * unit))
        if plan and (len(plan[-1]) + unit) * width <= max_tokens:
            plan[-1].extend(rows)
        else:
            plan.append(rows)
            width = -(-max(units[index], 1) // round_to) * round_to
    return plan


def cut_by_tokens(num_tokens: Sequence[int], max_tokens: int, *, unit: int = 1) -> list[slice]:
    """Consecutive rows of at most `max_tokens` together, or one unit of rows, never separated.

    Example: rows of 3, 1, 2, 5 tokens by 4 -> [0:2] [2:3] [3:4].
    """
    parts: list[slice] = []
    room = -1
    for start in range(0, len(num_tokens), unit):
        needed = sum(num_tokens[start : start + unit])
        if needed <= room:
            parts[-1] = slice(parts[-1].start, start + unit)
            room -= needed
        else:
            parts.append(slice(start, start + unit))
            room = max_tokens - needed
    return parts


def split_to(plan: list[Rows], num_micro_batches: int, *, unit: int = 1) -> list[Rows]:
    """Cut the largest micro-batches until there are enough; empty ones when rows run out.

    Ranks whose model is sharded meet in every forward and backward pass, so all of them must run
    equally many; an empty micro-batch takes part with a zero loss.
    """
    plan = [list(rows) for rows in plan]
    while len(plan) < num_micro_batches:
        largest = max(range(len(plan)), key=lambda i: len(plan[i]), default=None)
        if largest is None or len(plan[largest]) < 2 * unit:
            plan.append([])
            continue
        rows = plan[largest]
        half = len(rows) // (2 * unit) * unit
        plan[largest : largest + 1] = [rows[:half], rows[half:]]
    return plan


def make_micro_batch(batch: DataProto, rows: Rows, *, round_to: int = 1) -> MicroBatch:
    """Select `rows`; narrow tensors of width S, or S-1, to the columns that the rows attend to."""
    is_all = rows == list(range(len(batch)))
    selected = batch.slice() if is_all else batch.select_idxs(rows)
    attention_mask = selected["attention_mask"]
    full_width = attention_mask.shape[1]
    attended = (attention_mask != 0).any(dim=0).nonzero()[:, 0].tolist() or [0]
    begin, end = attended[0], attended[-1] + 1
    # At least two columns, so that there is a prediction to make.
    end = min(full_width, max(end, begin + -(-(end - begin) // round_to) * round_to, begin + 2))
    begin = max(0, min(begin, end - 2))
    selected.meta_info = batch.meta_info
    if (begin, end) != (0, full_width):
        assert selected.batch is not None
        for key in list(selected.batch.keys()):
            value = selected[key]
            if value.dim() >= 2 and value.shape[1] == full_width:
                selected[key] = value[:, begin:end]
            elif value.dim() >= 2 and value.shape[1] == full_width - 1:
                selected[key] = value[:, begin : end - 1]
    return MicroBatch(selected, rows, begin, end)
