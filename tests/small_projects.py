"""A folder with a tiny model, data, and a valid config for each pipeline: what `roll new` makes,
without its length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tiny_models import make_model_folder

ROLE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_train"}}
ENGINE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
COMMON = {
    "pretrain": "model",
    "max_steps": 2,
    "sequence_length": 64,
    "output_dir": "runs",
    "track_with": "none",
}
WALK = {"env_type": "guess_number", "env_config": {"low": 1, "high": 9}, "max_steps": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "sft": {
        "pipeline": "sft",
        **COMMON,
        "actor_train": {
            **ROLE,
            "training_args": BATCH,
            "data_args": {"file_name": "answers.jsonl", "response": "answer"},
        },
    },
    "dpo": {
        "pipeline": "dpo",
        **COMMON,
        "actor_train": {**ROLE, "training_args": BATCH, "data_args": {"file_name": "pairs.jsonl"}},
        "reference": ENGINE,
    },
    "rlvr": {
        "pipeline": "rlvr",
        **COMMON,
        "prompt_length": 32,
        "rollout_batch_size": 4,
        "adv_estimator": "reinforce",
        "init_kl_coef": 0.0,
        "actor_train": {
            **ROLE,
            "training_args": BATCH,
            "data_args": {"file_name": ["prompts.jsonl"], "template": "base"},
        },
        "actor_infer": ENGINE,
        "rewards": {"echo": {"reward_fn": "reward.py:score"}},
    },
    "agentic": {
        "pipeline": "agentic",
        **COMMON,
        "rollout_batch_size": 4,
        "val_batch_size": 4,
        "adv_estimator": "reinforce",
        "init_kl_coef": 0.0,
        "actor_train": {**ROLE, "training_args": BATCH},
        "actor_infer": {**ENGINE, "generating_args": {"max_new_tokens": 8}},
        "train_env_manager": {"num_env_groups": 4, "tags": ["Guess"]},
        "val_env_manager": {"num_env_groups": 4, "tags": ["Guess"]},
        "custom_envs": {"Guess": WALK},
    },
}


def make_project(folder: Path) -> Path:
    """Write sft.yaml, dpo.yaml, rlvr.yaml and agentic.yaml, and all that they name, into
    `folder`."""
    make_model_folder(folder / "model")
    files = {
        "answers.jsonl": [{"prompt": f"{n}?", "answer": f"{n}!"} for n in range(8)],
        "pairs.jsonl": [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(6)],
        "prompts.jsonl": [{"prompt": f"{n} ?", "ground_truth": str(n)} for n in range(8)],
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def score(prompt, response, ground_truth, **row):\n    return 1.0\n"
    )
    for name, values in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder
