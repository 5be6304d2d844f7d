"""Runs Python code that nobody has read, such as a model's answer, in a process of its own.

    result = run_python("print(input()[::-1])", stdin="abc")
    result.stdout == "cba\\n" and result.reason is None

Limits on CPU time, wall time, memory, file sizes, processes and output hold on any Linux. The code
gets an empty folder that is removed afterwards, and none of the caller's environment. All it has
started is gone when `run_python` returns, and also if the caller itself is killed.

`SandboxResult.isolation` says what kept the code from the rest of the machine:

    namespaces   it is alone: no network, no other processes to see or signal, a read-only view of
                 the file system (`read-only` is missing before Linux 5.12). Wherever user
                 namespaces are allowed.
    seccomp      they are not (Docker's default profile): the kernel refuses it sockets other than
                 local ones, tracing and signals to other processes. It can read and write what the
                 user who runs it can. If that is root, and the interpreter is not hidden from
                 others, it becomes a user number that nobody has (`user` is added).
    hooks        neither is there: Python's own calls for sockets and signals raise PermissionError.
                 Code that goes around Python is not stopped.

It guards against what models write by accident or to game a reward, not against an attacker who
knows a hole in the kernel.
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
from typing import Any

from roll.exceptions import RollError
from roll.rewards.processes import IS_LINUX, kill_tree

# Seconds that setting up and taking down may take on top of the wall limit.
_GRACE_S = 5.0
_ROOT = str(Path(__file__).parents[2])
_LAUNCH = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from roll.rewards.sandbox_child import main; main({root!r}, {fd})"
)


@dataclass(frozen=True)
class SandboxResult:
    """What became of the code.

    `exit_code` is negative for a signal, None if a limit ended the run. `reason` is None for exit
    code 0; otherwise `exit code N`, `signal NAME`, `timeout`, `cpu time`, `memory`, `output`,
    `processes`, or `sandbox: ...` for a fault that is not the code's.
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
        file_mb: size of each file, and of the folder where it has a file system of its own.
        max_processes: processes and threads at one time; a run that exceeds it is ended.
        max_output: bytes of stdout and of stderr; a run that exceeds it is ended.
        namespaces: False leaves them out, as where they are not allowed.
    """
    if not IS_LINUX:
        raise RollError(
            "code runs in a sandbox on Linux only; elsewhere, run this part in a Linux container"
        )
    for name in files or {}:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"files: {name!r} lies outside the folder of the code; use a relative path "
                "without '..'"
            )
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    job = {
        "code": code,
        "files": dict(files or {}),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "memory_mb": memory_mb,
        "file_mb": file_mb,
        "max_processes": max_processes,
        "namespaces": namespaces,
        "packages": packages,
        "caller": os.getpid(),
    }
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="roll-sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job_file,
        tempfile.TemporaryFile() as stdin_file,
    ):
        job_file.write(json.dumps({**job, "folder": folder}).encode())
        stdin_file.write(stdin.encode())
        job_file.seek(0)
        stdin_file.seek(0)
        launch = _LAUNCH.format(root=_ROOT, fd=job_file.fileno())
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launch],
            stdin=stdin_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            # Nothing of ours is handed on. Numerical libraries reserve memory for each thread.
            env={
                "PATH": os.defpath,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=[job_file.fileno()],
            start_new_session=True,
        )
        with process:
            try:
                outputs, is_too_much = _read(process, started + wall_s + _GRACE_S, max_output)
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
        # The child has written behind the job: its isolation, that the code started, and how it
        # ended, if the child lived to see that.
        report: dict[str, Any] = {"exit_code": None, "reason": "timeout", "isolation": []}
        job_file.seek(0)
        for line in job_file.read().splitlines()[1:]:
            report |= json.loads(line)
    stdout, stderr = (bytes(text[:max_output]).decode(errors="replace") for text in outputs)
    if "started" not in report:
        report |= {"exit_code": None, "reason": "sandbox: the code did not start"}
    reason = report["reason"]
    last_line = stderr.rstrip().rpartition("\n")[2]
    if is_too_much:
        report["exit_code"], reason = None, "output"
    elif reason == "exit code 1" and last_line.startswith("MemoryError"):
        reason = "memory"
    return SandboxResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=report["exit_code"],
        timed_out=reason in ("timeout", "cpu time"),
        reason=reason,
        isolation=tuple(report["isolation"]),
        seconds=time.monotonic() - started,
    )


def _read(
    process: subprocess.Popen[bytes], deadline: float, max_output: int
) -> tuple[list[bytearray], bool]:
    """Both outputs, each until its end, the deadline, or the first byte too many (then True)."""
    assert process.stdout is not None and process.stderr is not None
    outputs = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for index, pipe in enumerate((process.stdout, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ, index)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                outputs[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
                elif len(outputs[key.data]) > max_output:
                    return outputs, True
    return outputs, False
