"""Score functions in processes that can be killed.

    with ScorePool("my_file.py:score", num_processes=4, timeout_s=10, memory_mb=2048) as pool:
        scores = pool.score([{"prompt": "1+1", "response": "2", "ground_truth": "2"}, ...])

Rows are scored in parallel. A row whose scoring raises, hangs, crashes, eats memory or returns nonsense gets a `Score`
with the reason; its process is replaced where need be, and the other rows go on. See `child` for the processes.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.exceptions import ConfigError, RollError
from roll.utils.processes import describe_exit, kill_tree
from roll.utils.scoring.child import COMMAND, MAX_PROCESSES, send
from roll.utils.scoring.score import Score, dropped
from roll.utils.scoring.spec import absolute_spec, spec_of

_START_S = 120.0  # for importing the function
_MAX_CHUNK = 32
_MAX_FAILED_STARTS = 3
_ROOT = str(Path(__file__).parents[3])
_LAUNCH = "import sys; sys.path.insert(0, {root!r}); from roll.utils.scoring.child import nursery; nursery({fd})"


class _Channel:
    """A socket on which the other side writes lines of JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self.is_closed = False

    def messages(self) -> list[dict[str, Any]]:
        """What has arrived, without waiting."""
        while not self.is_closed:
            try:
                piece = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                piece = b""
            self.is_closed = not piece
            self._buffer += piece
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        return [json.loads(line) for line in lines]


@dataclass
class _Worker:
    """One worker as the pool sees it."""

    channel: _Channel
    since: float  # when it was started, or when its latest row was
    pid: int | None = None
    is_ready: bool = False  # said hello, and takes rows
    is_leaving: bool = False  # takes no more rows; the nursery will say when and how it ended
    rows: deque[int] = field(default_factory=deque)  # handed out; the first is being scored


class ScorePool:
    """Processes that hold one score function.

    Args:
        function: `my_file.py:score`, `package.module:score`, or a function at the top of a module.
        num_processes: rows scored at the same time.
        timeout_s: seconds for one row, counted from when its scoring begins, not while it waits for its turn.
        memory_mb: by how much scoring may grow its process.
        options: keyword arguments that go along with every row.

    Raises:
        ConfigError: the function cannot be found or imported.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        num_processes: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int = 4096,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = absolute_spec(function if isinstance(function, str) else spec_of(function))
        self.num_processes = num_processes
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._is_closed = False
        self._start_nursery()

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One Score for each row, in order. Threads take turns."""
        with self._lock:
            if self._is_closed:
                raise RollError("the pool of score processes was closed")
            if not self._end_processes.alive:
                self._start_nursery()
            try:
                return self._score(rows)
            except BaseException:
                # Answers to rows that nobody waits for any more must not be taken for those of the next call, which
                # starts anew.
                self._drop_processes()
                raise

    def close(self) -> None:
        """End all processes; they are gone when this returns. Safe to call again."""
        self._is_closed = True
        self._drop_processes()

    def __enter__(self) -> ScorePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the nursery ---------------------------------------------------------------------------------------------------

    def _start_nursery(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # The name of the function is there for people who look at a list of processes.
                [sys.executable, "-c", _LAUNCH.format(root=_ROOT, fd=theirs.fileno()), self.spec],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread each, since there are several; the user's own setting goes first.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C in the terminal is for the training, which closes the pool
            )
        # Also called when the pool is forgotten, and at the end of the program.
        self._end_processes = weakref.finalize(self, _end, process, ours)
        self._control = _Channel(ours)
        path, _, _ = self.spec.rpartition(":")
        setup = {
            "spec": self.spec,
            "file": path if path.endswith(".py") else None,
            "options": self._options,
            "memory_mb": self.memory_mb,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        answer: dict[str, Any] = {}
        try:
            send(ours, setup)
            ours.settimeout(_START_S)
            answer = json.loads(ours.makefile("rb", buffering=0).readline() or b"{}")
            ours.settimeout(None)
        except TimeoutError:
            answer = {
                "error": f"{self.spec!r} cannot be imported: it was not done after {_START_S:g} seconds"
            }
        except ConnectionError:
            pass  # it died; `answer` is empty
        if not answer.get("ready"):
            self.close()
            code = process.returncode
            raise ConfigError(
                answer.get("error")
                or f"{self.spec!r} cannot be imported: its process ended with {code}"
            )

    def _drop_processes(self) -> None:
        self._end_processes()
        self._workers = []

    def _add_worker(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, suppress(ConnectionError):  # a dead nursery is noticed by its closed channel
            socket.send_fds(self._control.sock, [COMMAND.pack(b"F", 0)], [theirs.fileno()])
        self._workers.append(_Worker(_Channel(ours), since=time.monotonic()))

    # -- one call ------------------------------------------------------------------------------------------------------

    def _score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        run = _Run(rows, chunk=max(1, min(_MAX_CHUNK, len(rows) // (4 * self.num_processes))))
        while not run.is_done:
            self._look_after_workers(run)
            with selectors.DefaultSelector() as selector:
                for channel in [
                    self._control,
                    *(w.channel for w in self._workers if not w.channel.is_closed),
                ]:
                    selector.register(channel.sock, selectors.EVENT_READ)
                selector.select(self._seconds_to_next_deadline())
            for worker in self._workers:
                self._read(worker, run)
            self._read_control(run)
            self._end_overdue(run)
        return [run.scores[index] for index in range(len(rows))]

    def _look_after_workers(self, run: _Run) -> None:
        while len(self._workers) < min(self.num_processes, run.num_open):
            self._add_worker()
        for worker in self._workers:
            if worker.is_ready and not worker.is_leaving and not worker.rows and run.queue:
                worker.rows = run.take()
                worker.since = time.monotonic()
                with suppress(OSError):  # it is dying; the nursery will say how
                    send(worker.channel.sock, [(index, run.rows[index]) for index in worker.rows])

    def _seconds_to_next_deadline(self) -> float:
        first = min(self._deadline(worker) for worker in self._workers)
        return max(0.0, min(first - time.monotonic(), _START_S))

    def _deadline(self, worker: _Worker) -> float:
        if not worker.is_ready:
            return worker.since + _START_S
        return worker.since + self.timeout_s if worker.rows else float("inf")

    def _read(self, worker: _Worker, run: _Run) -> None:
        for message in worker.channel.messages():
            worker.since = time.monotonic()
            if "hello" in message:
                worker.is_ready = True
                run.failed_starts = 0
                continue
            index = worker.rows.popleft()
            assert index == message["index"]
            score = Score(message["value"], message["parts"], message["reason"])
            if score.reason == "memory":  # the process ends by itself, to be replaced
                worker.is_leaving = True
                run.stopped_at(index, score, is_certain=False)
                run.give_back(worker.rows)
            else:
                run.scores[index] = score
        worker.is_leaving = worker.is_leaving or worker.channel.is_closed

    def _read_control(self, run: _Run) -> None:
        for message in self._control.messages():
            if "forked" in message:  # in the order in which they were asked for
                next(worker for worker in self._workers if worker.pid is None).pid = message[
                    "forked"
                ]
                continue
            crowded = "crowded" in message
            pid = message["crowded"] if crowded else message["ended"]
            for worker in [worker for worker in self._workers if worker.pid == pid]:
                self._read(worker, run)  # what it said before it ended
                how = (
                    f"more than {MAX_PROCESSES} processes"
                    if crowded
                    else describe_exit(message["status"])
                )
                self._remove(worker, run, dropped(f"killed: {how}"), is_certain=crowded)
        if self._control.is_closed:  # the nursery was killed, and its workers with it
            for worker in list(self._workers):
                self._remove(
                    worker,
                    run,
                    dropped("killed: with the process that it runs in"),
                    is_certain=False,
                )
            self._drop_processes()
            self._start_nursery()

    def _end_overdue(self, run: _Run) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if self._deadline(worker) <= now]:
            if worker.pid is not None:
                with suppress(ConnectionError):
                    self._control.sock.sendall(COMMAND.pack(b"K", worker.pid))
            self._remove(worker, run, dropped("timeout"), is_certain=True)

    def _remove(self, worker: _Worker, run: _Run, score: Score, *, is_certain: bool) -> None:
        """Take a worker out. The row it was at gets `score`; the rows that wait behind it go to others."""
        self._workers.remove(worker)
        worker.channel.sock.close()
        if not worker.is_ready:
            run.failed_starts += 1
            if run.failed_starts >= _MAX_FAILED_STARTS:
                raise RollError(
                    f"{self.spec!r}: {run.failed_starts} processes in a row ended before they could score anything "
                    f"({score.reason})"
                )
        if worker.rows:
            run.stopped_at(worker.rows.popleft(), score, is_certain=is_certain)
        run.give_back(worker.rows)


class _Run:
    """The rows of one call: which wait, which are scored."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], chunk: int) -> None:
        self.rows = [dict(row) for row in rows]
        self.queue = deque(range(len(rows)))
        self.scores: dict[int, Score] = {}
        self.failed_starts = 0
        self._chunk = chunk
        self._suspects: set[int] = set()

    @property
    def num_open(self) -> int:
        return len(self.rows) - len(self.scores)

    @property
    def is_done(self) -> bool:
        return not self.num_open

    def take(self) -> deque[int]:
        return deque(self.queue.popleft() for _ in range(min(self._chunk, len(self.queue))))

    def give_back(self, indices: deque[int]) -> None:
        """Rows that were handed out and not begun."""
        self.queue.extendleft(reversed(indices))
        indices.clear()

    def stopped_at(self, index: int, score: Score, *, is_certain: bool) -> None:
        """Scoring this row ended its process. The fault may be an earlier row's, a thread or a leak that it left: so
        unless it is certain, the row is tried once more in another process."""
        if is_certain or index in self._suspects:
            self.scores[index] = score
        else:
            self._suspects.add(index)
            self.queue.appendleft(index)


def check_reward_fn(function: str | Callable[..., Any]) -> None:
    """Raise a ConfigError that says what is wrong with a score function, if it cannot be loaded.

    It is imported in a process of its own, so nothing of it, its time limit included, touches the caller.
    """
    ScorePool(function).close()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
