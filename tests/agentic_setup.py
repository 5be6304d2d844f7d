"""Configs, stub proxies and sources for the tests of rollouts: no model, or a tiny one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.engines.request import GenerationOutput
from roll.models.tiny import character_tokenizer, make_tiny_model
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env_source import EnvSource
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, TurnRequest

STEP = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"


class EchoProxy(BaseLLMProxy):
    """Answers `a` (or what `answers` says of the request), instantly. Remembers what it was
    asked."""

    needs_messages = True

    def __init__(self, tokenizer: Any, answer: Any = "a") -> None:
        super().__init__(actor_infer=None, tokenizer=tokenizer, options={})
        self.answer = answer
        self.asked: list[list[TurnRequest]] = []

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        self.asked.append(list(requests))
        outputs = []
        for turn in requests:
            answer = self.answer(turn) if callable(self.answer) else self.answer
            if isinstance(answer, GenerationOutput):
                outputs.append(answer)
                continue
            ids = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id]
            outputs.append(
                GenerationOutput(turn.request.request_id, 0, ids, [-0.5] * len(ids), "stop", 0)
            )
        return outputs


def env_config(envs: dict[str, Any], **options: Any) -> AgenticConfig:
    """A config whose tags are the keys of `envs`; a value is a class name of `bad_envs`, or a whole
    template."""
    templates = {
        tag: {"env_type": f"bad_envs:{value}", "max_steps": 5} if isinstance(value, str) else value
        for tag, value in envs.items()
    }
    manager = {
        "num_env_groups": 2 * len(envs),
        "group_size": 2,
        "tags": list(envs),
        "env_timeout": 1.0,
    }
    manager |= options.pop("manager", {})
    groups = manager["num_env_groups"] * manager["group_size"]
    return AgenticConfig(
        **{
            "custom_envs": templates,
            "train_env_manager": manager,
            "rollout_batch_size": groups,
            "sequence_length": 200,
            "eval_steps": 0,
            "adv_estimator": "reinforce",
            "init_kl_coef": 0,
            **options,
        }
    )


@contextmanager
def source_of(config: AgenticConfig, proxy: Any = None, mode: Any = "train", **options: Any):
    tokenizer = character_tokenizer()
    manager = config.train_env_manager
    with Cluster(
        "train_env", manager.worker_cls, ResourceManager(backend="local"), manager
    ) as cluster:
        proxy = proxy or EchoProxy(tokenizer)
        both = config.model_copy(update={"val_env_manager": manager})
        source = EnvSource(both, mode, cluster, tokenizer, proxy=proxy, **options)
        try:
            yield source
        finally:
            source.close()


def tiny_pipeline_config(folder: Path, envs: dict[str, Any], **options: Any) -> AgenticConfig:
    """A whole run of a tiny model, made in `folder` if it is not there."""
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model, hidden=32, heads=1, intermediate=32, layers=1, max_length=256)
    role = {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": {"per_device_train_batch_size": 4, "learning_rate": 1e-3},
        "strategy_args": {"strategy_name": "hf_train"},
    }
    infer = {**role, "strategy_args": {"strategy_name": "hf_infer"}}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4}
    defaults = {
        "pretrain": str(model),
        "output_dir": str(folder / "output"),
        "exp_name": "run",
        "max_steps": 2,
        "track_with": "none",
        "actor_train": role,
        "actor_infer": {**infer, "generating_args": sampling},
        "reference": infer,
        "critic": role,
        "sequence_length": 128,
    }
    return env_config(envs, **{**defaults, **options})
