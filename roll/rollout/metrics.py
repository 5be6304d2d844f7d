"""What rollouts and batches of trajectories say about themselves, under ROLL's names."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.distributed.scheduler.protocol import DataProto
from roll.rollout.types import Dropped, Group, Trajectory

# -- responses to prompts --------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts responses, and remembers those that are dropped, with their reasons."""

    dropped: list[Dropped] = field(default_factory=list)
    num_samples: int = 0
    num_truncated: int = 0
    num_filtered: int = 0
    num_continued: int = 0

    def metrics(self) -> dict[str, float]:
        """Dropped samples by reason: a reason's text up to its colon."""
        metrics = {
            "rollout/samples": float(self.num_samples),
            "rollout/truncated_frac": self.num_truncated / max(self.num_samples, 1),
            "rollout/dropped_samples": float(len(self.dropped)),
        }
        reasons = Counter(item.reason.split(":")[0].strip() for item in self.dropped)
        for reason, count in reasons.items():
            metrics[f"rollout/dropped/{reason.replace(' ', '_')}"] = float(count)
        return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Scores by domain, and the share of groups whose samples all have the same score: nothing is
    learned from them."""
    if not groups:
        return {}
    by_domain: dict[str, list[float]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).extend(group.scores)
    flat = [max(group.scores) - min(group.scores) <= 1e-6 for group in groups]
    metrics = {"rollout/no_signal_group_frac": sum(flat) / len(groups)}
    for domain, scores in by_domain.items():
        metrics[f"scheduler/{domain}/score/mean"] = statistics.fmean(scores)
        metrics[f"scheduler/{domain}/score/max"] = max(scores)
        metrics[f"scheduler/{domain}/score/min"] = min(scores)
    return metrics


def val_metrics(groups: Sequence[Group], tally: Tally) -> dict[str, float]:
    """`val_correct/{tag}/mean` is the share of scores that are 1 (as ROLL counts),
    `val/score/{tag}/mean` the mean score, and `val/pass_at_k/{tag}` the chance that at least one of
    k samples is right; tag `all` is everything."""
    metrics = {
        "val/samples": float(sum(len(group.trajectories) for group in groups)),
        "val/dropped_samples": float(len(tally.dropped)),
        "val/truncated_frac": tally.num_truncated / max(tally.num_samples, 1),
    }
    by_tag: dict[str, list[list[float]]] = {"all": [group.scores for group in groups]}
    for group in groups:
        if group.prompt.tag:
            by_tag.setdefault(group.prompt.tag, []).append(group.scores)
    for tag, members in by_tag.items():
        scores = [score for found in members for score in found]
        if not scores:
            continue
        metrics[f"val_correct/{tag}/mean"] = statistics.fmean(score == 1 for score in scores)
        metrics[f"val/score/{tag}/mean"] = statistics.fmean(scores)
        most = max(len(found) for found in members)
        for k in (2**power for power in range(1, 11) if 2**power <= most):
            chances = [
                pass_at_k(len(found), sum(score == 1 for score in found), k)
                for found in members
                if len(found) >= k
            ]
            metrics[f"val/pass_at_{k}/{tag}"] = statistics.fmean(chances)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of these samples, drawn without replacement, hold a correct one: an
    unbiased estimate of the chance that k new samples do.

    Example: 1 of 4 correct, k = 2 -> 1 - C(3,2)/C(4,2) = 0.5.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


# -- episodes --------------------------------------------------------------------------------------


def get_episode_scores(batch: DataProto) -> Tensor:
    """The score of each episode, once, whether rows are episodes or turns."""
    scores = dict(zip(batch["traj_id"], batch["episode_scores"], strict=True))
    return torch.tensor([float(score) for score in scores.values()])


def compute_rollout_traj_metrics(batch: DataProto) -> dict[str, float]:
    """`rollout/{score,response_length,prompt_length,non_prompt_length}/{mean,max,min}`."""
    return _spread("rollout/score", get_episode_scores(batch)) | _length_metrics("rollout", batch)


def compute_train_data_metrics(batch: DataProto) -> dict[str, float]:
    """`critic/{score,rewards,advantages,returns,values}/*` and `tokens/*_length/*` of a batch with
    advantages."""
    mask = batch["response_mask"][:, 1:].bool()
    metrics = _spread("critic/score", get_episode_scores(batch)) | _length_metrics("tokens", batch)
    metrics |= _spread("critic/rewards", batch["response_level_rewards"])
    for name in ("advantages", "returns", "values"):
        if name in batch:
            metrics |= _spread(f"critic/{name}", batch[name][mask])
    for name in ("episode_rewards_norm", "step_rewards_norm"):
        if name in batch:
            metrics |= _spread(f"critic/{name}", batch[name])
    return metrics


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`val/score/*`, `val/{tag}/score/*` over the means of groups, and `val/success` where
    environments tell it."""
    by_tag: dict[str, dict[str, list[float]]] = {}
    for item in trajectories:
        by_tag.setdefault(item.tag, {}).setdefault(item.traj_group_id, []).append(item.score)
    metrics: dict[str, float] = {}
    everything: list[float] = []
    for tag, groups in by_tag.items():
        means = [sum(scores) / len(scores) for scores in groups.values()]
        everything += means
        metrics |= _spread(f"val/{tag}/score", torch.tensor(means))
    metrics |= _spread("val/score", torch.tensor(everything))
    successes = [item.success for item in trajectories if item.success is not None]
    if successes:
        metrics["val/success"] = sum(successes) / len(successes)
    return metrics


def validation_summary(metrics: Mapping[str, float]) -> str:
    """One sentence for the end of a run: success per tag, or scores where environments know no
    success."""
    rates = []
    for key, value in sorted(metrics.items()):
        if key.startswith("val/env/") and key.endswith("/success"):
            rates.append(f"{key.split('/')[2]} {value:.2f}")
    if rates:
        return f"Success: {', '.join(rates)}."
    return f"Mean score: {metrics['val/score/mean']:.3f}." if "val/score/mean" in metrics else ""


def _length_metrics(prefix: str, batch: DataProto) -> dict[str, float]:
    total = batch["attention_mask"].sum(1).float()
    prompt = batch["prompt_mask"].sum(1).float()
    return {
        **_spread(f"{prefix}/response_length", batch["response_mask"].sum(1).float()),
        **_spread(f"{prefix}/prompt_length", prompt),
        **_spread(f"{prefix}/non_prompt_length", total - prompt),
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
