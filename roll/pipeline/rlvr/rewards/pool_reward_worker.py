"""What the reward workers without a model have in common: a batch becomes rows of text, rows become scores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError
from roll.models.model_providers import default_tokenizer_provider
from roll.utils.columns import column
from roll.utils.machine import given_processors
from roll.utils.scoring.pool import ScorePool, check_reward_fn
from roll.utils.scoring.score import Score

# Processes that score, over all workers of a role on one machine, unless the role asks for more workers than that.
_MAX_PROCESSES = 8


class PoolRewardWorker(Worker):
    """Scores responses with a function, in processes that can be killed.

    Subclasses name the function, and what of the role's configuration goes along with every row.
    """

    function: ClassVar[str] = ""
    reward_types: ClassVar[tuple[str, ...] | None] = None  # values of `reward_type`; None: any

    @classmethod
    def function_of(cls, reward_config: Any) -> str:
        """The score function of a role, as `file.py:name` or `module:name`."""
        return cls.function

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        """Keyword arguments of the function that come from the configuration."""
        return {}

    @classmethod
    def reward_of(cls, score: Score) -> float | None:
        """What is trained on, before the penalty for length: the score itself, unless a subclass tells them apart."""
        return score.value

    @classmethod
    def num_processes(cls, world_size: int) -> int:
        """Processes of one worker: its share of the processors that there are for this process."""
        return max(1, min(_MAX_PROCESSES, given_processors()) // world_size)

    @classmethod
    def check(cls, reward_config: Any) -> None:
        """Raise a ConfigError or MissingDependencyError if the role cannot score; needs no model."""
        if cls.reward_types is not None and reward_config.reward_type not in (
            None,
            *cls.reward_types,
        ):
            expected = f"null or one of {', '.join(cls.reward_types)}"
            raise ConfigError(
                f"reward_type: found {reward_config.reward_type!r}, expected {expected}"
            )
        check_reward_fn(cls.function_of(reward_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        model_args = self.worker_config.model_args
        if model_args.model_name_or_path is None:
            model_args = pipeline_config.actor_train.model_args
        self.tokenizer = default_tokenizer_provider(model_args)
        self.pool = ScorePool(
            self.function_of(self.worker_config),
            num_processes=self.num_processes(self.world_size),
            timeout_s=self.worker_config.reward_timeout,
            memory_mb=self.worker_config.reward_memory_mb,
            options=self.options_of(self.worker_config),
        )

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """Score every row.

        Returns:
            `scores` (B,): the function's, NaN for rows to be dropped; `response_level_rewards` (B,): `reward_of` them
            less `response_length_penalty_coef` a token; `token_level_rewards` (B, S-1): zeros; the object columns
            `reward_parts` (a dict a row) and `drop_reason` (None, or why the row has no score).
        """
        started = time.monotonic()
        scores = self.scores(text_rows(data, self.tokenizer))
        rewards = [self.reward_of(score) for score in scores]
        result = reward_columns(
            data, scores, self.worker_config.response_length_penalty_coef, rewards
        )
        result.meta_info["metrics"] = {
            f"time/{self.cluster_name}/compute_rewards/total": time.monotonic() - started
        }
        return result

    def scores(self, rows: list[dict[str, Any]]) -> list[Score]:
        """The score of each row."""
        return self.pool.score(rows)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    async def compute_rewards_aside(self, data: DataProto) -> DataProto:
        """`compute_rewards` in a thread of its own, so that several workers of one process score at the same time."""
        return await asyncio.to_thread(self.compute_rewards, data)

    def close(self) -> None:
        """End the processes; they also end with this worker."""
        self.pool.close()


def text_rows(data: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """What a score function sees of each row: `prompt` and `response` as text, and every object column.

    The response is decoded without special tokens. The prompt is the `prompt` column if the batch has one, otherwise
    what the model saw, special tokens included.
    """
    ids_BS, response_BS, attention_BS = (
        column(data, name, "a reward").cpu().numpy()
        for name in ("input_ids", "response_mask", "attention_mask")
    )
    columns = {name: values.tolist() for name, values in data.non_tensor_batch.items()}
    responses = tokenizer.batch_decode(_selected(ids_BS, response_BS != 0), True)
    prompts = columns.get("prompt")
    if prompts is None:
        prompt_BS = (attention_BS != 0) & ((response_BS != 0).cumsum(-1) == 0)
        prompts = tokenizer.batch_decode(_selected(ids_BS, prompt_BS))
    return [
        {
            **{name: values[index] for name, values in columns.items()},
            "prompt": prompt,
            "response": response,
        }
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def _selected(ids_BS: np.ndarray, mask_BS: np.ndarray) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(ids_BS, mask_BS, strict=True)]


def reward_columns(
    data: DataProto,
    scores: Sequence[Score],
    length_penalty: float = 0.0,
    rewards: Sequence[float | None] | None = None,
) -> DataProto:
    """Scores, and rewards where they are not the same, as the columns that `compute_rewards` returns."""
    values = [score.value for score in scores]
    scores_B, rewards_B = (
        torch.tensor([float("nan") if value is None else value for value in column])
        for column in (values, values if rewards is None else rewards)
    )
    parts = [dict(score.parts) for score in scores]
    if length_penalty:
        penalty_B = length_penalty * data["response_mask"].sum(-1).float()
        rewards_B = rewards_B - penalty_B
        for part, penalty in zip(parts, penalty_B.tolist(), strict=True):
            part["length_penalty"] = -penalty
    tensors = {
        "token_level_rewards": torch.zeros(len(data), data["response_mask"].shape[1] - 1),
        "response_level_rewards": rewards_B,
        "scores": scores_B,
    }
    objects = {"reward_parts": parts, "drop_reason": [score.reason for score in scores]}
    return DataProto.from_dict(tensors, non_tensors=objects)
