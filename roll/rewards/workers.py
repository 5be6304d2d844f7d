"""The reward workers: a batch becomes rows of text, rows become scores, scores become columns.

A worker without a model is a subclass of `PoolRewardWorker`: a score function and the config keys
that it reads. Nothing else names the class; a config names its path as `worker_cls`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from roll.configs.worker_config import GENERATE_STRATEGIES
from roll.datasets.chat_template import get_chat_template
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.strategy import create_strategy
from roll.engines.request import GenerationRequest, SamplingParams, generate_with_retry
from roll.exceptions import ConfigError
from roll.models.model_providers import default_actor_model_provider, default_tokenizer_provider
from roll.pipeline.base_worker import RewardWorker
from roll.rewards.functions import (
    CROSSTHINK_REWARDS,
    JUDGE_PROMPTS,
    judge_question,
    read_verdict,
)
from roll.rewards.pool import Score, ScorePool, check_reward_fn, dropped, to_score
from roll.utils.columns import column
from roll.utils.machine import given_processors

# Processes that score, over all workers of a role on one machine.
_MAX_PROCESSES = 8
# Requests to a judge in flight: these processes wait for the judge, not for a core.
_NUM_REQUESTS = 16


class PoolRewardWorker(Worker):
    """Scores responses with a function, in processes that can be killed."""

    function: ClassVar[str] = ""  # `file.py:name` or `module:name`
    reads: ClassVar[tuple[str, ...]] = ()  # config keys that go along with every row, by name
    reward_types: ClassVar[tuple[str | None, ...] | None] = None  # of `reward_type`; None: any

    @classmethod
    def function_of(cls, reward_config: Any) -> str:
        return cls.function

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        """Keyword arguments of the function that come from the config."""
        return {key: getattr(reward_config, key) for key in cls.reads}

    @classmethod
    def keys_read(cls, reward_config: Any) -> tuple[str, ...] | None:
        """The keys of `check.OPTIONAL_KEYS` that have an effect; None if that is not known."""
        # A class of the user's own with other options may read any key.
        if cls.options_of.__func__ is not PoolRewardWorker.options_of.__func__:
            return None
        return ("reward_timeout", "reward_memory_mb", *cls.reads)

    @classmethod
    def reward_of(cls, score: Score) -> float | None:
        """What is trained on, before the penalty for length; a subclass may tell it from a
        score."""
        return score.value

    @classmethod
    def num_processes(cls, world_size: int) -> int:
        """Processes of one worker: its share of the processors that there are for this process."""
        return max(1, min(_MAX_PROCESSES, given_processors()) // world_size)

    @classmethod
    def check(cls, reward_config: Any) -> None:
        """Raise a ConfigError or MissingDependencyError if the role cannot score; needs no
        model."""
        if cls.reward_types is not None and reward_config.reward_type not in cls.reward_types:
            found = json.dumps(reward_config.reward_type)
            expected = "one of " + ", ".join(name for name in cls.reward_types if name)
            if None in cls.reward_types:
                expected = f"null or {expected}"
            raise ConfigError(f"reward_type: found {found}, expected {expected}")
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
            `scores` (B,): the function's, NaN for rows to be dropped; `response_level_rewards`
            (B,): `reward_of` them less `response_length_penalty_coef` a token;
            `token_level_rewards` (B, S-1): zeros; the object columns `reward_parts` (a dict a row)
            and `drop_reason` (None, or why the row has no score).
        """
        started = time.monotonic()
        scores = self.scores(text_rows(data, self.tokenizer))
        rewards = [self.reward_of(score) for score in scores]
        penalty = self.worker_config.response_length_penalty_coef
        result = reward_columns(data, scores, penalty, rewards)
        result.meta_info["metrics"] = {
            f"time/{self.cluster_name}/compute_rewards/total": time.monotonic() - started
        }
        return result

    def scores(self, rows: list[dict[str, Any]]) -> list[Score]:
        return self.pool.score(rows)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    async def compute_rewards_aside(self, data: DataProto) -> DataProto:
        """`compute_rewards` in a thread: several workers of one process score at the same time."""
        return await asyncio.to_thread(self.compute_rewards, data)

    def close(self) -> None:
        """End the processes; they also end with this worker."""
        self.pool.close()


class FunctionRewardWorker(PoolRewardWorker):
    """Scores with the function that `reward_fn` names."""

    @classmethod
    def function_of(cls, reward_config: Any) -> str:
        return reward_config.reward_fn


class MathRuleRewardWorker(PoolRewardWorker):
    """1 for the right answer by value, else 0; also 0 for one that misses `format_pattern`."""

    function = "roll.rewards.math_answers:score"
    reads = ("format_pattern",)


class MultipleChoiceBoxedRuleRewardWorker(PoolRewardWorker):
    """1 for the right letters in the last box, 0 for others or none."""

    function = "roll.rewards.functions:choice_score"


class GeneralValRuleRewardWorker(PoolRewardWorker):
    """1 for the right choice, 0 for a wrong one or none; rows of other tags are dropped."""

    function = "roll.rewards.functions:general_val_score"


class CrossThinkQARuleRewardWorker(PoolRewardWorker):
    """Scores are 1 or 0; rewards go from -1.5 to 1 by `reward_type`, less what is repeated.

    `response_length_penalty_coef` is a penalty for each token, as everywhere here. (ROLL's reward
    for length looks at the padded width of the batch.)
    """

    function = "roll.rewards.functions:crossthink_score"
    reads = ("reward_type",)
    reward_types = tuple(CROSSTHINK_REWARDS)

    @classmethod
    def reward_of(cls, score: Score) -> float | None:
        return None if score.value is None else score.parts["answer"] + score.parts["repetition"]


class GeneralRuleRewardWorker(PoolRewardWorker):
    """1 if all instructions of a row are followed; with `reward_type: fraction` the share that is.

    ROLL's files write `soft`, `loose` or `strict` here; as in ROLL they mean 1 or 0, like null.
    """

    function = "roll.rewards.ifeval:score"
    reads = ("reward_type",)
    reward_types = (None, "fraction", "loose", "soft", "strict")


class CodeSandboxRewardWorker(PoolRewardWorker):
    """1 if all test cases pass; with `reward_type: fraction` the share that does.

    `reward_timeout` covers all cases of a row.
    """

    function = "roll.rewards.functions:code_score"
    reads = ("reward_type",)
    reward_types = (None, "fraction")


class LLMJudgeRewardWorker(PoolRewardWorker):
    """Asks the model at `judge_api_url`, or with `judge_model_type: inference` its own, which
    `model_args`, `strategy_args` and `generating_args` describe.

    `judge_prompt` is a text with {prompt}, {response} and {ground_truth}, or the name of a prompt
    of ROLL's. An answer without a verdict drops the sample.
    """

    function = "roll.rewards.functions:judge_score"

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {
            "url": reward_config.judge_api_url,
            "model": reward_config.judge_model_name,
            "api_key": reward_config.judge_api_key,
            "template": reward_config.judge_prompt,
            # Less than the pool's own limit, so that the judge's error is told, not just the time.
            "timeout_s": reward_config.reward_timeout * 0.9,
        }

    @classmethod
    def keys_read(cls, reward_config: Any) -> tuple[str, ...] | None:
        if reward_config.judge_model_type == "inference":
            own_model = ("generating_args", "data_args", "infer_batch_size")
            return ("judge_prompt", "judge_model_type", *own_model)
        judge = ("prompt", "model_type", "model_name", "api_url", "api_key")
        return ("reward_timeout", "reward_memory_mb", *(f"judge_{name}" for name in judge))

    @classmethod
    def num_processes(cls, world_size: int) -> int:
        return _NUM_REQUESTS

    @classmethod
    def check(cls, reward_config: Any) -> None:
        prompt, kind = reward_config.judge_prompt, reward_config.judge_model_type
        if prompt and prompt not in JUDGE_PROMPTS and "{response}" not in prompt:
            raise ConfigError(
                "judge_prompt: has no {response}; write a text with {prompt}, {response} and "
                f"{{ground_truth}}, or the name of one: {', '.join(JUDGE_PROMPTS)}"
            )
        if kind not in (None, "api", "inference"):
            raise ConfigError(
                f'judge_model_type: found "{kind}", expected "api", for the judge at '
                'judge_api_url, or "inference", for one that this role holds'
            )
        if kind != "inference":
            if not reward_config.judge_api_url:
                raise ConfigError(
                    "judge_api_url: missing; the address of the judge, for example "
                    "http://localhost:8000/v1"
                )
            super().check(reward_config)
        elif reward_config.strategy_name not in GENERATE_STRATEGIES:
            found = reward_config.strategy_name or "no strategy"
            expected = " or ".join(GENERATE_STRATEGIES)
            raise ConfigError(
                f"strategy_args.strategy_name: found {found}, expected {expected}: the judge writes"
            )
        elif reward_config.generating_args is None:
            raise ConfigError(
                "generating_args: missing; say how the judge writes, for example "
                "max_new_tokens: 512"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        if self.worker_config.judge_model_type != "inference":
            super().initialize(pipeline_config)
            return
        Worker.initialize(self, pipeline_config)
        # The tokenizer of the samples, not of the judge.
        self.tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        self.strategy = create_strategy(self)
        self.strategy.initialize(default_actor_model_provider)

    def scores(self, rows: list[dict[str, Any]]) -> list[Score]:
        if self.strategy is None:
            return super().scores(rows)
        config, tokenizer = self.worker_config, self.strategy.tokenizer
        name = config.data_args.template if config.data_args else None
        template = get_chat_template(name or "native", tokenizer)
        seed = self.pipeline_config.seed
        sampling = SamplingParams.from_config(config.generating_args, seed=seed)
        requests = []
        for index, row in enumerate(rows):
            question = judge_question(
                config.judge_prompt, row["prompt"], row["response"], row.get("ground_truth")
            )
            text = template([{"role": "user", "content": question}], add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
            requests.append(GenerationRequest(str(index), tuple(ids), sampling))
        scores = []
        for output in generate_with_retry(self.strategy.generation_engine, requests).all_outputs:
            if output.error:
                scores.append(dropped(f"judge: {output.error}"))
                continue
            answer = tokenizer.decode(output.token_ids, skip_special_tokens=True)
            scores.append(to_score(read_verdict(answer)))
        return scores

    def close(self) -> None:
        if self.strategy is None:
            super().close()


class RewardModelWorker(RewardWorker):
    """Scores with the sequence classifier of `model_args` and the strategy of `strategy_args`.

    A reward model with the policy's vocabulary sees the policy's own tokens. One with another
    vocabulary sees the conversation as text, through its own chat template.
    """

    @classmethod
    def keys_read(cls, reward_config: Any) -> tuple[str, ...]:
        return ("infer_batch_size",)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.policy_tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        own = self.strategy.tokenizer.get_vocab()
        self.shares_vocabulary = self.policy_tokenizer.get_vocab() == own

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """The columns of `PoolRewardWorker.compute_rewards`; a score that is not finite drops."""
        seen = data if self.shares_vocabulary else self._in_own_tokens(data)
        result = super().compute_rewards(seen)
        scores = [to_score(value) for value in result["response_level_rewards"].tolist()]
        columns = reward_columns(data, scores, self.worker_config.response_length_penalty_coef)
        columns.meta_info = result.meta_info
        return columns

    def _in_own_tokens(self, data: DataProto) -> DataProto:
        tokenizer = self.strategy.tokenizer
        rows = []
        for row in text_rows(data, self.policy_tokenizer):
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            if tokenizer.chat_template is None:
                texts = [str(message["content"]) for message in messages]
                ids = tokenizer.encode("".join([*texts, row["response"]]))
            else:
                answered = [*messages, {"role": "assistant", "content": row["response"]}]
                ids = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
            rows.append(torch.tensor(ids))
        ids_BS = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        attended_BS = pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True)
        position_ids = (attended_BS.cumsum(-1) - 1).clamp(min=0)
        return DataProto.from_dict(
            {"input_ids": ids_BS, "attention_mask": attended_BS, "position_ids": position_ids}
        )


def text_rows(data: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """What a score function sees of each row: `prompt` and `response` as text, object columns.

    The response is decoded without special tokens. The prompt is the `prompt` column if the batch
    has one, otherwise what the model saw, special tokens included.
    """
    ids_BS, response_BS, attention_BS = (
        column(data, name, "a reward").cpu().numpy()
        for name in ("input_ids", "response_mask", "attention_mask")
    )
    response_BS = response_BS != 0
    columns = {name: values.tolist() for name, values in data.non_tensor_batch.items()}
    selected = [ids[mask].tolist() for ids, mask in zip(ids_BS, response_BS, strict=True)]
    columns["response"] = tokenizer.batch_decode(selected, True)
    if "prompt" not in columns:
        prompt_BS = (attention_BS != 0) & (response_BS.cumsum(-1) == 0)
        selected = [ids[mask].tolist() for ids, mask in zip(ids_BS, prompt_BS, strict=True)]
        columns["prompt"] = tokenizer.batch_decode(selected)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def reward_columns(
    data: DataProto,
    scores: Sequence[Score],
    length_penalty: float = 0.0,
    rewards: Sequence[float | None] | None = None,
) -> DataProto:
    """Scores, and rewards where they are not the same, as `compute_rewards` returns them."""
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
