"""What the pipelines that learn from the policy's own samples share: its roles, and a step's work that is theirs.

A subclass says where samples come from and what they are worth:

    class MyPipeline(PolicyPipeline):
        def run(self):
            for step in self.steps():
                with self.generation_paused(step):
                    self.update_engine(step)
                batch = ...                                     # samples; meta_info["loss_mask_keys"] names their masks
                batch = self.add_old_log_probs(self.add_values(self.add_reference(batch)))
                batch = ...                                     # rewards and advantages
                self.train_policy(batch)
                self.end_step(step, self.metrics.pop())
            self.finish()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from roll.configs.ppo_config import PPOConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.exceptions import ConfigError
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.loss_io import first_update_report
from roll.pipeline.mini_batches import balance_ranks
from roll.pipeline.on_policy import check_first_update
from roll.pipeline.replay import dump_rollout, load_rollout
from roll.utils.kl_controller import get_kl_controller
from roll.utils.metrics.metrics_manager import MetricsManager
from roll.utils.rollout_log import DroppedSample, RolloutLog, discard_rollouts_after
from roll.utils.run_folder import Status
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
MAX_EMPTY_STEPS = 3  # consecutive steps without a single sample before a run stops


class Background(Protocol):
    """Samples that are made while training goes on."""

    def paused(self, step: int) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...


class PolicyPipeline(BasePipeline):
    """A policy that samples and is trained, with a reference and a critic where the config wants them.

    A subclass sets `tokenizer` before it calls this constructor, and initializes the clusters after it.

    Attributes that subclasses read, besides those of `BasePipeline`:
        actor_train, actor_infer, reference, critic   the roles; None where the run has no such one
        clusters          all that take part in `is_offload_states`
        metrics           of the step so far
        kl_ctrl           the coefficient of the KL penalty
        num_empty_steps   steps in a row that brought no sample
        sample_logs       where samples are written: the run's folder, `rollout_dump_dir`
        background        set it where samples are made while training goes on
    """

    tokenizer: Any

    def __init__(self, pipeline_config: PPOConfig, *, progress: bool | None = None) -> None:
        config = pipeline_config
        super().__init__(config, progress=progress)
        self.metrics = MetricsManager()
        self.kl_ctrl = get_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self.num_empty_steps = 0
        self.background: Background | None = None
        self.sample_logs: list[RolloutLog] = []
        if config.log_samples_per_step != 0:
            self.sample_logs.append(
                RolloutLog(self.run_dir, self.tokenizer, config.log_samples_per_step)
            )
        if config.rollout_dump_dir is not None:
            self.sample_logs.append(RolloutLog(config.rollout_dump_dir, self.tokenizer, None))
        roles = self.pipeline_config.active_roles()
        self.actor_train = self.make_cluster("actor_train")
        self.reference = self.make_cluster("reference") if "reference" in roles else None
        self.critic = self.make_cluster("critic") if "critic" in roles else None
        self.actor_infer = self.make_cluster("actor_infer") if "actor_infer" in roles else None
        models = (self.actor_train, self.reference, self.critic, self.actor_infer)
        self.clusters = [cluster for cluster in models if cluster is not None]
        if self.actor_infer is not None:
            self.set_model_update_pair(
                self.actor_train, self.actor_infer, config.actor_infer.model_update_frequency
            )
        self.set_checkpoint_clusters(
            *(cluster for cluster in (self.actor_train, self.critic) if cluster is not None)
        )

    @staticmethod
    def load_tokenizer(config: PPOConfig) -> Any:
        """The policy's. Called before there is a run, so a config that cannot be trained with is an error here."""
        problems = config.missing_for_training()
        if problems:
            raise ConfigError("\n".join(map(str, problems)))
        return default_tokenizer_provider(config.actor_train.model_args)

    @property
    def pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)  # the provider makes sure of one

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def generation_paused(self, step: int) -> AbstractContextManager[None]:
        """Samples that are made while training goes on wait inside; afterwards they are made for `step` and later."""
        return nullcontext() if self.background is None else self.background.paused(step)

    def update_engine(self, step: int) -> None:
        """Bring the policy's weights to the role that generates; their checksum is in the metrics."""
        if self.actor_infer is not None:
            self.use(self.actor_train, self.actor_infer)
            with self.metrics.timer("time/step_model_update"):
                self.metrics.add_metrics(self.model_update(step))

    def load_rollout(self, step: int) -> DataProto:
        """The batch of this step from a dump; for runs that replay one (`is_replay`)."""
        assert self.pipeline_config.rollout_mock is not None
        return load_rollout(self.pipeline_config.rollout_mock.dump_dir, step)

    def dump_rollout(self, step: int, batch: DataProto) -> None:
        """Write the batch of this step for a replay, if `rollout_mock` asks for it."""
        if self.pipeline_config.is_dump:
            assert self.pipeline_config.rollout_mock is not None
            dump_rollout(self.pipeline_config.rollout_mock.dump_dir, step, batch)

    def log_samples(
        self,
        step: int,
        batch: DataProto | None,
        split: str = "train",
        dropped: Sequence[DroppedSample] = (),
    ) -> None:
        """Write samples of this step to the run's folder and to `rollout_dump_dir`."""
        for log in self.sample_logs:
            log.write(step, batch, split=split, dropped=dropped)

    def add_reference(self, batch: DataProto) -> DataProto:
        """`ref_log_probs` (B, S-1) of the reference, or of the policy without its adapter."""
        if self.pipeline_config.enable_reference:
            if self.reference is not None:
                scored = self.score_rows(self.reference, "compute_log_probs", batch)
            else:
                scored = self.score_rows(
                    self.actor_train, "compute_log_probs", batch, disable_adapter=True
                )
            batch["ref_log_probs"] = scored["log_probs"]
        return batch

    def add_values(self, batch: DataProto) -> DataProto:
        """`values` (B, S-1) of the critic, if there is one."""
        if self.critic is not None:
            batch["values"] = self.score_rows(self.critic, "compute_values", batch)["values"]
        return batch

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        """`old_log_probs` (B, S-1), what the ratio of the loss is taken against, where they are needed; `entropy` if
        the policy computed them, and what follows from their gap to the log-probabilities of sampling."""
        config = self.pipeline_config
        if not config.enable_old_logprobs_recompute:
            return batch
        if config.ratio_is_to_sampler:
            batch["old_log_probs"] = batch["infer_logprobs"].clone()
            return batch
        scored = self.score_rows(self.actor_train, "compute_log_probs", batch)
        batch["old_log_probs"], batch["entropy"] = scored["log_probs"], scored["entropy"]
        batch, found = apply_train_infer_correction_to_batch(config, batch)
        self.metrics.add_metrics(found)
        return batch

    def score_rows(
        self, cluster: Cluster, method: str, batch: DataProto, **meta_info: Any
    ) -> DataProto:
        """What a role computes for every row; ranks without a row get a copy of one, whose result is dropped."""
        self.use(cluster)
        rows = batch.select(MODEL_COLUMNS, [])
        rows.meta_info = {**batch.meta_info, **meta_info}
        padded, num_extra = pad_dataproto_to_divisor(
            rows, cluster.dp_size if len(rows) < cluster.dp_size else 1
        )
        result = cluster.execute_all_sync(method, padded)
        self.metrics.add_metrics(result.meta_info.pop("metrics", {}))
        return unpad_dataproto(result, num_extra)

    def train_on(self, cluster: Cluster, rows: DataProto) -> dict[str, Any]:
        """Train a role; its metrics. Ranks without a row get one whose masks are empty."""
        self.use(cluster)
        if len(rows) < cluster.dp_size:
            spare = rows.select_idxs([0] * (cluster.dp_size - len(rows)))
            for key in rows.meta_info["loss_mask_keys"]:
                spare[key] = torch.zeros_like(spare[key])
            rows = DataProto.concat([rows, spare])
        found = cluster.train_step(balance_ranks(rows, cluster.dp_size)).meta_info["metrics"]
        self.metrics.add_metrics(found)
        return found

    def train_policy(self, rows: DataProto) -> dict[str, Any]:
        """`train_on` for the policy; also reports how far it was from the one that sampled, and stops the run if that
        should be nothing and is too much."""
        found = self.train_on(self.actor_train, rows)
        self.metrics.add_metrics(first_update_report(found))
        check_first_update(found, self.pipeline_config)
        return found

    def use(self, *clusters: Cluster | None) -> None:
        """With `is_offload_states`, only these roles keep their models on the device."""
        if self.pipeline_config.is_offload_states:
            for cluster in self.clusters:
                (cluster.load_states if cluster in clusters else cluster.offload_states)()

    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the policy on the validation data. Subclasses that have such data say how."""
        raise NotImplementedError

    def final_validation(self) -> dict[str, float]:
        """Validate once more, with the weights that the run ends with."""
        with self.generation_paused(self.global_step):
            self.update_engine(self.global_step)
            result = self.validate(self.global_step)
        self.log(self.global_step, self.metrics.pop() | result)
        self.summary |= result
        return result

    # -- state ---------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        return {
            "kl_controller": dict(self.kl_ctrl.state_dict()),
            "steps": {"num_empty": self.num_empty_steps},
        }

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.kl_ctrl.load_state_dict(states["kl_controller"])
        self.num_empty_steps = states["steps"]["num_empty"]
        discard_rollouts_after(self.run_dir, self.global_step - 1)

    def close(self, status: Status = "stopped") -> None:
        if self.run_log is not None:  # not closed yet
            if self.background is not None:
                self.background.close()
            self.close_sources()
        super().close(status)

    def close_sources(self) -> None:
        """End what the subclass makes samples with, besides its clusters."""
