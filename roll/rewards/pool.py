"""Score functions in processes that can be killed.

    with ScorePool("my_file.py:score", num_processes=4, timeout_s=10, memory_mb=2048) as pool:
        scores = pool.score([{"prompt": "1+1", "response": "2", "ground_truth": "2"}, ...])

The pool starts one process, the nursery (`serve`). It imports the function once, forks workers,
hands out rows, and replaces workers that hang or die. It ends, with everything below it, when the
pool closes or its owner dies. By hand, because the pools of multiprocessing and pebble fork the
training process or import its main module (torch included), and leave alone what a function starts.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fcntl import F_GETFL, F_SETFL, F_SETOWN, fcntl
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

from roll.exceptions import ConfigError, RollError
from roll.rewards.processes import (
    adopt_orphans,
    descendants,
    describe_exit,
    die_with_parent,
    has_children,
    kill_descendants,
    kill_tree,
    num_tasks,
    reap,
)

_CLOSED = "the pool of score processes was closed"
_START_S = 120.0  # for importing the function, and for a worker to come up
_MAX_FAILED_STARTS = 3
_LOOK_S = 0.05  # seconds between two looks at deadlines and at the number of processes
_MAX_PROCESSES = 64  # below one worker
_MAX_REASON = 300  # characters of an exception
_RESERVE = 64 << 20  # bytes of memory for saying that there is none left
_ROOT = str(Path(__file__).parents[2])
_LAUNCH = (
    "import sys; sys.path.insert(0, {root!r}); from roll.rewards.pool import serve; serve({fd})"
)

Function = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Score:
    """The outcome of scoring one sample: a number with its parts, or the reason why there is none.

    A sample without a value is dropped from the batch and counted by the text before the colon of
    its reason (docs/custom-reward.md has the table). It is never a score of 0, which would teach
    the model that the answer was wrong.
    """

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


def dropped(reason: str) -> Score:
    return Score(None, {}, reason)


def to_score(returned: Any) -> Score:
    """What a score function returned, as a Score.

    A dict names the parts; their sum is the score, unless one of them is called `score`.
    """
    named = isinstance(returned, Mapping)
    parts: dict[str, float] = {}
    for name, part in (returned if named else {"score": returned}).items():
        value = part
        # Numbers of numpy, and tensors and arrays of one number.
        if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
            with suppress(ValueError, RuntimeError):  # more than one number
                value = item()
        if part is None and not named:
            return dropped("none")
        if not isinstance(value, int | float):
            text = repr(part)
            text = text if len(text) <= 60 else text[:57] + "..."
            found = f"{text} ({type(part).__name__})"
            if named:
                return dropped(f"type: part {name!r} is {found}; expected a number")
            return dropped(f"type: returned {found}; expected a number, a dict of numbers or None")
        if not math.isfinite(value):
            return dropped("nan")
        parts[str(name)] = float(value)
    if not parts:
        return dropped("none")
    total = parts["score"] if "score" in parts else math.fsum(parts.values())
    return Score(total, parts if named else {})


class ScorePool:
    """Processes that hold one score function.

    Args:
        function: `my_file.py:score` or `package.module:score`.
        num_processes: rows scored at the same time.
        timeout_s: seconds for one row, counted from when its scoring begins.
        memory_mb: by how much scoring may grow its process.
        options: keyword arguments that go along with every row.

    Raises:
        ConfigError: the function cannot be found or imported.
    """

    def __init__(
        self,
        function: str,
        *,
        num_processes: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int = 4096,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = _absolute_spec(function)
        self._setup = {
            "spec": self.spec,
            "options": dict(options or {}),
            "num_processes": num_processes,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One Score for each row, in order. Threads take turns."""
        with self._lock:
            if self._is_closed:
                raise RollError(_CLOSED)
            # Between two calls nothing is said: what can be read then is the end of the nursery,
            # which costs no row of this call.
            if self._end_processes.alive and self._control.poll():
                self._end_processes()
            scores: dict[int, Score] = {}
            try:
                self._score(rows, list(range(len(rows))), scores)
            except BaseException:
                # Answers that nobody waits for any more must not be taken for those of the next
                # call, which starts anew.
                self._end_processes()
                raise
            return [scores[index] for index in range(len(rows))]

    def close(self) -> None:
        """End all processes; they are gone when this returns. Safe to call again."""
        self._is_closed = True
        self._end_processes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._control, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                # The name of the function is there for people who look at a list of processes.
                [sys.executable, "-c", _LAUNCH.format(root=_ROOT, fd=theirs.fileno()), self.spec],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread each, since there are several; the user's own setting goes first.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C is for the training, which closes the pool
            )
        # Also called when the pool is forgotten, and at the end of the program.
        self._end_processes = weakref.finalize(self, _end, process, self._control)
        answer: dict[str, Any] = {}
        with suppress(EOFError, ConnectionError):  # it died
            self._control.send(self._setup)
            if self._control.poll(_START_S):
                answer = json.loads(self._control.recv_bytes())
            else:
                answer = {"error": f"{self.spec!r} cannot be imported in {_START_S:g} seconds"}
        if "ready" not in answer:
            self.close()
            ended = f"{self.spec!r} cannot be imported: its process ended with {process.returncode}"
            raise ConfigError(answer.get("error", ended))
        if self._is_closed:  # by another thread, which knew of the processes before these only
            self._end_processes()
            raise RollError(_CLOSED)

    def _score(
        self, rows: Sequence[Mapping[str, Any]], todo: list[int], scores: dict[int, Score]
    ) -> None:
        if not self._end_processes.alive:
            self._start()
        try:
            self._control.send([(index, pickle.dumps(dict(rows[index]))) for index in todo])
            for _ in todo:
                # What comes from a process that ran user code is never unpickled.
                answer = json.loads(self._control.recv_bytes())
                if "error" in answer:
                    raise RollError(f"{self.spec!r}: {answer['error']}")
                index = answer.pop("index")
                scores[index] = Score(**answer)
        except (EOFError, OSError):  # OSError: another thread has closed the pool
            # A row killed the nursery. Which one, is found by halves: a row is blamed only alone.
            self._end_processes()
            if self._is_closed:
                raise RollError(_CLOSED) from None
            if len(todo) == 1:
                scores[todo[0]] = dropped("killed: with the process that it runs in")
                return
            left = [index for index in todo if index not in scores]
            for part in (left[: len(left) // 2], left[len(left) // 2 :]):
                if part:
                    self._score(rows, part, scores)


def check_reward_fn(function: str) -> None:
    """Raise a ConfigError that says what is wrong with a score function, if it cannot be loaded.

    It is imported in a process of its own: if it hangs or crashes, the caller does not.
    """
    ScorePool(function).close()


def _end(process: subprocess.Popen[bytes], control: Connection) -> None:
    # Closing alone would leave a thread that waits for an answer waiting, and the nursery too.
    with suppress(OSError), socket.socket(fileno=os.dup(control.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    control.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()


# -- the nursery -----------------------------------------------------------------------------------


def serve(control_fd: int) -> NoReturn:
    """Score rows for the pool at the other end of `control_fd`, until that end closes."""
    control = Connection(control_fd)
    try:
        setup = control.recv()
    except EOFError:
        os._exit(0)
    # The function's file is user code, and may hang while it is imported. Nothing arrives on the
    # channel until it is loaded: so a signal about it, whose default is to end the process, can
    # only mean that the other end is closed.
    fcntl(control_fd, F_SETOWN, os.getpid())
    flags = fcntl(control_fd, F_GETFL)
    fcntl(control_fd, F_SETFL, flags | os.O_ASYNC)
    if control.poll():  # closed before that
        os._exit(0)
    sys.path[:] = setup["path"]
    # What the function prints or reads is no part of the protocol.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    try:
        function = _load(setup["spec"], setup["options"])
    except ConfigError as error:
        _tell(control, error=str(error))
        os._exit(0)
    fcntl(control_fd, F_SETFL, flags)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # forked workers do not touch, and so do not copy, what exists now
    nursery = _Nursery(control, function, setup)
    _tell(control, ready=True)
    with suppress(EOFError, ConnectionError):
        while True:
            nursery.score(control.recv())
    for worker in nursery.workers:
        kill_tree(worker.pid)
    while kill_descendants(os.getpid()):
        reap()
    os._exit(0)


def _tell(channel: Connection, **message: Any) -> None:
    channel.send_bytes(json.dumps(message).encode())


@dataclass
class _Worker:
    pid: int
    channel: Connection
    since: float  # when it was forked, or got its row
    is_ready: bool = False  # said that it is up
    is_open: bool = True  # takes rows; otherwise it is about to end
    row: tuple[int, bytes] | None = None  # index and pickle of what it scores


class _Nursery:
    """Forks workers, and hands them the rows of one call after the other."""

    def __init__(self, control: Connection, function: Function, setup: Mapping[str, Any]) -> None:
        self.control = control
        self.function = function
        self.setup = setup
        self.workers: list[_Worker] = []
        # What the function's module has started itself lives as long as the pool.
        self.helpers = set(descendants(os.getpid())) if has_children() else set()

    def score(self, batch: Sequence[tuple[int, bytes]]) -> None:
        """Answer every row of `batch`, in any order. EOFError if the pool's owner is gone."""
        self.queue = deque(batch)
        self.num_open = len(batch)
        self.suspects: set[int] = set()
        self.failed_starts = 0
        quiet = num_tasks()
        while self.num_open:
            while len(self.workers) < min(self.setup["num_processes"], self.num_open):
                self.workers.append(self._fork())
            for worker in self.workers:
                if worker.is_ready and worker.is_open and worker.row is None and self.queue:
                    worker.row = self.queue.popleft()
                    worker.since = time.monotonic()
                    with suppress(OSError):  # it is dying; `reap` will say how
                        worker.channel.send_bytes(worker.row[1])
            channels = [worker.channel for worker in self.workers if worker.is_open]
            if self.control in wait([self.control, *channels], _LOOK_S):
                raise EOFError  # the owner sends nothing during a call: it is gone
            for worker in self.workers:
                self._read(worker)
            for pid, status in reap().items():
                for worker in [worker for worker in self.workers if worker.pid == pid]:
                    self._read(worker)  # what it said before it ended
                    self._remove(worker, f"killed: {describe_exit(status)}")
            now = time.monotonic()
            for worker in list(self.workers):
                limit = self.setup["timeout_s"] if worker.is_ready else _START_S
                is_at_work = worker.row is not None or not worker.is_ready
                if is_at_work and now > worker.since + limit:
                    self._remove(worker, "timeout", is_certain=True)
            # The number of tasks of the machine is cheap to know; looking at each worker is not.
            if num_tasks() > quiet + _MAX_PROCESSES:
                for worker in list(self.workers):
                    if len(descendants(worker.pid)) > _MAX_PROCESSES:
                        reason = f"killed: more than {_MAX_PROCESSES} processes"
                        self._remove(worker, reason, is_certain=True)
                quiet = num_tasks()

    def _fork(self) -> _Worker:
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid, ours, time.monotonic())
        try:
            for channel in (self.control, ours, *(worker.channel for worker in self.workers)):
                channel.close()
            os.setsid()
            die_with_parent(parent)
            adopt_orphans()
            _limit_memory(self.setup["memory_mb"])
            with suppress(EOFError, ConnectionError):
                _work(theirs, self.function, self.setup["spec"])
            os._exit(0)
        finally:
            os._exit(1)  # never back into the nursery's code

    def _read(self, worker: _Worker) -> None:
        try:
            while worker.is_open and worker.channel.poll():
                message = json.loads(worker.channel.recv_bytes())
                if "hello" in message:
                    worker.is_ready = True
                    self.failed_starts = 0
                elif message["reason"] == "memory":  # the worker ends by itself
                    worker.is_open = False
                    self._blame(worker, message["reason"])
                elif worker.row is not None:
                    self._answer(worker.row[0], Score(**message))
                    worker.row = None
        except (EOFError, OSError):
            worker.is_open = False

    def _remove(self, worker: _Worker, reason: str, *, is_certain: bool = False) -> None:
        """Take out a worker, and all it has started. The row it was at gets `reason`."""
        self.workers.remove(worker)
        worker.channel.close()
        if is_certain:
            kill_tree(worker.pid)
        if has_children():
            spare = {other.pid for other in self.workers} | self.helpers
            kill_descendants(os.getpid(), spare)
        if not worker.is_ready:
            self.failed_starts += 1
            if self.failed_starts >= _MAX_FAILED_STARTS:
                how = "processes in a row ended before they could score anything"
                _tell(self.control, error=f"{self.failed_starts} {how} ({reason})")
                raise EOFError
        if worker.row is not None:
            self._blame(worker, reason, is_certain=is_certain)

    def _blame(self, worker: _Worker, reason: str, *, is_certain: bool = False) -> None:
        """A worker ended at its row. The fault may be an earlier row's, a thread or a leak that it
        left: unless it is certain, the row is tried once more in another process."""
        assert worker.row is not None
        row, worker.row = worker.row, None
        if is_certain or row[0] in self.suspects:
            self._answer(row[0], dropped(reason))
        else:
            self.suspects.add(row[0])
            self.queue.appendleft(row)

    def _answer(self, index: int, score: Score) -> None:
        self.num_open -= 1
        _tell(self.control, index=index, **asdict(score))


def _work(channel: Connection, function: Function, spec: str) -> None:
    """A worker: score one row after the other, until the channel closes."""
    me = os.getpid()
    _tell(channel, hello=True)
    while True:
        row = pickle.loads(channel.recv_bytes())
        try:
            score = to_score(function(row))
        except MemoryError:
            _limit_memory(None)
            score = dropped("memory")
        except BaseException as error:  # noqa: BLE001 - user code: whatever it raises drops one row
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            score = dropped(f"exception: {text[:_MAX_REASON]} ({_user_line(error, spec)})")
        if os.getpid() != me:  # a child that the function forked and that came back with it
            os._exit(0)
        if has_children():
            kill_descendants(me)
            while reap():
                pass
        _tell(channel, **asdict(score))
        if score.reason == "memory":
            return  # how much memory is left now, nobody knows


def _limit_memory(memory_mb: int | None) -> None:
    """Let the address space grow by so much from what it is: libraries are not counted.

    None raises the limit by the room that is kept for reporting that it was reached.
    """
    with suppress(OSError, ValueError):  # no /proc, or a lower limit is set already
        if memory_mb is None:
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            return
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit + _RESERVE))


# -- functions by name -----------------------------------------------------------------------------


def _absolute_spec(spec: str) -> str:
    """`spec` with the path of its file in full; a ConfigError if there is no such file."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ConfigError(
            f"{spec!r} names no function; expected my_file.py:score or package.module:score"
        )
    if not path.endswith(".py"):
        return spec
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        others = [other.name for other in file.parent.glob("*.py")]
        near = difflib.get_close_matches(file.name, others, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the path from here, or in full"
        raise ConfigError(f"{spec!r}: there is no file {file}; {hint}")
    return f"{file}:{name}"


def _load(spec: str, options: Mapping[str, Any]) -> Function:
    """The function behind an absolute spec, as a function of one row; `options` go along.

    Raises:
        ConfigError: what is wrong, with the line of the user's file where there is one.
    """
    path, _, name = spec.rpartition(":")
    try:
        module = _import(path)
    except RollError as error:  # one of ours, which says all there is to say
        raise ConfigError(str(error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code, which may raise anything
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            text = str(error)
            if error.name and f"{path}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{spec!r}: there is no module {error.name!r}; check the spelling, or name the "
                    "file as my_file.py:score"
                ) from None
        raise ConfigError(
            f"{spec!r} cannot be imported: {text} ({_user_line(error, spec)})"
        ) from None
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = difflib.get_close_matches(name, known, n=1)
        has = f"it has {', '.join(known) or 'no functions'}"
        if near:
            has = f"did you mean {near[0]!r}?"
        raise ConfigError(f"{spec!r}: {Path(path).name} has no {name!r}; {has}")
    if not callable(function):
        found = f"{function!r} ({type(function).__name__})"
        raise ConfigError(f"{spec!r}: {name} is {found}; expected a function")
    return _caller(function, spec, options)


def _import(path: str) -> ModuleType:
    if not path.endswith(".py"):
        return importlib.import_module(path)
    sys.path.insert(0, str(Path(path).parent))  # so that the file can import its neighbours
    name = Path(path).stem
    if name in sys.modules:
        name += "_reward"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _user_line(error: BaseException, spec: str) -> str:
    """`my_file.py:12`: the line of the user's own file where an error comes from, or the
    innermost."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == spec.rpartition(":")[0]] or frames[-1:]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "unknown line"


def _caller(function: Callable[..., Any], spec: str, options: Mapping[str, Any]) -> Function:
    """Give the function what it takes of a row: by name if it uses our names, else by position."""
    signature = inspect.signature(function)
    by_kind: dict[Any, list[str]] = {}
    for parameter in signature.parameters.values():
        by_kind.setdefault(parameter.kind, []).append(parameter.name)
    either = by_kind.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
    names = {*either, *by_kind.get(inspect.Parameter.KEYWORD_ONLY, [])}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in by_kind
    first: tuple[str, ...] = ()
    if "response" not in names:
        positional = [*by_kind.get(inspect.Parameter.POSITIONAL_ONLY, []), *either]
        if len(positional) < 3 and inspect.Parameter.VAR_POSITIONAL not in by_kind:
            found = f"{getattr(function, '__name__', 'it')}{signature}"
            expected = "a function score(prompt, response, ground_truth, **row)"
            raise ConfigError(f"{spec!r}: expected {expected}, found {found}")
        first = ("prompt", "response", "ground_truth")
        names -= set(positional[:3])

    def call(row: dict[str, Any]) -> Any:
        given = {"ground_truth": None, **options, **row}
        head = [given.pop(key, None) for key in first]
        if not takes_any_name:
            given = {key: value for key, value in given.items() if key in names}
        return function(*head, **given)

    return call
