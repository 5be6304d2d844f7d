"""Where checkpoints lie, which of them are complete, and which are kept.

    OUTPUT_DIR/checkpoints/checkpoint-STEP/ROLE/       one folder for each role that trains
    OUTPUT_DIR/checkpoints/checkpoint-STEP/pipeline/   the pipeline's own state, written last

Each folder appears whole or not at all, and the pipeline's comes last: a checkpoint that has it is complete.

Looking for checkpoints needs no torch, because `roll check` does it; saving and loading them imports it.
"""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from roll.exceptions import ConfigError, DataError

PIPELINE = "pipeline"
STATE_FILE = "state.json"
RANDOM_FILE = "random.pt"
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
        hint = (
            f"complete ones nearby: {', '.join(nearby)}"
            if nearby
            else "no complete checkpoint is nearby"
        )
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not a complete checkpoint of a run; {hint}"
        )
    return folder


def save_pipeline_state(
    output_dir: str | Path,
    global_step: int,
    states: Mapping[str, Mapping[str, Any]],
    *,
    max_ckpt_to_keep: int = 0,
    keep_steps: Collection[int] = (),
) -> Path:
    """Complete a checkpoint, after its roles have saved theirs, and delete the oldest beyond `max_ckpt_to_keep`, those
    of `keep_steps` excepted.

    `states` are the state dicts of what the pipeline itself carries from step to step, by name: the position in the
    data, KL controllers, running moments. They are plain values: JSON keeps Python's floats exactly.
    """
    import torch

    from roll.distributed.strategy.checkpoint import random_states
    from roll.models.hf_checkpoint import atomic_folder

    folder = role_folder(output_dir, global_step, PIPELINE)
    with atomic_folder(folder, replace=True) as temporary:
        text = json.dumps({"global_step": global_step, "states": states}, indent=2)
        (temporary / STATE_FILE).write_text(text + "\n")
        torch.save(random_states(), temporary / RANDOM_FILE)
    prune_checkpoints(output_dir, max_ckpt_to_keep, keep_steps)
    return folder


def load_pipeline_state(checkpoint: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """(global step, states) of a complete checkpoint; also restores this process's random states."""
    import torch

    from roll.distributed.strategy.checkpoint import restore_random_states

    saved = _read_state(checkpoint)
    restore_random_states(torch.load(checkpoint / PIPELINE / RANDOM_FILE, weights_only=True))
    return saved["global_step"], saved["states"]


def read_global_step(checkpoint: Path) -> int:
    """The steps that were done when the checkpoint was made."""
    return _read_state(checkpoint)["global_step"]


def _read_state(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / PIPELINE / STATE_FILE
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); use an earlier checkpoint") from None


def prune_checkpoints(
    output_dir: str | Path, max_ckpt_to_keep: int, keep_steps: Collection[int] = ()
) -> list[Path]:
    """Delete all but the newest `max_ckpt_to_keep` complete checkpoints (0 keeps all) and those of `keep_steps`;
    returns what was deleted."""
    kept = {checkpoint_folder(output_dir, step) for step in keep_steps}
    old = complete_checkpoints(output_dir)[:-max_ckpt_to_keep] if max_ckpt_to_keep > 0 else []
    old = [folder for folder in old if folder not in kept]
    for folder in old:
        # The marker goes first: a deletion that is interrupted leaves no folder that looks complete.
        shutil.rmtree(folder / PIPELINE)
        shutil.rmtree(folder)
    return old
