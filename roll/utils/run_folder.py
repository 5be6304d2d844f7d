"""The folder of one run: which one it gets, whether it continues an earlier one, what lies in it.

OUTPUT_DIR/EXP_NAME/          a run; EXP_NAME-2, EXP_NAME-3 ... if that name is taken
  run.json                    what was started, when and how it ended
  config.yaml                 the config with every value that was in effect
  metrics.jsonl               one line of numbers a step (see `roll.utils.tracking`)
  rollouts/                   samples, one file a step
  checkpoints/                see `roll.models.checkpoint`
  report.html                 what the viewer made of all this
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from roll.exceptions import ConfigError
from roll.models.checkpoint import complete_checkpoints, find_checkpoint, get_latest_ckpt

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, and the checkpoint that it continues from, if it does."""

    path: Path
    checkpoint: Path | None = None

    def info(self) -> dict[str, Any]:
        """What run.json says; {} for a folder without one, or where a machine died writing it."""
        try:
            return json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def update_info(self, **values: Any) -> None:
        """Change entries of run.json, which is replaced: a reader never sees half of it."""
        temporary = self.path / f".{RUN_FILE}.tmp"
        text = json.dumps({**self.info(), **values}, indent=2, default=str)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path / RUN_FILE)


def open_run(
    output_dir: str | Path, exp_name: str, resume_from_checkpoint: bool | str = False
) -> RunFolder:
    """The folder for a run, made if it is new.

    Args:
        resume_from_checkpoint: False starts a new run. True continues the newest run of this name
            that has a complete checkpoint, and starts a new one if there is none. A path names a
            checkpoint, or a run, whose newest one is meant. A run is continued in its own folder if
            the checkpoint is its newest; from an older one a new run is started, so that nothing of
            what came after it is lost.

    Raises:
        ConfigError: the path is neither a complete checkpoint nor a run that has one.
    """
    owner, checkpoint = resume_point(output_dir, exp_name, resume_from_checkpoint)
    if owner is not None:
        return RunFolder(owner, checkpoint)
    for number in count(1):
        name = exp_name if number == 1 else f"{exp_name}-{number}"
        folder = Path(output_dir) / name
        try:
            # Fails if it exists, so that two runs started together get two folders.
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir() or not _is_unused(folder):
                continue
        return RunFolder(folder, checkpoint)
    raise AssertionError("there is always another number")


def resume_point(
    output_dir: str | Path, exp_name: str, resume_from_checkpoint: bool | str = False
) -> tuple[Path | None, Path | None]:
    """The run that `open_run` would continue, and from which checkpoint; nothing is made."""
    if Path(exp_name).name != exp_name:
        raise ConfigError(
            f'exp_name: found "{exp_name}", expected a name without slashes: it names the run\'s '
            "folder"
        )
    if resume_from_checkpoint is True:
        for folder in reversed(runs_of(output_dir, exp_name)):
            checkpoint = get_latest_ckpt(folder)
            if checkpoint is not None:
                return folder, checkpoint
    elif resume_from_checkpoint:
        given = Path(resume_from_checkpoint).expanduser()
        if given.is_dir() and complete_checkpoints(given):
            checkpoint = get_latest_ckpt(given)
        else:
            checkpoint = find_checkpoint(Path(output_dir) / exp_name, str(given))
        assert checkpoint is not None
        owner = checkpoint.parent.parent
        is_newest = (owner / RUN_FILE).is_file() and get_latest_ckpt(owner) == checkpoint
        return owner if is_newest else None, checkpoint
    return None, None


def runs_of(output_dir: str | Path, exp_name: str) -> list[Path]:
    """The folders of all runs of this name, oldest first."""
    pattern = re.compile(re.escape(exp_name) + r"(?:-(\d+))?")
    found = []
    for folder in Path(output_dir).glob(f"{glob.escape(exp_name)}*"):
        match = pattern.fullmatch(folder.name)
        if match and (folder / RUN_FILE).is_file():
            found.append((int(match.group(1) or 1), folder))
    return [folder for _, folder in sorted(found)]


def _is_unused(folder: Path) -> bool:
    """Empty, or left by a run that failed before its first step: a typo should cost no name."""
    entries = {entry.name for entry in folder.iterdir()}
    metrics = folder / METRICS_FILE
    if not entries:
        return True
    if "checkpoints" in entries or (metrics.is_file() and metrics.stat().st_size > 0):
        return False
    return RunFolder(folder).info().get("status") == "failed"


def now() -> str:
    """The time, as run.json writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
