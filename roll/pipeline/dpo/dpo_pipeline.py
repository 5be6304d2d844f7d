"""Direct preference optimisation: pairs of a better and a worse answer in, a better model out.

The reference, which the policy is compared with, is one of three things and gives the same numbers:

    a cluster of its own, asked at every step               (reference_log_probs: live)
    its log-probs of all pairs, computed before training and stored in the run's folder; the model
    is then unloaded                                        (reference_log_probs: precompute)
    the policy without its adapter, if the policy is one    (actor_train.model_args.lora_target)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll.configs.model_files import check_model_files
from roll.datasets.collator import DataCollatorWithPaddingForDPO
from roll.datasets.preference import PreferenceDataset
from roll.distributed.executor.backend import free_cached_memory
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.data import load_data, make_sampler
from roll.pipeline.dpo.actor_worker import REFERENCE_SUMS, PreferenceSettings
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.pair_log_probs import (
    PairSamples,
    compute_log_probs,
    compute_pair_log_probs,
    load_log_probs,
    log_probs_fingerprint,
    save_log_probs,
)
from roll.pipeline.model_worker import balance_ranks
from roll.utils.rollout_log import RolloutLog, discard_rollouts_after

TRAIN, VALIDATION = "train", "validation"
# Among stored log-probs: those of every token of the pairs that the report shows.
SAMPLES = "validation_samples"
LOSS, ACCURACY = "val/actor/loss", "val/actor/acc"


class DPOPipeline(BasePipeline):
    """Trains `actor_train` on preference pairs against `reference`."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "loss": "actor/loss",
        "acc": "actor/acc",
        "margin": "actor/margin",
        "tok/s": "system/tps",
        "val acc": ACCURACY,
    }

    def __init__(self, pipeline_config: DPOConfig, *, progress: bool | None = None) -> None:
        # Everything about files and templates that can be wrong is noticed first.
        for role in pipeline_config.active_roles().values():
            check_model_files(role.model_args)
        tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        train_data = load_data(pipeline_config, "actor_train", tokenizer)
        assert train_data is not None  # missing_for_training
        self.datasets: dict[str, PreferenceDataset] = {TRAIN: train_data}
        val_data = load_data(pipeline_config, "validation", tokenizer)
        if val_data is not None:
            self.datasets[VALIDATION] = val_data
        self.collator = DataCollatorWithPaddingForDPO(tokenizer)
        self.sampler = make_sampler(pipeline_config, train_data)
        config = _with_length_of_run(pipeline_config, self.sampler.batches_per_epoch)
        super().__init__(config, progress=progress)
        self.summary["data"] = {
            name: dataset.summary.to_dict() for name, dataset in self.datasets.items()
        }
        self.settings = PreferenceSettings.of(config, {})
        self.validations = ValidationHistory(config.early_stop_patience)
        self.samples: PairSamples | None = None
        if val_data is not None:
            log = RolloutLog(self.run_dir, tokenizer, None)
            self.samples = PairSamples(val_data, self.collator, log)
        # Sums for all rows of a data set, by its name: known once computed, because the reference
        # does not change.
        self.reference_sums: dict[str, Tensor] = {}
        self.reference_tokens_RT: Tensor | None = None
        self.reference: Cluster | None = None
        self._make_clusters(config)
        self.restore()
        discard_rollouts_after(self.run_dir, self.global_step)

    def _make_clusters(self, config: DPOConfig) -> None:
        self.actor_train = self.make_cluster("actor_train")
        # With an adapter the policy itself is the reference, once it is there.
        is_own = "reference" not in config.active_roles()
        if not config.reference_free and not is_own:
            self.reference = self.make_cluster("reference")
        if config.reference_log_probs == "precompute":
            self._precompute(config, is_own)
        if self.reference is not None:
            self.initialize(self.reference, self.actor_train)
        elif not self.actor_train.initialized:
            self.initialize(self.actor_train)
        if is_own and not config.reference_free and not self.reference_sums:
            self.reference = self.actor_train
        self.set_checkpoint_clusters(self.actor_train)

    def _precompute(self, config: DPOConfig, is_own: bool) -> None:
        """Fill `reference_sums` for all pairs, from the file of an earlier start if it fits."""
        role = config.actor_train if is_own else config.reference
        fingerprint = log_probs_fingerprint(self.datasets, role, config.seed)
        folders = [self.run_dir]
        if self.checkpoint is not None:
            folders.append(self.checkpoint.parent.parent)
        stored = load_log_probs(folders, fingerprint)
        if stored is None:
            cluster = self.actor_train if self.reference is None else self.reference
            self.initialize(cluster)
            num_pairs = sum(map(len, self.datasets.values()))
            self.say(f"Scoring {num_pairs:,} pairs under the reference, once.")
            stored = {}
            for name in self.datasets:
                stored[name], tokens_RT = self._log_probs(cluster, name, is_own, label=name)
                if tokens_RT is not None:
                    stored[SAMPLES] = tokens_RT
            save_log_probs(self.run_dir, stored, fingerprint)
        self.reference_tokens_RT = stored.pop(SAMPLES, None)
        self.reference_sums = stored
        if self.reference is not None:
            self.release(self.reference)
            self.reference = None
            free_cached_memory()

    def _log_probs(
        self, cluster: Cluster, name: str, without_adapter: bool, label: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        samples = self.samples if name == VALIDATION else None
        return compute_pair_log_probs(
            cluster,
            self.datasets[name],
            self.collator,
            without_adapter=without_adapter,
            label=label,
            samples=samples,
        )

    # -- training ----------------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.steps():
            metrics = self.validate_if_due(step)
            if self.is_stopping:
                self.log(step, metrics)
                self.save_checkpoint()
                break
            started = time.monotonic()
            pairs = self.sampler.next_batch()
            batch = self.make_batch(step, pairs)
            metrics |= self.add_reference(batch, pairs)
            metrics |= self.train(batch)
            metrics |= self.statistics(pairs, seconds=time.monotonic() - started)
            self.end_step(step, metrics)
        self.finish_with_validation()

    def make_batch(self, step: int, pairs: list[int]) -> DataProto:
        """These pairs of the training data as one batch."""
        columns = self.collator([self.datasets[TRAIN][i] for i in pairs])
        meta_info = {"global_step": step, "completion_only": True, "loss_mask_keys": []}
        return DataProto.from_single_dict(columns, meta_info=meta_info)

    def add_reference(self, batch: DataProto, pairs: list[int]) -> dict[str, Any]:
        """Give the batch the reference's log-probs: stored sums, or those of every token."""
        started = time.monotonic()
        metrics: dict[str, Any] = {}
        if TRAIN in self.reference_sums:
            batch[REFERENCE_SUMS] = self.reference_sums[TRAIN].view(-1, 2)[pairs].flatten()
        elif self.reference is not None:
            is_own = self.reference is self.actor_train
            offload = self.pipeline_config.is_offload_states and not is_own
            if offload:
                self.actor_train.offload_states()
                self.reference.load_states()
            batch.meta_info["disable_adapter"] = is_own
            computed = compute_log_probs(self.reference, batch)
            batch["reference_log_probs"] = computed["log_probs"]
            if offload:
                self.reference.offload_states()
                self.actor_train.load_states()
            metrics = computed.meta_info["metrics"]
        return {**metrics, "time/cal_ref_log_probs": time.monotonic() - started}

    def train(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on all pairs of the batch."""
        started = time.monotonic()
        if self.actor_train.dp_size > 1:
            batch = balance_ranks(batch, self.actor_train.dp_size, unit=2)
        metrics = self.actor_train.train_step(batch).meta_info["metrics"]
        return {**metrics, "time/actor_train": time.monotonic() - started}

    def statistics(self, pairs: list[int], seconds: float) -> dict[str, float]:
        """Lengths of the rows of a step, how fast it was, and how far in the data the run is."""
        dataset = self.datasets[TRAIN]
        lengths = dataset.lengths.reshape(-1, 2)[pairs]
        prompts = dataset.prompt_lens.reshape(-1, 2)[pairs]
        answers = lengths - prompts
        return {
            "token/prompt_length/mean": float(prompts.mean()),
            "token/chosen_length/mean": float(answers[:, 0].mean()),
            "token/rejected_length/mean": float(answers[:, 1].mean()),
            "token/total_length/max": float(lengths.max()),
            "system/tps": float(lengths.sum()) / seconds,
            "system/samples": float(len(pairs)),
            "system/epoch": self.sampler.progress,
            "time/step_total": seconds,
        }

    # -- validation --------------------------------------------------------------------------------

    def validate_if_due(self, step: int) -> dict[str, Any]:
        """Validate before this step if that is due; stop a run that gets no better."""
        if VALIDATION not in self.datasets or not self.should_eval(step):
            return {}
        metrics = self.validate(step)
        history = self.validations
        if history.is_best and history.patience is not None and step > 0:
            self.save_checkpoint(keep=True)
        if history.patience is not None and history.bad_in_a_row >= history.patience:
            best = history.best[LOSS]
            self.stop(f"{history.bad_in_a_row} validations without a loss below {best:.4f}")
        return metrics

    def validate(self, step: int) -> dict[str, Any]:
        """Means over all pairs of the validation data, each pair counted once."""
        started = time.monotonic()
        policy_R, tokens_RT = self._log_probs(self.actor_train, VALIDATION, False)
        if not self.settings.reference_free and VALIDATION not in self.reference_sums:
            assert self.reference is not None
            is_own = self.reference is self.actor_train
            reference_R, self.reference_tokens_RT = self._log_probs(
                self.reference, VALIDATION, is_own
            )
            self.reference_sums[VALIDATION] = reference_R
        dataset = self.datasets[VALIDATION]
        lens_R = torch.from_numpy(dataset.lengths - dataset.prompt_lens)
        reference_R = self.reference_sums.get(VALIDATION)
        result, per_pair = self.settings.loss(policy_R, reference_R, lens_R)
        values = {LOSS: float(result.loss)}
        for name, values_P in per_pair.items():
            values[f"val/actor/{name}"] = float(values_P.mean())
        self.validations.add(step, values)
        if self.samples is not None and tokens_RT is not None:
            self.samples.write(step, result, tokens_RT, self.reference_tokens_RT)
        return {**values, "time/val_step": time.monotonic() - started}

    def finish_with_validation(self) -> None:
        """Validate the final weights, unless that was just done or Ctrl-C asks to leave."""
        history, keeps_best = self.validations, self.validations.patience is not None
        evaluates = VALIDATION in self.datasets and self.pipeline_config.eval_steps > 0
        if evaluates and not self.is_interrupted:
            if not history.last or history.last["step"] != self.global_step:
                self.log(self.global_step, self.validate(self.global_step))
                if history.is_best and keeps_best:
                    self.save_checkpoint(keep=True)
            self.summary["validation"] = history.state_dict()
        model: Path | None = None
        if keeps_best and history.best and history.best["step"] > 0 and not self.is_interrupted:
            model = self.model_folder(int(history.best["step"]))
        self.finish(history.describe(len(self.datasets.get(VALIDATION, ()))), model=model)

    # -- state -------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        return {"sampler": self.sampler.state_dict(), "validations": self.validations.state_dict()}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.sampler.load_state_dict(states["sampler"])
        self.validations.load_state_dict(states["validations"])
        if self.validations.patience is not None and self.validations.best:
            self.kept_steps = {int(self.validations.best["step"])}


class ValidationHistory:
    """The first, the last and the best validation, and how many in a row were no better.

    `patience`: so many in a row without a lower loss end the run; None never does.
    """

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.bad_in_a_row = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last = {"step": step, **metrics}
        self.first = self.first or self.last
        # A loss that is not a number is no improvement.
        if not self.best or metrics[LOSS] < self.best[LOSS] or math.isnan(self.best[LOSS]):
            self.best, self.bad_in_a_row = self.last, 0
        else:
            self.bad_in_a_row += 1

    @property
    def is_best(self) -> bool:
        return bool(self.last) and self.best is self.last

    def describe(self, num_pairs: int) -> str:
        """What validation says, in one sentence; empty where there was none."""
        if not self.last:
            return ""
        first, last, best = self.first, self.last, self.best
        text = (
            f"Validation on {num_pairs:,} pairs: "
            f"accuracy {first[ACCURACY]:.3f} -> {last[ACCURACY]:.3f}, "
            f"loss {first[LOSS]:.4f} -> {last[LOSS]:.4f}"
        )
        if self.patience is not None and not self.is_best:
            text += (
                f"; best at step {best['step']:.0f}: {best[ACCURACY]:.3f}, loss {best[LOSS]:.4f}"
            )
        return text + "."

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("first", "last", "best", "bad_in_a_row")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.last, self.best = (dict(state[name]) for name in ("first", "last", "best"))
        self.bad_in_a_row = state["bad_in_a_row"]


def _with_length_of_run(config: DPOConfig, steps_per_epoch: int) -> DPOConfig:
    """The config with the number of steps that data and settings come to."""
    num_steps = config.num_steps(steps_per_epoch)
    config = config.with_max_steps(num_steps)
    training_args = config.actor_train.training_args
    if "num_train_epochs" not in training_args.model_fields_set:
        epochs = float(math.ceil(num_steps / steps_per_epoch))
        training_args = training_args.model_copy(update={"num_train_epochs": epochs})
        role = config.actor_train.model_copy(update={"training_args": training_args})
        config = config.model_copy(update={"actor_train": role})
    return config
