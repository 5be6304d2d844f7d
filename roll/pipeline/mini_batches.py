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


def balance_ranks(batch: DataProto, num_ranks: int, unit: int = 1) -> DataProto:
    """The batch with rows in an order that gives every rank about the same number of tokens, and equally many rows.

    The new column `row_number` (B,) holds where each row was. `unit` neighbouring rows stay together (2 for pairs).
    Example: rows of 8, 8, 1 and 1 tokens on 2 ranks -> one long and one short row each.
    """
    if len(batch) % (num_ranks * unit):
        raise ValueError(f"{len(batch)} rows cannot be dealt to {num_ranks} ranks in units of {unit} rows")
    numbers = torch.arange(len(batch))
    numbered = DataProto(batch=batch.batch, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info)
    numbered = numbered.slice()
    numbered[ROW_NUMBER] = numbers
    if num_ranks == 1:
        return numbered
    lengths = batch["attention_mask"].sum(1).view(-1, unit).sum(1).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=True)
    units = torch.tensor([index for partition in partitions for index in sorted(partition)])
    return numbered.select_idxs((units[:, None] * unit + torch.arange(unit)).flatten())


def local_rows_of_steps(
    numbers: Sequence[int], *, num_global: int, rows_per_step: int, epochs: int, seed: int, unit: int = 1
) -> Iterator[list[int]]:
    """For each optimizer step, the local indices of this rank's rows in it.

    `numbers` are the global numbers, out of `num_global`, of the rows that this rank holds. Each epoch is a new
    permutation, cut into steps of `rows_per_step`; the last step of an epoch may be smaller. With `unit` 2, rows 2i and
    2i+1 stay together. Steps that hold all rows keep their order.

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
        if units_per_step < num_units:
            order = torch.randperm(num_units, generator=generator)
        for units in order.split(units_per_step):
            rows = (units[:, None] * unit + torch.arange(unit)).flatten().tolist()
            yield [local[row] for row in rows if row in local]
