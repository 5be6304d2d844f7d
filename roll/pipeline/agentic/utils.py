"""Rewards, masks and advantages of trajectories.

One row is a step or a whole trajectory. Rows of a trajectory share `traj_id` and are numbered by
`step`; trajectories that started from the same state share `traj_group_id`. The steps return a new
batch and leave the given one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.advantages import discounted_returns, turn_discounted_returns
from roll.algorithms.estimators import get_estimator
from roll.algorithms.masking import check_finite, segment_masked_mean
from roll.algorithms.rewards import (
    check_clip,
    clip_symmetric,
    group_index,
    normalize_rewards,
    zero_std_group_frac,
)
from roll.utils.columns import column, with_columns
from roll.utils.functionals import Metrics, compute_advantage

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.agentic.agentic_config import AgenticConfig, RewardNormalizationConfig

__all__ = [
    "agentic_compute_advantage",
    "agentic_reward_norm",
    "build_state_group",
    "compute_agentic_reinforce_return",
    "compute_discounted_returns",
    "compute_response_level_rewards",
    "compute_segment_masked_mean",
    "get_agentic_response_level_mask",
]


@torch.no_grad()
def compute_discounted_returns(
    batch: DataProto, adv_estimator: str, gamma: float = 1.0
) -> DataProto:
    """For estimators of turns, write `step_rewards` (B,): G_k = step_score_k + gamma G_{k+1}.

    Rows may come in any order; `step` orders the rows with the same `traj_id`. Other estimators:
    the batch as it is.
    """
    if not get_estimator(adv_estimator).rows_are_turns:
        return batch
    scores_B = _float_column(batch, "step_scores")
    trajectory_B = group_index(len(batch), ids=_labels(batch, "traj_id"))
    step_B = torch.tensor([int(step) for step in column(batch, "step")])
    # Sorted by trajectory and then by step, each trajectory becomes one row of a padded table.
    order = np.lexsort((step_B.numpy(), trajectory_B.numpy()))
    trajectory_sorted, step_sorted = trajectory_B[order], step_B[order]
    same = (trajectory_sorted[1:] == trajectory_sorted[:-1]) & (step_sorted[1:] == step_sorted[:-1])
    if same.any():
        row = int(order[int(same.nonzero()[0])])
        raise ValueError(
            f"trajectory {column(batch, 'traj_id')[row]!r} has step {int(step_B[row])} twice"
        )
    lengths = torch.bincount(trajectory_sorted)
    position = torch.arange(len(order)) - (lengths.cumsum(0) - lengths)[trajectory_sorted]
    table = torch.zeros(len(lengths), int(lengths.max()))
    table[trajectory_sorted, position] = scores_B[order]
    valid = torch.arange(table.shape[1]) < lengths[:, None]
    step_rewards_B = torch.empty_like(scores_B)
    step_rewards_B[order] = discounted_returns(table, valid, gamma)[trajectory_sorted, position]
    return with_columns(batch, step_rewards=step_rewards_B)


@torch.no_grad()
def agentic_reward_norm(
    batch: DataProto, reward_normalization: RewardNormalizationConfig
) -> Tensor:
    """Normalise `scores` (B,) as `normalize_rewards` does. The rows with the same value in the
    column `grouping` form a group; grouping `batch` makes one group of all."""
    scores_B = column(batch, "scores")
    check_finite(scores_B, name="scores")
    return _normalize(
        scores_B, _group_of(batch, reward_normalization.grouping), reward_normalization
    )


@torch.no_grad()
def build_state_group(batch: DataProto) -> DataProto:
    """Write `state_group_id`: the same for rows of one `traj_group_id` with the same `state_hash`.

    (ROLL writes the bare hash, so that equal states of different groups are mixed up afterwards.)
    The sizes of the groups go to `meta_info["metrics"]`.
    """
    pairs = list(zip(_labels(batch, "traj_group_id"), _labels(batch, "state_hash"), strict=True))
    sizes = torch.bincount(group_index(len(batch), ids=pairs)).double()
    metrics = {
        "system/state_batch_size/max": sizes.max().item(),
        "system/state_batch_size/mean": sizes.mean().item(),
        "system/state_batch_size/min": sizes.min().item(),
    }
    return with_columns(
        batch, metrics, state_group_id=np.array([repr(pair) for pair in pairs], dtype=object)
    )


@torch.no_grad()
def compute_response_level_rewards(
    batch: DataProto, pipeline_config: AgenticConfig
) -> tuple[DataProto, Metrics]:
    """Write `response_level_rewards` (B,), normalised and clipped.

    gigpo            episode_reward_weight * norm(`episode_scores`) + step_reward_weight *
                     norm(`step_rewards`), the latter among the rows in the same state of the same
                     trajectory group (arXiv:2505.10978); also writes both parts,
                     `episode_rewards_norm` and `step_rewards_norm`
    step_reinforce   norm(`step_rewards`)
    others           norm(sum of `scores` over the tokens)

    norm follows `reward_normalization`; for estimators that ROLL does not have and that define a
    normalisation (rloo, dr_grpo, reinforce_plus_plus_baseline) it is theirs, over `traj_group_id`
    unless another grouping is configured.
    """
    check_clip(pipeline_config.reward_clip, "reward_clip")
    estimator = get_estimator(pipeline_config.adv_estimator)
    norm = pipeline_config.reward_normalization
    columns: dict[str, Tensor] = {}
    if estimator.adds_episode_reward:
        batch = build_state_group(batch)
        episode_scores_B = scores_B = _float_column(batch, "episode_scores")
        groups = _group_of(batch, norm.grouping)
        episode_B = _normalize(episode_scores_B, groups, norm)
        step_B = _normalize(
            _float_column(batch, "step_rewards"), _group_of(batch, "state_group_id"), norm, "group"
        )
        rewards_B = (
            pipeline_config.episode_reward_weight * episode_B
            + pipeline_config.step_reward_weight * step_B
        )
        columns = {"episode_rewards_norm": episode_B, "step_rewards_norm": step_B}
    else:
        scores_B = (
            _float_column(batch, "step_rewards") if estimator.rows_are_turns else _score_sums(batch)
        )
        preset, rule = estimator.trajectory_norm(), estimator.group_rewards
        by_group = preset is not None or rule is not None
        grouping = "traj_group_id" if by_group and norm.grouping == "batch" else norm.grouping
        groups = _group_of(batch, grouping)
        if rule is not None:
            rewards_B = rule(scores_B, groups)
        elif preset is not None:
            rewards_B = normalize_rewards(scores_B, mean=preset.mean, std=preset.std, groups=groups)
        else:
            rewards_B = _normalize(scores_B, groups, norm)
    rewards_B, clip_frac = clip_symmetric(rewards_B, pipeline_config.reward_clip or None)
    metrics = {
        "critic/reward_clip_frac": clip_frac,
        "critic/zero_std_group_frac": zero_std_group_frac(scores_B, groups),
    }
    return with_columns(batch, response_level_rewards=rewards_B, **columns), metrics


@torch.no_grad()
def get_agentic_response_level_mask(
    data: DataProto, pipeline_config: Any
) -> tuple[DataProto, Metrics]:
    """Write `origin_response_mask` (B, S) and `final_response_mask` (B, T). Every trajectory is
    kept: unlike a single response, one that reached a limit still has complete turns to learn from.
    `pipeline_config` is not read."""
    response_mask = column(data, "response_mask")
    num_rows = float(len(response_mask))
    metrics = {
        "actor/max_len_mask_ratio": 1.0,
        "actor/final_mask_ratio": 1.0,
        "actor/samples_used": num_rows,
        "actor/samples_total": num_rows,
    }
    final_BT = response_mask[:, 1:].float()
    return with_columns(
        data, origin_response_mask=response_mask.clone(), final_response_mask=final_BT
    ), metrics


# One function knows all estimators; `agentic_reinforce` discounts once per turn.
agentic_compute_advantage = compute_advantage
compute_segment_masked_mean = segment_masked_mean


def compute_agentic_reinforce_return(
    token_level_rewards: Tensor, gamma: float, lambd: float = 1.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both those of `turn_discounted_returns`; `lambd` is not used."""
    mask = torch.ones_like(token_level_rewards) if mask is None else mask
    returns = turn_discounted_returns(token_level_rewards, mask, float(gamma))
    return returns, returns.clone()


def _normalize(
    scores_B: Tensor, groups: Tensor, norm: RewardNormalizationConfig, scope: str | None = None
) -> Tensor:
    """Normalise as configured; `scope` replaces the scope of the statistics that are on."""
    mean, std = norm.norm_mean_type, norm.norm_std_type
    if scope is not None:
        mean, std = mean and scope, std and scope
    return normalize_rewards(scores_B, mean=mean, std=std, groups=groups)


def _group_of(batch: DataProto, grouping: str) -> Tensor:
    if grouping == "batch":
        return torch.zeros(len(batch), dtype=torch.int64)
    return group_index(len(batch), ids=_labels(batch, grouping))


def _labels(batch: DataProto, key: str) -> Sequence[str]:
    values = column(batch, key)
    return [str(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def _float_column(batch: DataProto, key: str) -> Tensor:
    """A column of one number per row, tensor or objects, as floats; NaN is an error."""
    values = column(batch, key)
    tensor_B = (
        values if isinstance(values, Tensor) else torch.tensor([float(value) for value in values])
    )
    check_finite(tensor_B, name=key)
    return tensor_B if tensor_B.is_floating_point() else tensor_B.float()


def _score_sums(batch: DataProto) -> Tensor:
    """One score per row from scores per token (B, S); (B,) passes."""
    scores = column(batch, "scores")
    check_finite(scores, name="scores")
    scores = scores if scores.is_floating_point() else scores.float()
    return scores if scores.ndim == 1 else scores.float().sum(-1)
