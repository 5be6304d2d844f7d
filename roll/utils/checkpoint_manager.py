"""Where checkpoints lie, which of them are complete, and which are kept.

    OUTPUT_DIR/checkpoints/checkpoint-STEP/ROLE/       one folder for each role that trains
    OUTPUT_DIR/checkpoints/checkpoint-STEP/pipeline/   the pipeline's own state, written last

Each folder appears whole or not at all, and the pipeline's comes last: a checkpoint that has it is complete.
"""

import re
import shutil
from pathlib import Path

from roll.exceptions import ConfigError

PIPELINE = "pipeline"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(output_dir: str | Path, global_step: int) -> Path:
    return Path(output_dir) / "checkpoints" / f"checkpoint-{global_step}"


def role_folder(output_dir: str | Path, global_step: int, role: str) -> Path:
    return checkpoint_folder(output_dir, global_step) / role


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = [
        (int(match.group(1)), folder)
        for folder in (Path(output_dir) / "checkpoints").glob("checkpoint-*")
        if (match := _NAME.fullmatch(folder.name)) and (folder / PIPELINE).is_dir()
    ]
    return [folder for _, folder in sorted(found)]


def get_latest_ckpt(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete_checkpoints(output_dir)), None)


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: bool | str) -> Path | None:
    """The checkpoint to continue from: False is none, True the newest of this run (if there is one), else a path."""
    if resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        return get_latest_ckpt(output_dir)
    folder = Path(resume_from_checkpoint)
    if not (folder / PIPELINE).is_dir():
        nearby = [str(path) for path in complete_checkpoints(folder)] or [
            str(p) for p in complete_checkpoints(output_dir)
        ]
        hint = f"complete ones nearby: {', '.join(nearby)}" if nearby else "no complete checkpoint is nearby"
        raise ConfigError(f"resume_from_checkpoint: {folder} is not a complete checkpoint of a run; {hint}")
    return folder


def prune_checkpoints(output_dir: str | Path, max_ckpt_to_keep: int) -> list[Path]:
    """Delete all but the newest `max_ckpt_to_keep` complete checkpoints (0 keeps all); returns what was deleted."""
    old = complete_checkpoints(output_dir)[:-max_ckpt_to_keep] if max_ckpt_to_keep > 0 else []
    for folder in old:
        # The marker goes first: a deletion that is interrupted leaves no folder that looks complete.
        shutil.rmtree(folder / PIPELINE)
        shutil.rmtree(folder)
    return old
