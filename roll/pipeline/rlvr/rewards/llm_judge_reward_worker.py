"""A verdict of a language model behind an OpenAI-compatible address; see `judge_answers`."""

from __future__ import annotations

from typing import Any

from roll.exceptions import ConfigError
from roll.pipeline.rlvr.rewards.judge_answers import DEFAULT_PROMPT
from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker

# Requests in flight: these processes wait for the judge, not for a core.
_NUM_REQUESTS = 16


class LLMJudgeRewardWorker(PoolRewardWorker):
    """Asks the model at `judge_api_url`. `judge_prompt` is a text with {prompt}, {response} and {ground_truth}."""

    function = "roll.pipeline.rlvr.rewards.judge_answers:score"

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {
            "url": reward_config.judge_api_url,
            "model": reward_config.judge_model_name,
            "api_key": reward_config.judge_api_key,
            "template": reward_config.judge_prompt or DEFAULT_PROMPT,
            "timeout_s": reward_config.reward_timeout * 0.9,  # so that the judge's own error is told, not just the time
        }

    @classmethod
    def num_processes(cls, world_size: int) -> int:
        return _NUM_REQUESTS

    @classmethod
    def check(cls, reward_config: Any) -> None:
        if reward_config.judge_model_type not in (None, "api"):
            raise ConfigError(
                f'judge_model_type: found "{reward_config.judge_model_type}", expected "api"; serve the judge (for '
                "example with vLLM's OpenAI server) and name its address in judge_api_url"
            )
        if not reward_config.judge_api_url:
            raise ConfigError("judge_api_url: missing; the address of the judge, for example http://localhost:8000/v1")
        if reward_config.judge_prompt and "{response}" not in reward_config.judge_prompt:
            raise ConfigError(
                "judge_prompt: has no {response}; write a text with {prompt}, {response} and {ground_truth}"
            )
        super().check(reward_config)
