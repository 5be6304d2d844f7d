"""Runs Python code that nobody has read, such as a model's answer, in a process of its own.

    result = run_python("print(input()[::-1])", stdin="abc")
    result.stdout == "cba\\n" and result.reason is None

Limits on CPU time, wall time, memory, file sizes, processes and output hold on any Linux. The code gets an empty folder
that is removed afterwards, and none of the caller's environment. All it has started is gone when `run_python` returns,
processes that called `setsid` or forked twice included, and also if the caller itself is killed.

`SandboxResult.isolation` says what kept the code from the rest of the machine:

    namespaces   it is alone: no network, no other processes to see or signal, a read-only view of the file system
                 (`read-only` may be missing on kernels before 5.12). The rule wherever user namespaces are allowed.
    seccomp      namespaces are not allowed here (Docker's default profile, some distributions): the kernel refuses it
                 sockets other than local ones, tracing and signals to other processes. It can read what the user who
                 runs it can read, and write there, one file up to the size limit at a time. If that user is root, and
                 the interpreter is not hidden from others, it becomes a user that nobody is (`user` is added).
    hooks        neither is there (a kernel without seccomp, or a processor other than x86-64 and arm64): Python's own
                 calls for sockets and signals raise PermissionError. Code that goes around Python is not stopped.

It is a guard against what models write by accident or to game a reward. It is not meant to hold a determined attacker
who knows a hole in the kernel.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from roll.exceptions import RollError
from roll.utils.processes import IS_LINUX, kill_tree

# Seconds that setting up and taking down may take on top of the wall limit before the supervisor itself is killed.
_GRACE_S = 5.0
_LAUNCH = "import sys; sys.path.insert(0, {root!r}); from roll.utils.sandbox_child import main; main({root!r}, {fd})"


@dataclass(frozen=True)
class SandboxResult:
    """What became of the code.

    `exit_code` is negative for a signal, None if a limit ended the run. `reason` is None for exit code 0; otherwise
    `exit code N`, `signal NAME`, `timeout`, `cpu time`, `memory`, `output`, `processes`, or `sandbox: ...` for a fault
    that is not the code's.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    reason: str | None
    isolation: tuple[str, ...]
    seconds: float


def run_python(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    cpu_s: float = 5.0,
    wall_s: float = 10.0,
    memory_mb: int = 512,
    file_mb: int = 16,
    max_processes: int = 16,
    max_output: int = 1 << 20,
    namespaces: bool = True,
) -> SandboxResult:
    """Run `code` as a program and wait for it.

    Args:
        files: texts by name, written into the folder in which the code starts.
        memory_mb: address space of each process.
        file_mb: size of each file, and of the whole folder where it has a file system of its own.
        max_processes: processes and threads at one time; a run that exceeds it is ended.
        max_output: bytes of stdout and of stderr; a run that exceeds it is ended, and its output cut there.
        namespaces: False leaves them out, as where they are not allowed.
    """
    if not IS_LINUX:
        raise RollError(
            "code runs in a sandbox on Linux only; elsewhere, run this part in a Linux container"
        )
    for name in files or {}:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"files: {name!r} lies outside the folder of the code; use a relative path without '..'"
            )
    job = {
        "code": code,
        "files": dict(files or {}),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "memory_mb": memory_mb,
        "file_mb": file_mb,
        "max_processes": max_processes,
        "namespaces": namespaces,
        "packages": [
            path for path in sys.path if path.endswith(("site-packages", "dist-packages"))
        ],
    }
    with (
        tempfile.TemporaryDirectory(prefix="roll-sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job_file,
        tempfile.TemporaryFile() as stdin_file,
    ):
        job_file.write(json.dumps({**job, "folder": folder, "caller": os.getpid()}).encode())
        stdin_file.write(stdin.encode())
        for file in (job_file, stdin_file):
            file.seek(0)
        return _supervise(job_file, stdin_file, folder, wall_s, max_output)


def _supervise(
    job: IO[bytes], stdin: IO[bytes], folder: str, wall_s: float, max_output: int
) -> SandboxResult:
    started = time.monotonic()
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _LAUNCH.format(root=str(Path(__file__).parents[2]), fd=job.fileno()),
        ],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        # Nothing of ours is handed on; these keep numerical libraries from reserving memory for threads.
        env={
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        pass_fds=[job.fileno()],
        start_new_session=True,
    )
    try:
        out, too_much = _read(process, started + wall_s + _GRACE_S, max_output)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    report = _report(job)
    stdout, stderr = (bytes(text[:max_output]).decode(errors="replace") for text in out)
    exit_code, reason = report["exit_code"], report["reason"]
    if too_much:
        exit_code, reason = None, "output"
    elif reason == "exit code 1" and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        reason = "memory"
    return SandboxResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=exit_code,
        timed_out=reason in ("timeout", "cpu time"),
        reason=reason,
        isolation=tuple(report["isolation"]),
        seconds=time.monotonic() - started,
    )


def _read(
    process: subprocess.Popen[bytes], deadline: float, max_output: int
) -> tuple[list[bytearray], bool]:
    """Both outputs, each until its end, the deadline, or the first byte too many."""
    assert process.stdout is not None and process.stderr is not None
    out = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for index, pipe in enumerate((process.stdout, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ, index)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                out[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
                elif len(out[key.data]) > max_output:
                    return out, True
    return out, False


def _report(job: IO[bytes]) -> dict[str, Any]:
    """What the child wrote behind the job: its isolation, that the code started, how it ended if it lived to see it."""
    job.seek(0)
    report: dict[str, Any] = {
        "exit_code": None,
        "reason": "timeout",
        "isolation": [],
        "started": False,
    }
    for line in job.read().splitlines()[1:]:
        report |= json.loads(line)
    if not report["started"]:
        report |= {"exit_code": None, "reason": "sandbox: the code did not start"}
    return report
