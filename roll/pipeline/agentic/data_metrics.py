"""What a batch of trajectories says about itself, under ROLL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from roll.distributed.scheduler.protocol import DataProto
from roll.rollout.types import Trajectory


def get_episode_scores(batch: DataProto) -> Tensor:
    """The score of each episode, once, whether rows are episodes or turns."""
    scores = dict(zip(batch["traj_id"], batch["episode_scores"], strict=True))
    return torch.tensor([float(score) for score in scores.values()])


def compute_rollout_traj_metrics(batch: DataProto) -> dict[str, float]:
    """`rollout/{score,response_length,prompt_length,non_prompt_length}/{mean,max,min}`."""
    return _spread("rollout/score", get_episode_scores(batch)) | _length_metrics("rollout", batch)


def compute_train_data_metrics(batch: DataProto) -> dict[str, float]:
    """`critic/{score,rewards,advantages,returns,values}/*` and `tokens/*_length/*` of a batch with advantages."""
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
    """`val/score/*`, `val/{tag}/score/*` over the means of groups, and `val/success` where environments tell it."""
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
    """One sentence for the end of a run: success per tag, or scores where environments know no success."""
    rates = {key.split("/")[2]: value for key, value in metrics.items() if _is_success(key)}
    if rates:
        return (
            "Success: "
            + ", ".join(f"{tag} {rate:.2f}" for tag, rate in sorted(rates.items()))
            + "."
        )
    return f"Mean score: {metrics['val/score/mean']:.3f}." if "val/score/mean" in metrics else ""


def _is_success(key: str) -> bool:
    return key.startswith("val/env/") and key.endswith("/success")


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
