"""The other side of `roll.rewards.sandbox`, standard library only, so that it starts fast.

    supervisor   enters the namespaces, forks init, waits for it
      init       process 1 of its namespace: watches limits, adopts orphans
        code     gives up what it could still do, and runs the code as `__main__`

System calls that Python has no function for (namespaces, mounts, capabilities, seccomp) stand at
the end.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from roll.rewards.processes import (
    adopt_orphans,
    descendants,
    describe_exit,
    die_with_parent,
    kill_descendants,
    libc,
    reap,
)

_LOOK_S = 0.02  # seconds between two looks at the limits that the kernel does not watch
_AWAITED = [signal.SIGCHLD, signal.SIGTERM]


def main(root: str, job_fd: int) -> None:
    """Run the job of an open file, and write a report behind it."""
    with open(job_fd, "rb+", closefd=False) as file:
        job = json.loads(file.read())
        file.write(b"\n")
    sys.path.remove(root)
    die_with_parent(job["caller"])
    has_namespaces = job["namespaces"] and _enter_namespaces()
    parent = os.getpid()
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        os._exit(0)
    if has_namespaces:
        # In a process namespace of its own, a process does not see its parent: it is number 0.
        die_with_parent(0)
        isolation = ["namespaces", *_make_private(job["folder"], job["file_mb"])]
        os.chdir(job["folder"])
    else:
        # A signal that `_watch` waits for, to take along what the code has started.
        die_with_parent(parent, signal.SIGTERM)
        adopt_orphans()
        isolation = ["seccomp" if _in_child(_restrict_calls) else "hooks"]
        # Another user could not read an interpreter that lies in a private folder.
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
        if code in ended:
            exit_code = os.waitstatus_to_exitcode(ended[code])
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            # The kernel's soft limit is a signal that says so, its hard limit a plain SIGKILL.
            used_up = usage.ru_utime + usage.ru_stime >= job["cpu_s"] * 0.9
            if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and used_up):
                return {"exit_code": None, "reason": "cpu time"}
            reason = describe_exit(ended[code]) if exit_code else None
            return {"exit_code": exit_code, "reason": reason}
        num_tasks = 0
        for pid in descendants(init):
            with suppress(OSError):  # it ended while we looked
                num_tasks += len(os.listdir(f"/proc/{pid}/task"))
        reason = None
        if has_lost_supervisor or time.monotonic() - started > job["wall_s"]:
            reason = "timeout"
        elif num_tasks > job["max_processes"]:
            reason = "processes"
        if reason is not None:
            # The whole group at once, before a fork bomb grows further.
            with suppress(ProcessLookupError):
                os.killpg(code, signal.SIGKILL)
            return {"exit_code": None, "reason": reason}
        # Returns at once when a child ends. SIGTERM: the supervisor is dead.
        caught = signal.sigtimedwait(_AWAITED, _LOOK_S)
        has_lost_supervisor = caught is not None and caught.si_signo == signal.SIGTERM


def _run(job: dict[str, Any], isolation: list[str], init: int, job_fd: int) -> NoReturn:
    """In the code's process: files, limits, then the code. Ends as an interpreter would."""
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
        # A user number that nobody has: only `folder` and what is public is within reach.
        stranger = 2_000_000_000 + os.getpid()
        os.chown(job["folder"], stranger, stranger)
        os.setgroups([])
        os.setresgid(stranger, stranger, stranger)
        os.setresuid(stranger, stranger, stranger)
    if "namespaces" in isolation:
        _drop_capabilities()
    elif "seccomp" in isolation:
        _restrict_calls()
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
    except BaseException:  # noqa: BLE001 - the end of a program: it is printed, the exit code is 1
        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace and trace.tb_next)
        sys.exit(1)
    sys.exit(0)


def _limit(job: dict[str, Any], is_alone: bool) -> None:
    cpu = max(1, int(job["cpu_s"] + 0.999))  # the kernel counts whole seconds
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (job["memory_mb"] << 20,) * 2,
        resource.RLIMIT_FSIZE: (job["file_mb"] << 20,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (256, 256),
    }
    # Counted by user, so it says nothing where others run as that user; root is never counted.
    if os.getuid() and is_alone:
        limits[resource.RLIMIT_NPROC] = (job["max_processes"] + 2,) * 2
    for kind, (soft, hard) in limits.items():
        most = resource.getrlimit(kind)[1]  # the caller may be limited itself
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def _is_public(path: str) -> bool:
    """Whether any user can get to `path`."""
    path = os.path.realpath(path)
    while path != "/":
        if not os.stat(path).st_mode & 0o005:
            return False
        path = os.path.dirname(path)
    return True


def _refuse(event: str, args: Any) -> None:
    if event.startswith(("socket.", "os.kill", "os.killpg", "signal.pthread_kill")):
        raise PermissionError(f"{event} is not allowed in the sandbox")


def _in_child(function: Any) -> bool:
    """Whether `function` works, tried in a child: what it does cannot be undone."""
    child = os.fork()
    if not child:
        with suppress(OSError):
            os._exit(0 if function() else 1)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


# -- system calls ----------------------------------------------------------------------------------

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 0x1
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38

# (socket, kill, tkill, tgkill, ptrace, process_vm_readv, process_vm_writev, capset) by processor,
# with the number by which the kernel names it. From 424 on, calls have the same number everywhere.
_CALLS = {
    "x86_64": (0xC000003E, (41, 62, 200, 234, 101, 310, 311, 126)),
    "aarch64": (0xC00000B7, (198, 129, 130, 131, 117, 270, 271, 91)),
}
_PIDFD_SEND_SIGNAL, _IO_URING_SETUP = 424, 425


def _enter_namespaces() -> bool:
    """Leave the machine's users, network, mounts and messages; children leave its processes too.

    False where that is not allowed.
    """

    def unshare() -> bool:
        user, group = os.getuid(), os.getgid()
        flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID
        _check(libc.unshare(flags))
        # Files that the sandbox makes need an owner: the user that started it, as in the outside.
        maps = {
            "setgroups": "deny",
            "uid_map": f"{user} {user} 1",
            "gid_map": f"{group} {group} 1",
        }
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True

    return _in_child(unshare) and unshare()


def _make_private(folder: str, file_mb: int) -> list[str]:
    """In process 1 of the namespaces: a read-only file system, with `folder` empty, in memory."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only))
    achieved = ["read-only"] if libc.syscall(*call) == 0 else []
    for target in (folder, "/dev/shm"):
        _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_mb}m,mode=0700")
    # Refused where parts of /proc are masked, as in containers; the old view then shows processes
    # that are out of reach.
    with suppress(OSError):
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    return achieved


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _drop_capabilities() -> None:
    """Inside the namespaces this process may do anything, also undo them: it gives that up."""
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    calls = _CALLS.get(platform.machine())
    _check(libc.syscall(calls[1][-1], header, nothing) if calls else libc.capset(header, nothing))


def _restrict_calls() -> bool:
    """No sockets but local ones, no tracing, no signals to others, for this process and its
    children. False where the kernel or the processor does not have it."""
    if platform.machine() not in _CALLS:
        return False
    arch, (socket, kill, tkill, tgkill, *tracing, _) = _CALLS[platform.machine()]
    refuse, allow = 0x00050000 | errno.EACCES, 0x7FFF0000
    load, equal, answer = 0x20, 0x15, 0x06  # instructions of the kernel's packet filter
    number, architecture, first_argument = 0, 4, 16  # where these stand in what it looks at
    own_pid = os.getpid()
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, architecture),
        (equal, 1, 0, arch),
        (answer, 0, 0, refuse),
        (load, 0, 0, number),
    ]
    # Calls that are refused, unless their first argument is one of these. 1 is AF_UNIX.
    allowed = {socket: (1,), kill: (own_pid, 0), tkill: (own_pid,), tgkill: (own_pid,)}
    for call in (*allowed, *tracing, _PIDFD_SEND_SIGNAL, _IO_URING_SETUP):
        arguments = allowed.get(call, ())
        block = [(load, 0, 0, first_argument)] if arguments else []
        for index, value in enumerate(arguments):
            block.append((equal, len(arguments) - index, 0, value & 0xFFFFFFFF))
        block.append((answer, 0, 0, refuse))
        if arguments:
            block.append((answer, 0, 0, allow))
        program.append((equal, 0, len(block), call))  # other calls skip the block
        program.extend(block)
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(_PR_SET_SECCOMP, 2, filters, 0, 0) == 0


def _check(outcome: int) -> None:
    if outcome != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
