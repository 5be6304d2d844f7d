"""Reinforcement learning from verifiable rewards: generate, score, estimate, improve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from roll.algorithms.rewards import RunningMoments
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import DataError
from roll.pipeline.data import load_data, make_sampler
from roll.pipeline.policy_pipeline import MAX_EMPTY_STEPS, PolicyPipeline
from roll.pipeline.rlvr.advantages import add_advantages
from roll.pipeline.rlvr.async_rollout import AsyncRolloutCollector
from roll.pipeline.rlvr.evaluation import evaluate
from roll.pipeline.rlvr.rewards.check import check_rewards
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rollout import Rollout, RolloutCollector, Tally
from roll.pipeline.rlvr.samples import scored_batch
from roll.pipeline.rlvr.scoring import Scorer, close_rewards
from roll.pipeline.rlvr.validation import ValSampling, val_metrics, validate

LOSS_MASKS = ["response_mask", "final_response_mask"]


class RLVRPipeline(PolicyPipeline):
    """PPO, GRPO, REINFORCE++ and relatives on prompts with checkable answers."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "score": "critic/score/mean",
        "validation": "val_correct/all/mean",
        "length": "token/response_length/mean",
    }

    def __init__(self, pipeline_config: RLVRConfig, *, progress: bool | None = None) -> None:
        # What can be wrong with the input is found before a model is loaded and before the run has a folder.
        config = pipeline_config
        self.tokenizer = self.load_tokenizer(config)
        self.sampler = self.val_prompts = None
        if not config.is_replay:
            check_rewards(config)
            self.sampler = make_sampler(config, load_data(config, "actor_train", self.tokenizer))
            self.val_prompts = load_data(config, "validation", self.tokenizer)
        super().__init__(config, progress=progress)
        self.rewards = {
            domain: self.make_cluster(f"reward-{domain}")
            for domain in config.rewards
            if self.actor_infer
        }
        self.clusters += self.rewards.values()
        self.initialize(*self.clusters)
        self.running = {domain: RunningMoments() for domain in config.rewards}
        self.score = Scorer(self.rewards, self.tokenizer)
        self.collector: RolloutCollector | None = None
        if self.actor_infer is not None and self.sampler is not None:
            parts = (config, self.sampler, self.actor_infer, self.score, self.tokenizer)
            if config.async_pipeline:
                self.collector = self.background = AsyncRolloutCollector(*parts)
            else:
                self.collector = RolloutCollector(*parts)
        self.restore()

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.steps():
            metrics = self.metrics
            with metrics.timer("time/step_total"):
                with self.generation_paused(step):
                    self.update_engine(step)
                    if self.should_validate(step):
                        metrics.add_metrics(self.validate(step))
                with metrics.timer("time/step_generate"):
                    batch, rollout = self.collect(step)
                if batch is not None:
                    batch.meta_info = {"global_step": step, "loss_mask_keys": LOSS_MASKS}
                    with metrics.timer("time/ref_log_probs_values"):
                        batch = self.add_values(self.add_reference(batch))
                    with metrics.timer("time/old_log_probs"):
                        batch = self.add_old_log_probs(batch)
                    batch, found = add_advantages(
                        batch, self.pipeline_config, self.kl_ctrl, self.running
                    )
                    metrics.add_metrics(found)
                    with metrics.timer("time/step_train"):
                        self.train(step, batch)
                    metrics.add_all_metrics(step, batch)
                    metrics.add_domain_all_metrics(batch)
                    metrics.add_speeds(batch, self._resources())
                self.log_samples(step, batch, dropped=rollout.dropped)
            self.end_step(step, metrics.pop())
        self.finish(self._result())

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """The scored batch of this step, generated or replayed; None if not one sample could be scored."""
        if self.pipeline_config.is_replay:
            return self.load_rollout(step), Rollout()
        self.use(self.actor_infer, *self.rewards.values())
        assert self.collector is not None
        rollout = self.collector.collect(step)
        self.metrics.add_metrics(rollout.metrics)
        self._count_empty_steps(rollout)
        if not rollout.groups:
            return None, rollout
        batch = scored_batch(rollout.groups, self.pad_token_id)
        self.dump_rollout(step, batch)
        return batch, rollout

    def train(self, step: int, batch: DataProto) -> None:
        """Update critic and, after its warm-up, policy."""
        nothing_left = not bool(batch["final_response_mask"].any())
        self.metrics.add_metric("mask/final_mask_sum_eq_0", float(nothing_left))
        if nothing_left:
            return
        rows = batch.select(None, ["sample_uuid"])
        rows.pop(["prompts", "responses", "prompt_mask"])
        if self.critic is not None:
            self.train_on(self.critic, rows)
        if step >= self.pipeline_config.critic_warmup:
            self.train_policy(rows)

    def validate(self, step: int) -> dict[str, float]:
        """Answer and score the validation prompts; the samples go to the run's `rollouts/val-*.jsonl`."""
        assert self.val_prompts is not None and self.actor_infer is not None
        self.use(self.actor_infer, *self.rewards.values())
        tally = Tally(self.tokenizer)
        with self.metrics.timer("time/val_step"):
            sampling = ValSampling.of(self.pipeline_config)
            groups = validate(
                self.val_prompts, sampling, self.actor_infer.answer_requests, self.score, tally
            )
        batch = scored_batch(groups, self.pad_token_id) if groups else None
        self.log_samples(step, batch, split="val", dropped=tally.dropped)
        return val_metrics(groups, tally)

    @classmethod
    def evaluate(
        cls,
        pipeline_config: RLVRConfig,
        checkpoint: str | Path | None = None,
        *,
        samples_to: str | Path | None = None,
    ) -> dict[str, float]:
        """The validation alone, with the weights of `checkpoint`; see `roll.pipeline.rlvr.evaluation`."""
        return evaluate(pipeline_config, checkpoint, samples_to=samples_to)

    # -- state ---------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        moments = {domain: moments.state_dict() for domain, moments in self.running.items()}
        rollouts = {} if self.collector is None else {"rollouts": self.collector.state_dict()}
        return super().states() | {"running_moments": moments} | rollouts

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        super().load_states(states)
        for domain, moments in self.running.items():
            moments.load_state_dict(states["running_moments"][domain])
        if self.collector is not None and "rollouts" in states:
            self.collector.load_state_dict(states["rollouts"])

    def close_sources(self) -> None:
        for cluster in self.rewards.values():
            close_rewards(cluster)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def should_validate(self, step: int) -> bool:
        return self.val_prompts is not None and self.should_eval(step)

    def _count_empty_steps(self, rollout: Rollout) -> None:
        self.num_empty_steps = (
            0 if rollout.groups or not rollout.dropped else self.num_empty_steps + 1
        )
        if self.num_empty_steps >= MAX_EMPTY_STEPS:
            counts = {name: count for name, count in rollout.metrics.items() if "/dropped/" in name}
            reasons = "\n".join(
                f"  {name.rpartition('/')[2]}: {count:.0f} samples"
                for name, count in counts.items()
            )
            last = rollout.dropped[-1]
            raise DataError(
                f"not one sample of the last {self.num_empty_steps} steps could be used:\n{reasons}\nThe last one was "
                f"dropped because of {last.reason}. Its prompt: {last.prompt!r}. Its response: {last.response!r}"
            )

    def _resources(self) -> dict[str, tuple[int, int]]:
        roles = {"actor_infer": self.actor_infer, "actor_train": self.actor_train}
        return {
            name: (sum(map(len, cluster.placement_groups)), cluster.dp_size)
            for name, cluster in roles.items()
            if cluster is not None
        }

    def _result(self) -> str:
        if self.val_prompts is None or self.pipeline_config.eval_steps <= 0:
            return ""
        result = self.final_validation()
        return (
            f"Validation: {result.get('val_correct/all/mean', 0.0):.3f} of the samples are right."
        )
