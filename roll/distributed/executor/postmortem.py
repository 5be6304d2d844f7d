"""Why a worker process ended, or where it hangs: found out on its machine, from what it left.

A process that is killed cannot say so, and Ray reports only that a connection closed. What does
survive is its stderr file (a fatal signal or `os._exit` leaves a line there) and the kernel's count
of out-of-memory kills.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_LAST_WORDS = "roll: the process ends through os._exit"
_TAIL_BYTES = 20_000
_STACK_LINES = 20
# Frames of this file and below it on the stack are the way from Ray to the worker's method.
_BACKEND_FILE = os.path.join("executor", "ray_backend.py")


@dataclass(frozen=True)
class ProcessRecord:
    """What a worker process tells about itself when it starts."""

    pid: int
    stderr_path: str  # empty where stderr is not a file
    oom_kills: int  # of the whole machine, so far

    @property
    def stack_path(self) -> str:
        return f"{self.stderr_path}.stack" if self.stderr_path else ""


def prepare_this_process() -> ProcessRecord:
    """In a worker process, before any work: last words on `os._exit`, a stack dump on SIGUSR2."""
    try:
        stderr_path = os.readlink("/proc/self/fd/2")
    except OSError:  # no /proc on this system
        stderr_path = ""
    if not os.path.isfile(stderr_path):
        stderr_path = ""
    record = ProcessRecord(os.getpid(), stderr_path, oom_kill_count())
    leave = os._exit

    def leave_with_last_words(status: int) -> NoReturn:
        if os.getpid() == record.pid:  # forked children leave this way as a matter of course
            os.write(2, f"{_LAST_WORDS}({status})\n".encode())
        leave(status)

    os._exit = leave_with_last_words
    if record.stack_path and hasattr(signal, "SIGUSR2"):
        # faulthandler writes here from a signal handler, so it stays open while the process lives.
        descriptor = os.open(record.stack_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    return record


def oom_kill_count() -> int:
    """How many processes the kernel has killed for lack of memory since the machine booted."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_death(record: ProcessRecord, report: str) -> str:
    """Why the process ended; `report` is what Ray says. Runs on the machine of the process."""
    tail, report = "", " ".join(report.split())
    try:
        with open(record.stderr_path, "rb") as file:
            file.seek(max(0, os.path.getsize(record.stderr_path) - _TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except OSError:
        pass  # nothing was left, or the folder is gone
    if re.search(r"memory pressure|low on memory|OutOfMemory|memory usage threshold", report):
        reason = "out of memory: Ray's memory monitor ended it"
        machine = re.search(r"was (\S+) used / (\S+) limit", report)
        if machine is None:
            return f"{reason}: {report}"
        reason += f" when {machine[1]} of {machine[2]} were in use on that machine"
        own = re.search(rf"pid={record.pid}, actual memory used=([^,\s]+)", report)
        return reason + (f", {own[1]} of it by this worker" if own else "")
    last_words = re.search(re.escape(_LAST_WORDS) + r"\((-?\d+)\)", tail)
    if exited := re.search(r"exit code (-?\d+)", report) or last_words:
        return f"it exited with exit code {exited[1]}"
    if fatal := re.search(r"\*\*\* (SIG[A-Z0-9]+) received", tail):
        frames = _method_frames(tail[fatal.start() :])
        return f"it crashed with {fatal[1]}" + (f" in\n{frames}" if frames else "")
    killed = oom_kill_count() - record.oom_kills
    if killed > 0:
        return (
            "most likely out of memory: it was killed with SIGKILL, and the kernel's out-of-memory "
            f"killer ended {killed} process(es) on that machine since the worker started"
        )
    if "connection error" in report or "End of file" in report:
        return "it was killed with SIGKILL (kill -9), or ended without a word"
    return report


def stack_of(record: ProcessRecord) -> str:
    """The Python stack of a living worker, most recent call first. Runs on its machine."""
    if not record.stack_path or sys.platform == "win32":
        return ""
    path = Path(record.stack_path)
    try:
        os.kill(record.pid, signal.SIGUSR2)
        for _ in range(10):
            time.sleep(0.05)
            if path.stat().st_size:
                break
        dump = path.read_text()
        path.write_text("")
    except OSError:  # the process or its folder is gone
        return ""
    return _method_frames(dump)


def _method_frames(dump: str) -> str:
    """Of faulthandler's dump of all threads: the frames inside the worker's method."""
    frames: list[str] = []
    for line in dump.splitlines():
        if not line.startswith("  File "):
            frames = []  # another thread begins
        elif _BACKEND_FILE in line:
            return "\n".join(frames[:_STACK_LINES])
        else:
            frames.append(line)
    return ""
