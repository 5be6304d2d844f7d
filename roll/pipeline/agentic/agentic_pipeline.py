"""Learning from episodes: play, estimate, improve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from roll.algorithms.masking import masked_mean
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import DataError
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
from roll.pipeline.agentic.group_filter import GroupFilter, make_filter
from roll.pipeline.agentic.llm_proxy import create_llm_proxy
from roll.pipeline.agentic.rollout_scheduler import Rollout, RolloutScheduler
from roll.pipeline.agentic.utils import (
    agentic_compute_advantage,
    compute_discounted_returns,
    compute_response_level_rewards,
    get_agentic_response_level_mask,
)
from roll.pipeline.mini_batches import NUM_STEPS
from roll.pipeline.policy_pipeline import MAX_EMPTY_STEPS, PolicyPipeline
from roll.pipeline.staleness import STALE
from roll.rollout.collate import collate
from roll.utils.functionals import compute_token_reward
from roll.utils.rollout_log import DroppedSample

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
        roles = config.active_roles()
        self.train_rollouts = self._make_scheduler("train") if "train_env" in roles else None
        self.val_rollouts = self._make_scheduler("val") if "val_env" in roles else None
        self.async_rollouts: AsyncRollouts | None = None
        if self.train_rollouts is not None and config.async_pipeline:
            self.async_rollouts = self.background = AsyncRollouts(
                self.train_rollouts,
                num_trajectories=config.rollout_batch_size,
                ratio=config.async_generation_ratio,
                max_staleness=config.max_staleness,
                first_step=self.global_step,
                last_step=config.max_steps,
            )
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
            proxy=create_llm_proxy(
                manager.llm_proxy, actor_infer=self.actor_infer, tokenizer=self.tokenizer
            ),
            tokenizer=self.tokenizer,
            drop=make_filter(config, manager, mode, self.pad_token_id),
        )
        self.schedulers.append(scheduler)
        return scheduler

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
                        batch = self.add_old_log_probs(self.add_values(batch))
                    batch = self.add_advantages(batch)
                    with metrics.timer("time/step_train"):
                        self.train(step, batch)
                    metrics.add_metrics(compute_train_data_metrics(batch))
                with metrics.timer("time/step_log"):
                    self.log_samples(
                        step, batch, dropped=self._dropped(rollout) if self.sample_logs else ()
                    )
            self.add_speed(step, batch)
            self.end_step(step, metrics.pop())
        self.finish(self._result())

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """The rows of this step, of episodes that are played or replayed; None if every environment failed."""
        config = self.pipeline_config
        rollout = Rollout()
        if config.is_replay:
            batch = self.load_rollout(step)
            self._check_rows(batch)
        else:
            self.use(self.actor_infer)
            if self.async_rollouts is not None:
                rollout = self.async_rollouts.take(step)
            elif self.train_rollouts is not None:
                rollout = self.train_rollouts.rollout(step, config.rollout_batch_size)
            self.metrics.add_metrics(rollout.metrics)
            self._watch_failures(rollout)
            if not rollout.trajectories:
                return None, rollout
            batch = collate(rollout.trajectories, self.pad_token_id, per_turn=config.rows_are_turns)
            self.dump_rollout(step, batch)
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

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        batch = super().add_old_log_probs(batch)
        for name, column in (("old_log_prob", "old_log_probs"), ("entropy", "entropy")):
            if column in batch:
                self._add_mean(f"critic/{name}/mean", batch, column)
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
        rows = batch.select(
            [key for key in batch.batch.keys() if key not in unread], ["sample_uuid"]
        )
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
        metrics = {
            f"val/{name}": value
            for name, value in rollout.metrics.items()
            if not name.startswith("time/")
        }
        if rollout.trajectories:
            metrics |= validation_metrics(rollout.trajectories)
            batch = collate(rollout.trajectories, self.pad_token_id, per_turn=None)
            self.log_samples(step, batch, split="val")
        return metrics

    def close_sources(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _add_mean(self, name: str, batch: DataProto, column: str) -> None:
        self.metrics.add_metric(
            name, float(masked_mean(batch[column], batch["response_mask"][:, 1:]))
        )

    def _watch_failures(self, rollout: Rollout) -> None:
        """Add the success of all tags together; stop if nothing at all comes back from the environments."""
        successes = [item.success for item in rollout.trajectories if item.success is not None]
        if successes:
            self.metrics.add_metric("env/success", sum(successes) / len(successes))
        self.num_empty_steps = 0 if rollout.trajectories else self.num_empty_steps + 1
        if self.num_empty_steps >= MAX_EMPTY_STEPS:
            reasons = [
                f"{tag} {reason} x{count}" for (tag, reason), count in rollout.failures.items()
            ]
            dropped = {
                "dropped by the group filter": rollout.filtered,
                "dropped as too old": rollout.stale,
            }
            reasons += [f"{reason} x{len(items)}" for reason, items in dropped.items() if items]
            self.stop(
                f"no episode of {self.num_empty_steps} steps in a row can be used ({', '.join(reasons)})"
            )

    def _check_rows(self, batch: DataProto) -> None:
        """A dump has rows of episodes or of turns, and they cannot stand for each other."""
        config = self.pipeline_config
        found, expected = (
            "turns" if is_turns else "episodes"
            for is_turns in ("step" in batch, config.rows_are_turns)
        )
        if found != expected:
            raise DataError(
                f"rollout_mock.dump_dir: found a dump whose rows are {found}, expected {expected}, because of "
                f"adv_estimator={config.adv_estimator} and env_manager_cls in custom_envs; make the dump with these "
                "settings, or use those that it was made with"
            )

    def _dropped(self, rollout: Rollout) -> list[DroppedSample]:
        found = []
        for item, reason in [(it, "group filter") for it in rollout.filtered] + [
            (it, STALE) for it in rollout.stale
        ]:
            ids = [token for turn in item.turns for token in (*turn.prompt_ids, *turn.response_ids)]
            found.append(
                DroppedSample(
                    prompt=str(self.tokenizer.decode(list(item.turns[0].prompt_ids))),
                    response=str(self.tokenizer.decode(ids[len(item.turns[0].prompt_ids) :])),
                    reason=reason,
                    tag=item.tag,
                    token_ids=ids,
                    group=item.traj_group_id,
                    score=item.score,
                )
            )
        return found

    def add_speed(self, step: int, batch: DataProto | None) -> None:
        seconds = self.metrics.metrics["time/step_total"]
        tokens = 0 if batch is None else int(batch["attention_mask"].sum())
        samples = (step + 1) * self.pipeline_config.rollout_batch_size
        self.metrics.add_metrics(
            {"system/tps": tokens / max(seconds, 1e-9), "system/samples": samples}
        )

    def _result(self) -> str:
        if self.val_rollouts is None or self.is_interrupted:
            return ""
        return validation_summary(self.final_validation())
