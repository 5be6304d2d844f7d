"""Are the runs of two versions of this project equal to the last bit? For changes that must not
change a number.

    python tools/same_runs.py record BEFORE.json [--steps 3] [NAME ...]        # in the old tree
    python tools/same_runs.py compare BEFORE.json [--steps 3] [NAME ...]       # in the new tree, on the same machine

Every example that a CPU can run is trained with a fixed seed, one thread and a tiny model. Compared
are all metrics of every step but for times and memory, and the checksums of the weights of the last
checkpoint. Data and models are made once, in --inputs; --steps shortens the runs (0: as long as the
examples say). The exit code is 1 if something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NOT_A_RESULT = (
    "time",
    "memory",
    "system/",
    "tokens_per_second",
    "/tps",
)  # parts of names of metrics that differ

CPU = [
    "num_gpus_per_node=0",
    "actor_train.device_mapping=null",
    "actor_train.model_args.dtype=fp32",
]
PAIRS = [
    "actor_train.data_args.file_name={inputs}/pairs/train.jsonl",
    "validation.data_args.file_name={inputs}/pairs/validation.jsonl",
]


def digits(task: str, model: str) -> list[str]:
    return [
        f"pretrain={{inputs}}/{model}",
        f"actor_train.data_args.file_name={{inputs}}/digits/{task}_train.jsonl",
        f"validation.data_args.file_name={{inputs}}/digits/{task}_test.jsonl",
    ]


RUNS: dict[str, tuple[str, list[str]]] = {
    "dpo_tiny": ("dpo/dpo_tiny.yaml", ["pretrain={inputs}/pairs/model", *PAIRS]),
    "dpo_lora": (
        "dpo/dpo_lora.yaml",
        ["pretrain={inputs}/pairs/model", *PAIRS, *CPU, "max_steps=6"],
    ),
    "dpo_fsdp2_ray": (
        "dpo/dpo_fsdp2_ray.yaml",
        [
            *[
                "pretrain={inputs}/pairs/model",
                *PAIRS,
                *CPU,
                "max_steps=6",
                "actor_train.world_size=2",
            ],
            *[
                "reference.device_mapping=null",
                "reference.world_size=2",
                "reference.model_args.dtype=fp32",
            ],
        ],
    ),
    **{
        f"{task}_sft": (f"rlvr/{task}_sft.yaml", digits(task, "digits/model"))
        for task in ("add", "reverse", "sort")
    },
    **{
        f"{task}_grpo": (f"rlvr/{task}_grpo.yaml", digits(task, f"{task}_sft"))
        for task in ("add", "reverse", "sort")
    },
    "reverse_ppo": ("rlvr/reverse_ppo.yaml", digits("reverse", "reverse_sft")),
    "reverse_ray": (
        "rlvr/reverse_ray.yaml",
        [*digits("reverse", "reverse_sft"), "async_generation_ratio=0"],
    ),
    **{
        name: (f"agentic/{name}.yaml", [f"pretrain={{inputs}}/{name}"])
        for name in (
            *[
                "frozen_lake_gigpo",
                "frozen_lake_grpo",
                "frozen_lake_random",
                "frozen_lake_reinforce",
            ],
            *["frozen_lake_segment", "guess_number"],
        )
    },
}


def python(*arguments: str, folder: Path = ROOT) -> None:
    quiet = {
        "ROLL_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def train(name: str, inputs: Path, output: Path, steps: int) -> Path:
    file, overrides = RUNS[name]
    settings = [override.format(inputs=inputs) for override in overrides]
    settings += [f"output_dir={output}", f"exp_name={name}", "seed=7", "track_with=none"]
    python(
        "-m",
        "roll.cli",
        "train",
        str(EXAMPLES / file),
        *settings,
        *([f"max_steps={steps}"] if steps else []),
    )
    return output / name


def make_inputs(inputs: Path) -> None:
    """Data, a random model for each task, and what the reinforcement runs start from."""
    if (inputs / "done").exists():
        return
    python(str(EXAMPLES / "dpo" / "make_data.py"), str(inputs / "pairs"), "--model")
    python(str(EXAMPLES / "rlvr" / "make_data.py"), "--output", str(inputs / "digits"))
    for task in ("add", "reverse", "sort"):
        run = train(f"{task}_sft", inputs, inputs / "warm", 0)
        [model] = run.glob("checkpoints/*/actor_train")
        shutil.copytree(model, inputs / f"{task}_sft")
    for name, (file, _) in RUNS.items():
        if file.startswith("agentic/"):
            python(
                str(EXAMPLES / "agentic" / "warm_start.py"),
                str(EXAMPLES / file),
                f"pretrain={inputs / name}",
            )
    (inputs / "done").touch()


def result(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        {key: value for key, value in line.items() if not any(part in key for part in NOT_A_RESULT)}
        for line in lines
    ]
    weights = sorted((run / "checkpoints").glob("*/*/*.safetensors"))
    sums = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in weights
    }
    return {"metrics": metrics, "weights": sums}


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for before, after in zip(old["metrics"], new["metrics"], strict=False):
        found += [
            f"step {before.get('step')}: {key}: {before.get(key)} before, {after.get(key)} now"
            for key in sorted(before.keys() | after.keys())
            if json.dumps(before.get(key)) != json.dumps(after.get(key))
        ]
    if len(old["metrics"]) != len(new["metrics"]):
        found.append(f"{len(old['metrics'])} lines of metrics before, {len(new['metrics'])} now")
    if old["weights"] != new["weights"]:
        found.append(f"weights: {old['weights']} before, {new['weights']} now")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all if none is given")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--inputs", type=Path, default=Path(tempfile.gettempdir()) / "roll_same_runs"
    )
    args = parser.parse_intermixed_args()
    make_inputs(args.inputs)
    recorded = json.loads(args.file.read_text()) if args.file.exists() else {}
    different = 0
    for name in args.names or RUNS:
        with tempfile.TemporaryDirectory() as output:
            new = result(train(name, args.inputs, Path(output), args.steps))
        if args.action == "record":
            recorded[name] = new
            args.file.write_text(json.dumps(recorded))
            print(
                f"{name}: {len(new['metrics'])} steps, {len(new['weights'])} files of weights recorded",
                flush=True,
            )
            continue
        found = difference(recorded[name], new)
        different += bool(found)
        print(
            f"{name}: {'equal' if not found else 'DIFFERENT'}",
            *found[:10],
            sep="\n    ",
            flush=True,
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
