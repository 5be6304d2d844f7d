"""Which rows come when: shuffled by seed and epoch alone, with a position that can be saved and restored exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from roll.exceptions import DataError


class EpochSampler:
    """Batches of row indices, epoch after epoch.

    The order of an epoch is a function of (seed, epoch): no other random number of the process has a part in it, and
    earlier epochs need not be replayed to know it. Iterating gives the batches that are left of the current epoch:

        sampler = EpochSampler(num_rows=10, batch_size=4, seed=0, drop_last=False)
        while sampler.epoch < 3:
            for rows in sampler:     # 4, 4 and 2 rows
                train(rows)
                save(sampler.state_dict())

    The position moves before a batch is handed out, so a state that is saved while a batch is being worked on continues
    with the next one, and the state after the last batch of an epoch is the beginning of the next epoch.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        if num_rows < 1:
            raise DataError("there are no rows to take batches from")
        if drop_last and num_rows < batch_size:
            raise DataError(
                f"{num_rows} rows do not fill one batch of {batch_size}: use a smaller batch or more rows"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.index = 0
        """How many rows of the epoch have been handed out."""
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def batches_per_epoch(self) -> int:
        return (
            self.num_rows // self.batch_size
            if self.drop_last
            else -(-self.num_rows // self.batch_size)
        )

    def next_batch(self) -> list[int]:
        """The next batch, going on to the next epoch where one ends."""
        rows = self.order()[self.index : self.index + self.batch_size].tolist()
        self._go_to(self.epoch, self.index + len(rows))
        return rows

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def order(self) -> np.ndarray:
        """(num_rows,) the rows of the current epoch in order."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, _order(self.num_rows, self.seed, self.epoch, self.shuffle))
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. Raises DataError if it belongs to other data or another order.

        The batch size may differ: the rows that have been seen stay the same.
        """
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"the saved position was made with {name}={state[name]}, this run has {getattr(self, name)}: "
                    "it says nothing about these rows. Resume with the data and seed of the first run, or start anew"
                )
        if state["epoch"] < 0 or not 0 <= state["index"] < self.num_rows:
            raise DataError(
                f"epoch={state['epoch']}, index={state['index']} is no position in {self.num_rows} rows"
            )
        self._go_to(int(state["epoch"]), int(state["index"]))

    def _go_to(self, epoch: int, index: int) -> None:
        """Sets the position; where no further batch fits into the epoch, that is the beginning of the next one."""
        is_over = self.num_rows - index < (self.batch_size if self.drop_last else 1)
        self.epoch, self.index = (epoch + 1, 0) if is_over else (epoch, index)


def _order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(num_rows)
    # numpy promises the raw stream of a bit generator for ever, but no method on top of it (NEP 19). Sorting 64 random
    # bits a row keeps the order of an old run the same under any later version.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


class BatchStratifiedSampler:
    """ROLL's batches with a fixed number of rows of each domain, for programs that call it.

    A row's domain is its value of "domain". Each domain has its share of `batch_size`, rounded down; the last one has
    the rest. An epoch is as long as the domain that lasts longest; the others begin again. The order comes from the
    random numbers of the process (`numpy.random`, then `random`), as in ROLL; the pipelines here draw from their seed
    instead, see `PromptSampler`.

    Example: shares a: 5, b: 3, c: 2 and batches of 10 -> 5, 3 and 2 rows.
    """

    def __init__(
        self,
        dataset: Any,
        domain_ratios: Mapping[str, float],
        batch_size: int,
        drop_last: bool = True,
    ) -> None:
        assert len(dataset) > 0, "there are no rows to take batches from"
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.domain_indices: dict[str, list[int]] = {}
        for index in range(len(dataset)):
            self.domain_indices.setdefault(dataset[index]["domain"], []).append(index)
        without_share = [domain for domain in self.domain_indices if domain not in domain_ratios]
        without_rows = [domain for domain in domain_ratios if domain not in self.domain_indices]
        if without_share or without_rows:
            raise DataError(
                f"domains of the rows without a share: {without_share}; domains with a share and no row: {without_rows}"
            )
        total = sum(domain_ratios.values())
        self.domain_ratios = {domain: share / total for domain, share in domain_ratios.items()}
        self.domain_batch_num = {
            domain: int(share * batch_size) for domain, share in self.domain_ratios.items()
        }
        *others, last = self.domain_ratios
        self.domain_batch_num[last] = batch_size - sum(
            self.domain_batch_num[domain] for domain in others
        )
        empty = [domain for domain, count in self.domain_batch_num.items() if count < 1]
        if empty:
            raise DataError(
                f"a batch of {batch_size} rows has none of {', '.join(empty)}: use a larger batch"
            )
        self.domain_batch_capacities = {
            domain: (len(self.domain_indices[domain]) + (0 if drop_last else count - 1)) // count
            for domain, count in self.domain_batch_num.items()
        }
        self.total_batches = max(self.domain_batch_capacities.values())

    def __len__(self) -> int:
        return self.total_batches

    def __iter__(self) -> Iterator[list[int]]:
        drawn: dict[str, np.ndarray] = {}
        for domain, indices in self.domain_indices.items():
            order = np.array(indices)
            np.random.shuffle(order)
            drawn[domain] = np.resize(
                order, self.total_batches * self.domain_batch_num[domain]
            )  # begins again
        batches = []
        for number in range(self.total_batches):
            batch: list[int] = []
            for domain, count in self.domain_batch_num.items():
                batch += drawn[domain][number * count : (number + 1) * count].tolist()
            np.random.shuffle(batch)
            batches.append(batch)
        random.shuffle(batches)
        return iter(batches)
