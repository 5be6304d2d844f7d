"""The words of rollouts: a Turn is one response, a Trajectory an episode, a Group those to compare.

An answer to a prompt is an episode of one turn, so RLVR and agentic runs share everything from here
to the optimizer step. Turns hold the token ids that the policy read and wrote: nothing is ever
tokenised a second time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.datasets.encoding import Prompt
from roll.utils.rollout_log import DroppedSample


@dataclass
class Turn:
    """One response, what was read before it and what came of it.

    Attributes:
        prompt_ids: what the policy read since its last response, or the whole prompt
            (`Trajectory.prompts_are_whole`).
        log_probs: of the response tokens when they were sampled; None if whoever answered does
            not say.
        policy_version: of the oldest weights that made the response.
        reward: what this response earned.
        state: hash of the state that was answered.
        newest_version: of the newest weights, if it went on after the weights changed.
        token_versions: of the weights that made each response token, where that is known.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    log_probs: Sequence[float] | None
    policy_version: int = 0
    finish_reason: str = "stop"
    reward: float = 0.0
    state: str = ""
    newest_version: int | None = None
    token_versions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.response_ids):
            raise ValueError(
                f"{len(self.response_ids)} response tokens with {len(self.log_probs)} "
                "log-probabilities"
            )


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        env_id: which member of its group it is.
        prompts_are_whole: every turn's prompt stands alone, else it continues the turns before.
        metrics: of the episode, by name.
        stop_reason: terminated, truncated, max_steps or max_length.
        prompt: the row of a data file that was answered, if it was one.
        reward: what is learned from, where a reward worker tells it from the score.
        reward_parts: what the score is made of.
    """

    traj_id: str
    traj_group_id: str
    tag: str
    env_id: int
    group_id: int
    turns: list[Turn]
    prompts_are_whole: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "terminated"
    prompt: Prompt | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Sum of the rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> float | None:
        return self.metrics.get("success")

    @property
    def versions(self) -> set[int]:
        """Of the policies that made the responses."""
        found: set[int] = set()
        for turn in self.turns:
            newest = turn.policy_version if turn.newest_version is None else turn.newest_version
            found.update(turn.token_versions or (turn.policy_version, newest))
        return found


@dataclass
class Group:
    """Trajectories that started alike: responses to one prompt, episodes from one seed."""

    name: str
    trajectories: list[Trajectory]

    @property
    def scores(self) -> list[float]:
        return [trajectory.score for trajectory in self.trajectories]

    @property
    def prompt(self) -> Prompt:
        prompt = self.trajectories[0].prompt
        assert prompt is not None, "the group was not made from a prompt"
        return prompt


@dataclass(frozen=True)
class Dropped:
    """A trajectory that is not trained on, and why; `is_scored` if its score means something."""

    trajectory: Trajectory
    reason: str
    is_scored: bool = False

    def sample(self, tokenizer: Any) -> DroppedSample:
        """What the log of samples says about it."""
        item = self.trajectory
        first, last = item.turns[0], item.turns[-1]
        ids = [token for turn in item.turns for token in (*turn.prompt_ids, *turn.response_ids)]
        start = len(first.prompt_ids)
        return DroppedSample(
            prompt=item.prompt.text if item.prompt else str(tokenizer.decode(ids[:start])),
            response=str(tokenizer.decode(ids[start:])),
            reason=self.reason,
            tag=item.tag,
            domain=item.prompt.domain if item.prompt else None,
            token_ids=ids,
            group=item.traj_group_id,
            score=item.score if self.is_scored else None,
            rewards=item.reward_parts,
            finish_reason=last.finish_reason,
        )


@dataclass
class Rollout:
    """What a step trains on, and what became of everything else.

    Attributes:
        failures: how often environments failed, by tag and reason.
    """

    groups: list[Group] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def state_hash(observation: object) -> str:
    """Equal for equal states. It is compared within a group of trajectories only."""
    return hashlib.sha256(str(observation).encode()).hexdigest()
