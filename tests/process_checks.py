"""What is left of the processes that a test started."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def children(pid: int | None = None) -> list[psutil.Process]:
    """Running descendants of a process, by default this one."""
    found = psutil.Process(pid).children(recursive=True)
    return [child for child in found if running(child.pid)]


def running(pid: int) -> bool:
    """Whether there is such a process; one that waits to be reaped is over."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(marker: str) -> list[int]:
    """Processes of the machine that carry `marker` in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if marker in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether it comes to that, in a time that suffices however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
