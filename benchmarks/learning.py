"""Do the examples learn, on other seeds and with other arithmetic too? Each is run from nothing, as
its own lines say.

    python benchmarks/learning.py all --seeds 0 1 2 3 4 5 6 7 8 9 --arithmetic rotate --jobs 2 --results FILE.json
    python benchmarks/learning.py frozen_lake_gigpo sort_grpo [--seeds 0 1 2] [--arithmetic avx2] [--set KEY=VALUE ...]
    python benchmarks/learning.py reverse_grpo --shuffle        # the control: rewards dealt to the wrong samples
    python benchmarks/learning.py --readme                      # the table of results/learning.json into README.md

A line is one run: success of greedy answers on held-out prompts or seeds before and after training,
its curve, success of sampled answers in the first and in the last five training steps, and the
processor's seconds from random weights to the end, warm start included. RECIPES says what a run has
to reach at its end to count as learned; the learning tests ask for the same.

Another processor adds in another order, and after some steps draws other samples. `--arithmetic`
makes this one do so: one of the ARITHMETIC settings, or `rotate`, which gives seed k the k-th of
them in turn.

Every run is a process of its own with one thread, if its setting says nothing else; one that fails
costs its own line only. The runs stay in --output, so that `roll view` can show them; --results
gets each run as it ends, in place of an earlier one of the same name, seed and setting.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
RESULTS = HERE / "results" / "learning.json"
README = HERE / "README.md"
MARKS = (
    "<!-- learning table: written by benchmarks/learning.py --readme -->",
    "<!-- end of learning table -->",
)
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Recipe:
    """What a run has to reach at its end to count as learned."""

    greedy: float  # success of greedy answers in the last validation
    sampled: float = 0.0  # mean success of sampled answers in the last five training steps

    def learned(self, run: dict[str, list[float]]) -> bool:
        return (
            run["greedy"][-1] >= self.greedy
            and statistics.mean(run["sampled"][-5:]) >= self.sampled
        )


RECIPES = {
    "reverse_grpo": Recipe(greedy=0.9),
    "reverse_ppo": Recipe(greedy=0.9),
    "sort_grpo": Recipe(greedy=0.75),
    "add_grpo": Recipe(greedy=0.8),
    "grpo_minimal": Recipe(greedy=0.9),
    "dpo_tiny": Recipe(greedy=0.95),
    "frozen_lake_gigpo": Recipe(greedy=1.0, sampled=0.9),
    "frozen_lake_grpo": Recipe(greedy=1.0, sampled=0.9),
    "frozen_lake_reinforce": Recipe(greedy=1.0, sampled=0.9),
    "frozen_lake_segment": Recipe(greedy=1.0, sampled=0.9),
    "frozen_lake_random": Recipe(greedy=0.8),
    "guess_number": Recipe(greedy=0.65, sampled=0.65),
}

ARITHMETIC = {
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "one-thread": {"OMP_NUM_THREADS": "1"},
    # Threads that wait must sleep: spinning ones take the processor from those they wait for on a
    # busy machine.
    "two-threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shuffle_rewards(seed: int) -> None:
    """From now on every sample gets the reward of another one, drawn over all samples of a step."""
    from roll.rollout.prompts import PromptSource

    score, draw = PromptSource.score, random.Random(seed)

    def dealt(self: PromptSource, trajectories: Any) -> list[str | None]:
        reasons = score(self, trajectories)
        if any(item.traj_group_id.startswith("val") for item in trajectories):
            return reasons
        worth = [(item.turns[0].reward, item.reward, item.reward_parts) for item in trajectories]
        draw.shuffle(worth)
        for item, (points, reward, parts) in zip(trajectories, worth, strict=True):
            item.turns[0].reward, item.reward, item.reward_parts = points, reward, parts
        return reasons

    PromptSource.score = dealt  # pyrefly: ignore[bad-assignment]


def train(config: Path, overrides: list[str]) -> list[dict[str, Any]]:
    from roll.pipeline.registry import load_config, pipeline_class
    from roll.utils.tracking import read_metrics

    settings = load_config(config, [*overrides, "track_with=none"]).config
    with pipeline_class(settings)(settings, progress=False) as pipeline:
        pipeline.run()
    return read_metrics(pipeline.run_dir / "metrics.jsonl")


def run_digits(
    name: str, seed: int, folder: Path, shuffle: bool, more: list[str]
) -> dict[str, list[float]]:
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
    lines = train(
        EXAMPLES / "rlvr" / f"{name}.yaml", [*data, f"pretrain={folder}/{task}_sft", *more]
    )
    return {
        "greedy": values(lines, "val_correct/all/mean"),
        "sampled": values(lines, "critic/score/mean"),
    }


def run_game(name: str, seed: int, folder: Path, more: list[str]) -> dict[str, list[float]]:
    config = EXAMPLES / "agentic" / f"{name}.yaml"
    own = [f"seed={seed}", f"pretrain={folder}/model", f"output_dir={folder}", *more]
    warm_start = load(EXAMPLES / "agentic" / "warm_start.py")
    warm_start.warm_start(str(config), own, 25)
    lines = train(config, own)
    return {"greedy": values(lines, "val/success"), "sampled": values(lines, "env/success")}


def run_pairs(name: str, seed: int, folder: Path, more: list[str]) -> dict[str, list[float]]:
    """Greedy and sampled are the share of pairs, held out and trained on, of which the better
    answer is preferred."""
    make_data = [
        sys.executable,
        str(EXAMPLES / "dpo" / "make_data.py"),
        str(folder),
        "--model",
        "--seed",
        str(seed),
    ]
    subprocess.run(make_data, check=True, capture_output=True)
    data = [
        f"{role}.data_args.file_name={folder}/{file}.jsonl" for role, file in PAIR_FILES.items()
    ]
    own = [f"seed={seed}", f"pretrain={folder}/model", f"output_dir={folder}", *data, *more]
    lines = train(EXAMPLES / "dpo" / f"{name}.yaml", own)
    return {"greedy": values(lines, "val/actor/acc"), "sampled": values(lines, "actor/acc")}


PAIR_FILES = {"actor_train": "train", "validation": "validation"}


def run_script(name: str, seed: int) -> dict[str, list[float]]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--seed", str(seed)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [(before, after)] = re.findall(r"Held-out accuracy: (\S+) before, (\S+) after", printed)
    between = re.findall(r"held-out accuracy (\S+)", printed)
    sampled = re.findall(r"step +\d+  reward (\S+)", printed)
    return {
        "greedy": [float(x) for x in [before, *between, after]],
        "sampled": [float(x) for x in sampled],
    }


def values(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


def curve(numbers: list[float]) -> str:
    return "".join(BARS[min(int(number * len(BARS)), len(BARS) - 1)] for number in numbers)


def run_here(name: str, seed: int, folder: Path, shuffle: bool, more: list[str]) -> None:
    """One run in this process; its last line of output is the result."""
    if (EXAMPLES / "rlvr" / f"{name}.yaml").exists():
        found = run_digits(name, seed, folder, shuffle, more)
    elif (EXAMPLES / "agentic" / f"{name}.yaml").exists():
        found = run_game(name, seed, folder, more)
    elif (EXAMPLES / "dpo" / f"{name}.yaml").exists():
        found = run_pairs(name, seed, folder, more)
    else:
        found = run_script(name, seed)
    print(
        json.dumps({"name": name, "seed": seed, **found, "seconds": round(sum(os.times()[:4]), 1)})
    )


def run_apart(name: str, seed: int, arithmetic: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own; `error` in place of its numbers if that fails."""
    folder = args.output / f"{name}{'-shuffled' if args.shuffle else ''}-{seed}-{arithmetic}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        __file__,
        name,
        "--seeds",
        str(seed),
        "--here",
        "--output",
        str(folder),
    ]
    command += ["--shuffle"] * args.shuffle + (["--set", *args.set] if args.set else [])
    quiet = {"ROLL_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, **ARITHMETIC[arithmetic]},
    )
    run = {
        "name": name,
        "seed": seed,
        "arithmetic": arithmetic,
        "shuffled": args.shuffle,
        "set": args.set,
    }
    title = f"{name + (' shuffled' if args.shuffle else ''):22s} seed {seed} {arithmetic:14s}"
    if done.returncode:
        print(f"{title}  failed:\n{done.stderr}", flush=True)
        return {**run, "error": done.stderr}
    run |= json.loads(done.stdout.strip().splitlines()[-1])
    greedy, sampled = run["greedy"], run["sampled"]
    verdict = "learned" if RECIPES[name].learned(run) else "not learned"
    print(
        f"{title}  greedy {greedy[0]:.3f} -> {greedy[-1]:.3f}  {curve(greedy)}  sampled {sampled[0]:.3f} -> "
        f"{statistics.mean(sampled[-5:]):.3f}  {run['seconds']:.0f} s  {verdict}",
        flush=True,
    )
    return run


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("name", "seed", "arithmetic", "shuffled", "set"))


def keep(path: Path, run: dict[str, Any]) -> None:
    """Put a run into the results file, one line for each run, in place of an earlier one like
    it."""
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    runs = sorted(
        [*(old for old in runs if not same(old, run)), run], key=lambda r: (r["name"], r["seed"])
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n", encoding="utf-8")


def summary(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """The cells of a recipe's row: what it asks for, and what its runs reached."""
    ended = [run for run in runs if "error" not in run]
    if not ended:
        return [name, "", f"0 of {len(runs)}", "", "", "", ""]
    asked = f"greedy {RECIPES[name].greedy:g}"
    asked += f", sampled {RECIPES[name].sampled:g}" if RECIPES[name].sampled else ""
    before, after = [run["greedy"][0] for run in ended], [run["greedy"][-1] for run in ended]
    sampled = [statistics.mean(run["sampled"][-5:]) for run in ended]
    seconds = [run["seconds"] for run in ended]
    return [
        name,
        asked,
        f"{sum(map(RECIPES[name].learned, ended))} of {len(runs)}",
        f"{min(before):.2f} to {max(before):.2f}",
        f"{min(after):.3f}, {statistics.median(after):.3f}",
        f"{min(sampled):.3f}, {statistics.median(sampled):.3f}",
        f"{min(seconds):.0f} to {max(seconds):.0f}",
    ]


HEADER = [
    "recipe",
    "asked for",
    "learned",
    "before",
    "greedy: worst, median",
    "sampled: worst, median",
    "seconds",
]


def recorded() -> list[dict[str, Any]]:
    """The runs of the results file that are as `all --arithmetic rotate` makes them."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    settings = list(ARITHMETIC)
    plain = [
        run for run in runs if run["name"] in RECIPES and not run["shuffled"] and not run["set"]
    ]
    return [run for run in plain if run["arithmetic"] == settings[run["seed"] % len(settings)]]


def table() -> str:
    rows = [HEADER, ["---"] * len(HEADER)]
    rows += [
        summary(name, own)
        for name in RECIPES
        if (own := [run for run in recorded() if run["name"] == name])
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_readme() -> None:
    """Put the table of the results file between the marks of benchmarks/README.md."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="recipes, or all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arithmetic", choices=["rotate", *ARITHMETIC], default="one-thread")
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the example's config"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("output/learning"))
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--readme",
        action="store_true",
        help="copy the table of results/learning.json into README.md",
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.readme:
        return write_readme()
    if args.here:
        return run_here(args.names[0], args.seeds[0], args.output, args.shuffle, args.set)
    names = list(RECIPES) if "all" in args.names else args.names
    settings = list(ARITHMETIC)
    results = []
    with ThreadPoolExecutor(args.jobs) as executor:
        runs = [
            executor.submit(
                run_apart,
                name,
                seed,
                settings[seed % len(settings)] if args.arithmetic == "rotate" else args.arithmetic,
                args,
            )
            for name in names
            for seed in args.seeds
        ]
        for run in as_completed(runs):
            results.append(run.result())
            if args.results is not None:
                keep(args.results, results[-1])
    for name in names:
        cells = summary(name, [run for run in results if run["name"] == name])
        print(", ".join(f"{title} {cell}" for title, cell in zip(HEADER, cells, strict=True)))
    return None


if __name__ == "__main__":
    main()
