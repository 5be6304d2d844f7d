"""Parts of ROLL that this project does not have, by the names under which a config file asks for them.

A file that needs one of them fails with the key and the reason, beside whatever else is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_VISION = "a vision or audio model; only text models are trained"

_KEYS_BY_REASON = {
    "on-policy distillation": (
        "student_train student_infer teacher use_opd is_pure_opd pure_opd_pipeline_type opd_kl_coef "
        "opsd_mode opsd_solution_key opsd_max_solution_length"
    ),
    "distillation": "student distill_loss_weight distill_on_prompt kd_temperature",
    (
        "ROLL's supervised fine-tuning is `pipeline: sft` here; write that, rename sft_train to actor_train, and give "
        "max_steps instead of num_train_epochs"
    ): "sft_train",
    "name the column in actor_train.data_args.prompt, and in that of validation": "prompt_key",
    "name the column in actor_train.data_args.response, and in that of validation": "response_key",
    "only one column is the prompt; join the texts in the file, or write them as messages": "query_key system_key",
    _VISION: (
        "vlm_filter vision_dp media_folder image_folder image_max_pixels image_min_pixels video_folder video_fps "
        "video_max_pixels video_min_pixels video_maxlen audio_folder audio_sampling_rate"
    ),
}
UNSUPPORTED_KEYS: Mapping[str, str] = {
    key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()
}

# Strategy names of ROLL that do not exist here, and the ones that come nearest.
UNSUPPORTED_STRATEGIES: Mapping[str, str] = {
    "megatron_train": "fsdp2_train",
    "megatron_infer": "fsdp2_infer",
    "sglang": "vllm",
    "mock_infer": "hf_infer",
    "diffusion_deepspeed_train": "deepspeed_train",
}

_AGENTS = "agents that call tools in messages of their own; here an answer is a text that the environment reads"

# What an entry of `custom_envs` may ask for.
NOT_BUILT_YET: Mapping[str, str] = {
    "tool_wrapper": "tools around any environment; the environment tool_task has a sandboxed Python tool of its own",
    "agent_runner_cls": "programs that ask the policy by themselves; leave it null",
}
UNSUPPORTED_ENVIRONMENTS: Mapping[str, str] = {
    "webshop": "it needs WebShop's own search engine and data",
    "sokoban_sandbox": "it plays at a remote sandbox; sokoban plays here",
    "sokoban_mcp": "it plays at an MCP server; sokoban plays here",
    "sokoban_native_env": f"{_AGENTS}; sokoban is the same game",
    "sokoban_tool_call": f"{_AGENTS}; sokoban is the same game",
    "rock_tb_native_env": "it runs in ROCK's remote sandboxes",
    "openreward_env": "it needs OpenReward's service",
    "atropos_env": "it needs Atropos",
    "deepeyes": _VISION,
}

_MANAGERS = "roll.pipeline.agentic.env_manager"
_REWARDS = "roll.pipeline.rlvr.rewards"
UNSUPPORTED_CLASSES: Mapping[str, str] = {
    path: f"{path.rpartition('.')[2]}, {reason}"
    for path, reason in {
        f"{_MANAGERS}.agent_native_env_manager.AgentNativeStepEnvManager": f"which is for {_AGENTS}",
        f"{_MANAGERS}.proxy_env_manager.ProxyEnvManager": "which is for programs that ask the policy by themselves",
        f"{_REWARDS}.detection_reward_worker.DetectionRewardWorker": "which judges what a vision model sees",
        f"{_REWARDS}.video_r1_reward_worker.VideoR1RewardWorker": "which judges what a vision model sees",
        f"{_REWARDS}.remote_reward_system_worker.RemoteRewardSystemWorker": "which asks a remote reward system",
    }.items()
}

# The last part of a model's name, of a template or of an environment manager that is made for images.
_VISION_NAME = re.compile(
    r"(^|[-_.])(vl|vlm|omni)([-_.]|$)|internvl|llava|pixtral|idefics|paligemma", re.IGNORECASE
)


# Keys of pipelines that do not exist here: nothing else of such a file can be judged.
FOREIGN_PIPELINES = ("student", "student_train", "teacher", "sft_train")


def unsupported_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted key, reason) for every part of a composed config file that this project cannot run.

    Strategy names are not looked at: `StrategyArguments` refuses them, in files and in Python alike.
    """
    found = [
        (key, UNSUPPORTED_KEYS[key]) for key in raw if key in UNSUPPORTED_KEYS
    ] or _vision_parts(raw)
    for key, value in _strings(raw, ""):
        if key.endswith(".worker_cls") and value in UNSUPPORTED_CLASSES:
            found.append((key, UNSUPPORTED_CLASSES[value]))
    return [(key, f"not supported: {reason}") for key, reason in found]


def _vision_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys that name a vision model, each model once; what else says so only if none does."""
    models: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in _strings(raw, ""):
        name = key.rpartition(".")[2]
        if name in ("pretrain", "reward_pretrain", "model_name_or_path") and _is_vision_model(
            value
        ):
            models.setdefault(value, key)
        elif name == "template" and _VISION_NAME.search(value):
            others.setdefault(f'template "{value}"', key)
        elif name == "env_manager_cls" and "vl_" in value and key.startswith("custom_envs."):
            others.setdefault(value, key)
    if models:
        return [(key, f'"{value}" is {_VISION}') for value, key in models.items()]
    return [(key, f"{value} is for {_VISION}") for value, key in others.items()]


def _is_vision_model(name_or_path: str) -> bool:
    """A local folder is judged by its config.json, anything else by its name."""
    try:
        config = json.loads((Path(name_or_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _VISION_NAME.search(name_or_path.rstrip("/").rpartition("/")[2]) is not None
    return isinstance(config, dict) and "vision_config" in config


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}" if key else str(name))
