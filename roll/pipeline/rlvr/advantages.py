"""From scores to advantages: sample masks, normalised rewards, token rewards and the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roll.algorithms.rewards import RunningMoments
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.rlvr.actor_worker import SAMPLE_WEIGHTS, compute_sample_weights
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.functionals import (
    compute_advantage,
    compute_token_reward,
    get_sample_level_mask,
    reward_postprocess,
)
from roll.utils.kl_controller import KLController


def add_advantages(
    batch: DataProto,
    config: RLVRConfig,
    kl_ctrl: KLController,
    running: Mapping[str, RunningMoments],
) -> tuple[DataProto, dict[str, Any]]:
    """Adds `final_response_mask`, `token_level_rewards`, `advantages`, `raw_advantages`, `returns` and, if they are on,
    `sample_weights`. Groups are rows of one `group_id`, however many of them are left.

    Rewards and advantages are normalised within each domain. The KL penalty knows no domains: one call, one update of
    its coefficient a step. (ROLL updates it once for each domain.)
    """
    batch, metrics = get_sample_level_mask(batch, config)
    batch, reward_metrics = _by_domain(
        batch, lambda rows: reward_postprocess(rows, config, running)
    )
    batch, kl_metrics = compute_token_reward(batch, config, kl_ctrl)
    batch, advantage_metrics = _by_domain(batch, lambda rows: _advantages(rows, config))
    if config.difficulty_loss_weight or config.length_loss_weight:
        batch[SAMPLE_WEIGHTS] = compute_sample_weights(batch, config)
    return batch, metrics | reward_metrics | kl_metrics | advantage_metrics


def _advantages(rows: DataProto, config: RLVRConfig) -> tuple[DataProto, dict[str, float]]:
    rows.meta_info = {key: value for key, value in rows.meta_info.items() if key != "metrics"}
    rows = compute_advantage(
        rows, response_mask=rows["final_response_mask"], **config.advantage_settings
    )
    return rows, rows.meta_info.pop("metrics", {})


def _by_domain(batch: DataProto, function: Any) -> tuple[DataProto, dict[str, Any]]:
    """`function(rows) -> (rows, metrics)` on the rows of each domain; the rows come back in their old order.

    Metrics are averaged over domains by those who log them (lists), and each domain's own is `{domain}/{name}`.
    """
    positions: dict[str, list[int]] = {}
    for row, domain in enumerate(batch["domain"]):
        positions.setdefault(str(domain), []).append(row)
    if len(positions) == 1:
        return function(batch)
    parts, metrics = [], {}
    for domain, rows in positions.items():
        part, found = function(batch.select_idxs(rows))
        parts.append(part)
        for name, value in found.items():
            metrics[f"{domain}/{name}"] = value
            metrics.setdefault(name, []).append(value)
    order = torch.tensor([row for rows in positions.values() for row in rows])
    return DataProto.concat(parts).select_idxs(order.argsort()), metrics
