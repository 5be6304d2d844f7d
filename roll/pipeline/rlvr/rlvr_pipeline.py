"""Reinforcement learning from verifiable rewards: generate, score, estimate, improve.

The step itself is `PolicyPipeline.run`; an episode is one response to a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from roll.algorithms.rewards import RunningMoments
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError, DataError
from roll.pipeline.data import load_data, make_sampler
from roll.pipeline.policy_pipeline import PolicyPipeline
from roll.pipeline.rlvr.actor_worker import SAMPLE_WEIGHTS, compute_sample_weights
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.rewards.check import check_rewards
from roll.rollout.prompts import PromptSource
from roll.rollout.types import Rollout
from roll.utils.functionals import (
    compute_advantage,
    compute_token_reward,
    get_sample_level_mask,
    reward_postprocess,
)


class RLVRPipeline(PolicyPipeline):
    """PPO, GRPO, REINFORCE++ and relatives on prompts with checkable answers."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "score": "critic/score/mean",
        "validation": "val_correct/all/mean",
        "length": "token/response_length/mean",
    }
    timers: ClassVar[Mapping[str, str]] = {
        "rollout": "time/step_generate",
        "reference": "time/ref_log_probs_values",
        "old_log_probs": "time/old_log_probs",
        "validate": "time/val_step",
    }
    loss_masks = ("response_mask", "final_response_mask")
    not_trained_on = ("prompts", "responses", "prompt_mask")
    val_roles = "reward-"

    def __init__(self, pipeline_config: RLVRConfig, *, progress: bool | None = None) -> None:
        # What can be wrong with the input is found before a model is loaded and before the run has
        # a folder.
        config = pipeline_config
        self.tokenizer = self.load_tokenizer(config)
        sampler = val_prompts = None
        if not config.is_replay:
            check_rewards(config)
            sampler = make_sampler(config, load_data(config, "actor_train", self.tokenizer))
            val_prompts = load_data(config, "validation", self.tokenizer)
        super().__init__(config, progress=progress)
        self.rewards: dict[str, Cluster] = {}
        if self.actor_infer is not None:
            self.rewards = {name: self.make_cluster(f"reward-{name}") for name in config.rewards}
        self.clusters += self.rewards.values()
        self.initialize(*self.clusters)
        self.running = {domain: RunningMoments() for domain in config.rewards}
        self.prompts: PromptSource | None = None
        if self.actor_infer is not None and sampler is not None:
            self.prompts = self.source = PromptSource(
                config, self.actor_infer, self.rewards, self.pad_token_id, sampler, val_prompts
            )
            self.val_source = None if val_prompts is None else self.prompts
        self.restore()

    @classmethod
    def load_validation(cls, config: RLVRConfig, tokenizer: Any) -> Any:
        data_args = config.validation.data_args if config.validation is not None else None
        if data_args is None or not data_args.files:
            raise ConfigError(
                "validation: missing; it says which prompts to evaluate on, and how to sample"
            )
        check_rewards(config)
        return load_data(config, "validation", tokenizer)

    @classmethod
    def make_val_source(
        cls, config: RLVRConfig, clusters: Mapping[str, Cluster], tokenizer: Any, data: Any
    ) -> PromptSource:
        rewards = {name: clusters[f"reward-{name}"] for name in config.rewards}
        return PromptSource(
            config, clusters["actor_infer"], rewards, tokenizer.pad_token_id, val_prompts=data
        )

    def reward_clusters(self) -> Sequence[Cluster]:
        return list(self.rewards.values())

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Adds `final_response_mask`, `token_level_rewards`, `advantages`, `raw_advantages`,
        `returns` and, if they are on, `sample_weights`.

        Rewards and advantages are normalised within each domain. The KL penalty knows no domains:
        one call, one update of its coefficient a step. (ROLL updates it once for each domain.)
        """
        config = self.pipeline_config

        def advantages(rows: DataProto) -> tuple[DataProto, dict[str, Any]]:
            rows.meta_info = {
                key: rows.meta_info[key] for key in rows.meta_info if key != "metrics"
            }
            mask = rows["final_response_mask"]
            rows = compute_advantage(rows, response_mask=mask, **config.advantage_settings)
            return rows, rows.meta_info.pop("metrics", {})

        batch, metrics = get_sample_level_mask(batch, config)
        nothing_left = not bool(batch["final_response_mask"].any())
        metrics["mask/final_mask_sum_eq_0"] = float(nothing_left)
        batch, found = _by_domain(batch, lambda r: reward_postprocess(r, config, self.running))
        metrics |= found
        batch, found = compute_token_reward(batch, config, self.kl_ctrl)
        metrics |= found
        batch, found = _by_domain(batch, advantages)
        self.metrics.add_metrics(metrics | found)
        if config.difficulty_loss_weight or config.length_loss_weight:
            batch[SAMPLE_WEIGHTS] = compute_sample_weights(batch, config)
        return batch

    def add_batch_metrics(self, step: int, batch: DataProto | None) -> None:
        if batch is None:
            return
        self.metrics.add_all_metrics(step, batch)
        self.metrics.add_domain_all_metrics(batch)
        resources = {}
        for name, cluster in (("actor_infer", self.actor_infer), ("actor_train", self.actor_train)):
            if cluster is not None:
                num_gpus = sum(map(len, cluster.placement_groups))
                resources[name] = (num_gpus, cluster.dp_size)
        self.metrics.add_speeds(batch, resources)

    def result(self) -> str:
        if self.val_source is None or self.pipeline_config.eval_steps <= 0:
            return ""
        share = self.final_validation().get("val_correct/all/mean", 0.0)
        return f"Validation: {share:.3f} of the samples are right."

    def give_up(self, rollout: Rollout) -> None:
        reasons = [
            f"  {name.rpartition('/')[2]}: {count:.0f} samples"
            for name, count in rollout.metrics.items()
            if "/dropped/" in name
        ]
        last = rollout.dropped[-1].sample(self.tokenizer)
        raise DataError(
            f"not one sample of the last {self.num_empty_steps} steps could be used:\n"
            + "\n".join(reasons)
            + f"\nThe last one was dropped because of {last.reason}. Its prompt: {last.prompt!r}. "
            f"Its response: {last.response!r}"
        )

    # -- state -------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        moments = {domain: moments.state_dict() for domain, moments in self.running.items()}
        states = super().states() | {"running_moments": moments}
        if self.prompts is not None:
            states["rollouts"] = self.prompts.state_dict()
        return states

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        super().load_states(states)
        for domain, moments in self.running.items():
            moments.load_state_dict(states["running_moments"][domain])
        if self.prompts is not None and "rollouts" in states:
            self.prompts.load_state_dict(states["rollouts"])


def _by_domain(
    batch: DataProto, function: Callable[[DataProto], tuple[DataProto, Mapping[str, Any]]]
) -> tuple[DataProto, dict[str, Any]]:
    """`function(rows) -> (rows, metrics)` on the rows of each domain; the rows come back in their
    old order.

    Metrics are averaged over domains by those who log them (lists), and each domain's own is
    `{domain}/{name}`.
    """
    positions: dict[str, list[int]] = {}
    for row, domain in enumerate(batch["domain"]):
        positions.setdefault(str(domain), []).append(row)
    if len(positions) == 1:
        batch, found = function(batch)
        return batch, dict(found)
    parts, metrics = [], {}
    for domain, rows in positions.items():
        part, found = function(batch.select_idxs(rows))
        parts.append(part)
        for name, value in found.items():
            metrics[f"{domain}/{name}"] = value
            metrics.setdefault(name, []).append(value)
    order = torch.tensor([row for rows in positions.values() for row in rows])
    return DataProto.concat(parts).select_idxs(order.argsort()), metrics
