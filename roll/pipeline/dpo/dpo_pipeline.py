"""Direct preference optimisation: pairs of a better and a worse answer in, a better model out.

The reference, which the policy is compared with, is one of three things and gives the same numbers in each case:

    a cluster of its own, asked at every step               (reference_log_probs: live)
    its answers about all pairs, made before training and stored in the run's folder; the model is then unloaded
                                                            (reference_log_probs: precompute)
    the policy without its adapter, if the policy is one    (actor_train.model_args.lora_target)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll.algorithms.preference_loss import pair_accuracy, preference_loss, split_pairs
from roll.configs.data_args import DataArguments
from roll.configs.model_files import check_model_files
from roll.datasets.collator import DataCollatorWithPaddingForDPO
from roll.datasets.files import load_table
from roll.datasets.preference import PreferenceDataset
from roll.distributed.executor.backend import free_cached_memory
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.dpo.actor_worker import REFERENCE_SUMS, PreferenceSettings
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.pair_data import encode_table, make_sampler
from roll.pipeline.dpo.reference_scores import (
    compute_log_probs,
    load_scores,
    save_scores,
    score_pairs,
    scores_fingerprint,
)
from roll.pipeline.dpo.samples import PairSamples
from roll.pipeline.mini_batches import balance_ranks
from roll.utils.logging import get_logger
from roll.utils.rollout_log import RolloutLog, discard_rollouts_after

logger = get_logger(__name__)

TRAIN, VALIDATION = "train", "validation"
SAMPLES = "validation_samples"  # among stored scores: log-probs of every token of the pairs that the report shows
LOSS, ACCURACY = "val/actor/loss", "val/actor/acc"


@dataclass(frozen=True)
class PreferenceData:
    """What is trained and validated on, with what turns pairs into batches."""

    datasets: dict[str, PreferenceDataset]
    collator: DataCollatorWithPaddingForDPO

    @classmethod
    def load(cls, config: DPOConfig) -> PreferenceData:
        """Read and encode the pairs. Everything about files and templates that can be wrong is noticed here."""
        for role in config.active_roles().values():
            check_model_files(role.model_args)
        tokenizer = default_tokenizer_provider(config.actor_train.model_args)

        def encode(data_args: DataArguments | None) -> PreferenceDataset:
            assert data_args is not None
            return encode_table(
                config, data_args, load_table(data_args.files), tokenizer, config.sequence_length
            )

        datasets = {TRAIN: encode(config.actor_train.data_args)}
        if config.has_validation:
            datasets[VALIDATION] = encode(config.validation.data_args)
        return cls(datasets, DataCollatorWithPaddingForDPO(tokenizer))

    def batch(self, pairs: list[int], **meta_info: Any) -> DataProto:
        """These pairs of the training data as one batch."""
        dataset = self.datasets[TRAIN]
        return DataProto.from_single_dict(
            self.collator([dataset[i] for i in pairs]), meta_info=meta_info
        )


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
        self.data = PreferenceData.load(pipeline_config)
        self.sampler = make_sampler(pipeline_config, self.data.datasets[TRAIN])
        config = _with_length_of_run(pipeline_config, self.sampler.batches_per_epoch)
        super().__init__(config, progress=progress)
        for name, dataset in self.data.datasets.items():
            logger.info("%s data: %s", name, dataset.summary)
        self.summary["data"] = {
            name: dataset.summary.to_dict() for name, dataset in self.data.datasets.items()
        }
        self.settings = PreferenceSettings.of(config, {})
        self.validations = ValidationHistory(config.early_stop_patience)
        # Sums for all rows of a data set, by its name: known once computed, because the reference does not change.
        self.reference_sums: dict[str, Tensor] = {}
        self.reference: Cluster | None = None
        self.samples: PairSamples | None = None
        self.reference_tokens_RT: Tensor | None = None
        if VALIDATION in self.data.datasets:
            log = RolloutLog(self.run_dir, self.data.collator.tokenizer, None)
            self.samples = PairSamples(self.data.datasets[VALIDATION], self.data.collator, log)
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
        """Fill `reference_sums` for all pairs, from the file of an earlier start if it fits; then free the model."""
        role = config.actor_train if is_own else config.reference
        fingerprint = scores_fingerprint(self.data.datasets, role, config.seed)
        folders = (
            [self.run_dir]
            if self.checkpoint is None
            else [self.run_dir, self.checkpoint.parent.parent]
        )
        stored = load_scores(folders, fingerprint)
        if stored is None:
            cluster = self.actor_train if self.reference is None else self.reference
            self.initialize(cluster)
            self.say(
                f"Scoring {sum(map(len, self.data.datasets.values())):,} pairs under the reference, once."
            )
            stored = {}
            for name in self.data.datasets:
                stored[name], tokens_RT = self._score(cluster, name, is_own, label=name)
                if tokens_RT is not None:
                    stored[SAMPLES] = tokens_RT
            save_scores(self.run_dir, stored, fingerprint)
        self.reference_tokens_RT = stored.pop(SAMPLES, None)
        self.reference_sums = stored
        if self.reference is not None:
            self.release(self.reference)
            self.reference = None
            free_cached_memory()

    def _score(
        self, cluster: Cluster, name: str, without_adapter: bool, *, label: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of all answers of a data set, (2N,); for validation also those of every token of its samples."""
        tokens_RT = keep = None
        if name == VALIDATION and self.samples is not None:
            tokens_RT = self.samples.empty()
            keep = partial(self.samples.keep, tokens_RT)
        meta_info = {"completion_only": True, "disable_adapter": without_adapter}
        sums_R = score_pairs(
            cluster, self.data.datasets[name], self.data.collator, meta_info, label=label, keep=keep
        )
        return sums_R, tokens_RT

    # -- training ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.steps():
            metrics = self.validate_if_due(step)
            if self.is_stopping:
                self.log(step, metrics)
                self.save_checkpoint()
                break
            started = time.monotonic()
            pairs = self.sampler.next_batch()
            batch = self.data.batch(
                pairs, global_step=step, completion_only=True, loss_mask_keys=[]
            )
            metrics |= self.add_reference(batch, pairs)
            metrics |= self.train(batch)
            metrics |= self.statistics(pairs, seconds=time.monotonic() - started)
            self.end_step(step, metrics)
        self.finish_with_validation()

    def add_reference(self, batch: DataProto, pairs: list[int]) -> dict[str, Any]:
        """Give the batch the reference's log-probs: stored sums, or those of every token of the answers."""
        started = time.monotonic()
        metrics: dict[str, Any] = {}
        if TRAIN in self.reference_sums:
            batch[REFERENCE_SUMS] = self.reference_sums[TRAIN].view(-1, 2)[pairs].flatten()
        elif self.reference is not None:
            offload = (
                self.pipeline_config.is_offload_states and self.reference is not self.actor_train
            )
            if offload:
                self.actor_train.offload_states()
                self.reference.load_states()
            batch.meta_info["disable_adapter"] = self.reference is self.actor_train
            scores = compute_log_probs(self.reference, batch)
            batch["reference_log_probs"] = scores["log_probs"]
            if offload:
                self.reference.offload_states()
                self.actor_train.load_states()
            metrics = scores.meta_info["metrics"]
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
        dataset = self.data.datasets[TRAIN]
        lengths, prompts = (
            dataset.lengths.reshape(-1, 2)[pairs],
            dataset.prompt_lens.reshape(-1, 2)[pairs],
        )
        answers = lengths - prompts
        return {
            "token/prompt_length/mean": float(prompts.mean()),
            "token/chosen_length/mean": float(answers[:, 0].mean()),
            "token/rejected_length/mean": float(answers[:, 1].mean()),
            "token/total_length/max": float(lengths.max()),
            "system/tps": float(lengths.sum()) / seconds,
            "system/samples": float(len(pairs)),
            "system/epoch": self.sampler.epoch + self.sampler.index / self.sampler.num_rows,
            "time/step_total": seconds,
        }

    # -- validation ----------------------------------------------------------------------------------------------------

    def validate_if_due(self, step: int) -> dict[str, Any]:
        """Metrics of a validation before this step, if one is due; asks the run to stop if it gets no better."""
        if VALIDATION not in self.data.datasets or not self.should_eval(step):
            return {}
        metrics = self.validate(step)
        if self.validations.is_best and self.validations.patience is not None and step > 0:
            self.save_checkpoint(keep=True)
        if self.validations.is_exhausted:
            best = self.validations.best
            self.stop(
                f"{self.validations.bad_in_a_row} validations without a loss below {best[LOSS]:.4f}"
            )
        return metrics

    def validate(self, step: int) -> dict[str, Any]:
        """Means over all pairs of the validation data, each pair counted once."""
        started = time.monotonic()
        policy_R, tokens_RT = self._score(self.actor_train, VALIDATION, without_adapter=False)
        reference_chosen_P = reference_rejected_P = None
        if not self.settings.reference_free:
            if VALIDATION not in self.reference_sums:
                assert self.reference is not None
                is_own = self.reference is self.actor_train
                reference_R, self.reference_tokens_RT = self._score(
                    self.reference, VALIDATION, without_adapter=is_own
                )
                self.reference_sums[VALIDATION] = reference_R
            reference_chosen_P, reference_rejected_P = split_pairs(self.reference_sums[VALIDATION])
        chosen_P, rejected_P = split_pairs(policy_R)
        dataset = self.data.datasets[VALIDATION]
        chosen_lens_P, rejected_lens_P = split_pairs(
            torch.from_numpy(dataset.lengths - dataset.prompt_lens)
        )
        result = preference_loss(
            policy_chosen_P=chosen_P,
            policy_rejected_P=rejected_P,
            reference_chosen_P=reference_chosen_P,
            reference_rejected_P=reference_rejected_P,
            chosen_lens_P=chosen_lens_P,
            rejected_lens_P=rejected_lens_P,
            loss_type=self.settings.loss_type,
            beta=self.settings.beta,
            label_smoothing=self.settings.label_smoothing,
            discopop_tau=self.settings.discopop_tau,
        )
        margins_P = result.chosen_rewards_P - result.rejected_rewards_P
        means = {
            LOSS: result.loss,
            ACCURACY: pair_accuracy(margins_P).mean(),
            "val/actor/margin": margins_P.mean(),
            "val/actor/chosen_reward": result.chosen_rewards_P.mean(),
            "val/actor/reject_reward": result.rejected_rewards_P.mean(),
            "val/actor/chosen_logps": chosen_P.mean(),
            "val/actor/reject_logps": rejected_P.mean(),
        }
        values = {name: float(value) for name, value in means.items()}
        self.validations.add(step, values)
        if self.samples is not None and tokens_RT is not None:
            self.samples.write(step, result, tokens_RT, self.reference_tokens_RT)
        return {**values, "time/val_step": time.monotonic() - started}

    def finish_with_validation(self) -> None:
        """Validate the final weights, unless that was just done or the user is waiting to leave; then end the run."""
        if (
            VALIDATION in self.data.datasets
            and self.pipeline_config.eval_steps > 0
            and not self.is_interrupted
        ):
            if self.validations.last_step != self.global_step:
                self.log(self.global_step, self.validate(self.global_step))
                if self.validations.is_best and self.validations.patience is not None:
                    self.save_checkpoint(keep=True)
            self.summary["validation"] = self.validations.state_dict()
        model: Path | None = None
        best = self.validations.best
        if (
            self.validations.patience is not None
            and best
            and best["step"] > 0
            and not self.is_interrupted
        ):
            model = self.model_folder(int(best["step"]))
        self.finish(
            self.validations.describe(len(self.data.datasets.get(VALIDATION, ()))), model=model
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        return {"sampler": self.sampler.state_dict(), "validations": self.validations.state_dict()}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.sampler.load_state_dict(states["sampler"])
        self.validations.load_state_dict(states["validations"])
        if self.validations.patience is not None and self.validations.best:
            self.kept_steps = {int(self.validations.best["step"])}


class ValidationHistory:
    """The first, the last and the best validation, and whether it is time to give up.

    Args:
        patience: validations in a row without a lower loss after which a run is exhausted; None: never.
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
    def last_step(self) -> int | None:
        return int(self.last["step"]) if self.last else None

    @property
    def is_best(self) -> bool:
        return bool(self.last) and self.best is self.last

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.bad_in_a_row >= self.patience

    def describe(self, num_pairs: int) -> str:
        """What validation says, in one sentence; empty where there was none."""
        if not self.last:
            return ""

        def change(name: str, digits: int) -> str:
            return f"{self.first[name]:.{digits}f} -> {self.last[name]:.{digits}f}"

        text = f"Validation on {num_pairs:,} pairs: accuracy {change(ACCURACY, 3)}, loss {change(LOSS, 4)}"
        if self.patience is not None and not self.is_best:
            text += f"; best at step {self.best['step']:.0f}: {self.best[ACCURACY]:.3f}, loss {self.best[LOSS]:.4f}"
        return text + "."

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            "best": self.best,
            "bad_in_a_row": self.bad_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.last, self.best = (dict(state[name]) for name in ("first", "last", "best"))
        self.bad_in_a_row = state["bad_in_a_row"]


def _with_length_of_run(config: DPOConfig, steps_per_epoch: int) -> DPOConfig:
    """The config with the number of steps that data and settings come to, in `max_steps` and in the epochs."""
    num_steps = config.num_steps(steps_per_epoch)
    config = config.with_max_steps(num_steps)
    training_args = config.actor_train.training_args
    if "num_train_epochs" not in training_args.model_fields_set:
        epochs = float(math.ceil(num_steps / steps_per_epoch))
        training_args = training_args.model_copy(update={"num_train_epochs": epochs})
        role = config.actor_train.model_copy(update={"training_args": training_args})
        config = config.model_copy(update={"actor_train": role})
    return config
