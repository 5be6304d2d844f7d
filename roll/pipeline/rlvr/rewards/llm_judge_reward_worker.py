"""A verdict of a language model: behind an OpenAI-compatible address, or held by this role; see `judge_answers`."""

from __future__ import annotations

from typing import Any

from roll.configs.worker_config import GENERATE_STRATEGIES
from roll.datasets.chat_template import get_chat_template
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.strategy.strategy import create_strategy
from roll.engines.request import GenerationRequest, SamplingParams, generate_with_retry
from roll.exceptions import ConfigError
from roll.models.model_providers import default_actor_model_provider, default_tokenizer_provider
from roll.pipeline.rlvr.rewards.judge_answers import PROMPTS, question_for, read_verdict
from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker
from roll.utils.scoring.score import Score, dropped, to_score

# Requests in flight: these processes wait for the judge, not for a core.
_NUM_REQUESTS = 16


class LLMJudgeRewardWorker(PoolRewardWorker):
    """Asks the model at `judge_api_url`, or with `judge_model_type: inference` its own, which `model_args`,
    `strategy_args` and `generating_args` describe.

    `judge_prompt` is a text with {prompt}, {response} and {ground_truth}, or the name of a prompt of ROLL's. An answer
    without a verdict drops the sample.
    """

    function = "roll.pipeline.rlvr.rewards.judge_answers:score"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        if self.worker_config.judge_model_type != "inference":
            super().initialize(pipeline_config)
            return
        Worker.initialize(self, pipeline_config)
        self.tokenizer = default_tokenizer_provider(
            pipeline_config.actor_train.model_args
        )  # of the samples
        self.strategy = create_strategy(self)
        self.strategy.initialize(default_actor_model_provider)

    def scores(self, rows: list[dict[str, Any]]) -> list[Score]:
        if self.strategy is None:
            return super().scores(rows)
        config, tokenizer = self.worker_config, self.strategy.tokenizer
        data_args = config.data_args
        template = get_chat_template(
            (data_args.template if data_args else None) or "native", tokenizer
        )
        sampling = SamplingParams.from_config(
            config.generating_args, seed=self.pipeline_config.seed
        )
        requests = []
        for index, row in enumerate(rows):
            question = question_for(
                config.judge_prompt, row["prompt"], row["response"], row.get("ground_truth")
            )
            text = template([{"role": "user", "content": question}], add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
            requests.append(GenerationRequest(str(index), tuple(ids), sampling))
        outputs = generate_with_retry(self.strategy.generation_engine, requests).all_outputs
        return [
            dropped(f"judge: {output.error}")
            if output.error
            else to_score(
                read_verdict(tokenizer.decode(output.token_ids, skip_special_tokens=True))
            )
            for output in outputs
        ]

    def close(self) -> None:
        if self.strategy is None:
            super().close()

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {
            "url": reward_config.judge_api_url,
            "model": reward_config.judge_model_name,
            "api_key": reward_config.judge_api_key,
            "template": reward_config.judge_prompt,
            "timeout_s": reward_config.reward_timeout
            * 0.9,  # so that the judge's own error is told, not just the time
        }

    @classmethod
    def num_processes(cls, world_size: int) -> int:
        return _NUM_REQUESTS

    @classmethod
    def check(cls, reward_config: Any) -> None:
        prompt, kind = reward_config.judge_prompt, reward_config.judge_model_type
        if prompt and prompt not in PROMPTS and "{response}" not in prompt:
            raise ConfigError(
                "judge_prompt: has no {response}; write a text with {prompt}, {response} and {ground_truth}, or the "
                f"name of one: {', '.join(PROMPTS)}"
            )
        if kind == "inference":
            if reward_config.strategy_name not in GENERATE_STRATEGIES:
                found = reward_config.strategy_name or "no strategy"
                expected = " or ".join(GENERATE_STRATEGIES)
                raise ConfigError(
                    f"strategy_args.strategy_name: found {found}, expected {expected}: the judge writes"
                )
            if reward_config.generating_args is None:
                raise ConfigError(
                    "generating_args: missing; say how the judge writes, for example max_new_tokens: 512"
                )
            return
        if kind not in (None, "api"):
            raise ConfigError(
                f'judge_model_type: found "{kind}", expected "api", for the judge at judge_api_url, or "inference", '
                "for one that this role holds"
            )
        if not reward_config.judge_api_url:
            raise ConfigError(
                "judge_api_url: missing; the address of the judge, for example http://localhost:8000/v1"
            )
        super().check(reward_config)
