"""Plays an environment as no policy would, and says what is wrong with it: `roll env-check ID`.

For each seed an episode with random actions, one with malformed answers, and one with both. Every
episode is played a second time, by another object and in another order, to see whether seed and
actions decide everything.
"""

import math
import numbers
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roll.pipeline.agentic.env import EntryPoint, entry_point_of
from roll.pipeline.agentic.env_host import PROTOCOL, EnvCall, EnvReply, EnvSpec, LocalEnvs

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
        verdict = "ok" if self.ok else f"{len(self.problems)} problem(s)"
        decides = "yes: seed and actions decide everything" if self.is_deterministic else "NO"
        success = "not reported"
        if self.success_rate is not None:
            success = f"{self.success_rate:.1%} of random play"
        lines = [
            f"{self.env_id}: {verdict}",
            f"  played         {self.num_episodes} episodes, {self.num_steps} steps, "
            f"{self.mean_turns:.1f} turns each",
            f"  deterministic  {decides}",
            f"  rewards        {low:g} to {high:g} a step, {least:g} to {most:g} an episode",
            f"  success        {success}",
            f"  observations   up to {self.longest_observation} characters",
            f"  speed          {self.steps_per_second:,.0f} steps/s, "
            f"slowest {self.slowest_step_s * 1000:.1f} ms",
        ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check_env(
    env_id: EntryPoint,
    config: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = range(20),
    *,
    max_turns: int = 200,
    timeout_s: float = 10.0,
) -> EnvReport:
    """Play an environment and report. ConfigError if there is no such environment.

    Args:
        env_id: a class, an id, a dotted path, or an adapter's `gymnasium:ID`.
        config: its arguments.
        seeds: one round of episodes for each.
        max_turns: turns after which an episode that does not end is left.
        timeout_s: seconds for one call (on the main thread; elsewhere calls are not interrupted).
    """
    entry_point, leading = entry_point_of(env_id)
    spec = EnvSpec(0, entry_point, leading, dict(config or {}), random_actions=True)
    limit = timeout_s if threading.current_thread() is threading.main_thread() else None
    styles = ("random", "malformed", "mixed")
    # An environment without random actions is played with malformed ones only.
    envs = LocalEnvs([spec])
    first = envs.call(EnvCall(0, seed=0), limit)
    has_random = first.reason != PROTOCOL or "sample_random_action" not in first.detail
    if not has_random:
        spec, styles = replace(spec, random_actions=False), ("malformed",)
        envs = LocalEnvs([spec])
    played = [
        _play(envs, _Episode(seed, style), None, max_turns, limit)
        for seed in seeds
        for style in styles
    ]
    envs.close()
    envs = LocalEnvs([spec])
    again = [
        _play(envs, _Episode(episode.seed, episode.style), episode.actions, max_turns, limit)
        for episode in reversed(played)
    ]
    envs.close()
    name = env_id if isinstance(env_id, str) else env_id.__name__
    return _report(name, played, again[::-1], has_random)


def _play(
    envs: LocalEnvs,
    episode: _Episode,
    actions: list[str] | None,
    max_turns: int,
    timeout_s: float | None,
) -> _Episode:
    """Fill `episode`: a new one, or with `actions` one that says the same again."""
    rng = random.Random(f"{episode.seed} {episode.style}")
    call = EnvCall(0, seed=episode.seed)
    while True:
        started = time.perf_counter()
        reply = envs.call(call, timeout_s)
        episode.seconds.append(time.perf_counter() - started)
        episode.replies.append(reply)
        turn = len(episode.actions)
        if episode.has_ended or turn >= (max_turns if actions is None else len(actions)):
            return episode
        if actions is not None:
            action = actions[turn]
        else:
            is_malformed = episode.style == "malformed"
            if episode.style == "mixed":
                is_malformed = rng.random() < 0.5
            action = reply.random_action
            if is_malformed or action is None:
                action = rng.choice(MALFORMED)
        episode.actions.append(action)
        call = EnvCall(0, action=action)


def _report(
    env_id: str, episodes: list[_Episode], again: list[_Episode], has_random: bool
) -> EnvReport:
    replies = [reply for episode in episodes for reply in episode.replies]
    steps = [reply for episode in episodes for reply in episode.replies[1:]]
    steps = [reply for reply in steps if reply.reason is None]
    returns = [math.fsum(reply.reward for reply in episode.replies[1:]) for episode in episodes]
    rewards = [reply.reward for reply in steps] or [0.0]
    returns = returns or [0.0]
    seconds = [second for episode in episodes for second in episode.seconds[1:]] or [0.0]

    found = dict.fromkeys(problem for episode in episodes for problem in _problems(episode))
    differences = []
    for pair in zip(episodes, again, strict=True):
        difference = _difference(*pair)
        if difference is not None:
            differences.append(difference)
    if differences:
        count = f"{len(differences)} of {len(episodes)} episodes differ"
        found[f"not deterministic: {differences[0]} ({count})"] = None
    # The first few of each kind, so that one fault does not fill the screen.
    kinds: Counter[str] = Counter()
    problems = []
    for problem in found:
        kind = problem.partition(":")[0]
        kinds[kind] += 1
        if kinds[kind] <= _MAX_SHOWN:
            problems.append(problem)
    for kind, count in kinds.items():
        if count > _MAX_SHOWN:
            problems.append(f"{kind}: {count - _MAX_SHOWN} more of this kind")

    notes = []
    if not has_random:
        notes.append(
            "no sample_random_action(): only malformed answers were played, and the random proxy "
            "cannot be used"
        )
    unfinished = [episode for episode in episodes if not episode.has_ended]
    if unfinished:
        turns = len(unfinished[0].actions)
        notes.append(f"{len(unfinished)} episodes had not ended after {turns} turns")
    starts = {episode.replies[0].observation for episode in episodes}
    if len(starts) == 1 and len({episode.seed for episode in episodes}) > 1:
        notes.append("every seed starts with the same observation")
    ends = [_entries(episode.replies[-1], "metrics") for episode in episodes]
    was_played = any(len(episode.replies) > 1 for episode in episodes)
    if was_played and not any("success" in metrics for metrics in ends):
        notes.append("info['metrics'] has no 'success': validation cannot report a success rate")

    successes = []
    for episode, metrics in zip(episodes, ends, strict=True):
        if episode.style == "random" and _is_number(metrics.get("success")):
            successes.append(float(metrics["success"]))
    return EnvReport(
        env_id=env_id,
        num_episodes=len(episodes),
        num_steps=len(steps),
        problems=tuple(problems),
        notes=tuple(notes),
        is_deterministic=not differences,
        reward_range=(min(rewards), max(rewards)),
        return_range=(min(returns), max(returns)),
        success_rate=sum(successes) / len(successes) if successes else None,
        mean_turns=len(seconds) / max(len(episodes), 1),
        longest_observation=max((len(reply.observation) for reply in replies), default=0),
        steps_per_second=len(seconds) / max(sum(seconds), 1e-9),
        slowest_step_s=max(seconds),
    )


def _problems(episode: _Episode) -> Iterator[str]:
    last = episode.replies[-1]
    if last.reason is not None:
        detail = (last.detail.strip().splitlines() or [""])[-1]
        where = f"seed {episode.seed}, {episode.style} actions, turn {len(episode.actions)}"
        yield f"{last.reason}: {detail} ({where})"
    for reply in episode.replies[1:]:
        for key in ("metrics", "metrics_agg_mode"):
            if not isinstance(reply.info.get(key, {}), Mapping):
                yield f"protocol: info[{key!r}] is {reply.info[key]!r:.60}, expected a dict"
        for name, value in _entries(reply, "metrics").items():
            if not _is_number(value):
                yield f"protocol: metric {name!r} is {value!r:.60}, expected a number"
        for name, mode in _entries(reply, "metrics_agg_mode").items():
            if mode not in AGG_MODES:
                expected = f"expected one of {', '.join(AGG_MODES)}"
                yield f"protocol: metrics_agg_mode of {name!r} is {mode!r}, {expected}"


def _difference(first: _Episode, second: _Episode) -> str | None:
    """The first thing in which two plays of one episode differ."""
    for turn, (left, right) in enumerate(zip(first.replies, second.replies, strict=False)):
        for name in ("observation", "reward", "terminated", "truncated", "reason"):
            one, other = getattr(left, name), getattr(right, name)
            if one != other:
                where = f"{name} at turn {turn} of seed {first.seed}"
                return f"{where} is {one!r:.60}, then {other!r:.60}"
    turns, again = len(first.replies), len(second.replies)
    if turns != again:
        return f"the episode of seed {first.seed} has {turns}, then {again} turns"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or hasattr(value, "item")


def _entries(reply: EnvReply, key: str) -> Mapping[str, Any]:
    entries = reply.info.get(key, {})
    return entries if isinstance(entries, Mapping) else {}
