"""Processes that must not outlive their purpose: death signals, adoption of orphans, killing trees.

By hand, because psutil loses what forks while it looks; only the standard library, because it runs
in processes that start in milliseconds. Elsewhere than on Linux, grandchildren may be missed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_LOOKS = 50  # at /proc, while a tree that is being stopped still grows

IS_LINUX = sys.platform == "linux"

libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent, of pid `parent` at the fork, ends.

    The signal follows the *thread* that forked us, and is forgotten when this process changes user.
    """
    if not IS_LINUX:
        return
    libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was in place
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends: forking twice does not hide them."""
    if IS_LINUX:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def has_children() -> bool:
    """Whether this process has any child, running or waiting to be reaped. One system call."""
    if not IS_LINUX:
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int, spare: Collection[int] = ()) -> list[int]:
    """Children of `pid`, their children, and so on, by one look at /proc; nothing below `spare`."""
    if not IS_LINUX:
        return []
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spare:
            continue
        with suppress(OSError):  # it ended while we looked
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command stands in parentheses and may hold any text; state, parent follow.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children[int(parent)].append(int(name))
    found, todo = [], [pid]
    while todo:
        below = children.pop(todo.pop(), [])
        todo += below
        found += below
    return found


def num_tasks() -> int:
    """Processes and threads of the whole machine, at the price of one small read; 0 if unknown."""
    if not IS_LINUX:
        return 0
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[3].partition(b"/")[2])


def kill_descendants(pid: int, spare: Collection[int] = ()) -> int:
    """Kill all processes below `pid`, except `spare` and what is below them. Returns their number.

    They are stopped before they are killed: a stopped process does not fork, and its orphans stay.
    """
    stopped: set[int] = set()
    for _ in range(_MAX_LOOKS):
        fresh = set(descendants(pid, spare)) - stopped
        if not fresh:
            break
        for child in fresh:
            _send(child, signal.SIGSTOP)
        stopped |= fresh
    for child in stopped:
        _send(child, signal.SIGKILL)
    return len(stopped)


def kill_tree(pid: int) -> None:
    """Kill `pid`, its process group if it leads one, and everything below it."""
    leads_group = False
    with suppress(ProcessLookupError):
        leads_group = os.getpgid(pid) == pid
    # The group goes first: the kernel signals all of it in one go, however fast it forks.
    target = -pid if leads_group else pid
    _send(target, signal.SIGSTOP)
    kill_descendants(pid)
    _send(target, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Collect the children that have ended: wait status by pid."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def describe_exit(status: int) -> str:
    """`exit code 3` or `signal SIGSEGV`, from a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _send(pid: int, number: signal.Signals) -> None:
    """To a process, or to a group for a negative number."""
    assert pid not in (0, 1, -1)  # our own group, process 1, everybody
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
