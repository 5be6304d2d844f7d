"""Generation in one thread that another one interrupts, so that weights can change while nothing is generated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from roll.distributed.executor.cluster import Cluster
from roll.engines.request import GenerationOutput, GenerationRequest

ABORT_AGAIN = 0.2  # seconds; a call that was on its way to a worker has not been aborted yet


class EngineGate:
    """The generating workers behind a gate.

    The generating thread calls `generate_requests`, and finds samples among the outputs that were aborted and can go
    on. The other thread calls everything else.

    Args:
        changed: guards the gate and hears of every change; a user's own condition, if its state hangs together with it.
    """

    def __init__(self, engine: Cluster, changed: threading.Condition | None = None) -> None:
        self.engine = engine
        # In one process an abort comes through without a thread of its own for the generation, which would slow both.
        self._generate = (
            engine.answer_requests if engine.backend_name == "local" else engine.generate_requests
        )
        self.is_open = True
        self.is_busy = False
        self._is_closed = False
        self._changed = threading.Condition() if changed is None else changed

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
