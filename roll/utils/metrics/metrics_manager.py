"""The metrics of a training batch under ROLL's names: tokens, scores, advantages, groups, speed.

"right" samples have the score 1, "error" samples the score 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.utils.columns import row_groups
from roll.utils.metrics.reduction import bring_to_host

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto

WINDOW = 5  # steps that speeds are averaged over
Metrics = dict[str, Any]


class DurationTracker:
    """Seconds and tokens of one phase over the last steps."""

    def __init__(self, window: int = WINDOW) -> None:
        self._entries: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, seconds: float, tokens: float) -> None:
        self._entries.append((seconds, tokens))

    @property
    def mean_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._entries) / max(len(self._entries), 1)

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(seconds for seconds, _ in self._entries)
        return sum(tokens for _, tokens in self._entries) / seconds if seconds else 0.0


class MetricsManager:
    """Collects the metrics of one step after the other.

    with manager.timer("time/step_generate"): ...
    manager.add_all_metrics(step, batch)
    manager.add_speeds(batch, {"actor_infer": (gpus, ranks), "actor_train": (gpus, ranks)})
    metrics = manager.pop()
    """

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self._timers: dict[str, DurationTracker] = {}

    def add_metric(self, name: str, value: Any) -> None:
        self.metrics[name] = value

    def add_metrics(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        self.metrics |= {f"{prefix}{name}": value for name, value in metrics.items()}

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the seconds of the block under `name`, on top of what is there."""
        started = monotonic()
        yield
        self.metrics[name] = self.metrics.get(name, 0.0) + monotonic() - started

    def pop(self) -> Metrics:
        """The metrics of the step; only the windows of the speeds stay in the manager."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    def add_all_metrics(self, global_step: int, batch: DataProto) -> None:
        """Everything that the columns of the batch tell; one that is not there is left out."""
        self.add_metrics({"system/global_step": global_step, "system/batch_size": len(batch)})
        self.add_metrics(batch_metrics(batch))

    def add_domain_all_metrics(self, batch: DataProto) -> None:
        """The same for the rows of each domain, as `{domain}/{name}`, where there are several."""
        domains = batch.group_by("domain") if "domain" in batch else {}
        if len(domains) > 1:
            for domain, rows in domains.items():
                self.add_metrics(batch_metrics(rows), prefix=f"{domain}/")

    def add_speeds(self, batch: DataProto, resources: Mapping[str, tuple[int, int]]) -> None:
        """Tokens per second over the last steps.

        `resources` are the (GPUs, DP ranks) of actor_infer and actor_train; a role without GPUs
        counts as one.
        """
        tokens = float(batch["attention_mask"].sum())
        response_tokens = float(batch["response_mask"].sum())
        parts = ("step_generate", "ref_log_probs_values", "old_log_probs", "step_train")
        seconds = {part: self.metrics.get(f"time/{part}", 0.0) for part in parts}
        phases = {
            "tps": (sum(seconds.values()), tokens),
            "actor_infer": (seconds["step_generate"], tokens),
            "actor_infer_response": (seconds["step_generate"], response_tokens),
            "actor_train": (seconds["step_train"], tokens),
        }
        for phase, (duration, count) in phases.items():
            timer = self._timers.setdefault(phase, DurationTracker())
            timer.add(duration, count)
            speed = timer.tokens_per_second
            self.add_metric(f"system/{phase}/tps", speed)
            self.add_metric(f"system/time/{phase}_mean", timer.mean_seconds)
            if phase == "tps":
                num_gpus = sum(gpus for gpus, _ in resources.values())
                self.add_metric("system/tps_gpu", speed / max(num_gpus, 1))
                continue
            gpus, ranks = resources.get(phase.removesuffix("_response"), (0, 1))
            key = phase.replace("_response", "/response")
            self.add_metric(f"system/{key}/tps_gpu", speed / max(gpus, 1))
            self.add_metric(f"system/{key}/tps_dp", speed / max(ranks, 1))


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Tokens, scores, advantages and groups of the rows of one batch."""
    metrics: dict[str, Tensor | float] = {}
    mask_BT = batch["response_mask"][:, 1:].bool()
    response_B = mask_BT.sum(-1).float()
    prompt_B = batch["prompt_mask"].sum(-1).float()
    total_B = batch["attention_mask"].sum(-1).float()
    # Rows whose response ended at the length limit.
    cut_B = response_B == batch["responses"].shape[1]
    if "finish_reason" in batch:
        reasons = batch["finish_reason"]
        cut_B = torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)
    metrics |= _spread("token/prompt_length", prompt_B)
    for name, lengths_B in (("response_length", response_B), ("total_length", total_B)):
        metrics |= _spread(f"token/{name}", lengths_B)
        metrics[f"token/{name}/diff"] = lengths_B.max() - lengths_B.min()
    metrics["token/total_response_length/clip"] = cut_B.float().mean()

    scores_B = batch["scores"].float()
    right_B, error_B = scores_B == 1, scores_B == 0
    metrics["critic/correct/mean"] = right_B.float().mean()
    metrics |= {
        "critic/score_distribution/max_value": scores_B.max(),
        "critic/score_distribution/min_value": scores_B.min(),
        "critic/score_distribution/correct_samples_ratio": right_B.float().mean(),
        "critic/score_distribution/incorrect_samples_ratio": error_B.float().mean(),
    }
    metrics |= _spread("critic/score", scores_B)
    metrics |= _spread("critic/rewards", batch["response_level_rewards"].float())
    for name in ("advantages", "raw_advantages", "returns", "values"):
        if name in batch and mask_BT.any():
            metrics |= _spread(f"critic/{name}", batch[name][mask_BT].float())
    if "token_level_rewards" in batch and mask_BT.any():
        metrics |= _spread(
            "critic/token_level_rewards_mean", batch["token_level_rewards"][mask_BT].float()
        )
    if "entropy" in batch and mask_BT.any():
        metrics["critic/entropy/mean"] = batch["entropy"][mask_BT].float().mean()
    for name, rows_B in (("right", right_B), ("error", error_B)):
        if not rows_B.any():
            continue
        metrics |= _spread(f"token/{name}_response_length", response_B[rows_B])
        metrics[f"token/{name}_response_length/clip"] = cut_B[rows_B].float().mean()
        tokens_BT = mask_BT & rows_B.unsqueeze(1)
        for key in ("advantages", "raw_advantages"):
            if key in batch and tokens_BT.any():
                values = batch[key][tokens_BT].float()
                metrics |= _spread(f"critic/{name}_response/{key}", values)
                metrics[f"critic/{name}_response/{key}/std"] = values.std(correction=0)
    groups_B = row_groups(batch)
    if groups_B is not None:
        metrics |= _group_metrics(batch, groups_B, right_B, response_B, mask_BT)
    return bring_to_host([metrics])[0]


def _group_metrics(
    batch: DataProto, groups_B: Tensor, right_B: Tensor, response_B: Tensor, mask_BT: Tensor
) -> dict[str, Tensor | float]:
    num_groups = int(groups_B.max()) + 1
    sizes_G = torch.bincount(groups_B, minlength=num_groups).float()
    if int(sizes_G.max()) < 2:
        return {}
    correct_G = torch.zeros(num_groups).index_add_(0, groups_B, right_B.float()) / sizes_G
    metrics: dict[str, Tensor | float] = {
        "group/correct_ratio/mean": correct_G.mean(),
        "group/correct_ratio/std": correct_G.std(correction=0),
        "group/all_correct_groups_ratio": (correct_G == 1).float().mean(),
        "group/all_incorrect_groups_ratio": (correct_G == 0).float().mean(),
        "group/mixed_groups_ratio": ((correct_G > 0) & (correct_G < 1)).float().mean(),
    }
    metrics |= _spread(
        "group/response_length_diff", _range_of_groups(response_B, groups_B, num_groups)
    )
    if "advantages" in batch:
        # The mean over a row's tokens: for outcome estimators, the advantage of the row.
        counts_B = mask_BT.sum(-1).clamp(min=1)
        advantage_B = torch.where(mask_BT, batch["advantages"].float(), 0.0).sum(-1) / counts_B
        metrics |= _spread(
            "group/advantage_diff", _range_of_groups(advantage_B, groups_B, num_groups)
        )
        mixed_G = (correct_G > 0) & (correct_G < 1)
        if mixed_G.any():
            zeros_G, num_right_G = torch.zeros(num_groups), correct_G * sizes_G
            right_G = zeros_G.index_add(0, groups_B, torch.where(right_B, advantage_B, 0.0))
            wrong_G = zeros_G.index_add(0, groups_B, torch.where(right_B, 0.0, advantage_B))
            right_G = right_G / num_right_G.clamp(min=1)
            gap_G = right_G - wrong_G / (sizes_G - num_right_G).clamp(min=1)
            name = "group/correct_vs_incorrect_advantage_diff"
            metrics[f"{name}/mean"] = gap_G[mixed_G].mean()
            metrics[f"{name}/std"] = gap_G[mixed_G].std(correction=0)
    return metrics


def _range_of_groups(values_B: Tensor, groups_B: Tensor, num_groups: int) -> Tensor:
    """Largest minus smallest value of each group, (G,)."""
    high = torch.full((num_groups,), -torch.inf).scatter_reduce_(0, groups_B, values_B, "amax")
    low = torch.full((num_groups,), torch.inf).scatter_reduce_(0, groups_B, values_B, "amin")
    return high - low


def _spread(name: str, values: Tensor) -> dict[str, Tensor | float]:
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}
