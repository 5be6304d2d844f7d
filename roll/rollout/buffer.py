"""Groups that wait for the step that trains on them, and the thread that makes them ahead of it.

    version (= step)   3                      4                      5
    trainer            trains on step 3       trains on step 4       trains on step 5 ...
    source             groups of step 4 ..    | .. and of step 5 ..  |
                                              weights change: responses under way are interrupted
                                              and go on with the new weights

Staleness is the step that trains on a sample minus the version of its oldest token. Groups are
started at most `async_generation_ratio` batches ahead, and no step trains on a sample that is
staler than `PPOConfig.max_staleness`: what is older is dropped, counted, and replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from roll.distributed.executor.cluster import Cluster
from roll.engines.request import GenerationOutput, GenerationRequest
from roll.rollout.types import Group, Trajectory

STALE = "stale"  # the reason that dropped samples are listed under
ABORT_AGAIN = 0.2  # seconds; a call that was on its way to a worker has not been aborted yet


def is_stale(trajectories: Sequence[Trajectory], step: int, max_staleness: int) -> bool:
    """Whether a group is too old for `step`: its oldest token counts."""
    return any(step - min(item.versions) > max_staleness for item in trajectories)


def staleness_metrics(
    trajectories: Sequence[Trajectory], step: int, num_dropped: int
) -> dict[str, float]:
    """How old the samples of a step are; `num_dropped` more were too old for it."""
    versions = [item.versions for item in trajectories]
    ages = [step - min(found) for found in versions]
    metrics = {f"rollout/dropped/{STALE}": float(num_dropped)}
    if ages:
        metrics |= {
            "rollout/staleness/mean": sum(ages) / len(ages),
            "rollout/staleness/max": float(max(ages)),
            "scheduler/off_policy_ratio": sum(age > 0 for age in ages) / len(ages),
            "rollout/mixed_version_samples": float(sum(len(found) > 1 for found in versions)),
        }
    return metrics


class EngineGate:
    """The generating workers behind a gate, so that weights change while nothing is generated.

    The generating thread calls `generate_requests`, and finds samples among the outputs that were
    aborted and can go on. The other thread calls everything else.
    """

    def __init__(self, engine: Cluster) -> None:
        self.engine = engine
        # In one process an abort comes through without a thread of its own for the generation,
        # which would slow both.
        self._generate = (
            engine.answer_requests if engine.backend_name == "local" else engine.generate_requests
        )
        self.is_open = True
        self.is_busy = False
        self._is_closed = False
        self._changed = threading.Condition()

    def generate_requests(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """Those of the engine, once the gate is open. RuntimeError after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_open or self._is_closed)
            if self._is_closed:
                raise RuntimeError("the rollouts were closed")
            self.is_busy = True
        try:
            return self._generate(requests)
        finally:
            with self._changed:
                self.is_busy = False
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is generated inside: what runs is aborted, what comes waits."""
        with self._changed:
            self.is_open = False
        self._interrupt()
        yield
        with self._changed:
            self.is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Abort what runs, and generate nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._interrupt()

    def _interrupt(self) -> None:
        while self.is_busy:
            self.engine.abort_requests()
            with self._changed:
                self._changed.wait_for(lambda: not self.is_busy, timeout=ABORT_AGAIN)


class Source(Protocol):
    """Who makes groups, a piece at a time, in the buffer's thread."""

    def has_work(self) -> bool:
        """Start what `Buffer.room` allows, and say whether `work` has anything to do. The lock
        `Buffer.changed` is held."""
        ...

    def work(self) -> None:
        """Do the next piece and `put` what is complete."""
        ...

    def drop(self, group: Group, reason: str) -> None:
        """Take note of a group that is not trained on. The lock is held."""
        ...

    def waiting_for(self) -> str:
        """What is under way, for the message of a timeout; raises if waiting is hopeless."""
        ...


class Buffer:
    """Keeps a source at work until `close`; the main thread pauses it around weight updates.

    Args:
        sizes: how many groups of each pool a step trains on.
        ratio: how many batches the source may be ahead.
        timeout: seconds that `take` waits for something to happen.
        first_step: groups of the steps before have been trained on.
    """

    def __init__(
        self,
        source: Source,
        gate: EngineGate,
        *,
        sizes: Mapping[str, int],
        ratio: float,
        max_staleness: int,
        timeout: float,
        first_step: int = 0,
    ) -> None:
        self.source, self.gate, self.sizes = source, gate, sizes
        self.ratio, self.max_staleness, self.timeout = ratio, max_staleness, timeout
        self.step = first_step
        self.changed = threading.Condition()
        self.ready: dict[str, list[tuple[int, Group | None]]] = {pool: [] for pool in sizes}
        self.num_used = {pool: first_step * size for pool, size in sizes.items()}
        self._error: BaseException | None = None
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="roll-rollouts", daemon=True)

    # -- the main thread's side --------------------------------------------------------------------

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Nothing is generated inside; afterwards groups are made for `step` and those ahead."""
        with self.gate.paused():
            yield
            self.step = step
        with self.changed:
            if self.thread.ident is None and not self._is_closed:
                self.thread.start()
            self.changed.notify_all()

    def take(self, step: int) -> list[Group]:
        """The oldest groups, as many as a step trains on; waits until there are enough."""
        groups: list[Group] = []
        with self.changed:
            for pool, size in self.sizes.items():
                while True:
                    self._drop_stale(pool, step)
                    if len(self.ready[pool]) >= size:
                        break
                    if self._error is not None:
                        raise self._error
                    under_way = self.source.waiting_for()
                    if not self.changed.wait(self.timeout) and self._error is None:
                        raise TimeoutError(
                            f"no rollout for step {step} within {self.timeout:g} s (rpc_timeout): "
                            f"{under_way}, {len(self.ready[pool])} of {size} groups are ready"
                        )
                taken, self.ready[pool] = self.ready[pool][:size], self.ready[pool][size:]
                self.num_used[pool] += size
                groups += [group for _, group in taken if group is not None]
            self.changed.notify_all()
        return groups

    def close(self) -> None:
        """Stop the thread; what is under way is thrown away. Safe to call again."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self.gate.close()
        if self.thread.is_alive():
            self.thread.join()

    def _drop_stale(self, pool: str, step: int) -> None:
        fresh = []
        for number, group in self.ready[pool]:
            if group is None or not is_stale(group.trajectories, step, self.max_staleness):
                fresh.append((number, group))
            else:
                self.source.drop(group, STALE)
                self.changed.notify_all()  # another group may be started
        self.ready[pool] = fresh

    # -- the source's side -------------------------------------------------------------------------

    def room(self, pool: str) -> int:
        """Groups that may be ready or under way in addition to those that are ready."""
        allowed = self.sizes[pool] * (self.step + 1 + self.ratio) - self.num_used[pool]
        return int(allowed) - len(self.ready[pool])

    def put(self, pool: str, number: int, group: Group | None) -> None:
        """A group is complete; None takes the place of one that came to nothing. The oldest (lowest
        number) is trained on first."""
        with self.changed:
            self.ready[pool].append((number, group))
            self.ready[pool].sort(key=lambda entry: entry[0])
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise this in the main thread."""
        with self.changed:
            self._error = error
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(
                        lambda: self._is_closed or (self.gate.is_open and self.source.has_work())
                    )
                    if self._is_closed:
                        return
                self.source.work()
        except BaseException as error:  # noqa: BLE001 - `take` raises it in the main thread
            self.fail(error)
