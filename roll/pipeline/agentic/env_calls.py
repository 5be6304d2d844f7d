"""What is asked of an environment and what it answers, and the code that asks: the same in this process and in others.

No torch here: processes that only play environments start in a fraction of a second.
"""

from __future__ import annotations

import math
import numbers
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from roll.pipeline.agentic.env.registry import EntryPoint, load_entry_point

# Why a call failed. LOST: the process that held the episode ended because of another environment in it.
EXCEPTION, TIMEOUT, KILLED, LOST = "exception", "timeout", "killed", "lost"
NAN_REWARD, NO_OBSERVATION, PROTOCOL = "nan_reward", "no_observation", "protocol"


@dataclass(frozen=True)
class EnvSpec:
    """How an environment is made; `entry_point` can be imported by another process, or is a class of this one."""

    env_id: int
    entry_point: EntryPoint
    leading: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    random_actions: bool = False  # answers carry a random action, for the random proxy


@dataclass(frozen=True)
class EnvCall:
    """`reset` with a seed, or `step` with an action (a text)."""

    env_id: int
    seed: int | None = None
    action: str | None = None

    @property
    def is_reset(self) -> bool:
        return self.action is None


@dataclass
class EnvReply:
    """What came of a call: an observation and so on, or the reason why not, with a traceback in `detail`."""

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
    """Raised inside an environment that takes too long. Not an Exception, so that few environments catch it."""


class EnvTable:
    """Environments by id, made when they are first reset, made anew after a failure."""

    def __init__(self) -> None:
        self.specs: dict[int, EnvSpec] = {}
        self._envs: dict[int, Any] = {}

    def call(self, call: EnvCall, timeout_s: float | None = None) -> EnvReply:
        """Ask one environment. Every failure becomes a reply. `timeout_s` interrupts it, on the main thread only."""
        try:
            with _alarm(timeout_s):
                return self._ask(call)
        except _BadAnswer as bad:
            reply = EnvReply(call.env_id, reason=bad.reason, detail=str(bad))
        except EnvTimeout:
            reply = EnvReply(call.env_id, reason=TIMEOUT, detail=f"no answer within {timeout_s} s")
        except Exception:  # noqa: BLE001 - the border of the environment's own code
            reply = EnvReply(call.env_id, reason=EXCEPTION, detail=traceback.format_exc(limit=-8))
        self._drop(call.env_id)
        return reply

    def close(self) -> None:
        for env_id in list(self._envs):
            self._drop(env_id)

    def _ask(self, call: EnvCall) -> EnvReply:
        spec = self.specs[call.env_id]
        if call.is_reset:
            if call.env_id not in self._envs:
                self._envs[call.env_id] = load_entry_point(spec.entry_point)(
                    *spec.leading, **spec.config
                )
            env = self._envs[call.env_id]
            reply = _reset_reply(call.env_id, env.reset(seed=call.seed))
        elif call.env_id not in self._envs:
            return EnvReply(call.env_id, reason=LOST, detail="its process was started anew")
        else:
            env = self._envs[call.env_id]
            reply = _step_reply(call.env_id, env.step(call.action))
        if spec.random_actions:
            if not hasattr(env, "sample_random_action"):
                raise _BadAnswer(
                    PROTOCOL, "the random proxy needs the environment's sample_random_action()"
                )
            reply.random_action = str(env.sample_random_action())
        return reply

    def _drop(self, env_id: int) -> None:
        env = self._envs.pop(env_id, None)
        close = getattr(env, "close", None)
        if close is None:
            return
        try:
            with _alarm(1.0):
                close()
        except (Exception, EnvTimeout):  # noqa: BLE001 - it is being thrown away, and its failure was reported
            return


class _BadAnswer(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _reset_reply(env_id: int, answer: Any) -> EnvReply:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise _BadAnswer(
            PROTOCOL, f"reset() returned {answer!r:.200}, expected (observation, info)"
        )
    observation, info = answer
    return EnvReply(env_id, _text(observation, "reset()"), info=_info(info))


def _step_reply(env_id: int, answer: Any) -> EnvReply:
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        expected = "(observation, reward, terminated, truncated, info)"
        reason = NO_OBSERVATION if answer is None else PROTOCOL
        raise _BadAnswer(reason, f"step() returned {answer!r:.200}, expected {expected}")
    observation, reward, terminated, truncated, info = answer
    is_number = isinstance(reward, numbers.Real) or hasattr(reward, "item")
    if not is_number or not math.isfinite(float(reward)):
        raise _BadAnswer(
            NAN_REWARD, f"step() returned the reward {reward!r:.100}, expected a finite number"
        )
    # The last observation is never shown to the policy, so it may be missing.
    text = "" if observation is None and (terminated or truncated) else _text(observation, "step()")
    return EnvReply(env_id, text, float(reward), bool(terminated), bool(truncated), _info(info))


def _text(observation: Any, where: str) -> str:
    if observation is None:
        raise _BadAnswer(NO_OBSERVATION, f"{where} returned the observation None")
    if not isinstance(observation, str):
        raise _BadAnswer(
            PROTOCOL,
            f"{where} returned an observation of {type(observation).__name__}, expected text",
        )
    return observation


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise _BadAnswer(PROTOCOL, f"info is {info!r:.200}, expected a dict")
    known = ("metrics", "metrics_agg_mode", "env_instruction", "suffix", "state")
    return {key: info[key] for key in known if key in info}


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise EnvTimeout in this (the main) thread after `seconds`: ends loops, sleeps and waits, not C code."""
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
