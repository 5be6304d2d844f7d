"""Supervised fine-tuning: the model learns the answers of a file, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from roll.configs.data_args import DataArguments
from roll.datasets.collator import DataCollatorWithPaddingForPaddedKeys
from roll.datasets.files import load_table
from roll.datasets.prompt_answers import LABEL_PAD, PromptAnswers
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_pipeline import BasePipeline
from roll.pipeline.sft.answer_data import encode_table, make_sampler
from roll.pipeline.sft.sft_config import SFTConfig
from roll.utils.logging import get_logger
from roll.utils.rollout_log import RolloutLog, discard_rollouts_after

logger = get_logger(__name__)

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
        data_args, validation = pipeline_config.actor_train.data_args, pipeline_config.validation
        assert data_args is not None
        self.dataset = self._encode(pipeline_config, data_args, pipeline_config.sequence_length)
        self.val_dataset: PromptAnswers | None = None
        if validation is not None and validation.data_args is not None:
            length = pipeline_config.val_sequence_length
            self.val_dataset = self._encode(pipeline_config, validation.data_args, length)
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
        for step in self.steps():
            metrics: dict[str, Any] = {}
            if self.val_dataset is not None and self.should_eval(step):
                metrics |= self.validate(step)
                if self._has_learned_enough(metrics):
                    self.log(step, metrics)
                    break
            batch = self.make_batch([self.dataset[row] for row in self.sampler.next_batch()])
            batch.meta_info["global_step"] = step
            metrics |= self.actor_train.train_step(batch).meta_info["metrics"]
            self.end_step(step, metrics)
        self.save_checkpoint()
        self.finish(self._result())

    def make_batch(self, rows: Sequence[Mapping[str, Any]]) -> DataProto:
        """Right-padded rows; `response_mask` (B, S) is 1 on the tokens of the answers."""
        batch = DataProto.from_single_dict(self.collate(rows))
        batch["response_mask"] = (batch.pop(["labels"])["labels"] != LABEL_PAD).long()
        return batch

    def validate(self, step: int) -> dict[str, float]:
        """Mean loss of a token, share of tokens that are the model's first choice, share of rows where all are."""
        loss = tokens = correct = exact = 0.0
        for number, batch in enumerate(self._validation_batches()):
            scored = self.actor_train.evaluate(batch)
            if number == 0:
                batch["old_log_probs"] = scored["log_probs"]
                batch["scores"] = (scored["correct"] == scored["tokens"]).float()
                self.sample_log.write(step, batch, split="val")
            loss += float(scored["loss"].double().sum())
            tokens += int(scored["tokens"].sum())
            correct += int(scored["correct"].sum())
            exact += int((scored["correct"] == scored["tokens"]).sum())
        assert self.val_dataset is not None
        return {
            "val/loss": loss / tokens,
            "val/token_accuracy": correct / tokens,
            "val/exact_match": exact / len(self.val_dataset),
        }

    def states(self) -> dict[str, dict[str, Any]]:
        return {"sampler": self.sampler.state_dict()}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self.sampler.load_state_dict(states["sampler"])

    def _validation_batches(self) -> Iterator[DataProto]:
        assert self.val_dataset is not None
        for start in range(0, len(self.val_dataset), VALIDATION_ROWS):
            yield self.make_batch(self.val_dataset.rows[start : start + VALIDATION_ROWS])

    def _has_learned_enough(self, metrics: Mapping[str, float]) -> bool:
        goal = self.pipeline_config.stop_at_exact_match
        if goal is None or metrics["val/exact_match"] < goal:
            return False
        self.stop(
            f"{metrics['val/exact_match']:.3f} of the validation is answered exactly (asked for: {goal:g})"
        )
        return True

    def _result(self) -> str:
        if self.val_dataset is None:
            return ""
        result = self.validate(self.global_step)
        self.summary |= result
        if not self.is_stopping:
            self.log(self.global_step, result)
        return f"Validation: loss {result['val/loss']:.4f}, {result['val/exact_match']:.3f} answered exactly."

    def _encode(
        self, config: SFTConfig, data_args: DataArguments, max_length: int
    ) -> PromptAnswers:
        answers = encode_table(
            config, data_args, load_table(data_args.files), self.tokenizer, max_length
        )
        logger.info("%s: %s", ", ".join(data_args.files), answers.summary)
        return answers
