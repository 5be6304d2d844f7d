"""Plays an environment as no policy would, and says what is wrong with it: what `roll env-check ID` prints.

For each seed an episode with random actions, one with malformed answers, and one with both. Every episode is played a
second time, by another object and in another order, to see whether seed and actions decide everything.
"""

from __future__ import annotations

import math
import numbers
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.pipeline.agentic.env.registry import entry_point_of
from roll.pipeline.agentic.env_calls import PROTOCOL, EnvCall, EnvReply, EnvSpec, EnvTable

AGG_MODES = ("mean", "sum", "max", "min", "first", "last")
MALFORMED = (
    "",
    " \n",
    "I do not know.",
    "<answer></answer>",
    "<answer>",
    "</answer>left<answer>",
    "<answer>\x00\ufffd</answer>",
    "<answer>" + "9" * 400 + "</answer>",
    "<tool>while True: pass",
    "null",
    "\u00e9" * 50 + "(((",
    "x" * 20_000,
)
_STYLES = ("random", "malformed", "mixed")
_MAX_SHOWN = 5


@dataclass
class _Episode:
    """One episode as it was played: what was said to the environment, and what it said."""

    seed: int
    style: str
    actions: list[str] = field(default_factory=list)
    replies: list[EnvReply] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"seed {self.seed}, {self.style} actions, turn {len(self.actions)}"

    @property
    def has_ended(self) -> bool:
        last = self.replies[-1]
        return last.terminated or last.truncated or last.reason is not None


@dataclass(frozen=True)
class EnvReport:
    """What was found. `problems` have to be corrected; `notes` are worth knowing."""

    env_id: str
    num_episodes: int
    num_steps: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    is_deterministic: bool
    reward_range: tuple[float, float]
    return_range: tuple[float, float]
    success_rate: float | None  # of random actions
    mean_turns: float
    longest_observation: int  # characters
    steps_per_second: float
    slowest_step_s: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        (low, high), (least, most) = self.reward_range, self.return_range
        success = (
            "not reported"
            if self.success_rate is None
            else f"{self.success_rate:.1%} of random play"
        )
        lines = [
            f"{self.env_id}: {'ok' if self.ok else f'{len(self.problems)} problem(s)'}",
            f"  played         {self.num_episodes} episodes, {self.num_steps} steps, {self.mean_turns:.1f} turns each",
            f"  deterministic  {'yes: seed and actions decide everything' if self.is_deterministic else 'NO'}",
            f"  rewards        {low:g} to {high:g} a step, {least:g} to {most:g} an episode",
            f"  success        {success}",
            f"  observations   up to {self.longest_observation} characters",
            f"  speed          {self.steps_per_second:,.0f} steps/s, slowest {self.slowest_step_s * 1000:.1f} ms",
        ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check_env(
    env_id: str,
    config: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = range(20),
    *,
    max_turns: int = 200,
    timeout_s: float = 10.0,
) -> EnvReport:
    """Play an environment and report.

    Args:
        env_id: an id, a dotted path, or an adapter's `gymnasium:ID`.
        config: its arguments.
        seeds: one round of episodes for each.
        max_turns: turns after which an episode that does not end is left.
        timeout_s: seconds for one call (on the main thread; elsewhere calls are not interrupted).

    Raises:
        ConfigError: there is no such environment.
    """
    entry_point, leading = entry_point_of(env_id)
    spec = EnvSpec(0, entry_point, leading, dict(config or {}), random_actions=True)
    player = _Player(spec, max_turns, timeout_s)
    # An environment without random actions is played with malformed ones only.
    first = player.play(0, "random", None)
    has_random = not (
        first.replies[0].reason == PROTOCOL and "sample_random_action" in first.replies[0].detail
    )
    if not has_random:
        player = _Player(EnvSpec(0, entry_point, leading, dict(config or {})), max_turns, timeout_s)
    seeds = list(seeds)
    episodes = [
        player.play(seed, style, None)
        for seed in seeds
        for style in (_STYLES if has_random else _STYLES[1:2])
    ]
    player.close()
    again = _Player(player.spec, max_turns, timeout_s)
    replayed = [
        again.play(episode.seed, episode.style, episode.actions) for episode in reversed(episodes)
    ][::-1]
    again.close()
    return _report(env_id, episodes, replayed, has_random)


class _Player:
    """Plays episodes in one environment."""

    def __init__(self, spec: EnvSpec, max_turns: int, timeout_s: float) -> None:
        self.spec, self.max_turns = spec, max_turns
        self.timeout_s = (
            timeout_s if threading.current_thread() is threading.main_thread() else None
        )
        self._table = EnvTable()
        self._table.specs[spec.env_id] = spec

    def play(self, seed: int, style: str, actions: list[str] | None) -> _Episode:
        """A new episode, or with `actions` one that says the same again."""
        episode = _Episode(seed, style)
        self._call(episode, EnvCall(self.spec.env_id, seed=seed))
        script = iter(actions) if actions is not None else self._actions(episode)
        while not episode.has_ended and (action := next(script, None)) is not None:
            episode.actions.append(action)
            self._call(episode, EnvCall(self.spec.env_id, action=action))
        return episode

    def close(self) -> None:
        self._table.close()

    def _actions(self, episode: _Episode) -> Iterator[str]:
        rng = random.Random(f"{episode.seed} {episode.style}")
        for _ in range(self.max_turns):
            is_malformed = episode.style == "malformed" or (
                episode.style == "mixed" and rng.random() < 0.5
            )
            suggested = episode.replies[-1].random_action
            yield rng.choice(MALFORMED) if is_malformed or suggested is None else suggested

    def _call(self, episode: _Episode, call: EnvCall) -> None:
        started = time.perf_counter()
        episode.replies.append(self._table.call(call, self.timeout_s))
        episode.seconds.append(time.perf_counter() - started)


def _report(
    env_id: str, episodes: list[_Episode], replayed: list[_Episode], has_random: bool
) -> EnvReport:
    problems = Counter(problem for episode in episodes for problem in _problems(episode))
    differences = [
        text for pair in zip(episodes, replayed, strict=True) if (text := _difference(*pair))
    ]
    if differences:
        problems[
            f"not deterministic: {differences[0]} ({len(differences)} of {len(episodes)} episodes differ)"
        ] += 1
    steps = [reply for episode in episodes for reply in episode.replies[1:] if reply.reason is None]
    rewards = [reply.reward for reply in steps] or [0.0]
    returns = [
        math.fsum(reply.reward for reply in episode.replies[1:]) for episode in episodes
    ] or [0.0]
    seconds = [second for episode in episodes for second in episode.seconds[1:]] or [0.0]
    texts = [reply.observation for episode in episodes for reply in episode.replies]
    return EnvReport(
        env_id=env_id,
        num_episodes=len(episodes),
        num_steps=len(steps),
        problems=_shown(problems),
        notes=tuple(_notes(episodes, has_random)),
        is_deterministic=not differences,
        reward_range=(min(rewards), max(rewards)),
        return_range=(min(returns), max(returns)),
        success_rate=_success_rate(episodes),
        mean_turns=len(seconds) / max(len(episodes), 1),
        longest_observation=max(map(len, texts), default=0),
        steps_per_second=len(seconds) / max(sum(seconds), 1e-9),
        slowest_step_s=max(seconds),
    )


def _problems(episode: _Episode) -> Iterator[str]:
    last = episode.replies[-1]
    if last.reason is not None:
        detail = last.detail.strip().splitlines()
        yield f"{last.reason}: {detail[-1] if detail else ''} ({episode.where})"
    for reply in episode.replies[1:]:
        for key in ("metrics", "metrics_agg_mode"):
            if not isinstance(reply.info.get(key, {}), Mapping):
                yield f"protocol: info[{key!r}] is {reply.info[key]!r:.60}, expected a dict"
        for name, value in _entries(reply, "metrics").items():
            if not _is_number(value):
                yield f"protocol: metric {name!r} is {value!r:.60}, expected a number"
        for name, mode in _entries(reply, "metrics_agg_mode").items():
            if mode not in AGG_MODES:
                yield f"protocol: metrics_agg_mode of {name!r} is {mode!r}, expected one of {', '.join(AGG_MODES)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or hasattr(value, "item")


def _entries(reply: EnvReply, key: str) -> Mapping[str, Any]:
    entries = reply.info.get(key, {})
    return entries if isinstance(entries, Mapping) else {}


def _difference(first: _Episode, second: _Episode) -> str | None:
    """The first thing in which two plays of one episode differ."""
    for turn, (left, right) in enumerate(zip(first.replies, second.replies, strict=False)):
        for name in ("observation", "reward", "terminated", "truncated", "reason"):
            one, other = getattr(left, name), getattr(right, name)
            if one != other:
                return (
                    f"{name} at turn {turn} of seed {first.seed} is {one!r:.60}, then {other!r:.60}"
                )
    if len(first.replies) != len(second.replies):
        return f"the episode of seed {first.seed} has {len(first.replies)}, then {len(second.replies)} turns"
    return None


def _notes(episodes: list[_Episode], has_random: bool) -> Iterator[str]:
    if not has_random:
        yield "no sample_random_action(): only malformed answers were played, and the random proxy cannot be used"
    unfinished = [episode for episode in episodes if not episode.has_ended]
    if unfinished:
        yield f"{len(unfinished)} episodes had not ended after {len(unfinished[0].actions)} turns"
    starts = {episode.replies[0].observation for episode in episodes}
    if len(starts) == 1 and len({episode.seed for episode in episodes}) > 1:
        yield "every seed starts with the same observation"
    finished = [episode.replies[-1] for episode in episodes if len(episode.replies) > 1]
    if finished and not any("success" in _entries(reply, "metrics") for reply in finished):
        yield "info['metrics'] has no 'success': validation cannot report a success rate"


def _success_rate(episodes: list[_Episode]) -> float | None:
    ends = [
        _entries(episode.replies[-1], "metrics")
        for episode in episodes
        if episode.style == "random"
    ]
    known = [float(metrics["success"]) for metrics in ends if _is_number(metrics.get("success"))]
    return sum(known) / len(known) if known else None


def _shown(problems: Counter[str]) -> tuple[str, ...]:
    """The first few of each kind, so that one fault does not fill the screen."""
    kinds: Counter[str] = Counter()
    shown = []
    for problem in problems:
        kind = problem.partition(":")[0]
        kinds[kind] += 1
        if kinds[kind] <= _MAX_SHOWN:
            shown.append(problem)
    more = [
        f"{kind}: {count - _MAX_SHOWN} more of this kind"
        for kind, count in kinds.items()
        if count > _MAX_SHOWN
    ]
    return (*shown, *more)
