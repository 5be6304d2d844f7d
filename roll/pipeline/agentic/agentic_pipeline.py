"""Learning from episodes: play, estimate, improve. The step itself is `PolicyPipeline.run`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from roll.algorithms.masking import masked_mean
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError, DataError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env_source import EnvSource, GroupFilter
from roll.pipeline.agentic.utils import (
    agentic_compute_advantage,
    compute_discounted_returns,
    compute_response_level_rewards,
    get_agentic_response_level_mask,
)
from roll.pipeline.model_worker import NUM_STEPS
from roll.pipeline.policy_pipeline import PolicyPipeline
from roll.rollout.buffer import STALE
from roll.rollout.metrics import (
    compute_rollout_traj_metrics,
    compute_train_data_metrics,
    get_episode_scores,
    validation_summary,
)
from roll.rollout.types import Rollout
from roll.utils.functionals import compute_token_reward

__all__ = [
    "AgenticPipeline",
    "GroupFilter",
    "compute_rollout_traj_metrics",
    "compute_train_data_metrics",
    "get_episode_scores",
]


class AgenticPipeline(PolicyPipeline):
    """StarPO (grpo, reinforce, gae), GiGPO and step-wise REINFORCE in environments."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "score": "rollout/score/mean",
        "success": "env/success",
        "validation": "val/success",
    }
    timers: ClassVar[Mapping[str, str]] = {
        "rollout": "time/step_rollout",
        "reference": "time/step_ref_log_probs_values_reward",
        "old_log_probs": "time/step_old_log_probs_values",
        "validate": "time/step_val",
        "log": "time/step_log",
    }
    loss_masks = ("response_mask",)
    not_trained_on = (
        "prompt_mask",
        "scores",
        "origin_response_mask",
        "final_response_mask",
        "entropy",
    )
    val_roles = "val_env"

    def __init__(self, pipeline_config: AgenticConfig, *, progress: bool | None = None) -> None:
        # What can be wrong with the input is found before a model is loaded and before the run has
        # a folder.
        config = pipeline_config
        self.tokenizer = self.load_tokenizer(config)
        super().__init__(config, progress=progress)
        self.initialize(*self.clusters)
        roles = config.active_roles()
        if "train_env" in roles:
            self.source = self._make_source("train")
        if "val_env" in roles:
            self.val_source = self._make_source("val")
        self.rows_are_turns = config.rows_are_turns
        self.restore()

    def _make_source(self, mode: Literal["train", "val"]) -> EnvSource:
        cluster = self.make_cluster(f"{mode}_env")
        self.initialize(cluster)
        config, step = self.pipeline_config, self.global_step
        return EnvSource(config, mode, cluster, self.tokenizer, self.actor_infer, first_step=step)

    @classmethod
    def load_validation(cls, config: AgenticConfig, tokenizer: Any) -> None:
        if "val_env" not in config.active_roles():
            raise ConfigError("val_env_manager: missing; it says which episodes to evaluate on")
        # A config with eval_steps: 0 was loaded without a look at its validation.
        problems = config._problems()
        if problems:
            raise ConfigError("\n".join(map(str, problems)))

    @classmethod
    def make_val_source(
        cls, config: AgenticConfig, clusters: Mapping[str, Cluster], tokenizer: Any, data: Any
    ) -> EnvSource:
        return EnvSource(config, "val", clusters["val_env"], tokenizer, clusters["actor_infer"])

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """The rows of this step, of episodes that are played or replayed."""
        config = self.pipeline_config
        batch, rollout = super().collect(step)
        if batch is None:
            return None, rollout
        if ("step" in batch) != config.rows_are_turns:
            found, expected = ("turns", "episodes")[:: 1 if "step" in batch else -1]
            raise DataError(
                f"rollout_mock.dump_dir: found a dump whose rows are {found}, expected {expected}, "
                f"because of adv_estimator={config.adv_estimator} and env_manager_cls in "
                "custom_envs; make the dump with these settings, or use those that it was made with"
            )
        self.metrics.add_metrics(compute_rollout_traj_metrics(batch))
        batch = compute_discounted_returns(batch, config.adv_estimator, config.step_reward_gamma)
        batch, counts = adjust_batch(batch, config, seed=config.seed + step)
        self.metrics.add_metrics(counts)
        batch.meta_info[NUM_STEPS] = optimizer_steps(config)
        return batch, rollout

    def add_reference(self, batch: DataProto) -> DataProto:
        batch = super().add_reference(batch)
        self._add_mean("critic/ref_log_prob/mean", batch, "ref_log_probs")
        return batch

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        batch = super().add_old_log_probs(batch)
        self._add_mean("critic/old_log_prob/mean", batch, "old_log_probs")
        self._add_mean("critic/entropy/mean", batch, "entropy")
        return batch

    def _add_mean(self, name: str, batch: DataProto, column: str) -> None:
        if column in batch:
            mean = masked_mean(batch[column], batch["response_mask"][:, 1:])
            self.metrics.add_metric(name, float(mean))

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Scores -> rewards of rows -> rewards of tokens -> `advantages` and `returns` (B, S-1)."""
        config, metrics = self.pipeline_config, self.metrics
        with metrics.timer("time/step_cal_response_level_mask"):
            batch, found = get_agentic_response_level_mask(batch, config)
            metrics.add_metrics(found)
        with metrics.timer("time/step_cal_norm_rewards"):
            batch, found = compute_response_level_rewards(batch, config)
            metrics.add_metrics(found)
        with metrics.timer("time/step_cal_token_reward"):
            batch, found = compute_token_reward(batch, config, self.kl_ctrl)
            metrics.add_metrics(found)
        with metrics.timer("time/step_adv"):
            batch = agentic_compute_advantage(batch, **config.advantage_settings)
        metrics.add_metrics(batch.meta_info.pop("metrics", {}))
        return batch

    def add_batch_metrics(self, step: int, batch: DataProto | None) -> None:
        seconds, tokens = max(self.metrics.metrics["time/step_total"], 1e-9), 0
        if batch is not None:
            self.metrics.add_metrics(compute_train_data_metrics(batch))
            tokens = int(batch["attention_mask"].sum())
        samples = (step + 1) * self.pipeline_config.rollout_batch_size
        self.metrics.add_metrics({"system/tps": tokens / seconds, "system/samples": samples})

    def result(self) -> str:
        if self.val_source is None or self.is_interrupted:
            return ""
        return validation_summary(self.final_validation())

    def give_up(self, rollout: Rollout) -> None:
        """Stop with a checkpoint: environments may work again when the run is resumed."""
        reasons = [f"{tag} {reason} x{count}" for (tag, reason), count in rollout.failures.items()]
        for reason, count in Counter(item.reason for item in rollout.dropped).items():
            text = "dropped as too old" if reason == STALE else f"dropped by the {reason}"
            reasons.append(f"{text} x{count}")
        self.stop(
            f"no episode of {self.num_empty_steps} steps in a row can be used "
            f"({', '.join(reasons)})"
        )


# How rows, whose number is known only after the episodes, fill the optimizer steps: the number of
# steps is that of the batch plan, where a trajectory counts as one row, so that learning rate
# schedules end where the run ends. The rows are dealt evenly to these steps: no row is repeated,
# none is lost, and all have the same weight. (ROLL fills steps up with copies, which then count
# twice, or deletes rows.)


def optimizer_steps(config: AgenticConfig) -> dict[str, int]:
    """Optimizer steps that each trained role takes on a batch in one epoch."""
    return {
        name: plan.optimizer_steps_per_batch // plan.epochs
        for name, plan in config.batch_plans().items()
    }


def adjust_batch(
    batch: DataProto, config: AgenticConfig, *, seed: int
) -> tuple[DataProto, dict[str, float]]:
    """The rows to train on, as `batch_adjust_mode` says.

    copy, auto       all of them
    delete           without a few random rows, so that every optimizer step has equally many
    random_sample    as many random rows as one optimizer step has by the batch plan
    """
    keep = len(batch)
    if config.batch_adjust_mode == "delete":
        divisor = math.lcm(*optimizer_steps(config).values())
        if keep >= divisor:
            keep -= keep % divisor
    elif config.batch_adjust_mode == "random_sample":
        plans = config.batch_plans().values()
        keep = min(keep, math.lcm(*(plan.samples_per_optimizer_step for plan in plans)))
    removed = len(batch) - keep
    if removed:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(batch), generator=generator)[:keep].sort().values
        batch = batch.select_idxs(chosen)
    return batch, {"system/batch_add_count": 0.0, "system/batch_remove_count": float(removed)}
