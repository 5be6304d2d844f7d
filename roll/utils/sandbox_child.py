"""The other side of `roll.utils.sandbox`: what happens in the process that it starts. Standard library only.

supervisor   enters the namespaces, forks init, waits for it
  init       process 1 of its namespace: watches limits, adopts orphans; what is left dies with it
    code     gives up what it could still do, and runs the code as `__main__`
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from roll.utils.processes import (
    adopt_orphans,
    descendants,
    describe_exit,
    die_with_parent,
    kill_descendants,
    reap,
)
from roll.utils.sandbox_kernel import (
    drop_capabilities,
    enter_namespaces,
    make_private,
    restrict_calls,
)

_LOOK_S = 0.02  # seconds between two looks at the limits that the kernel does not watch
_AWAITED = [signal.SIGCHLD, signal.SIGTERM]
_MEGABYTE = 1 << 20


def main(root: str, job_fd: int) -> None:
    """Run the job of an open file, and write a report behind it."""
    with open(job_fd, "rb+", closefd=False) as file:
        job = json.loads(file.read())
        file.write(b"\n")
    sys.path.remove(root)
    die_with_parent(job["caller"])
    has_namespaces = job["namespaces"] and enter_namespaces()
    parent = os.getpid()
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        os._exit(0)
    # In a process namespace of its own, a process does not see its parent: it is number 0.
    # Elsewhere the signal is one that `_watch` waits for, to take along what the code has started.
    die_with_parent(*((0, signal.SIGKILL) if has_namespaces else (parent, signal.SIGTERM)))
    isolation = ["namespaces"] if has_namespaces else []
    if has_namespaces:
        isolation += make_private(job["folder"], job["file_mb"])
        os.chdir(job["folder"])
    else:
        adopt_orphans()
        isolation.append("seccomp" if _seccomp_works() else "hooks")
        if os.getuid() == 0 and _is_public(os.__file__) and _is_public(sys.executable):
            isolation.append("user")
    _report(job_fd, {"isolation": isolation})
    _report(job_fd, _watch(job, isolation, job_fd))
    if not has_namespaces:  # inside, the kernel kills what is left when process 1 ends
        kill_descendants(os.getpid())
    os._exit(0)


def _report(job_fd: int, entry: dict[str, Any]) -> None:
    with open(job_fd, "ab", closefd=False) as file:
        file.write(json.dumps(entry).encode() + b"\n")


def _watch(job: dict[str, Any], isolation: list[str], job_fd: int) -> dict[str, Any]:
    """Fork the code, and wait until it ends or has to be ended."""
    init = os.getpid()
    started = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    code = os.fork()
    if not code:
        _run(job, isolation, init, job_fd)
    has_lost_supervisor = False
    while True:
        ended = reap()
        reason = None
        if code in ended:
            return _outcome(ended[code], resource.getrusage(resource.RUSAGE_CHILDREN), job["cpu_s"])
        if has_lost_supervisor or time.monotonic() - started > job["wall_s"]:
            reason = "timeout"
        elif _num_tasks(init) > job["max_processes"]:
            reason = "processes"
        if reason is not None:
            # The whole group at once, before a fork bomb grows further; what left the group is found by its parents.
            with suppress(ProcessLookupError):
                os.killpg(code, signal.SIGKILL)
            return {"exit_code": None, "reason": reason}
        # Returns at once when a child ends. SIGTERM: the supervisor is dead.
        caught = signal.sigtimedwait(_AWAITED, _LOOK_S)
        has_lost_supervisor = caught is not None and caught.si_signo == signal.SIGTERM


def _num_tasks(init: int) -> int:
    count = 0
    for pid in descendants(init):
        with suppress(OSError):  # it ended while we looked
            count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def _outcome(status: int, usage: resource.struct_rusage, cpu_s: float) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    out_of_time = code == -signal.SIGXCPU or (code == -signal.SIGKILL and used >= cpu_s * 0.9)
    if out_of_time:
        return {"exit_code": None, "reason": "cpu time"}
    return {"exit_code": code, "reason": describe_exit(status) if code else None}


def _run(job: dict[str, Any], isolation: list[str], init: int, job_fd: int) -> NoReturn:
    """In the code's process: files, limits, then the code. Ends the process as an interpreter would."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    os.setsid()
    for name, text in {**job["files"], "main.py": job["code"]}.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    sys.path += job["packages"]
    sys.path.insert(0, os.getcwd())
    _limit(job, "namespaces" in isolation)
    if "user" in isolation:
        _become_a_stranger(job["folder"])
    if "namespaces" in isolation:
        drop_capabilities()
    elif "seccomp" in isolation:
        restrict_calls(os.getpid())
    else:
        sys.addaudithook(_refuse)
    die_with_parent(init)
    _report(job_fd, {"started": True})  # whatever fails from here on is the code's own doing
    os.close(job_fd)
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = "main.py"
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    try:
        exec(compile(job["code"], "main.py", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - the end of a program: whatever it is, it is printed and the exit code is 1
        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace and trace.tb_next)
        sys.exit(1)
    sys.exit(0)


def _limit(job: dict[str, Any], is_alone: bool) -> None:
    cpu = max(1, int(job["cpu_s"] + 0.999))  # the kernel counts whole seconds
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (job["memory_mb"] * _MEGABYTE,) * 2,
        resource.RLIMIT_FSIZE: (job["file_mb"] * _MEGABYTE,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (256, 256),
    }
    for kind, (soft, hard) in limits.items():
        most = resource.getrlimit(kind)[1]  # the caller may be limited itself
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    # Counted by user, so it says nothing about a sandbox that shares its user; root is never counted.
    if os.getuid() and is_alone:
        resource.setrlimit(resource.RLIMIT_NPROC, (job["max_processes"] + 2,) * 2)


def _is_public(path: str) -> bool:
    """Whether any user can get to `path`."""
    path = os.path.realpath(path)
    folders = [path]
    while (path := os.path.dirname(path)) != "/":
        folders.append(path)
    return all(os.stat(folder).st_mode & 0o005 for folder in folders)


def _become_a_stranger(folder: str) -> None:
    """A user that nobody is, so that nothing but `folder` and what is public is within reach."""
    stranger = 2_000_000_000 + os.getpid()
    os.chown(folder, stranger, stranger)
    os.setgroups([])
    os.setresgid(stranger, stranger, stranger)
    os.setresuid(stranger, stranger, stranger)


def _seccomp_works() -> bool:
    """Tried in a child, because a filter cannot be taken off again."""
    child = os.fork()
    if not child:
        os._exit(0 if restrict_calls(os.getpid()) else 1)
    return os.waitpid(child, 0)[1] == 0


_REFUSED = ("socket.", "os.kill", "os.killpg", "signal.pthread_kill")


def _refuse(event: str, args: Any) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed in the sandbox")
