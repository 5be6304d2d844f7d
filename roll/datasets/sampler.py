"""Which rows come when: decided by seed and epoch, with a position that can be saved and restored.

torch's samplers draw from the random numbers of the process and cannot resume inside an epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from roll.datasets.encoding import EVERYTHING, Prompt, PromptDataset
from roll.exceptions import DataError


class EpochSampler:
    """Batches of row indices, epoch after epoch.

    The order of an epoch is a function of (seed, epoch): no other random number of the process has
    a part in it, and earlier epochs need not be replayed to know it. Iterating gives the batches
    that are left of the current epoch:

        sampler = EpochSampler(num_rows=10, batch_size=4, seed=0, drop_last=False)
        while sampler.epoch < 3:
            for rows in sampler:     # 4, 4 and 2 rows
                train(rows)
                save(sampler.state_dict())

    The position moves before a batch is handed out, so a state that is saved while a batch is being
    worked on continues with the next one, and the state after the last batch of an epoch is the
    beginning of the next epoch. `index` counts the rows of the epoch that have been handed out.
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
                f"{num_rows} rows do not fill one batch of {batch_size}: use a smaller batch or "
                "more rows"
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = self.index = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def batches_per_epoch(self) -> int:
        extra = 0 if self.drop_last else self.batch_size - 1
        return (self.num_rows + extra) // self.batch_size

    @property
    def progress(self) -> float:
        """Passes over the data so far."""
        return self.epoch + self.index / self.num_rows

    def next_batch(self) -> list[int]:
        """The next batch, going on to the next epoch where one ends."""
        if self._order is None or self._order[0] != self.epoch:
            order = np.arange(self.num_rows)
            if self.shuffle:
                # numpy promises the raw stream of a bit generator for ever, but no method on top of
                # it (NEP 19). Sorting 64 random bits a row keeps the order of an old run the same
                # under any later version.
                generator = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch]))
                order = np.argsort(generator.random_raw(self.num_rows), kind="stable")
            self._order = (self.epoch, order)
        rows = self._order[1][self.index : self.index + self.batch_size].tolist()
        self._go_to(self.epoch, self.index + len(rows))
        return rows

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        names = ("epoch", "index", "num_rows", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if it belongs to other data or another order.

        The batch size may differ: the rows that have been seen stay the same.
        """
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"the saved position was made with {name}={state[name]}, this run has "
                    f"{getattr(self, name)}: it says nothing about these rows. Resume with the "
                    "data and seed of the first run, or start anew"
                )
        if state["epoch"] < 0 or not 0 <= state["index"] < self.num_rows:
            raise DataError(
                f"epoch={state['epoch']}, index={state['index']} is no position in "
                f"{self.num_rows} rows"
            )
        self._go_to(int(state["epoch"]), int(state["index"]))

    def _go_to(self, epoch: int, index: int) -> None:
        # Where no further batch fits into the epoch, this is the beginning of the next one.
        is_over = self.num_rows - index < (self.batch_size if self.drop_last else 1)
        self.epoch, self.index = (epoch + 1, 0) if is_over else (epoch, index)


def domain_sizes(num_prompts: int, shares: Mapping[str, float]) -> dict[str, int]:
    """How many of `num_prompts` each domain gets: its share, rounded down; the last one the rest.

    Example: 64 prompts at 0.7 and 0.3 are 44 and 20. (ROLL's rule, with the shares of exact
    fractions exact: 0.29 of 100 is 29, though as floats the product is below it.)
    """
    *names, last = shares
    sizes = {name: int(num_prompts * shares[name] + 1e-9) for name in names}
    return {**sizes, last: num_prompts - sum(sizes.values())}


class PromptSampler:
    """Prompts in an order that seed and position decide, domain by domain, epoch after epoch.

    With `shares`, each domain has an order of its own, so that drawing more from one changes
    nothing for the others. Without, all prompts form one pool, and domains come as often as their
    rows.
    """

    def __init__(
        self, dataset: PromptDataset, *, seed: int, shares: Mapping[str, float] | None = None
    ) -> None:
        self.dataset = dataset
        self.shares = dict(shares) if shares else {EVERYTHING: 1.0}
        self._rows: dict[str, np.ndarray] = {}
        self._samplers: dict[str, EpochSampler] = {}
        domains = np.asarray(dataset.domains, dtype=object)
        for number, name in enumerate(self.shares):
            rows = np.flatnonzero(domains == name) if shares else np.arange(len(dataset))
            if not len(rows):
                raise DataError(
                    f"{dataset.table.name}: domain {name!r} of domain_interleave_probs has no "
                    f"prompt; the prompts are of {', '.join(sorted(set(dataset.domains)))}. Rows "
                    "get their domain from the column `domain`, or from rewards.*.tag_included"
                )
            self._rows[name] = rows
            self._samplers[name] = EpochSampler(len(rows), 1, seed + 7919 * number)

    def batch(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, domain after domain, each domain as many as its share says."""
        sizes = domain_sizes(num_prompts, self.shares)
        return [prompt for name, size in sizes.items() for prompt in self.take(name, size)]

    def take(self, pool: str, num_prompts: int) -> list[Prompt]:
        """The next prompts of one domain (of `EVERYTHING`, where there are no shares)."""
        sampler, rows = self._samplers[pool], self._rows[pool]
        return [self.dataset[int(rows[sampler.next_batch()[0]])] for _ in range(num_prompts)]

    @property
    def epoch(self) -> float:
        """Passes over the data so far, over the pool that is ahead of the others."""
        return max(sampler.progress for sampler in self._samplers.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: sampler.state_dict() for name, sampler in self._samplers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. DataError if it belongs to other data, domains or seed."""
        if set(state) != set(self._samplers):
            raise DataError(
                f"the saved position is of the domains {', '.join(state)}, this run has "
                f"{', '.join(self._samplers)}: resume with the data of the first run, or start anew"
            )
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state[name])


class BatchStratifiedSampler:
    """ROLL's batches with a fixed number of rows of each domain, for programs that call it.

    A row's domain is its value of "domain". Each domain has its share of `batch_size`, rounded
    down; the last one has the rest. An epoch is as long as the domain that lasts longest; the
    others begin again. The order comes from the random numbers of the process (`numpy.random`, then
    `random`), as in ROLL; the pipelines here use `PromptSampler`.

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
                f"domains of the rows without a share: {without_share}; domains with a share and "
                f"no row: {without_rows}"
            )
        total = sum(domain_ratios.values())
        self.domain_ratios = {domain: share / total for domain, share in domain_ratios.items()}
        # As ROLL rounds; `domain_sizes`, which the pipelines use, forgives 0.29 * 100 < 29.
        *others, last = self.domain_ratios
        sizes = {domain: int(self.domain_ratios[domain] * batch_size) for domain in others}
        self.domain_batch_num = {**sizes, last: batch_size - sum(sizes.values())}
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
            # A domain that is too short begins again.
            drawn[domain] = np.resize(order, self.total_batches * self.domain_batch_num[domain])
        batches = []
        for number in range(self.total_batches):
            batch: list[int] = []
            for domain, count in self.domain_batch_num.items():
                batch += drawn[domain][number * count : (number + 1) * count].tolist()
            np.random.shuffle(batch)
            batches.append(batch)
        random.shuffle(batches)
        return iter(batches)
