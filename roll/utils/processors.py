"""How many processors a run may use: those that its process is given, less those that are busy with other work.

A thread that waits for its turn on a busy processor holds up all others of its sum: two threads on a machine with one
free processor are many times slower than one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# /proc/stat counts hundredths of a second, so this shows shares of about 3%.
_LOOK_SECONDS = 0.3
_ROOT = Path("/")


@dataclass(frozen=True)
class Threads:
    """A number of threads, out of the processors of the machine, and why it is not more."""

    count: int
    total: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} of {self.total} processors" + (
            f": {self.reason}" if self.reason else ""
        )


def given_processors(root: Path = _ROOT) -> int:
    """Processors that this process may run on, by its affinity and the quotas of its control groups; at least 1."""
    quotas = [float(len(_affinity()))]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mount, read = root / "sys/fs/cgroup", _quota
            elif "cpu" in controllers.split(","):
                mount, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            else:
                continue
            # A group is bound by those above it. In a container the path may be one of the host, and not be there.
            folder = mount / path.lstrip("/")
            quotas += [
                read(parent) for parent in (folder, *folder.parents) if parent.is_relative_to(mount)
            ]
    return max(1, int(min(quotas)))


def idle_processors(
    root: Path = _ROOT, pause: Callable[[], None] = lambda: time.sleep(_LOOK_SECONDS)
) -> float:
    """How many of the processors of this process were idle during a pause; all of them where that is not known."""
    try:
        before = _times(root)
        pause()
        after = _times(root)
    except OSError:
        return float(len(_affinity()))
    spent = [
        (after[cpu][0] - idle, after[cpu][1] - total)
        for cpu, (idle, total) in before.items()
        if cpu in after
    ]
    return sum(idle / total if total else 1.0 for idle, total in spent)


def free_threads(
    root: Path = _ROOT, pause: Callable[[], None] = lambda: time.sleep(_LOOK_SECONDS)
) -> Threads:
    """As many threads as processors are free now, unless OMP_NUM_THREADS says how many."""
    total = os.cpu_count() or 1
    if (chosen := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return Threads(int(chosen), total, f"OMP_NUM_THREADS={chosen}")
    given = given_processors(root)
    idle = round(idle_processors(root, pause))
    if idle < given:
        return Threads(max(1, idle), total, "the others are busy")
    return Threads(given, total, "this process is given no more" if given < total else "")


def limit_threads(count: int) -> None:
    """Have torch use at most so many threads, unless OMP_NUM_THREADS says how many."""
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(count, torch.get_num_threads()))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota(folder: Path) -> float:
    """`cpu.max` holds "200000 100000", microseconds in a period, or "max 100000"."""
    with suppress(OSError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            return int(quota) / int(period)
    return float("inf")


def _quota_v1(folder: Path) -> float:
    """The same in two files; -1 is no quota."""
    with suppress(OSError):
        quota, period = (
            int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        if quota > 0:
            return quota / period
    return float("inf")


def _times(root: Path) -> dict[int, tuple[int, int]]:
    """(idle, all) hundredths of a second of each processor of this process since the machine was started."""
    found = {}
    for line in (root / "proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in _affinity():
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
            times = [int(number) for number in numbers[:8]]
            found[int(name[3:])] = (times[3] + times[4], sum(times))
    return found
