"""`roll demo`: watch a model learn on this machine, from nothing, within minutes.

A project is made as `roll new` makes it, and trained as its README says: the demo does nothing that
a user could not do with the same files, which stay where they are for a second look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.commands.new_project import new_project
from roll.exceptions import RollError
from roll.pipeline.registry import load_config, pipeline_class
from roll.utils.machine import free_threads, limit_threads
from roll.utils.run_folder import METRICS_FILE
from roll.utils.tracking import read_metrics

NUM_SHOWN = 2


@dataclass(frozen=True)
class Stage:
    """One run of the demo. `{examples}` in its words is the folder of the examples.

    Attributes:
        words: what it is about.
        metric: what says whether it learned.
        what: what the metric counts; empty for a run that only prepares the next one.
        prepare: a script of examples/ and its arguments, run before.
    """

    name: str
    words: str
    config: str
    metric: str
    what: str = ""
    overrides: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a stage came to."""

    stage: Stage
    before: float
    after: float
    seconds: float
    run_dir: Path


GRPO = (
    Stage(
        "warm start",
        "First, a little supervised learning: the model sees right answers until it gets about a "
        "third of the held-out ones.",
        "warm_start.yaml",
        "val/exact_match",
    ),
    Stage(
        "GRPO",
        "Now reinforcement: it answers each prompt eight times, a Python function says which "
        "answers are right, and what worked becomes more likely. Nobody shows it an answer any "
        "more.",
        "grpo.yaml",
        "val_correct/all/mean",
        "digits reversed, held out",
    ),
)
# Runs of the repository's examples, shortened.
AGENTIC = (
    Stage(
        "agentic",
        "A tiny model crosses a frozen lake: it sees the map, answers with a direction, sees the "
        "map again. At first it only knows what an answer looks like.",
        "{examples}/agentic/frozen_lake_gigpo.yaml",
        "val/success",
        "lake crossed, greedily",
        ("output_dir=runs",),
        ("agentic/warm_start.py", "{examples}/agentic/frozen_lake_gigpo.yaml"),
    ),
)
DPO = (
    Stage(
        "DPO",
        "Pairs of a better and a worse answer to questions about three digits: no reward, no "
        "sampling, only which of the two is preferred.",
        "{examples}/dpo/dpo_tiny.yaml",
        "val/actor/acc",
        "right digit preferred, held out",
        ("max_steps=100", "output_dir=runs"),
        ("dpo/make_data.py", "output/dpo_data", "--model"),
    ),
)


def run_demo(
    folder: Path, *, everything: bool = False, console: Console | None = None
) -> list[Outcome]:
    """Run the demo in a new folder like `folder`; prints and returns what each stage came to."""
    console = console or Console(highlight=False)
    started = time.monotonic()
    folder = _unused(folder)
    console.print("\n[bold]A model learns to write digits backwards[/]: 12345< becomes 54321.")
    console.print(
        f"A tokenizer of 14 tokens and a Qwen2 of 134,000 random parameters are made in {folder}."
    )
    threads = free_threads()
    limit_threads(threads.count)
    console.print(f"It uses {threads}.")
    outcomes = _run_project(new_project(folder / "digits"), GRPO, console)
    if everything:
        console.print("\n[bold]A model learns to act over several turns[/]")
        outcomes += _run_project(folder / "frozen_lake", AGENTIC, console)
        console.print("\n[bold]A model learns from preferences[/]")
        outcomes += _run_project(folder / "preferences", DPO, console)

    table = Table("", "before", "after", "time", title="\nWhat was learned", title_justify="left")
    for item in outcomes:
        cells = (f"{item.before:.2f}", f"{item.after:.2f}", f"{item.seconds:.0f} s")
        table.add_row(item.stage.what, *cells)
    console.print(table)
    seconds = time.monotonic() - started
    console.print(f"{seconds:.0f} s in all. The story of each run, down to its tokens:")
    for item in outcomes:
        report = item.run_dir / "report.html"
        console.print(Text(f"  {report if report.is_file() else item.run_dir}"))
    reward = outcomes[0].run_dir.parent.parent / "reward.py"
    console.print(Text(f"\nNext: change {reward}, then in that folder: roll train grpo.yaml"))
    return outcomes


def _run_project(project: Path, stages: tuple[Stage, ...], console: Console) -> list[Outcome]:
    """Run the stages inside `project`; those that only prepare have no outcome."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    project.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for stage in stages:
        console.print(Text(f"\n{stage.words}", style="cyan"))
        started = time.monotonic()
        with chdir(project):
            if stage.prepare:
                _run_example(stage.prepare)
            config = load_config(_in_examples(stage.config), stage.overrides, warn=False).config
            with pipeline_class(config)(config) as pipeline:
                pipeline.run()
            if pipeline.is_interrupted:
                raise KeyboardInterrupt
            run_dir = pipeline.run_dir.resolve()
        lines = read_metrics(run_dir / METRICS_FILE)
        values = [line[stage.metric] for line in lines if stage.metric in line]
        _print_samples(console, run_dir)
        if stage.what:
            seconds = time.monotonic() - started
            outcomes.append(Outcome(stage, values[0], values[-1], seconds, run_dir))
    return outcomes


def _print_samples(console: Console, run_dir: Path) -> None:
    """The first and the last answers to the same validation prompts, side by side."""
    files = sorted((run_dir / "rollouts").glob("val-*.jsonl"))
    samples: list[dict[str, dict[str, Any]]] = []
    for file in files[:1] + files[1:][-1:]:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        # An environment has no right answer to show.
        samples.append({row["sample"]: row for row in rows if row.get("ground_truth") is not None})
    if len(samples) < 2 or not samples[0].keys() & samples[1].keys():
        return
    first, last = samples
    titles = ("prompt", "answer before", "answer after", "right answer")
    table = Table(*titles, box=None, padding=(0, 3, 0, 0))
    # Those that were wrong before tell more than those that were right.
    keys = sorted(first.keys() & last.keys(), key=lambda key: first[key]["score"] or 0)
    for key in keys[:NUM_SHOWN]:
        one = first[key]
        cells = [one["prompt"], one["response"], last[key]["response"], one["ground_truth"]]
        table.add_row(*(Text(str(cell).replace("<|im_end|>", "")) for cell in cells))
    console.print(table)


def examples_folder() -> Path:
    """Where the examples lie: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).parents[1]
    inside = package / "examples"
    return inside if inside.is_dir() else package.parent / "examples"


def _in_examples(text: str) -> str:
    return text.replace("{examples}", str(examples_folder()))


def _run_example(command: tuple[str, ...]) -> None:
    import torch

    script, *arguments = command
    words = [sys.executable, str(examples_folder() / script), *map(_in_examples, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RollError(f"{script} failed:\n{done.stderr.strip()}")


def _unused(folder: Path) -> Path:
    number, found = 1, folder
    while found.exists() and (not found.is_dir() or any(found.iterdir())):
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
