"""Do the examples learn, on other seeds too? Each is run from nothing, as its README lines say, and its curve printed.

    python benchmarks/learning.py reverse_grpo reverse_ppo frozen_lake_gigpo ... [--seeds 0 1 2] [--jobs 1]
        [--set KEY=VALUE ...]
    python benchmarks/learning.py reverse_grpo --shuffle        # the control: rewards dealt to the wrong samples

A line is one run: success of greedy answers on held-out prompts or seeds before and after training, its curve, success
of sampled answers in the first and in the last training step, and the seconds from random weights to the end, warm
start included. With --jobs 2 two runs share the machine, one thread each. The runs stay in --output, so that
`roll view` can show them; the table is added to --results as JSON if that is given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
BARS = "▁▂▃▄▅▆▇█"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shuffle_rewards(seed: int) -> None:
    """From now on every sample gets the reward of another one, drawn over all samples of a step."""
    from dataclasses import replace

    from roll.pipeline.rlvr.scoring import Scorer

    scored, draw = Scorer.__call__, random.Random(seed)

    def dealt(self: Scorer, samples: Any) -> list[Any]:
        verdicts = scored(self, samples)
        if any(sample.group.startswith("val") for sample in samples):
            return verdicts
        worth = [(verdict.score, verdict.reward, verdict.parts) for verdict in verdicts]
        draw.shuffle(worth)
        return [
            replace(verdict, score=score, reward=reward, parts=parts)
            for verdict, (score, reward, parts) in zip(verdicts, worth, strict=True)
        ]

    Scorer.__call__ = dealt  # pyrefly: ignore[bad-assignment]


def train(config: Path, overrides: list[str]) -> list[dict[str, Any]]:
    from roll.pipeline.registry import load_config, pipeline_class
    from roll.utils.tracking import read_metrics

    settings = load_config(config, [*overrides, "track_with=none"]).config
    with pipeline_class(settings)(settings, progress=False) as pipeline:
        pipeline.run()
    return read_metrics(pipeline.run_dir / "metrics.jsonl")


def run_digits(name: str, seed: int, folder: Path, shuffle: bool, more: list[str]) -> dict[str, list[float]]:
    load(EXAMPLES / "rlvr" / "make_data.py").make(folder / "digits", seed=seed)
    task = name.partition("_")[0]
    data = [
        f"seed={seed}",
        f"output_dir={folder}",
        f"actor_train.data_args.file_name={folder}/digits/{task}_train.jsonl",
        f"validation.data_args.file_name={folder}/digits/{task}_test.jsonl",
    ]
    train(EXAMPLES / "rlvr" / f"{task}_sft.yaml", [*data, f"pretrain={folder}/digits/model"])
    if shuffle:
        shuffle_rewards(seed)
    lines = train(EXAMPLES / "rlvr" / f"{name}.yaml", [*data, f"pretrain={folder}/{task}_sft", *more])
    return {"greedy": values(lines, "val_correct/all/mean"), "sampled": values(lines, "critic/score/mean")}


def run_game(name: str, seed: int, folder: Path, more: list[str]) -> dict[str, list[float]]:
    config = EXAMPLES / "agentic" / f"{name}.yaml"
    own = [f"seed={seed}", f"pretrain={folder}/model", f"output_dir={folder}", *more]
    warm_start = load(EXAMPLES / "agentic" / "warm_start.py")
    warm_start.warm_start(str(config), own, 25)
    lines = train(config, own)
    return {"greedy": values(lines, "val/success"), "sampled": values(lines, "env/success")}


def values(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


def curve(numbers: list[float]) -> str:
    return "".join(BARS[min(int(number * len(BARS)), len(BARS) - 1)] for number in numbers)


def run_here(name: str, seed: int, folder: Path, shuffle: bool, more: list[str]) -> None:
    """One run in this process; its last line of output is the result."""
    started = time.monotonic()
    digits = (EXAMPLES / "rlvr" / f"{name}.yaml").exists()
    found = run_digits(name, seed, folder, shuffle, more) if digits else run_game(name, seed, folder, more)
    print(json.dumps({"name": name, "seed": seed, "shuffled": shuffle, **found, "seconds": time.monotonic() - started}))


def run_apart(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.output / f"{name}{'-shuffled' if args.shuffle else ''}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, name, "--seeds", str(seed), "--here", "--output", str(folder)]
    command += ["--shuffle"] * args.shuffle + (["--set", *args.set] if args.set else [])
    threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
    environment = {**os.environ, "ROLL_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **threads}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}:\n{done.stderr}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    greedy, sampled = result["greedy"], result["sampled"]
    print(
        f"{name + (' shuffled' if args.shuffle else ''):28s} seed {seed}  greedy {greedy[0]:.3f} -> {greedy[-1]:.3f}  "
        f"{curve(greedy)}  sampled {sampled[0]:.3f} -> {sampled[-1]:.3f}  {result['seconds']:.0f} s",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="files of examples/rlvr or examples/agentic, without .yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the example's config")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("output/learning"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return run_here(args.names[0], args.seeds[0], args.output, args.shuffle, args.set)
    with ThreadPoolExecutor(args.jobs) as executor:
        runs = [executor.submit(run_apart, name, seed, args) for name in args.names for seed in args.seeds]
        results = [run.result() for run in runs]
    if args.results is not None:
        before = json.loads(args.results.read_text(encoding="utf-8")) if args.results.exists() else []
        args.results.write_text(json.dumps(before + results, indent=1), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
