"""Learning from episodes: play, estimate, improve."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch

from roll.algorithms.masking import masked_mean
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.exceptions import ConfigError
from roll.models.model_providers import default_tokenizer_provider
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
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.mini_batches import NUM_STEPS, balance_ranks
from roll.utils.functionals import compute_token_reward
from roll.utils.kl_controller import get_kl_controller
from roll.utils.metrics.metrics_manager import MetricsManager
from roll.utils.metrics.reduction import reduce_metrics
from roll.utils.rollout_log import DroppedSample, RolloutLog, discard_rollouts_after
from roll.utils.run_folder import Status
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

__all__ = [
    "AgenticPipeline",
    "GroupFilter",
    "compute_rollout_traj_metrics",
    "compute_train_data_metrics",
    "get_episode_scores",
]

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
MAX_EMPTY_STEPS = 3  # consecutive steps without a single trajectory before a run stops


class AgenticPipeline(BasePipeline):
    """StarPO (grpo, reinforce, gae), GiGPO and step-wise REINFORCE on environments of several turns."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "score": "rollout/score/mean",
        "success": "env/success",
        "validation": "val/success",
    }

    def __init__(self, pipeline_config: AgenticConfig, *, progress: bool | None = None) -> None:
        # What can be wrong with the input is found before a model is loaded and before the run has a folder.
        config = pipeline_config
        problems = config.missing_for_training()
        if problems:
            raise ConfigError("\n".join(map(str, problems)))
        self.tokenizer = default_tokenizer_provider(config.actor_train.model_args)
        super().__init__(config, progress=progress)
        self.schedulers: list[RolloutScheduler] = []
        self.async_rollouts: AsyncRollouts | None = None

        roles = self.pipeline_config.active_roles()
        self.actor_train = self.make_cluster("actor_train")
        self.actor_infer = self.make_cluster("actor_infer")
        self.reference = self.make_cluster("reference") if "reference" in roles else None
        self.critic = self.make_cluster("critic") if "critic" in roles else None
        models = (self.actor_train, self.actor_infer, self.reference, self.critic)
        self.clusters = [cluster for cluster in models if cluster is not None]
        self.initialize(*self.clusters)
        self.set_model_update_pair(self.actor_train, self.actor_infer, config.actor_infer.model_update_frequency)
        self.set_checkpoint_clusters(*(cluster for cluster in (self.actor_train, self.critic) if cluster is not None))

        self.train_rollouts = self._make_scheduler("train")
        self.val_rollouts = self._make_scheduler("val") if "val_env" in roles else None
        self.async_rollouts = self._make_async_rollouts() if config.async_pipeline else None
        self.metrics = MetricsManager()
        self.kl_ctrl = get_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self.num_empty_steps = 0
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
            drop=make_filter(config, manager, mode, self._pad_token_id),
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
                with self.engine_at_rest(step):
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
        self.finish(self._final_validation())

    def engine_at_rest(self, step: int) -> AbstractContextManager[None]:
        """Inside, episodes that are played while training goes on wait; `step` comes next."""
        return nullcontext() if self.async_rollouts is None else self.async_rollouts.paused(step)

    def update_engine(self, step: int) -> None:
        """Bring the policy's weights to the role that generates."""
        self._use(self.actor_train, self.actor_infer)
        with self.metrics.timer("time/step_model_update"):
            self.metrics.add_metrics(self.model_update(step))

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """Play the episodes of this step; their rows, or None if every environment failed."""
        config = self.pipeline_config
        self._use(self.actor_infer)
        if self.async_rollouts is None:
            rollout = self.train_rollouts.rollout(step, config.rollout_batch_size)
        else:
            rollout = self.async_rollouts.take(step)
        self.metrics.add_metrics(rollout.metrics)
        self._watch_failures(rollout)
        if not rollout.trajectories:
            return None, rollout
        rows = [row for item in rollout.trajectories for row in rows_of(item, config.rows_are_turns)]
        batch = collate(rows, self._pad_token_id)
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
        """`ref_log_probs` (B, S-1) of the reference, or of the policy without its adapter."""
        if not self.pipeline_config.enable_reference:
            return batch
        if self.reference is not None:
            scored = self._score_rows(self.reference, "compute_log_probs", batch)
        else:
            scored = self._score_rows(self.actor_train, "compute_log_probs", batch, disable_adapter=True)
        batch["ref_log_probs"] = scored["log_probs"]
        self._add_mean("critic/ref_log_prob/mean", batch, "ref_log_probs")
        return batch

    def add_old_log_probs_and_values(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropy` of the policy before this step's updates, where they are needed, `values` of
        the critic, and the correction of the gap between sampling and training."""
        config = self.pipeline_config
        if self.critic is not None:
            batch["values"] = self._score_rows(self.critic, "compute_values", batch)["values"]
        if config.enable_old_logprobs_recompute:
            scored = self._score_rows(self.actor_train, "compute_log_probs", batch)
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
            batch = agentic_compute_advantage(
                batch,
                gamma=config.gamma,
                lambd=config.lambd,
                adv_estimator=config.adv_estimator,
                advantage_clip=config.advantage_clip,
                whiten_advantages=config.whiten_advantages,
                whiten_rewards=config.whiten_rewards,
            )
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
            self._train_on(self.critic, rows)
        if step >= self.pipeline_config.critic_warmup:
            found = reduce_metrics(self._train_on(self.actor_train, rows))
            if "actor/first_gap@sum" in found:  # training and sampling, before the first update of the step
                self.metrics.add_metric("rollout/logprob_gap/mean", found["actor/first_gap@sum"])
                self.metrics.add_metric("rollout/logprob_gap/max", found.get("actor/first_gap_max@max", 0.0))

    def validate(self, step: int) -> dict[str, float]:
        """Play the validation's episodes, the same every time; scores, success and the environments' metrics."""
        assert self.val_rollouts is not None
        self._use(self.actor_infer)
        with self.metrics.timer("time/step_val"):
            rollout = self.val_rollouts.rollout(step, self.pipeline_config.val_batch_size)
        metrics = {f"val/{name}": value for name, value in rollout.metrics.items() if not name.startswith("time/")}
        if rollout.trajectories:
            metrics |= validation_metrics(rollout.trajectories)
            rows = [row for item in rollout.trajectories for row in rows_of(item, item.prompts_are_whole)]
            if self.sample_log is not None:
                self.sample_log.write(step, collate(rows, self._pad_token_id), split="val")
        return metrics

    # -- state ---------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        return {"kl_controller": dict(self.kl_ctrl.state_dict()), "steps": {"num_empty": self.num_empty_steps}}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.kl_ctrl.load_state_dict(states["kl_controller"])
        self.num_empty_steps = states["steps"]["num_empty"]
        discard_rollouts_after(self.run_dir, self.global_step - 1)

    def close(self, status: Status = "stopped") -> None:
        if self.async_rollouts is not None:
            self.async_rollouts.close()
            self.async_rollouts = None
        for scheduler in self.schedulers:
            scheduler.close()
        self.schedulers = []
        super().close(status)

    # -- helpers -------------------------------------------------------------------------------------------------------

    @property
    def _pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)  # pyrefly: ignore[bad-argument-type] (the provider makes sure of one)

    def _score_rows(self, cluster: Cluster, method: str, batch: DataProto, **meta_info: Any) -> DataProto:
        """What a role computes for every row; ranks without a row get a copy of one, whose result is dropped."""
        self._use(cluster)
        rows = batch.select(MODEL_COLUMNS, [])
        rows.meta_info = {**batch.meta_info, **meta_info}
        padded, num_extra = pad_dataproto_to_divisor(rows, cluster.dp_size if len(rows) < cluster.dp_size else 1)
        result = cluster.execute_all_sync(method, padded)
        self.metrics.add_metrics(result.meta_info.pop("metrics", {}))
        return unpad_dataproto(result, num_extra)

    def _train_on(self, cluster: Cluster, rows: DataProto) -> dict[str, Any]:
        self._use(cluster)
        if len(rows) < cluster.dp_size:
            spare = rows.select_idxs([0] * (cluster.dp_size - len(rows)))
            spare["response_mask"] = torch.zeros_like(spare["response_mask"])  # only gives every rank something to do
            rows = DataProto.concat([rows, spare])
        found = cluster.train_step(balance_ranks(rows, cluster.dp_size)).meta_info["metrics"]
        self.metrics.add_metrics(found)
        return found

    def _use(self, *clusters: Cluster) -> None:
        """With `is_offload_states`, only these roles keep their models on the device."""
        if self.pipeline_config.is_offload_states:
            for cluster in self.clusters:
                (cluster.load_states if cluster in clusters else cluster.offload_states)()

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

    def _final_validation(self) -> str:
        if self.val_rollouts is None or self.is_interrupted:
            return ""
        with self.engine_at_rest(self.global_step):
            self.update_engine(self.global_step)
            result = self.validate(self.global_step)
        self.log(self.global_step, self.metrics.pop() | result)
        self.summary |= result
        return validation_summary(result)
