"""The processes behind a `ScorePool`. Standard library only, so that they start in milliseconds and hold no torch.

    nursery   imports the score function once, forks workers on demand, kills and buries them
      worker  scores rows, one answer a row

The nursery ends, and everything below it, when its end of the control channel closes: with the pool, or with the death
of the process that owns the pool. Workers adopt what the score function starts; it does not outlive the sample.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, F_SETOWN, fcntl
from typing import Any, NoReturn

from roll.exceptions import ConfigError
from roll.utils.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    has_children,
    kill_descendants,
    kill_tree,
    num_tasks,
    reap,
)
from roll.utils.scoring.score import Score, dropped, to_score
from roll.utils.scoring.spec import load_function, user_line

Function = Callable[[dict[str, Any]], Any]

# What the pool asks of the nursery: b"F" with a socket attached (fork a worker that serves it), or b"K" and a pid.
COMMAND = struct.Struct("=cI")
LENGTH = struct.Struct("=I")
_MAX_REASON = 300
_RESERVE = 64 << 20  # bytes of memory
_LOOK_S = 0.05  # seconds between two looks at how many processes there are
MAX_PROCESSES = 64  # below one worker


def nursery(control_fd: int) -> NoReturn:
    """Serve the pool at the other end of `control_fd`. Says first whether the function could be loaded."""
    control = socket.socket(fileno=control_fd)
    setup = receive(control)
    if setup is None:
        os._exit(0)
    # The function's file is user code, and may hang while it is imported. Nothing arrives on the channel until it is
    # loaded, so a signal about it, whose default is to end the process, can only mean that the other end is closed.
    fcntl(control, F_SETOWN, os.getpid())
    flags = fcntl(control, F_GETFL)
    fcntl(control, F_SETFL, flags | os.O_ASYNC)
    if select.select([control], [], [], 0)[0]:  # closed before that
        os._exit(0)
    sys.path[:] = setup["path"]
    # Whatever the function prints or reads is no part of the protocol, and megabytes of it are no news.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    try:
        function = load_function(setup["spec"], setup["options"])
    except ConfigError as error:
        tell(control, error=str(error))
        os._exit(0)
    fcntl(control, F_SETFL, flags)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # forked workers do not touch, and so do not copy, what exists now
    tell(control, ready=True)
    _serve_pool(control, function, setup["memory_mb"], setup["file"])


def _serve_pool(
    control: socket.socket, function: Function, memory_mb: int, file: str | None
) -> NoReturn:
    me = os.getpid()
    # What the function's module has started itself lives as long as the pool.
    helpers = set(descendants(me)) if has_children() else set()
    workers: set[int] = set()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    quiet = num_tasks()
    while True:
        ready, _, _ = select.select([control, wake_read], [], [], _LOOK_S if workers else None)
        if num_tasks() > quiet + MAX_PROCESSES:
            for pid in workers:
                if len(descendants(pid)) > MAX_PROCESSES:
                    kill_tree(pid)
                    tell(control, crowded=pid)
            quiet = num_tasks()
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, status in reap().items():
                if pid in workers:
                    workers.remove(pid)
                    kill_descendants(me, spare=workers | helpers)
                    tell(control, ended=pid, status=status)
        if control in ready:
            message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            if len(message) < COMMAND.size:
                for pid in workers:
                    kill_tree(pid)
                while kill_descendants(me):
                    reap()
                os._exit(0)
            command, pid = COMMAND.unpack(message)
            if command == b"F":
                pid = _fork_worker(control, fds[0], function, memory_mb, file)
                workers.add(pid)
                tell(control, forked=pid)
            elif pid in workers:
                kill_tree(pid)


def _fork_worker(
    control: socket.socket, fd: int, function: Function, memory_mb: int, file: str | None
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        os.setsid()
        die_with_parent(parent)
        adopt_orphans()
        _limit_memory(memory_mb)
        with suppress(ConnectionError):
            _serve_rows(socket.socket(fileno=fd), function, file)
        os._exit(0)
    finally:
        os._exit(1)  # never back into the nursery's code


def _serve_rows(channel: socket.socket, function: Function, file: str | None) -> None:
    tell(channel, hello=True)
    while (rows := receive(channel)) is not None:
        for index, row in rows:
            score = _score(function, row, file)
            tell(channel, index=index, value=score.value, parts=score.parts, reason=score.reason)
            if score.reason == "memory":
                return  # what is left of the memory is anyone's guess


def _score(function: Function, row: dict[str, Any], file: str | None) -> Score:
    me = os.getpid()
    try:
        score = to_score(function(row))
    except MemoryError:
        _limit_memory(None)
        score = dropped("memory")
    except BaseException as error:  # noqa: BLE001 - the edge of user code: whatever it raises drops one sample
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        score = dropped(f"exception: {text[:_MAX_REASON]} ({user_line(error, file)})")
    if os.getpid() != me:  # a child that the function forked and that came back with it
        os._exit(0)
    if has_children():
        kill_descendants(me)
        while reap():
            pass
    return score


def _limit_memory(memory_mb: int | None) -> None:
    """Let the address space grow by so much from what it is: the function's own libraries are not counted.

    None raises the limit as far as it goes, to the room that is kept for reporting that it was reached.
    """
    with suppress(OSError, ValueError):  # no /proc, or a lower limit is set already
        if memory_mb is None:
            limit, most = (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2
        else:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            limit = pages * resource.getpagesize() + (memory_mb << 20)
            most = limit + _RESERVE
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def tell(channel: socket.socket, **message: Any) -> None:
    """One line of JSON: what comes from a process that ran user code is never unpickled."""
    channel.sendall(json.dumps(message).encode() + b"\n")


def send(channel: socket.socket, message: Any) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    channel.sendall(LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> Any:
    """What `send` sent; None at the end."""
    header = _exactly(channel, LENGTH.size)
    body = None if header is None else _exactly(channel, LENGTH.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < size:
        piece = channel.recv(min(size - len(pieces), 1 << 20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)
