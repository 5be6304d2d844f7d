"""Which rows make up each optimizer step, chosen over the rows of all ranks together.

The permutation is drawn over *global* row numbers from the seed alone, so every rank draws the same one, and a run with
two ranks takes its optimizer steps on the same rows as a run with one. A rank keeps the rows that it holds and picks,
for every step, those that belong to it; how many these are may differ from rank to rank. `balance_ranks` deals rows of
all lengths evenly to the ranks, and numbers them first, so that balancing changes no step either.
"""

from collections.abc import Iterator, Sequence

import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.balancing import get_seqlen_balanced_partitions

ROW_NUMBER = "row_number"
NUM_STEPS = "optimizer_steps"  # meta_info key: {role: optimizer steps of an epoch}, where rows are dealt evenly to them


def balance_ranks(batch: DataProto, num_ranks: int, unit: int = 1) -> DataProto:
    """The batch with rows in an order that gives every rank about the same number of tokens, and equally many rows.

    The new column `row_number` (B,) holds where each row was. `unit` neighbouring rows stay together (2 for pairs).
    Where the ranks do not divide the rows, the first ranks get one more, as `DataProto.chunk` deals them.
    Example: rows of 8, 8, 1 and 1 tokens on 2 ranks -> one long and one short row each.
    """
    if (
        len(batch) % unit
        or len(batch) < num_ranks * unit
        or (unit > 1 and len(batch) % (num_ranks * unit))
    ):
        raise ValueError(
            f"{len(batch)} rows cannot be dealt to {num_ranks} ranks in units of {unit} rows"
        )
    numbers = torch.arange(len(batch))
    numbered = DataProto(
        batch=batch.batch, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info
    )
    numbered = numbered.slice()
    numbered[ROW_NUMBER] = numbers
    if num_ranks == 1:
        return numbered
    lengths = batch["attention_mask"].sum(1).view(-1, unit).sum(1).tolist()
    # Rows of no length make the parts equal. They are the shortest, so that each part gets at most one of them.
    num_units = len(lengths)
    padded = lengths + [0] * (-num_units % num_ranks)
    partitions = get_seqlen_balanced_partitions(padded, num_ranks, equal_size=True)
    partitions = [[index for index in partition if index < num_units] for partition in partitions]
    partitions.sort(key=len, reverse=True)
    units = torch.tensor([index for partition in partitions for index in sorted(partition)])
    return numbered.select_idxs((units[:, None] * unit + torch.arange(unit)).flatten())


def local_rows_of_steps(
    numbers: Sequence[int],
    *,
    num_global: int,
    rows_per_step: int,
    epochs: int,
    seed: int,
    unit: int = 1,
    num_steps: int | None = None,
) -> Iterator[list[int]]:
    """For each optimizer step, the local indices of this rank's rows in it.

    `numbers` are the global numbers, out of `num_global`, of the rows that this rank holds. Each epoch is a new
    permutation, cut into steps of `rows_per_step`; the last step of an epoch may be smaller. With `num_steps` it is
    dealt evenly to that many steps instead, so that every row has the same weight in its step (up to one row more or
    less). With `unit` 2, rows 2i and 2i+1 stay together. Steps that hold all rows keep their order.

    Example: 4 rows, 2 a step, on ranks that hold rows 0-1 and 2-3. If the permutation is 3 0 1 2, rank 0 gets [0] and
    [1], rank 1 gets [1] and [0].
    """
    if num_global % unit or len(numbers) % unit:
        raise ValueError(
            f"{len(numbers)} of {num_global} rows: rows come in units of {unit} that must not be cut apart"
        )
    local = {number: index for index, number in enumerate(numbers)}
    generator = torch.Generator().manual_seed(seed)
    units_per_step = max(rows_per_step // unit, 1)
    num_units = num_global // unit
    for _ in range(epochs):
        order = torch.arange(num_units)
        is_cut = units_per_step < num_units if num_steps is None else num_steps > 1
        if is_cut:
            order = torch.randperm(num_units, generator=generator)
        parts = (
            order.split(units_per_step)
            if num_steps is None
            else order.tensor_split(min(num_steps, num_units))
        )
        for units in parts:
            rows = (units[:, None] * unit + torch.arange(unit)).flatten().tolist()
            yield [local[row] for row in rows if row in local]
