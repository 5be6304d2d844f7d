"""A process that plays many environments for another one, and can be killed when one of them hangs.

    with EnvHost(specs, timeout_s=60) as host:
        host.submit([EnvCall(0, seed=1), EnvCall(1, seed=1)])
        replies = host.collect(wait_s=2.0)

One process serves any number of environments, one after the other, so a turn costs microseconds. An environment that
takes longer than `timeout_s` is interrupted inside that process and the others go on. If that does not help (it sits in
C code, or the process died), the process is killed and started anew: its other episodes are lost and reported as such.

Messages are pickled and preceded by their length, over a socket pair; neither side ever waits for the other to read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from roll.exceptions import ConfigError, RollError
from roll.pipeline.agentic.env.registry import load_entry_point
from roll.pipeline.agentic.env_calls import KILLED, LOST, EnvCall, EnvReply, EnvSpec, EnvTable

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 18
# Beyond an environment's own timeout, before its process is killed; also the time that a process may take to start.
_GRACE_S, _START_S = 2.0, 60.0


class EnvHost:
    """The parent's side. Calls to one environment must not overlap."""

    def __init__(self, specs: Iterable[EnvSpec], *, timeout_s: float) -> None:
        self.specs = {spec.env_id: _importable(spec) for spec in specs}
        self.timeout_s = timeout_s
        self.num_kills = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._waiting: deque[EnvCall] = deque()  # in the order in which the process answers
        self._heard = (
            0.0  # when the process last gave a sign of life, or was last given work while idle
        )
        self._starting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, calls: Sequence[EnvCall]) -> None:
        """Hand over calls; `collect` brings the replies."""
        if not calls:
            return
        if self._process is None:
            self._start()
        if not self._waiting:
            self._heard = time.monotonic()
        self._waiting.extend(calls)
        self._send(("calls", list(calls)))

    def collect(self, wait_s: float) -> list[EnvReply]:
        """Replies, in the order in which they came: all that are outstanding, or those of the next `wait_s` seconds."""
        replies: list[EnvReply] = []
        deadline = time.monotonic() + wait_s
        while self._waiting:
            now = time.monotonic()
            limit = (
                _START_S if self._starting else self.timeout_s + max(self.timeout_s / 2, _GRACE_S)
            )
            if now - self._heard > limit:
                replies += self._replace(f"no sign of life for {limit:.1f} s")
                break
            if now >= deadline:
                break
            replies += self._exchange(min(deadline - now, self._heard + limit - now + 0.01))
        return replies

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is None:
            return
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.close()  # the end of its input: an idle process ends itself
        if self._waiting:
            self._kill()
        else:
            try:
                self._process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                self._kill()
        # Whatever an environment started in this process group ends with it.
        self._signal_group()
        self._process = self._socket = None
        self._waiting.clear()
        self._outgoing.clear()
        self._incoming.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        package = os.path.dirname(
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        )
        path = os.pathsep.join(
            dict.fromkeys([package, *(entry or os.getcwd() for entry in sys.path)])
        )
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roll.pipeline.agentic.env_host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a group of its own: no Ctrl-C of the terminal, and killed with its children
            )
        self._socket = ours
        self._heard, self._starting = time.monotonic(), True
        self._send(("specs", list(self.specs.values()), self.timeout_s))

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(data)) + data
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(memoryview(self._outgoing)[:_CHUNK])]

    def _exchange(self, wait_s: float) -> list[EnvReply]:
        """Write what is left to write, and read what has come within `wait_s` seconds."""
        assert self._socket is not None
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            selector.register(self._socket, events)
            ready = selector.select(max(wait_s, 0.0))
        for _, mask in ready:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                try:
                    data = self._socket.recv(_CHUNK)
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    data = b""
                if not data:
                    return self._replace("its process ended")
                self._incoming += data
        return self._parse()

    def _parse(self) -> list[EnvReply]:
        replies: list[EnvReply] = []
        position = 0
        while len(self._incoming) - position >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._incoming, position)
            end = position + _LENGTH.size + size
            if len(self._incoming) < end:
                break
            reply = pickle.loads(memoryview(self._incoming)[position + _LENGTH.size : end])
            position = end
            self._heard, self._starting = time.monotonic(), False
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, EnvReply):
                call = self._waiting.popleft()
                assert call.env_id == reply.env_id
                replies.append(reply)
        del self._incoming[:position]
        return replies

    def _replace(self, why: str) -> list[EnvReply]:
        """Kill the process. The call that it was at fails; those behind it lost their episode."""
        self.num_kills += 1
        waiting = list(self._waiting)
        assert self._process is not None
        self._kill()
        code = self._process.returncode
        self.close()
        detail = f"{why} (exit status {code})"
        return [
            EnvReply(call.env_id, reason=KILLED if index == 0 else LOST, detail=detail)
            for index, call in enumerate(waiting)
        ]

    def _kill(self) -> None:
        assert self._process is not None
        self._signal_group()
        self._process.wait()

    def _signal_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalEnvs:
    """Environments in this process, with the interface of `EnvHost`: `breakpoint()` works in them, and nothing stops
    one that hangs."""

    num_kills = 0

    def __init__(self, specs: Iterable[EnvSpec]) -> None:
        self._table = EnvTable()
        self._table.specs = {spec.env_id: spec for spec in specs}
        self._replies: list[EnvReply] = []

    def submit(self, calls: Sequence[EnvCall]) -> None:
        self._replies += [self._table.call(call) for call in calls]

    def collect(self, wait_s: float) -> list[EnvReply]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        self._table.close()
        self._replies.clear()


def _importable(spec: EnvSpec) -> EnvSpec:
    """The spec with its class named by module, because another process has to find it."""
    if isinstance(spec.entry_point, str):
        return spec
    module, name = spec.entry_point.__module__, spec.entry_point.__qualname__
    if module == "__main__" or "<" in name:
        raise ConfigError(
            f"environment {name}: environments run in processes of their own, which cannot import it from "
            f"{'the script that is run' if module == '__main__' else 'inside a function'}; move the class to a module, "
            "or set env_isolation: false"
        )
    return EnvSpec(spec.env_id, f"{module}:{name}", spec.leading, spec.config, spec.random_actions)


# -- the process's side ------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Answer calls until the other side closes."""
    table, timeout_s = EnvTable(), 60.0
    stream = connection.makefile("rb")

    def reply(answer: Any) -> None:
        data = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        connection.sendall(_LENGTH.pack(len(data)) + data)

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while header := stream.read(_LENGTH.size):
            kind, *content = pickle.loads(stream.read(_LENGTH.unpack(header)[0]))
            if kind == "specs":
                specs, timeout_s = content
                table.specs = {spec.env_id: spec for spec in specs}
                reply(_import_all(table.specs.values()))
                continue
            for call in content[0]:
                reply(table.call(call, timeout_s))
    table.close()


def _import_all(specs: Iterable[EnvSpec]) -> str | RollError:
    """Import what the environments are made of: slow the first time, so not a part of anybody's timeout. A path that
    does not exist, or a package that is missing, is a mistake of the configuration: it ends the run."""
    try:
        for entry_point in {spec.entry_point for spec in specs}:
            load_entry_point(entry_point)
    except RollError as error:
        return error
    return "ready"


if __name__ == "__main__":
    sys.stdout = sys.stderr  # what environments print is not ours to interpret
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        serve(_connection)
    os._exit(0)  # threads that an environment left behind do not keep the process
