"""One step of learning from the policy's own samples: roll out, estimate, improve.

RLVR and agentic runs share it. A subclass says where groups come from, what a batch of them is
worth, and the names of its metrics:

    class MyPipeline(PolicyPipeline):
        def __init__(self, pipeline_config, *, progress=None):
            self.tokenizer = self.load_tokenizer(pipeline_config)
            super().__init__(pipeline_config, progress=progress)
            self.initialize(*self.clusters)
            self.source = ...                                  # collect(step) -> Rollout
            self.restore()

        def add_advantages(self, batch): ...                   # scores -> advantages, returns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from roll.algorithms.kl import get_kl_controller
from roll.configs.ppo_config import PPOConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, DataError, RollError
from roll.models.checkpoint import seed_everything
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.loss_io import first_update_report
from roll.pipeline.model_worker import balance_ranks
from roll.rollout.buffer import Buffer
from roll.rollout.collate import collate
from roll.rollout.types import Rollout
from roll.utils.metrics.metrics_manager import MetricsManager
from roll.utils.metrics.reduction import reduce_metrics
from roll.utils.rollout_log import RolloutLog, discard_rollouts_after
from roll.utils.run_folder import Status
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
MAX_EMPTY_STEPS = 3  # consecutive steps without a single sample before a run stops


class OffPolicyError(RollError, RuntimeError):
    """The policy that is trained did not make the samples, although nothing should have changed."""


class RolloutSource(Protocol):
    """Where groups come from: those of a step, and those of the validation, always the same. With a
    buffer, they are made while training goes on."""

    @property
    def buffer(self) -> Buffer | None: ...

    def collect(self, step: int) -> Rollout: ...

    def validate(self) -> Rollout: ...

    def close(self) -> None: ...


class PolicyPipeline(BasePipeline):
    """A policy that samples and is trained, with a reference and a critic where they are wanted.

    A subclass sets `tokenizer` before it calls this constructor, and initializes the clusters after
    it.

    Attributes that subclasses read or set, besides those of `BasePipeline`:
        actor_train, actor_infer, reference, critic   the roles; None where the run has no such one
        clusters          all that take part in `is_offload_states`
        source            of groups; None for a run that replays a dump
        rows_are_turns    every turn of an episode is a row of the batch
        val_source        of validation; None where there is none
        metrics           of the step so far
        kl_ctrl           the coefficient of the KL penalty
        num_empty_steps   steps in a row that brought no sample
        sample_logs       where samples are written: the run's folder, `rollout_dump_dir`
    """

    timers: ClassVar[Mapping[str, str]] = {}
    """Names of the times of a step's parts: rollout, reference, old_log_probs, validate, log."""
    loss_masks: ClassVar[Sequence[str]] = ("response_mask",)
    """The masks that losses are taken over."""
    not_trained_on: ClassVar[Sequence[str]] = ()
    """Columns that no loss reads; they stay behind."""
    val_roles: ClassVar[str] = "actor_infer"
    """How the names of roles begin that validation needs besides `actor_infer`."""

    tokenizer: Any

    def __init__(self, pipeline_config: PPOConfig, *, progress: bool | None = None) -> None:
        config = pipeline_config
        super().__init__(config, progress=progress)
        self.source: RolloutSource | None = None
        self.val_source: RolloutSource | None = None
        self.rows_are_turns = False
        self.metrics = MetricsManager()
        self.kl_ctrl = get_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self.num_empty_steps = 0
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
        """The policy's. Called before there is a run, so a config that cannot be trained with is an
        error here."""
        problems = config.missing_for_training()
        if problems:
            raise ConfigError("\n".join(map(str, problems)))
        return default_tokenizer_provider(config.actor_train.model_args)

    @property
    def pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)  # the provider makes sure of one

    # -- the algorithm -----------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.steps():
            with self.metrics.timer("time/step_total"):
                with self.generation_paused(step):
                    self.update_engine(step)
                    if self.val_source is not None and self.should_eval(step):
                        self.metrics.add_metrics(self.validate(step))
                with self._timer("rollout"):
                    batch, rollout = self.collect(step)
                if batch is not None:
                    with self._timer("reference"):
                        batch = self.add_values(self.add_reference(batch))
                    with self._timer("old_log_probs"):
                        batch = self.add_old_log_probs(batch)
                    batch = self.add_advantages(batch)
                    with self.metrics.timer("time/step_train"):
                        self.train(step, batch)
                with self._timer("log"):
                    self.log_samples(step, batch, rollout)
            self.add_batch_metrics(step, batch)
            self.end_step(step, self.metrics.pop())
        self.finish(self.result())

    def generation_paused(self, step: int) -> AbstractContextManager[None]:
        """Samples that are made while training goes on wait inside; afterwards they are made for
        `step` and later."""
        buffer = None if self.source is None else self.source.buffer
        return nullcontext() if buffer is None else buffer.paused(step)

    def update_engine(self, step: int) -> None:
        """Bring the policy's weights to the role that generates; metrics have its checksum."""
        if self.actor_infer is not None:
            self.use(self.actor_train, self.actor_infer)
            with self.metrics.timer("time/step_model_update"):
                self.metrics.add_metrics(self.model_update(step))

    def collect(self, step: int) -> tuple[DataProto | None, Rollout]:
        """The scored batch of this step, rolled out or replayed; None if there is not one sample.

        `rollout_mock` writes the batch of every step to DUMP_DIR/train/step-000012, before anything
        that the trained models compute, or trains on what it wrote: without data, environments or
        an engine.
        """
        mock = self.pipeline_config.rollout_mock
        rollout = Rollout()
        if self.pipeline_config.is_replay:
            batch = DataProto.load(_dump_of(mock.dump_dir, step))
        else:
            assert self.source is not None
            self.use(self.actor_infer, *self.reward_clusters())
            rollout = self.source.collect(step)
            self.metrics.add_metrics(rollout.metrics)
            nothing_asked = not rollout.dropped and not rollout.failures
            is_empty = not rollout.groups and not nothing_asked
            self.num_empty_steps = self.num_empty_steps + 1 if is_empty else 0
            if self.num_empty_steps >= MAX_EMPTY_STEPS:
                self.give_up(rollout)
            if not rollout.groups:
                return None, rollout
            batch = collate(rollout.trajectories, self.pad_token_id, per_turn=self.rows_are_turns)
            if self.pipeline_config.is_dump:
                folder = Path(mock.dump_dir) / "train" / f"step-{step:06d}"
                folder.parent.mkdir(parents=True, exist_ok=True)
                batch.save(folder)
        batch.meta_info = {"global_step": step, "loss_mask_keys": list(self.loss_masks)}
        return batch, rollout

    def add_reference(self, batch: DataProto) -> DataProto:
        """`ref_log_probs` (B, S-1) of the reference, or of the policy without its adapter."""
        if self.pipeline_config.enable_reference:
            if self.reference is not None:
                found = self.compute_rows(self.reference, "compute_log_probs", batch)
            else:
                found = self.compute_rows(
                    self.actor_train, "compute_log_probs", batch, disable_adapter=True
                )
            batch["ref_log_probs"] = found["log_probs"]
        return batch

    def add_values(self, batch: DataProto) -> DataProto:
        """`values` (B, S-1) of the critic, if there is one."""
        if self.critic is not None:
            batch["values"] = self.compute_rows(self.critic, "compute_values", batch)["values"]
        return batch

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        """`old_log_probs` (B, S-1), what the ratio of the loss is taken against, where they are
        needed; `entropy` if the policy computed them, and what follows from their gap to the
        log-probabilities of sampling."""
        config = self.pipeline_config
        if not config.enable_old_logprobs_recompute:
            return batch
        if config.ratio_is_to_sampler:
            batch["old_log_probs"] = batch["infer_logprobs"].clone()
            return batch
        found = self.compute_rows(self.actor_train, "compute_log_probs", batch)
        batch["old_log_probs"], batch["entropy"] = found["log_probs"], found["entropy"]
        batch, metrics = apply_train_infer_correction_to_batch(config, batch)
        self.metrics.add_metrics(metrics)
        return batch

    def train(self, step: int, batch: DataProto) -> None:
        """Update critic and, after its warm-up, policy."""
        if not bool(batch["final_response_mask"].any()):
            return
        assert batch.batch is not None
        names = [name for name in batch.batch.keys() if name not in self.not_trained_on]
        rows = batch.select(names, ["sample_uuid"])
        if self.critic is not None:
            self.train_on(self.critic, rows)
        if step >= self.pipeline_config.critic_warmup:
            self.train_on(self.actor_train, rows)

    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the policy on the validation data; samples go to `rollouts/val-*.jsonl`."""
        assert self.val_source is not None
        self.use(self.actor_infer, *self.reward_clusters())
        with self._timer("validate"):
            rollout = self.val_source.validate()
        self.log_samples(step, val_batch(rollout, self.pad_token_id), rollout, split="val")
        return rollout.metrics

    def final_validation(self) -> dict[str, float]:
        """Validate once more, with the weights that the run ends with."""
        with self.generation_paused(self.global_step):
            self.update_engine(self.global_step)
            result = self.validate(self.global_step)
        self.log(self.global_step, self.metrics.pop() | result)
        self.summary |= result
        return result

    # -- what a subclass says ----------------------------------------------------------------------

    def reward_clusters(self) -> Sequence[Cluster]:
        """Roles that score with a model, and so share the devices."""
        return ()

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Scores -> `final_response_mask`, `advantages` and `returns` (B, S-1)."""
        raise NotImplementedError

    def add_batch_metrics(self, step: int, batch: DataProto | None) -> None:
        """Metrics of what was trained on, and of the step's speed."""

    @classmethod
    def load_validation(cls, config: Any, tokenizer: Any) -> Any:
        """What validation needs besides models; an error if the config has none."""
        raise NotImplementedError

    @classmethod
    def make_val_source(
        cls, config: Any, clusters: Mapping[str, Cluster], tokenizer: Any, data: Any
    ) -> RolloutSource:
        """Given what `load_validation` returned, and `actor_infer` and the `val_roles`."""
        raise NotImplementedError

    def result(self) -> str:
        """What the end of the run says, in one sentence; perhaps of a last validation."""
        return ""

    def give_up(self, rollout: Rollout) -> None:
        """End the run: `num_empty_steps` steps in a row brought nothing."""
        raise DataError(f"not one sample of the last {self.num_empty_steps} steps could be used")

    # -- parts of the parts ------------------------------------------------------------------------

    def _timer(self, part: str) -> AbstractContextManager[None]:
        return self.metrics.timer(self.timers[part]) if part in self.timers else nullcontext()

    def log_samples(
        self, step: int, batch: DataProto | None, rollout: Rollout, split: str = "train"
    ) -> None:
        """Write samples of this step to the run's folder and to `rollout_dump_dir`."""
        if self.sample_logs:
            dropped = [item.sample(self.tokenizer) for item in rollout.dropped]
            for log in self.sample_logs:
                log.write(step, batch, split=split, dropped=dropped)

    def compute_rows(
        self, cluster: Cluster, method: str, batch: DataProto, **meta_info: Any
    ) -> DataProto:
        """What a role computes for every row; ranks without a row get a copy of one, whose result
        is dropped."""
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
        """Train a role; its metrics. Ranks without a row get one whose masks are empty.

        For the policy also reports how far it was from the one that sampled, and stops the run if
        that should be nothing and is too much.
        """
        self.use(cluster)
        if len(rows) < cluster.dp_size:
            spare = rows.select_idxs([0] * (cluster.dp_size - len(rows)))
            for key in rows.meta_info["loss_mask_keys"]:
                spare[key] = torch.zeros_like(spare[key])
            rows = DataProto.concat([rows, spare])
        found = cluster.train_step(balance_ranks(rows, cluster.dp_size)).meta_info["metrics"]
        self.metrics.add_metrics(found)
        if cluster is self.actor_train:
            self.metrics.add_metrics(first_update_report(found))
            check_first_update(found, self.pipeline_config)
        return found

    def use(self, *clusters: Cluster | None) -> None:
        """With `is_offload_states`, only these roles keep their models on the device."""
        if self.pipeline_config.is_offload_states:
            for cluster in self.clusters:
                (cluster.load_states if cluster in clusters else cluster.offload_states)()

    # -- state -------------------------------------------------------------------------------------

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
        try:
            if self.run_log is not None:  # not closed yet
                if self.source is not None:
                    self.source.close()
                if self.val_source is not None and self.val_source is not self.source:
                    self.val_source.close()
        finally:  # a reward worker that died must not keep the devices of the others
            super().close(status)

    # -- `roll eval` -------------------------------------------------------------------------------

    @classmethod
    def evaluate(
        cls,
        pipeline_config: Any,
        checkpoint: str | Path | None = None,
        *,
        samples_to: str | Path | None = None,
    ) -> dict[str, float]:
        """The metrics of one validation, without training anything.

        Args:
            checkpoint: a run (its newest checkpoint), a checkpoint of a run, or any model folder or
                Hugging Face name; by default the model that the config starts from.
            samples_to: a folder whose `rollouts/val-000000.jsonl` gets every sample.
        """
        model_args = pipeline_config.actor_infer.model_args
        if checkpoint is not None:
            model_args = model_args.model_copy(update={"model_name_or_path": str(checkpoint)})
        infer = pipeline_config.actor_infer.model_copy(update={"model_args": model_args})
        # Without `eval_steps`, or in a replay of a dump, a config has no roles for validation.
        config = pipeline_config.model_copy(
            update={"actor_infer": infer, "eval_steps": 1, "rollout_mock": None}
        )
        tokenizer = default_tokenizer_provider(model_args)
        data = cls.load_validation(config, tokenizer)
        seed_everything(config.seed)
        manager = ResourceManager(
            config.num_gpus_per_node, config.num_nodes, backend=config.execution_backend
        )
        clusters: dict[str, Cluster] = {}
        source: RolloutSource | None = None
        try:
            for name, role in config.active_roles().items():
                if name == "actor_infer" or name.startswith(cls.val_roles):
                    clusters[name] = Cluster(name, role.worker_cls, manager, role)
            for cluster in clusters.values():
                cluster.initialize(config)
            source = cls.make_val_source(config, clusters, tokenizer, data)
            rollout = source.validate()
        finally:
            if source is not None:
                source.close()
            for cluster in clusters.values():
                cluster.shutdown()
        if samples_to is not None:
            batch = val_batch(rollout, tokenizer.pad_token_id)
            dropped = [item.sample(tokenizer) for item in rollout.dropped]
            RolloutLog(samples_to, tokenizer, None).write(0, batch, split="val", dropped=dropped)
        return rollout.metrics


def val_batch(rollout: Rollout, pad_token_id: int) -> DataProto | None:
    """The rows of a validation, for the log: turns where each has a prompt of its own."""
    if not rollout.groups:
        return None
    return collate(rollout.trajectories, pad_token_id, per_turn=None)


def _dump_of(dump_dir: str | Path, step: int) -> Path:
    folder = Path(dump_dir) / "train" / f"step-{step:06d}"
    if not folder.is_dir():
        there = sorted(path.name for path in folder.parent.glob("step-*"))
        found = f"there are {len(there)}, {there[0]} to {there[-1]}" if there else "there are none"
        raise DataError(
            f"rollout_mock: {folder} has no dump for step {step} ({found}). Set max_steps to the "
            "steps that were dumped, or make the dump with rollout_mock.mode=dump"
        )
    return folder


def check_first_update(metrics: Mapping[str, Any], config: PPOConfig) -> None:
    """Stop if the ratio at the first update is too far from 1 (see `PPOConfig.ratio_tolerance`)."""
    reduced = reduce_metrics(
        {key: value for key, value in metrics.items() if key.startswith("actor/first_ratio")}
    )
    error, tolerance = reduced.get("actor/first_ratio_error@sum"), config.ratio_tolerance
    if error is None or tolerance is None or error <= tolerance:
        return
    sampling = config.actor_infer.generating_args
    assert sampling is not None
    causes = []
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        causes.append(
            f"tokens are cut off before sampling (top_p={sampling.top_p:g}, "
            f"top_k={sampling.top_k}, min_p={sampling.min_p:g}): set actor_infer.generating_args "
            "top_p=1, top_k=0, min_p=0"
        )
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        causes.append(f"repetition_penalty={penalty:g} changes what is sampled: set it to 1")
    if not config.log_probs_at_sampling_temperature and sampling.temperature != 1:
        causes.append(
            f"sampling at temperature {sampling.temperature:g} with "
            "log_probs_at_sampling_temperature=false"
        )
    if sampling.temperature == 0 or not sampling.do_sample:
        causes.append(
            "tokens are not sampled but the most likely ones: set temperature=1 and do_sample=true"
        )
    dtypes = {role.model_args.dtype for role in (config.actor_train, config.actor_infer)}
    if dtypes != {"fp32"}:
        found = " and ".join(sorted(dtypes))
        causes.append(f"precision {found}: engine and trainer round differently")
    frequency = config.actor_infer.model_update_frequency
    if frequency > 1:
        causes.append(f"stale weights: actor_infer.model_update_frequency={frequency}")
    causes.append(
        "dropout in the model, or attention kernels that differ between engine and trainer"
    )
    listed = "\n".join(f"  - {cause}" for cause in causes)
    raise OffPolicyError(
        "the first update of this step should be on-policy, but the probabilities of the sampled "
        f"tokens in training and in sampling differ: the mean of |ratio - 1| is {error:.2g}, more "
        f"than {tolerance:g} (first_ratio_tolerance). Training would push on a policy that did not "
        f"make these samples. Likely causes:\n{listed}\nIf the gap is meant, turn on "
        "train_infer_correction, or set first_ratio_tolerance=0."
    )
