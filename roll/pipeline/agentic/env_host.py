"""Environments in a process of their own, which can be killed when one of them hangs.

    with EnvHost(specs, timeout_s=60) as host:
        host.submit([EnvCall(0, seed=1), EnvCall(1, seed=1)])
        replies = host.collect(wait_s=2.0)

One process serves any number of environments, one after the other, so a turn costs microseconds. An
environment that takes longer than `timeout_s` is interrupted inside that process and the others go
on. If that does not help (it sits in C code, or the process died), the process is killed and
started anew: its other episodes are lost and reported as such.

It is `subprocess` and a pipe, and no pool of a library: pools hand out calls to any process and
know no state, and `multiprocessing` would import the script that the user runs. No torch here:
processes that only play environments start in a fraction of a second.
"""

import contextlib
import math
import multiprocessing
import numbers
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from roll.exceptions import ConfigError, RollError
from roll.pipeline.agentic.env import EntryPoint, load_entry_point

# Why a call failed. LOST: the process that held the episode ended because of another environment.
EXCEPTION, TIMEOUT, KILLED, LOST = "exception", "timeout", "killed", "lost"
NAN_REWARD, NO_OBSERVATION, PROTOCOL = "nan_reward", "no_observation", "protocol"
# Seconds beyond an environment's own timeout before its process is killed, and for its start.
_GRACE_S, _START_S = 2.0, 60.0


@dataclass(frozen=True)
class EnvSpec:
    """How an environment is made; another process can import `entry_point`, or it is a class."""

    env_id: int
    entry_point: EntryPoint
    leading: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    random_actions: bool = False  # replies carry a random action, for the random proxy


@dataclass(frozen=True)
class EnvCall:
    """`step` with an action (a text), or `reset` with a seed if there is no action."""

    env_id: int
    seed: int | None = None
    action: str | None = None


@dataclass
class EnvReply:
    """What came of a call: an observation and so on, or the reason why not, with a traceback."""

    env_id: int
    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    random_action: str | None = None
    reason: str | None = None
    detail: str = ""


class EnvTimeout(BaseException):
    """Raised inside an environment that takes too long. No Exception, so that few catch it."""


class _BadAnswer(Exception):
    """What an environment returned is not what the protocol says: the reason, and the details."""


class LocalEnvs:
    """Environments in this process, made when they are first reset and made anew after a failure.

    `breakpoint()` works in them. Without a timeout nothing stops one that hangs.
    """

    def __init__(self, specs: Iterable[EnvSpec]) -> None:
        self.specs = {spec.env_id: spec for spec in specs}
        self._envs: dict[int, Any] = {}
        self._replies: list[EnvReply] = []

    def submit(self, calls: Sequence[EnvCall]) -> None:
        self._replies += [self.call(call) for call in calls]

    def collect(self, wait_s: float) -> list[EnvReply]:
        replies, self._replies = self._replies, []
        return replies

    def call(self, call: EnvCall, timeout_s: float | None = None) -> EnvReply:
        """Ask one environment. Every failure becomes a reply.

        `timeout_s` interrupts it, on the main thread only.
        """
        try:
            with _alarm(timeout_s):
                return self._ask(call)
        except _BadAnswer as bad:
            reason, detail = bad.args
        except EnvTimeout:
            reason, detail = TIMEOUT, f"no answer within {timeout_s} s"
        except Exception:  # noqa: BLE001 - the border of the environment's own code
            reason, detail = EXCEPTION, traceback.format_exc(limit=-8)
        self._drop(call.env_id)
        return EnvReply(call.env_id, reason=reason, detail=detail)

    def close(self) -> None:
        for env_id in list(self._envs):
            self._drop(env_id)
        self._replies.clear()

    def _ask(self, call: EnvCall) -> EnvReply:
        spec = self.specs[call.env_id]
        if call.action is not None:
            if call.env_id not in self._envs:
                raise _BadAnswer(LOST, "its process was started anew")
            env = self._envs[call.env_id]
            reply = _checked(call, env.step(call.action))
        else:
            if call.env_id not in self._envs:
                make = load_entry_point(spec.entry_point)
                self._envs[call.env_id] = make(*spec.leading, **spec.config)
            env = self._envs[call.env_id]
            reply = _checked(call, env.reset(seed=call.seed))
        if spec.random_actions:
            if not hasattr(env, "sample_random_action"):
                needed = "the random proxy needs the environment's sample_random_action()"
                raise _BadAnswer(PROTOCOL, needed)
            reply.random_action = str(env.sample_random_action())
        return reply

    def _drop(self, env_id: int) -> None:
        close = getattr(self._envs.pop(env_id, None), "close", None)
        if close is None:
            return
        try:
            with _alarm(1.0):
                close()
        except (Exception, EnvTimeout):  # noqa: BLE001 - its failure was reported already
            return


def _checked(call: EnvCall, answer: Any) -> EnvReply:
    """The reply for what `reset()` or `step()` returned; _BadAnswer if it breaks the protocol."""
    where, expected = "step()", "(observation, reward, terminated, truncated, info)"
    if call.action is None:
        where, expected = "reset()", "(observation, info)"
    if not isinstance(answer, tuple | list) or len(answer) != len(expected.split(",")):
        reason = NO_OBSERVATION if answer is None and call.action is not None else PROTOCOL
        raise _BadAnswer(reason, f"{where} returned {answer!r:.200}, expected {expected}")
    observation, *scored, info = answer
    reward, terminated, truncated = scored or (0.0, False, False)
    is_number = isinstance(reward, numbers.Real) or hasattr(reward, "item")
    if not is_number or not math.isfinite(float(reward)):
        found = f"{where} returned the reward {reward!r:.100}, expected a finite number"
        raise _BadAnswer(NAN_REWARD, found)
    if observation is None and (terminated or truncated):
        observation = ""  # the last observation is never shown to the policy, so it may be missing
    if observation is None:
        raise _BadAnswer(NO_OBSERVATION, f"{where} returned the observation None")
    if not isinstance(observation, str):
        found = f"{where} returned an observation of {type(observation).__name__}, expected text"
        raise _BadAnswer(PROTOCOL, found)
    if not isinstance(info, Mapping):
        raise _BadAnswer(PROTOCOL, f"info is {info!r:.200}, expected a dict")
    # Nothing else is read, and what is not sent need not be picklable.
    known = ("metrics", "metrics_agg_mode", "env_instruction", "suffix", "state")
    read = {key: info[key] for key in known if key in info}
    done = bool(terminated), bool(truncated)
    return EnvReply(call.env_id, observation, float(reward), *done, read)


@contextlib.contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise EnvTimeout in the main thread after `seconds`: ends loops and waits, not C code."""
    if seconds is None:
        yield
        return
    armed = True

    def ring(_signal: int, _frame: Any) -> None:
        if armed:
            raise EnvTimeout

    previous = signal.signal(signal.SIGALRM, ring)
    # It rings again and again, in case the environment catches the first one.
    signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds / 4, 0.05))
    try:
        yield
    finally:
        armed = False  # first of all: a ring between these lines must not leave the timer running
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class EnvHost:
    """The parent's side. Calls to one environment must not overlap."""

    def __init__(self, specs: Iterable[EnvSpec], *, timeout_s: float) -> None:
        self.specs = {spec.env_id: _importable(spec) for spec in specs}
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._starting = False
        self._heard = 0.0  # when the process last gave a sign of life, or was given work while idle
        # What the process is at, in the order of its replies.
        self._waiting: deque[EnvCall] = deque()
        # What it gets next. It is sent when the process has nothing left to say, so that neither
        # side ever waits for the other to read. The price: the process is idle from the end of a
        # slow step until the next `collect`.
        self._backlog: list[EnvCall] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, calls: Sequence[EnvCall]) -> None:
        """Hand over calls; `collect` brings the replies."""
        self._backlog += calls
        if calls and self._process is None:
            self._start()
        self._send()

    def collect(self, wait_s: float) -> list[EnvReply]:
        """Replies in the order in which they came: all, or those of the next `wait_s` seconds."""
        replies: list[EnvReply] = []
        deadline = time.monotonic() + wait_s
        while self._waiting or self._backlog:
            now = time.monotonic()
            limit = self.timeout_s + max(self.timeout_s / 2, _GRACE_S)
            if self._starting:
                limit = _START_S
            # What lies in the pipe is a sign of life, too: the caller may have been away for long.
            if now - self._heard > limit and not self._pipe.poll():
                return replies + self._replace(f"no sign of life for {limit:.1f} s")
            if now >= deadline:
                break
            try:
                if not self._pipe.poll(min(deadline - now, self._heard + limit - now + 0.01)):
                    continue
                reply = self._pipe.recv()
            except (EOFError, OSError):
                return replies + self._replace("its process ended")
            self._heard = time.monotonic()
            if isinstance(reply, Exception):
                raise reply
            if self._starting:
                self._starting = False
            else:
                call = self._waiting.popleft()
                assert call.env_id == reply.env_id
                replies.append(reply)
            self._send()
        return replies

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is None:
            return
        self._pipe.close()  # the end of its input: an idle process ends itself
        if not self._waiting and not self._backlog:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        # Whatever an environment started in this process group ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._pipe = None
        self._waiting.clear()
        self._backlog.clear()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        root = str(Path(__file__).resolve().parents[3])
        path = dict.fromkeys([root, *(entry or os.getcwd() for entry in sys.path)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
                # A group of its own: no Ctrl-C of the terminal, and killed with its children.
                start_new_session=True,
            )
        self._heard, self._starting = time.monotonic(), True
        with contextlib.suppress(OSError):  # a process that is gone is found by `collect`
            self._pipe.send((list(self.specs.values()), self.timeout_s))

    def _send(self) -> None:
        if self._backlog and not self._waiting and not self._starting:
            self._waiting.extend(self._backlog)
            self._backlog.clear()
            self._heard = time.monotonic()
            with contextlib.suppress(OSError):
                self._pipe.send(list(self._waiting))

    def _replace(self, why: str) -> list[EnvReply]:
        """Kill the process. The call that it was at fails; those behind it lost their episode."""
        assert self._process is not None
        calls = [*self._waiting, *self._backlog]
        process = self._process
        self.close()
        detail = f"{why} (exit status {process.returncode})"
        replies = [EnvReply(call.env_id, reason=LOST, detail=detail) for call in calls]
        replies[0].reason = KILLED
        return replies


def _importable(spec: EnvSpec) -> EnvSpec:
    """The spec with its class named by module, because another process has to find it."""
    if isinstance(spec.entry_point, str):
        return spec
    module, name = spec.entry_point.__module__, spec.entry_point.__qualname__
    if module == "__main__" or "<" in name:
        where = "the script that is run" if module == "__main__" else "inside a function"
        raise ConfigError(
            f"environment {name}: environments run in processes of their own, which cannot import "
            f"it from {where}; move the class to a module, or set env_isolation: false"
        )
    return replace(spec, entry_point=f"{module}:{name}")


def serve(descriptor: int) -> None:
    """The process's side: answer calls until the other side closes."""
    sys.stdout = sys.stderr  # what environments print is not ours to interpret
    pipe: Any = Connection(descriptor)
    envs = LocalEnvs([])
    with contextlib.suppress(EOFError, OSError):
        specs, timeout_s = pipe.recv()
        envs = LocalEnvs(specs)
        # Importing is slow the first time, so it is no part of anybody's timeout. A path that does
        # not exist, or a package that is missing, is a mistake in the config: it ends the run.
        try:
            for entry_point in {spec.entry_point for spec in specs}:
                load_entry_point(entry_point)
        except RollError as error:
            pipe.send(error)
            return
        pipe.send("ready")
        while True:
            for call in pipe.recv():
                pipe.send(envs.call(call, timeout_s))
    envs.close()
    os._exit(0)  # threads that an environment left behind do not keep the process
