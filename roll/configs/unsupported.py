"""Parts of ROLL that this project does not have, by the names under which a config file asks for them.

A file that needs one of them fails with the key and the reason, before anything else about it is judged.
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
    "ROLL's supervised fine-tuning pipeline": "sft_train",
    _VISION: (
        "vlm_filter vision_dp media_folder image_folder image_max_pixels image_min_pixels video_folder video_fps "
        "video_max_pixels video_min_pixels video_maxlen audio_folder audio_sampling_rate"
    ),
}
UNSUPPORTED_KEYS: Mapping[str, str] = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()}

# Strategy names of ROLL that do not exist here, and the ones that come nearest.
UNSUPPORTED_STRATEGIES: Mapping[str, str] = {
    "megatron_train": "fsdp2_train",
    "megatron_infer": "fsdp2_infer",
    "sglang": "vllm",
    "mock_infer": "hf_infer",
    "diffusion_deepspeed_train": "deepspeed_train",
}

# The last part of a model's name, of a template or of an environment manager that is made for images.
_VISION_NAME = re.compile(r"(^|[-_.])(vl|vlm|omni)([-_.]|$)|internvl|llava|pixtral|idefics|paligemma", re.IGNORECASE)


def unsupported_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted key, reason) for every part of a composed config file that this project cannot run.

    Strategy names are not looked at: `StrategyArguments` refuses them, in files and in Python alike.
    """
    found = [(key, UNSUPPORTED_KEYS[key]) for key in raw if key in UNSUPPORTED_KEYS]
    return [(key, f"not supported: {reason}") for key, reason in found or _vision_parts(raw)]


def _vision_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys that name a vision model, each model once; what else says so only if none does."""
    models: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in _strings(raw, ""):
        name = key.rpartition(".")[2]
        if name in ("pretrain", "reward_pretrain", "model_name_or_path") and _is_vision_model(value):
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
