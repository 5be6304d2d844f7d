"""Which rows make up each optimizer step, chosen over the rows of all ranks together.

The permutation is drawn over *global* row numbers from the seed alone, so every rank draws the same one, and a run with
two ranks takes its optimizer steps on the same rows as a run with one. A rank keeps the rows that it holds and picks,
for every step, those that belong to it; how many these are may differ from rank to rank.
"""

from collections.abc import Iterator

import torch


def local_rows_of_steps(
    *, num_local: int, offset: int, num_global: int, rows_per_step: int, epochs: int, seed: int, unit: int = 1
) -> Iterator[list[int]]:
    """For each optimizer step, the local indices of this rank's rows in it.

    This rank holds the global rows offset ... offset + num_local - 1 of `num_global`. Each epoch is a new permutation,
    cut into steps of `rows_per_step`; the last step of an epoch may be smaller. With `unit` 2, rows 2i and 2i+1 stay
    together. A step with all rows keeps their order.

    Example: 4 rows, 2 a step, on ranks that hold rows 0-1 and 2-3. If the permutation is 3 0 1 2, rank 0 gets [0] and
    [1], rank 1 gets [1] and [0].
    """
    for name, value in (("offset", offset), ("num_local", num_local), ("num_global", num_global)):
        if value % unit:
            raise ValueError(f"{name}={value} is not a multiple of {unit}, and rows come in units of {unit}")
    generator = torch.Generator().manual_seed(seed)
    units_per_step = max(rows_per_step // unit, 1)
    num_units = num_global // unit
    for _ in range(epochs):
        if units_per_step >= num_units:
            order = torch.arange(num_units)
        else:
            order = torch.randperm(num_units, generator=generator)
        for units in order.split(units_per_step):
            rows = (units[:, None] * unit + torch.arange(unit)).flatten() - offset
            yield rows[(rows >= 0) & (rows < num_local)].tolist()
