"""A whole RLVR run small enough for tests: digit strings to reverse, a tiny model, a reward that is
a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from roll.models.tiny import make_tiny_model
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.tracking import read_metrics

CHARACTERS = "0123456789<> "
REWARD = """
def score(prompt, response, ground_truth, **row):
    # A random model gets some of the digits right, so every group has something to learn from.
    return sum(a == b for a, b in zip(response, ground_truth)) / len(ground_truth)
"""
# Timings and speeds differ from run to run, and so does the clock.
CLOCKED = ("time", "system/time", "system/tps", "system/actor", "rollout/wait")


def write_rows(path: Path, num: int, *, seed: int = 0, digits: int = 3, **columns: Any) -> Path:
    rng = random.Random(seed)
    texts = ["".join(rng.choice("0123456789") for _ in range(digits)) for _ in range(num)]
    rows = [
        {"prompt": f"{text}<", "ground_truth": text[::-1], "tag": "reverse", **columns}
        for text in texts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_inputs(folder: Path, *, reward: str = REWARD, num_rows: int = 24, seed: int = 0) -> Path:
    """model/, train.jsonl, test.jsonl and reward.py in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(
        folder / "model", CHARACTERS, seed=seed, hidden=32, heads=1, initializer_range=0.2
    )
    write_rows(folder / "train.jsonl", num_rows)
    write_rows(folder / "test.jsonl", 6, seed=1)
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    return folder


def make_values(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of the config; `overrides` replace top-level keys."""
    role = {"model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True}}
    values: dict[str, Any] = {
        "exp_name": "run",
        "output_dir": str(folder / "output"),
        "track_with": "none",
        "seed": 3,
        "max_steps": 3,
        "save_steps": 100,
        "eval_steps": -1,
        "pretrain": str(folder / "model"),
        "prompt_length": 8,
        "response_length": 5,
        "global_template": "base",
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "adv_estimator": "grpo",
        "loss_agg_mode": "token-mean",
        "init_kl_coef": 0,
        "actor_train": {
            **role,
            "data_args": {"file_name": str(folder / "train.jsonl")},
            "training_args": {
                "learning_rate": 1e-2,
                "per_device_train_batch_size": 8,
                "lr_scheduler_type": "constant",
            },
            "strategy_args": {"strategy_name": "hf_train"},
        },
        "actor_infer": {
            **role,
            "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "strategy_args": {"strategy_name": "hf_infer"},
        },
        "rewards": {
            "reverse": {"reward_fn": f"{folder / 'reward.py'}:score", "reward_timeout": 10}
        },
    }
    return {**values, **overrides}


def make_config(folder: Path, **overrides: Any) -> RLVRConfig:
    return RLVRConfig(**make_values(folder, **overrides))


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run without anything that depends on the clock, and without lines that say
    nothing else."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    kept = [
        {key: value for key, value in line.items() if not key.startswith(CLOCKED)} for line in lines
    ]
    return [line for line in kept if line.keys() > {"step"}]


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The sample records of one step."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
