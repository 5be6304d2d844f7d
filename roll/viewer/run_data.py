"""A run folder as the report reads it. Odd data never raises: it becomes a sentence in `problems`.

A run that is being written, was killed half way, or was edited by hand must still give a report.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ROLLOUTS = re.compile(r"(step|val)-(\d{1,12})\.jsonl")
_MAX_PROBLEMS = 50


@dataclass(frozen=True)
class RolloutFile:
    """The samples of one step."""

    path: Path
    step: int
    split: str  # "train" or "val"
    stamp: str  # changes when the file does


@dataclass
class RunData:
    """What a run folder holds, without the samples themselves."""

    path: Path
    name: str
    info: dict[str, Any] = field(default_factory=dict)  # run.json
    config: dict[str, Any] = field(default_factory=dict)  # config.yaml
    steps: list[int] = field(default_factory=list)
    times: list[float | None] = field(default_factory=list)
    # Metric -> one value per entry of `steps`: None if not logged; may be NaN or infinite.
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    rollouts: list[RolloutFile] = field(default_factory=list)  # by step, training first
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Add a sentence about what could not be read; a flood of them is cut off."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(text)
        elif len(self.problems) == _MAX_PROBLEMS:
            self.problems.append("More problems follow; only the first are listed.")


def read_run(run_dir: str | Path) -> RunData:
    """Everything but the samples.

    Raises:
        FileNotFoundError: there is no such folder, or it holds nothing that a run writes.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder; expected the folder of a run, as printed when it started"
        )
    known = ("run.json", "metrics.jsonl", "config.yaml", "rollouts")
    if not any((path / name).exists() for name in known):
        raise FileNotFoundError(f"{path} holds no run: none of {', '.join(known)} is in it")
    run = RunData(path, path.resolve().name)
    run.info = _mapping(run, "run.json", json.loads)
    run.config = _mapping(run, "config.yaml", yaml.safe_load)
    _read_metrics(run)
    run.rollouts = rollout_files(path)
    return run


def rollout_files(run_dir: Path) -> list[RolloutFile]:
    """The sample files of a run folder."""
    files = []
    folder = run_dir / "rollouts"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _ROLLOUTS.fullmatch(path.name)
        if match and path.is_file():
            stat = path.stat()
            split = "train" if match[1] == "step" else "val"
            stamp = f"{stat.st_size}-{stat.st_mtime_ns}"
            files.append(RolloutFile(path, int(match[2]), split, stamp))
    return sorted(files, key=lambda file: (file.step, file.split))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, object), or (line number, what is wrong with that line)."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                # Without an end it is still being written, or was when the run was killed.
                if line.endswith("\n"):
                    yield number, str(error)
                continue
            if not isinstance(value, dict):
                value = f"expected an object, found {line.strip()[:40]!r}"
            yield number, value


def as_number(value: Any) -> float | None:
    """A float of what a metric may be: a number, a truth value, or the name of an odd number."""
    if isinstance(value, bool | int | float) or value in ("NaN", "Infinity", "-Infinity"):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def as_whole(value: Any) -> int | None:
    """An int of what a step may be."""
    number = as_number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def _mapping(run: RunData, name: str, parse: Any) -> dict[str, Any]:
    path = run.path / name
    if not path.exists():
        return {}
    try:
        value = parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        run.problem(f"{name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        run.problem(f"{name} holds {type(value).__name__} instead of a mapping.")
        return {}
    return value


def _read_metrics(run: RunData) -> None:
    path = run.path / "metrics.jsonl"
    if not path.exists():
        run.problem("There is no metrics.jsonl: nothing was logged yet.")
        return
    # Later lines of a step win, metric by metric: a step may log several times, and a run that
    # resumes logs it again.
    rows: dict[int, dict[str, float]] = {}
    times: dict[int, float | None] = {}
    try:
        for number, row in json_lines(path):
            step = as_whole(row.get("step")) if isinstance(row, dict) else None
            if isinstance(row, str) or step is None:
                found = row if isinstance(row, str) else f"step is {row.get('step')!r}"
                run.problem(f"metrics.jsonl, line {number}: {found}")
                continue
            times[step] = as_number(row.get("time"))
            values = rows.setdefault(step, {})
            for key, value in row.items():
                logged = as_number(value)
                if key not in ("step", "time") and logged is not None:
                    # The part after the @ says how a metric is reduced over workers.
                    values[key.rpartition("@")[0] or key] = logged
    except OSError as error:
        run.problem(f"metrics.jsonl cannot be read: {error}")
    run.steps = sorted(rows)
    run.times = [times[step] for step in run.steps]
    names = sorted({name for row in rows.values() for name in row})
    run.metrics = {name: [rows[step].get(name) for step in run.steps] for name in names}
