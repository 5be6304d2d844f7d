"""How far a run is: a bar that moves on a terminal, plain lines anywhere else."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# Seconds between two plain lines: a log should tell how the run goes, not repeat metrics.jsonl.
_LINE_INTERVAL = 1.0
# The time that is left follows from so many steps. One that took more than so many times the middle
# one, because the machine was busy, counts as that: longer than a validation takes, shorter than
# what a stall does to an average.
_RECENT = 20
_LONGEST = 5


class StepProgress:
    """Shows steps `done` to `total` with a few metrics beside them; used as a context.

    Args:
        metrics: label to metric: {"loss": "actor/loss"} shows that metric as `loss 0.431`. A metric
            that a step did not have keeps its last value.
        show: None is a bar on a terminal and lines elsewhere; False shows nothing, True a bar.
    """

    def __init__(
        self, total: int, done: int, metrics: Mapping[str, str], *, show: bool | None = None
    ) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=show is False)
        self._total, self._done = total, done
        self._metrics = metrics
        self._values: dict[str, str] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._is_first = True
        self._last_step = time.monotonic()
        self._last_line = 0.0
        self._bar: Progress | None = None
        if show or (show is None and self._console.is_terminal):
            columns = (
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        self._last_step = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps are done, the last with these metrics (names without reducer tags)."""
        now = time.monotonic()
        if not self._is_first:  # the first step warms up, and says nothing about the others
            self._recent.append((now - self._last_step) / max(done - self._done, 1))
        self._is_first = False
        self._last_step, self._done = now, done
        for label, name in self._metrics.items():
            if name in metrics:
                self._values[label] = number(metrics[name])
        text = "  ".join(f"{label} {value}" for label, value in self._values.items()) + self.left()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif now - self._last_line >= _LINE_INTERVAL or done == self._total:
            self._last_line = now
            self.say(f"step {done}/{self._total}  {text}")

    def left(self) -> str:
        """`  left 0:01:30`, from the recent steps; nothing as long as only the first is done."""
        if not self._recent and self._done < self._total:
            return ""
        longest = _LONGEST * statistics.median(self._recent or [0.0])
        seconds = statistics.fmean(min(step, longest) for step in self._recent or [0.0])
        return f"  left {timedelta(seconds=round(seconds * (self._total - self._done)))}"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, markup=False)


def number(value: float) -> str:
    """Four digits, or whole thousands: 0.6931, 12.35, 8,120."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
