"""Turns of an episode -> rows of tokens. Token ids only: nothing is tokenised or decoded here.

A trajectory row holds the whole episode, p1 r1 p2 r2 ...: what the policy read and what it wrote, in turn. With two
turns, prompts [5 6] and [7], answers [8 9] and [4]:

    input_ids        5  6  8  9  7  4        p1 p1 r1 r1 p2 r2
    response_mask    0  0  1  1  0  1        1 exactly on sampled tokens
    infer_logprobs      0 -a -b  0 -c        column t speaks of token t+1
    scores           0  0  0  0  0  R        the episode's score on the last sampled token, whatever follows it

A step row holds one turn: its whole prompt and its answer. GiGPO and step_reinforce learn from these. For the same
episode they are `5 6 | 8 9` and `5 6 8 9 7 | 4`, or `new prompt | 4` if the manager wrote one for the second turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roll.datasets.collator import placed, positions
from roll.distributed.scheduler.protocol import DataProto


@dataclass
class Turn:
    """One answer and what came before and of it.

    Attributes:
        prompt_ids: what the policy read since its last answer, or the whole prompt (`Trajectory.prompts_are_whole`).
        log_probs: of the response tokens when they were sampled; None if whoever answered does not say.
        policy_version: of the oldest weights that made the answer.
        newest_version: of the newest, if it went on after the weights changed.
        reward: what the environment gave for this answer.
        state: hash of the state that was answered.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    log_probs: Sequence[float] | None
    policy_version: int = 0
    finish_reason: str = "stop"
    reward: float = 0.0
    state: str = ""
    newest_version: int | None = None

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.response_ids):
            raise ValueError(
                f"{len(self.response_ids)} response tokens with {len(self.log_probs)} log-probabilities"
            )


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        prompts_are_whole: every turn's prompt stands alone; otherwise it continues the turns before.
        metrics: of the episode, by name.
        stop_reason: terminated, truncated, max_steps or max_length.
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

    @property
    def score(self) -> float:
        """Sum of the rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> float | None:
        return self.metrics.get("success")

    @property
    def versions(self) -> set[int]:
        """Of the policies that gave the answers."""
        found = {
            version for turn in self.turns for version in (turn.policy_version, turn.newest_version)
        }
        return {version for version in found if version is not None}


@dataclass
class Row:
    """One row of a batch before padding: tokens, and per token what is known of it."""

    ids: list[int]
    mask: list[int]
    log_probs: list[float] | None
    score: float
    columns: dict[str, Any]


def state_hash(observation: object) -> str:
    """What two states have in common if and only if they are equal. `build_state_group` compares it within the group of
    trajectories only."""
    return hashlib.sha256(str(observation).encode()).hexdigest()


def trajectory_row(trajectory: Trajectory) -> Row:
    """The whole episode as one row."""
    if trajectory.prompts_are_whole and len(trajectory.turns) > 1:
        raise ValueError(
            f"trajectory {trajectory.traj_id}: each turn has a prompt of its own, so the turns do not form one row; "
            "use TrajEnvManager for rows of whole episodes"
        )
    row = _join(trajectory.turns)
    row.score = trajectory.score
    step_scores = np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)
    row.columns |= _labels(trajectory) | {"step_scores": step_scores}
    return row


def step_rows(trajectory: Trajectory) -> list[Row]:
    """One row for each turn, `step` counting from 0. A turn without sampled tokens keeps its row, so that its reward is
    part of the returns of the turns before."""
    rows = []
    for step, turn in enumerate(trajectory.turns):
        history = [] if trajectory.prompts_are_whole else trajectory.turns[:step]
        row = _join([*history, turn], only_last=True)
        row.score = turn.reward
        row.columns |= _labels(trajectory) | {
            "step_scores": turn.reward,
            "state_hash": turn.state,
            "step": step,
        }
        rows.append(row)
    return rows


def _join(turns: Sequence[Turn], *, only_last: bool = False) -> Row:
    """Prompts and answers one after the other; with `only_last` the earlier answers count as prompt."""
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] | None = []
    parts: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        is_trained = not only_last or index == len(turns) - 1
        start = len(ids)
        ids += turn.prompt_ids
        parts.append({"role": "observation", "start": start, "end": len(ids), "reward": None})
        parts.append(
            {"role": "response", "start": len(ids), "end": len(ids) + len(turn.response_ids)}
        )
        parts[-1]["reward"] = turn.reward
        ids += turn.response_ids
        mask += [0] * len(turn.prompt_ids) + [int(is_trained)] * len(turn.response_ids)
        if turn.log_probs is None and is_trained:
            log_probs = None
        if log_probs is not None:
            values = (
                turn.log_probs
                if is_trained and turn.log_probs is not None
                else [0.0] * len(turn.response_ids)
            )
            log_probs += [0.0] * len(turn.prompt_ids)
            log_probs += values
    columns = {
        "turns": parts,
        "policy_version": min(turn.policy_version for turn in turns),
        "finish_reason": turns[-1].finish_reason,
    }
    return Row(ids, mask, log_probs, 0.0, columns)


def _labels(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "env_ids": trajectory.env_id,
        "group_ids": trajectory.group_id,
        "tags": trajectory.tag,
        "traj_id": trajectory.traj_id,
        "traj_group_id": trajectory.traj_group_id,
        "episode_scores": trajectory.score,
        "stop_reason": trajectory.stop_reason,
    }


def collate(rows: Sequence[Row], pad_token_id: int) -> DataProto:
    """Right-padded batch of rows, as wide as the longest.

    (B, S): `input_ids`, `attention_mask`, `position_ids`, `response_mask`, `prompt_mask` (tokens before the first
    sampled one), `scores` (on the last sampled token); (B, S-1): `infer_logprobs`, if every row has them. Other columns
    are those of the rows, and `sample_uuid`.
    """
    if not rows:
        raise ValueError("no rows to collate")
    lengths = np.array([len(row.ids) for row in rows])
    width = max(int(lengths.max()), 2)
    attended = torch.from_numpy(np.arange(width) < lengths[:, None])
    response_mask = torch.from_numpy(placed([row.mask for row in rows], 0, width, 0, np.int64))
    last = (response_mask * torch.arange(width)).argmax(1)
    scores = torch.zeros(len(rows), width)
    has_response = response_mask.any(1)
    given = torch.tensor([row.score for row in rows], dtype=torch.float32)
    scores[torch.arange(len(rows)), last] = torch.where(has_response, given, 0.0)
    tensors = {
        "input_ids": torch.from_numpy(
            placed([row.ids for row in rows], 0, width, pad_token_id, np.int64)
        ),
        "attention_mask": attended.long(),
        "position_ids": positions(attended),
        "response_mask": response_mask,
        "prompt_mask": (attended & (response_mask.cumsum(1) == 0)).long(),
        "scores": scores,
    }
    if all(row.log_probs is not None for row in rows):
        log_probs = torch.from_numpy(
            placed([row.log_probs or [] for row in rows], 0, width, 0.0, np.float32)
        )
        tensors["infer_logprobs"] = log_probs[:, 1:]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    columns["sample_uuid"] = [f"{row.columns['traj_id']}_{i}" for i, row in enumerate(rows)]
    return DataProto.from_dict(tensors, non_tensors=columns)
