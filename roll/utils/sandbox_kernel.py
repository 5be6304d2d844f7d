"""System calls behind the sandbox that Python has no function for: namespaces, mounts, capabilities, seccomp."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from contextlib import suppress

from roll.utils.processes import libc

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 0x1
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38

# (socket, kill, tkill, tgkill, ptrace, process_vm_readv, process_vm_writev, capset) by processor, with the number by
# which the kernel names the processor. Calls numbered 424 and up have the same number everywhere.
_CALLS = {
    "x86_64": (0xC000003E, (41, 62, 200, 234, 101, 310, 311, 126)),
    "aarch64": (0xC00000B7, (198, 129, 130, 131, 117, 270, 271, 91)),
}
_PIDFD_SEND_SIGNAL, _IO_URING_SETUP = 424, 425


def enter_namespaces() -> bool:
    """Leave the machine's users, network, mounts and messages; children also leave its processes. False: not allowed.

    Asked in a child first, because a process that is half inside cannot go back.
    """
    child = os.fork()
    if not child:
        with suppress(OSError):
            _unshare()
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        return False
    _unshare()
    return True


def _unshare() -> None:
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID
    _check(libc.unshare(flags))
    # Files that the sandbox makes need an owner: the user that started it, under the same number.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def make_private(folder: str, file_mb: int) -> list[str]:
    """In the first process of the namespaces: the file system becomes read-only, `folder` an empty one in memory."""
    achieved = []
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    if (
        libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only))
        == 0
    ):
        achieved.append("read-only")
    for target in (folder, "/dev/shm"):
        _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_mb}m,mode=0700")
    # Refused where parts of /proc are masked, as in containers; the old view then shows processes out of reach.
    with suppress(OSError):
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    return achieved


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def drop_capabilities() -> None:
    """Inside the namespaces this process is all-powerful, and could undo them: from here on it is nobody."""
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    calls = _CALLS.get(platform.machine())
    _check(libc.syscall(calls[1][-1], header, nothing) if calls else libc.capset(header, nothing))


def restrict_calls(own_pid: int) -> bool:
    """No sockets but local ones, no tracing, no signals to others, for this process and its children for good.

    False where the kernel or the processor does not have it.
    """
    if platform.machine() not in _CALLS:
        return False
    arch, (socket, kill, tkill, tgkill, *tracing, _) = _CALLS[platform.machine()]
    refuse = 0x00050000 | errno.EACCES
    allow = 0x7FFF0000
    load, equal, answer = 0x20, 0x15, 0x06
    number, first_argument = 0, 16
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, arch),
        (answer, 0, 0, refuse),
        (load, 0, 0, number),
    ]

    def refuse_unless(call: int, arguments: tuple[int, ...]) -> None:
        """Skip over the block for other calls; inside, allow one of these first arguments and refuse any other."""
        block = [(load, 0, 0, first_argument)] if arguments else []
        for index, value in enumerate(arguments):
            block.append((equal, len(arguments) - index, 0, value & 0xFFFFFFFF))
        block.append((answer, 0, 0, refuse))
        if arguments:
            block.append((answer, 0, 0, allow))
        program.append((equal, 0, len(block), call))
        program.extend(block)

    refuse_unless(socket, (1,))  # AF_UNIX
    for call in (kill, tkill, tgkill):
        refuse_unless(call, (own_pid, 0) if call == kill else (own_pid,))
    for call in (*tracing, _PIDFD_SEND_SIGNAL, _IO_URING_SETUP):
        refuse_unless(call, ())
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
