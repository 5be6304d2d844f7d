"""Supervised fine-tuning: the model learns the answers of a file, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from roll.datasets.collator import DataCollatorWithPaddingForPaddedKeys
from roll.datasets.encoding import LABEL_PAD, PromptAnswers
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.data import load_data, make_sampler
from roll.pipeline.sft.sft_config import SFTConfig
from roll.utils.rollout_log import RolloutLog, discard_rollouts_after

VALIDATION_ROWS = 256  # rows of one call to the workers
NUM_SAMPLES = 16  # rows of a validation that the report shows token by token


class SFTPipeline(BasePipeline):
    """Trains on batches of prompts and answers; validates on rows that it does not train on."""

    progress_metrics: ClassVar[Mapping[str, str]] = {
        "loss": "actor/loss",
        "exact match": "val/exact_match",
    }

    def __init__(self, pipeline_config: SFTConfig, *, progress: bool | None = None) -> None:
        problems = pipeline_config.missing_for_training()
        if problems:
            raise ConfigError("\n".join(map(str, problems)))
        self.tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        self.dataset: PromptAnswers = load_data(pipeline_config, "actor_train", self.tokenizer)
        self.val_dataset: PromptAnswers | None = load_data(
            pipeline_config, "validation", self.tokenizer
        )
        self.sampler = make_sampler(pipeline_config, self.dataset)
        super().__init__(pipeline_config, progress=progress)
        self.collate = DataCollatorWithPaddingForPaddedKeys(self.tokenizer, padding_side="right")
        self.actor_train = self.make_cluster("actor_train")
        self.initialize(self.actor_train)
        self.set_checkpoint_clusters(self.actor_train)
        self.restore()
        self.sample_log = RolloutLog(self.run_dir, self.tokenizer, NUM_SAMPLES)
        discard_rollouts_after(self.run_dir, self.global_step)

    def run(self) -> None:
        goal = self.pipeline_config.stop_at_exact_match
        for step in self.steps():
            metrics: dict[str, Any] = {}
            if self.val_dataset is not None and self.should_eval(step):
                metrics |= self.validate(step)
                exact = metrics["val/exact_match"]
                if goal is not None and exact >= goal:
                    self.stop(
                        f"{exact:.3f} of the validation is answered exactly (asked for: {goal:g})"
                    )
                    self.log(step, metrics)
                    break
            batch = self.make_batch([self.dataset[row] for row in self.sampler.next_batch()])
            batch.meta_info["global_step"] = step
            metrics |= self.actor_train.train_step(batch).meta_info["metrics"]
            self.end_step(step, metrics)
        self.save_checkpoint()
        result = ""
        if self.val_dataset is not None:
            final = self.validate(self.global_step)
            self.summary |= final
            if not self.is_stopping:
                self.log(self.global_step, final)
            result = (
                f"Validation: loss {final['val/loss']:.4f}, "
                f"{final['val/exact_match']:.3f} answered exactly."
            )
        self.finish(result)

    def make_batch(self, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        """Right-padded rows; `response_mask` (B, S) is 1 on the tokens of the answers."""
        batch = DataProto.from_single_dict(self.collate(rows))
        batch["response_mask"] = (batch.pop(["labels"])["labels"] != LABEL_PAD).long()
        return batch

    def validate(self, step: int) -> dict[str, float]:
        """Mean loss of a token, share of tokens that the model puts first, and of such rows."""
        assert self.val_dataset is not None
        loss = tokens = correct = exact = 0.0
        for start in range(0, len(self.val_dataset), VALIDATION_ROWS):
            batch = self.make_batch(self.val_dataset.rows[start : start + VALIDATION_ROWS])
            found = self.actor_train.evaluate(batch)
            is_exact_B = found["correct"] == found["tokens"]
            if start == 0:
                batch["old_log_probs"] = found["log_probs"]
                batch["scores"] = is_exact_B.float()
                self.sample_log.write(step, batch, split="val")
            loss += float(found["loss"].double().sum())
            tokens += int(found["tokens"].sum())
            correct += int(found["correct"].sum())
            exact += int(is_exact_B.sum())
        return {
            "val/loss": loss / tokens,
            "val/token_accuracy": correct / tokens,
            "val/exact_match": exact / len(self.val_dataset),
        }

    def states(self) -> dict[str, dict[str, Any]]:
        return {"sampler": self.sampler.state_dict()}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.sampler.load_state_dict(states["sampler"])
