"""Learning from episodes: play, estimate, improve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from roll.algorithms.masking import masked_mean
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.async_rollouts import AsyncRollouts
from roll.pipeline.agentic.batch_adjust import adjust_batch, optimizer_steps
from roll.pipeline.agentic.data_metrics import (
    compute_rollout_traj_metrics,
    compute_train_data_metrics,
    get_episode_scores,
    validation_metrics,
    validation_summary,
)
from roll.pipeline.agentic.group_filter import GroupFilter, make_filter, rows_of
from roll.pipeline.agentic.llm_proxy import create_llm_proxy
from roll.pipeline.agentic.rollout_scheduler import Rollout, RolloutScheduler
from roll.pipeline.agentic.trajectory import Trajectory, collate
from roll.pipeline.agentic.utils import (
    agentic_compute_advantage,
    compute_discounted_returns,
    compute_response_level_rewards,
    get_agentic_response_level_mask,
)
from roll.pipeline.mini_batches import NUM_STEPS
from roll.pipeline.policy_pipeline import MAX_EMPTY_STEPS, PolicyPipeline
from roll.utils.functionals import compute_token_reward
from roll.utils.rollout_log import DroppedSample, RolloutLog
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

__all__ = [
    "AgenticPipeline",
    "GroupFilter",
    "compute_rollout_traj_metrics",
    "compute_train_data_metrics",
    "get_episode_scores",
]


class AgenticPipeline(PolicyPipeline):
    """StarPO (grpo, reinforce, gae), GiGPO and step-wise REINFORCE on environments of several turns."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "score": "rollout/score/mean",
        "success": "env/success",
        "validation": "val/success",
    }

    def __init__(self, pipeline_config: AgenticConfig, *, progress: bool | None = None) -> None:
        # What can be wrong with the input is found before a model is loaded and before the run has a folder.
        config = pipeline_config
        self.tokenizer = self.load_tokenizer(config)
        self.schedulers: list[RolloutScheduler] = []
        super().__init__(config, progress=progress)
        self.initialize(*self.clusters)
        self.train_rollouts = self._make_scheduler("train")
        self.val_rollouts = self._make_scheduler("val") if "val_env" in self.pipeline_config.active_roles() else None
        self.async_rollouts = self.background = self._make_async_rollouts() if config.async_pipeline else None
        limit = self.pipeline_config.log_samples_per_step
        self.sample_log = RolloutLog(self.run_dir, self.tokenizer, limit) if limit != 0 else None
        self.restore()

    def _make_scheduler(self, mode: Literal["train", "val"]) -> RolloutScheduler:
        config = self.pipeline_config
        manager = config.train_env_manager if mode == "train" else config.val_env_manager
        cluster = self.make_cluster(f"{mode}_env")
        self.initialize(cluster)
        scheduler = RolloutScheduler(
            config,
            manager,
            mode,
            env_cluster=cluster,
            proxy=create_llm_proxy(manager.llm_proxy, actor_infer=self.actor_infer, tokenizer=self.tokenizer),
            tokenizer=self.tokenizer,
            drop=make_filter(config, manager, mode, self.pad_token_id),
        )
        self.schedulers.append(scheduler)
        return scheduler

    def _make_async_rollouts(self) -> AsyncRollouts:
        config = self.pipeline_config
        return AsyncRollouts(
            self.train_rollouts,
            num_trajectories=config.rollout_batch_size,
            ratio=config.async_generation_ratio,
            first_step=self.global_step,
            last_step=config.max_steps,
        )

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.steps():
            metrics = self.metrics
            with metrics.timer("time/step_total"):
                with self.generation_paused(step):
                    self.update_engine(step)
                    if self.val_rollouts is not None and self.should_eval(step):
                        metrics.add_metrics(self.validate(step))
                with metrics.timer("time/step_rollout"):
                    batch, rollout = self.collect(step)
                if batch is not None:
                    with metrics.timer("time/step_ref_log_probs_values_reward"):
                        batch = self.add_reference(batch)
                    with metrics.timer("time/step_old_log_probs_values"):
                        batch = self.add_old_log_probs_and_values(batch)
                    batch = self.add_advantages(batch)
                    with metrics.timer("time/step_train"):
                        self.train(step, batch)
                    metrics.add_metrics(compute_train_data_metrics(batch))
                self.log_samples(step, batch, rollout)
            self.add_speed(step, batch)
            self.end_step(step, metrics.pop())
        self.finish(self._result())

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """Play the episodes of this step; their rows, or None if every environment failed."""
        config = self.pipeline_config
        self.use(self.actor_infer)
        if self.async_rollouts is None:
            rollout = self.train_rollouts.rollout(step, config.rollout_batch_size)
        else:
            rollout = self.async_rollouts.take(step)
        self.metrics.add_metrics(rollout.metrics)
        self._watch_failures(rollout)
        if not rollout.trajectories:
            return None, rollout
        rows = [row for item in rollout.trajectories for row in rows_of(item, config.rows_are_turns)]
        batch = collate(rows, self.pad_token_id)
        self.metrics.add_metrics(compute_rollout_traj_metrics(batch))
        batch = compute_discounted_returns(batch, config.adv_estimator, config.step_reward_gamma)
        batch, counts = adjust_batch(batch, config, seed=config.seed + step)
        self.metrics.add_metrics(counts)
        batch.meta_info = {
            "global_step": step,
            "loss_mask_keys": ["response_mask"],
            NUM_STEPS: optimizer_steps(config),
        }
        return batch, rollout

    def add_reference(self, batch: DataProto) -> DataProto:
        batch = super().add_reference(batch)
        if "ref_log_probs" in batch:
            self._add_mean("critic/ref_log_prob/mean", batch, "ref_log_probs")
        return batch

    def add_old_log_probs_and_values(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropy` of the policy before this step's updates, where they are needed, `values` of
        the critic, and the correction of the gap between sampling and training."""
        config = self.pipeline_config
        batch = self.add_values(batch)
        if config.enable_old_logprobs_recompute:
            scored = self.score_rows(self.actor_train, "compute_log_probs", batch)
            batch["old_log_probs"], batch["entropy"] = scored["log_probs"], scored["entropy"]
            self._add_mean("critic/old_log_prob/mean", batch, "old_log_probs")
            self._add_mean("critic/entropy/mean", batch, "entropy")
            batch, found = apply_train_infer_correction_to_batch(config, batch)
            self.metrics.add_metrics(found)
        return batch

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

    def train(self, step: int, batch: DataProto) -> None:
        """Update critic and, after its warm-up, policy."""
        if not bool(batch["response_mask"][:, 1:].any()):
            return
        assert batch.batch is not None
        unread = ("prompt_mask", "scores", "origin_response_mask", "final_response_mask", "entropy")
        rows = batch.select([key for key in batch.batch.keys() if key not in unread], ["sample_uuid"])
        if self.critic is not None:
            self.train_on(self.critic, rows)
        if step >= self.pipeline_config.critic_warmup:
            self.train_policy(rows)

    def validate(self, step: int) -> dict[str, float]:
        """Play the validation's episodes, the same every time; scores, success and the environments' metrics."""
        assert self.val_rollouts is not None
        self.use(self.actor_infer)
        with self.metrics.timer("time/step_val"):
            rollout = self.val_rollouts.rollout(step, self.pipeline_config.val_batch_size)
        metrics = {f"val/{name}": value for name, value in rollout.metrics.items() if not name.startswith("time/")}
        if rollout.trajectories:
            metrics |= validation_metrics(rollout.trajectories)
            rows = [row for item in rollout.trajectories for row in rows_of(item, item.prompts_are_whole)]
            if self.sample_log is not None:
                self.sample_log.write(step, collate(rows, self.pad_token_id), split="val")
        return metrics

    def close_sources(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _add_mean(self, name: str, batch: DataProto, column: str) -> None:
        self.metrics.add_metric(name, float(masked_mean(batch[column], batch["response_mask"][:, 1:])))

    def _watch_failures(self, rollout: Rollout) -> None:
        """Add the success of all tags together; stop if nothing at all comes back from the environments."""
        successes = [item.success for item in rollout.trajectories if item.success is not None]
        if successes:
            self.metrics.add_metric("env/success", sum(successes) / len(successes))
        self.num_empty_steps = 0 if rollout.trajectories else self.num_empty_steps + 1
        if self.num_empty_steps >= MAX_EMPTY_STEPS:
            reasons = ", ".join(f"{tag} {reason} x{count}" for (tag, reason), count in rollout.failures.items())
            self.stop(f"no environment finished an episode in {self.num_empty_steps} steps ({reasons})")

    def log_samples(self, step: int, batch: DataProto | None, rollout: Rollout) -> None:
        """Write the samples of this step to the run's folder."""
        if self.sample_log is not None:
            with self.metrics.timer("time/step_log"):
                dropped = [self._dropped(item) for item in rollout.filtered]
                self.sample_log.write(step, batch, dropped=dropped)

    def _dropped(self, item: Trajectory) -> DroppedSample:
        ids = [token for turn in item.turns for token in (*turn.prompt_ids, *turn.response_ids)]
        return DroppedSample(
            prompt=str(self.tokenizer.decode(list(item.turns[0].prompt_ids))),
            response=str(self.tokenizer.decode(ids[len(item.turns[0].prompt_ids) :])),
            reason="group filter",
            tag=item.tag,
            token_ids=ids,
            group=item.traj_group_id,
            score=item.score,
        )

    def add_speed(self, step: int, batch: DataProto | None) -> None:
        seconds = self.metrics.metrics["time/step_total"]
        tokens = 0 if batch is None else int(batch["attention_mask"].sum())
        samples = (step + 1) * self.pipeline_config.rollout_batch_size
        self.metrics.add_metrics({"system/tps": tokens / max(seconds, 1e-9), "system/samples": samples})

    def _result(self) -> str:
        if self.val_rollouts is None or self.is_interrupted:
            return ""
        return validation_summary(self.final_validation())
