"""Episodes while training goes on: a thread plays the coming steps, at most `async_generation_ratio` steps ahead.

    trainer     trains on step 3         | trains on step 4         |
    episodes    of step 4 ...            | ... and of step 5 ...    |
                                         weights change: answers under way are interrupted and go on with the new ones

The batch of a step may so hold answers of older policies; every row knows the oldest. What is too old for its step
leaves by the rule of `roll.pipeline.staleness`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from roll.pipeline.agentic.llm_proxy import PolicyProxy
from roll.pipeline.agentic.rollout_scheduler import Rollout, RolloutScheduler
from roll.pipeline.staleness import staleness_metrics


class AsyncRollouts:
    """Plays steps `first_step` to `last_step` - 1 in order, in a thread of its own, until it is closed."""

    def __init__(
        self,
        scheduler: RolloutScheduler,
        *,
        num_trajectories: int,
        ratio: float,
        max_staleness: int,
        first_step: int,
        last_step: int,
    ) -> None:
        assert isinstance(scheduler.proxy, PolicyProxy) and scheduler.proxy.gate is not None
        self.scheduler, self.gate = scheduler, scheduler.proxy.gate
        self.num_trajectories, self.max_ahead, self.max_staleness = (
            num_trajectories,
            math.ceil(ratio),
            max_staleness,
        )
        self.timeout = scheduler.env_cluster.rpc_timeout
        self._steps = range(first_step, last_step)
        self._ready: dict[int, Rollout] = {}
        self._current = first_step  # the step that is trained now
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="roll-agentic-rollouts", daemon=True)

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Inside, the policy answers nobody but the caller; afterwards episodes go on, for `step` and those ahead."""
        with self.gate.paused():
            yield
        with self._changed:
            self._current = step
            if self._thread.ident is None and not self._is_closed:  # not started yet
                self._thread.start()
            self._changed.notify_all()

    def take(self, step: int) -> Rollout:
        """The episodes of `step`; waits for them."""
        started = monotonic()
        with self._changed:
            ready = self._changed.wait_for(
                lambda: step in self._ready or self._error is not None, self.timeout
            )
            if self._error is not None:
                raise self._error
            if not ready:
                raise TimeoutError(
                    f"the episodes of step {step} were not played within {self.timeout:g} s (rpc_timeout)"
                )
            rollout = self._ready.pop(step)
        versions = [trajectory.versions for trajectory in rollout.trajectories]
        rollout.metrics |= staleness_metrics(versions, step, len(rollout.stale))
        rollout.metrics["rollout/wait_seconds"] = monotonic() - started
        return rollout

    def close(self) -> None:
        """End the thread; what it was playing is lost. Safe to call again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self.gate.close()
            self._thread.join()

    def _run(self) -> None:
        try:
            for step in self._steps:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closed or step <= self._current + self.max_ahead  # noqa: B023
                    )
                    if self._is_closed:
                        return
                rollout = self.scheduler.rollout(
                    step, self.num_trajectories, max_staleness=self.max_staleness
                )
                with self._changed:
                    self._ready[step] = rollout
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the thread's border: `take` raises it in the main thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
