"""Trajectories -> the rows of a batch.

A row holds a whole episode, p1 r1 p2 r2 ...: what the policy read and what it wrote, in turn. With
two turns, prompts [5 6] and [7], responses [8 9] and [4]:

    input_ids        5  6  8  9  7  4        p1 p1 r1 r1 p2 r2
    response_mask    0  0  1  1  0  1        1 exactly on sampled tokens
    infer_logprobs      0 -a -b  0 -c        column t speaks of token t+1
    scores           0  0  0  0  0  R        the episode's score on the last sampled token

With `per_turn` each turn is a row: its whole prompt and its response. GiGPO and step_reinforce
learn from these. For the same episode they are `5 6 | 8 9` and `5 6 8 9 7 | 4`, or `new prompt | 4`
if the manager wrote one for the second turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll.datasets.collator import placed, positions
from roll.distributed.scheduler.protocol import DataProto
from roll.rollout.types import Trajectory, Turn


@dataclass
class _Row:
    """One row before padding: tokens, and per token what is known of it."""

    ids: list[int]
    mask: list[int]
    log_probs: list[float] | None
    score: float
    columns: dict[str, Any]


def collate(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, per_turn: bool | None = False
) -> DataProto:
    """Right-padded batch, as wide as its longest row; `per_turn=None` makes rows of turns exactly
    where prompts are whole.

    (B, S): `input_ids`, `attention_mask`, `position_ids`, `response_mask`, `prompt_mask` (tokens
    before the first sampled one) and `scores`; (B, S-1): `infer_logprobs`, if every row has them.
    Responses to prompts also have `prompts` (left padded), `responses`, `policy_versions` (B, S-1,
    -1 where nothing was sampled), every column of their data file and, once they are scored,
    `response_level_rewards` and `scores`, one number a row: (B,).
    """
    rows = [row for item in trajectories for row in _rows_of(item, per_turn)]
    if not rows:
        raise ValueError("no rows to collate")
    lengths = np.array([len(row.ids) for row in rows])
    width = max(int(lengths.max()), 2)
    attended = torch.from_numpy(np.arange(width) < lengths[:, None])
    response_mask = torch.from_numpy(placed([row.mask for row in rows], 0, width, 0, np.int64))
    last = (response_mask * torch.arange(width)).argmax(1)
    scores = torch.zeros(len(rows), width)
    given = torch.tensor([row.score for row in rows], dtype=torch.float32)
    scores[torch.arange(len(rows)), last] = torch.where(response_mask.any(1), given, 0.0)
    ids = placed([row.ids for row in rows], 0, width, pad_token_id, np.int64)
    tensors = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": attended.long(),
        "position_ids": positions(attended),
        "response_mask": response_mask,
        "prompt_mask": (attended & (response_mask.cumsum(1) == 0)).long(),
        "scores": scores,
    }
    if all(row.log_probs is not None for row in rows):
        values = placed([row.log_probs or [] for row in rows], 0, width, 0.0, np.float32)
        tensors["infer_logprobs"] = torch.from_numpy(values)[:, 1:]
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    if trajectories[0].prompt is not None:
        del tensors["scores"]
        tensors |= _prompt_tensors(trajectories, pad_token_id, width)
        if all(item.reward is not None for item in trajectories):
            columns["reward_parts"] = [item.reward_parts for item in trajectories]
    else:
        columns["sample_uuid"] = [f"{row.columns['traj_id']}_{i}" for i, row in enumerate(rows)]
    return DataProto.from_dict(tensors, non_tensors=columns)


def _rows_of(trajectory: Trajectory, per_turn: bool | None) -> list[_Row]:
    turns = trajectory.turns
    if trajectory.prompt is not None:
        row = _join(turns)
        row.score, row.columns = trajectory.score, _prompt_columns(trajectory)
        return [row]
    labels = {
        "env_ids": trajectory.env_id,
        "group_ids": trajectory.group_id,
        "tags": trajectory.tag,
        "traj_id": trajectory.traj_id,
        "traj_group_id": trajectory.traj_group_id,
        "episode_scores": trajectory.score,
        "stop_reason": trajectory.stop_reason,
    }
    if per_turn or (per_turn is None and trajectory.prompts_are_whole):
        rows = []
        # A turn without sampled tokens keeps its row, so that its reward is part of the returns of
        # the turns before.
        for step, turn in enumerate(turns):
            history = [] if trajectory.prompts_are_whole else turns[:step]
            row = _join([*history, turn], only_last=True)
            row.score = turn.reward
            own = {"step_scores": turn.reward, "state_hash": turn.state, "step": step}
            row.columns |= labels | own
            rows.append(row)
        return rows
    if trajectory.prompts_are_whole and len(turns) > 1:
        raise ValueError(
            f"trajectory {trajectory.traj_id}: each turn has a prompt of its own, so the turns do "
            "not form one row; use TrajEnvManager for rows of whole episodes"
        )
    row = _join(turns)
    row.score = trajectory.score
    step_scores = np.array([turn.reward for turn in turns], dtype=np.float64)
    row.columns |= labels | {"step_scores": step_scores}
    return [row]


def _join(turns: Sequence[Turn], *, only_last: bool = False) -> _Row:
    """Prompts and responses one after the other; with `only_last` earlier responses are prompt."""
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] | None = []
    parts: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        is_trained = not only_last or index == len(turns) - 1
        start, middle = len(ids), len(ids) + len(turn.prompt_ids)
        ids += turn.prompt_ids
        ids += turn.response_ids
        parts.append({"role": "observation", "start": start, "end": middle, "reward": None})
        parts.append({"role": "response", "start": middle, "end": len(ids), "reward": turn.reward})
        mask += [0] * len(turn.prompt_ids) + [int(is_trained)] * len(turn.response_ids)
        if turn.log_probs is None and is_trained:
            log_probs = None
        if log_probs is not None:
            log_probs += [0.0] * len(turn.prompt_ids)
            if is_trained and turn.log_probs is not None:
                log_probs += turn.log_probs
            else:
                log_probs += [0.0] * len(turn.response_ids)
    columns = {
        "turns": parts,
        "policy_version": min(turn.policy_version for turn in turns),
        "finish_reason": turns[-1].finish_reason,
    }
    return _Row(ids, mask, log_probs, 0.0, columns)


def _prompt_columns(trajectory: Trajectory) -> dict[str, Any]:
    """The columns of the data file, and where the row comes from."""
    prompt, turn = trajectory.prompt, trajectory.turns[0]
    assert prompt is not None
    return {
        **prompt.row,
        "prompt": prompt.question,
        "ground_truth": prompt.ground_truth,
        "tag": prompt.tag,
        "domain": prompt.domain,
        "prompt_id": trajectory.traj_group_id,
        "group_id": trajectory.traj_group_id,
        "sample_uuid": trajectory.traj_id,
        "finish_reason": turn.finish_reason,
        "policy_version": turn.policy_version,
    }


def _prompt_tensors(
    trajectories: Sequence[Trajectory], pad_token_id: int, width: int
) -> dict[str, torch.Tensor]:
    turns = [item.turns[0] for item in trajectories]
    prompts = [turn.prompt_ids for turn in turns]
    responses = [turn.response_ids for turn in turns]
    lengths = np.array([len(ids) for ids in prompts])
    longest, longest_response = int(lengths.max()), max(len(ids) for ids in responses)
    versions = [
        turn.token_versions or [turn.policy_version] * len(turn.response_ids) for turn in turns
    ]
    tables = {
        "prompts": placed(prompts, longest - lengths, longest, pad_token_id, np.int64),
        "responses": placed(responses, 0, max(longest_response, 1), pad_token_id, np.int64),
        # Column t speaks of token t+1, so the first response token stands one column before it.
        "policy_versions": placed(versions, lengths - 1, width - 1, -1, np.int64),
    }
    rewards = [item.reward for item in trajectories]
    if None not in rewards:  # else it is a batch that goes to the reward workers
        tables["scores"] = np.array([item.score for item in trajectories], dtype=np.float32)
        tables["response_level_rewards"] = np.array(rewards, dtype=np.float32)
    return {name: torch.from_numpy(table) for name, table in tables.items()}
