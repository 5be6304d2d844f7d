"""Rollouts on disk: the batch of any step can be dumped, and trained again from the dump alone.

    rollout_mock: {enable: true, mode: dump, dump_dir: dumps}      writes dumps/train/step-000012 for every step
    rollout_mock: {enable: true, mode: mock, dump_dir: dumps}      trains on them: no data or environments, no engine

A dump is the scored batch of a step, before anything that the trained models compute, in the form of `DataProto.save`.
"""

from __future__ import annotations

from pathlib import Path

from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import DataError


def dump_folder(dump_dir: str | Path, step: int) -> Path:
    return Path(dump_dir) / "train" / f"step-{step:06d}"


def dump_rollout(dump_dir: str | Path, step: int, batch: DataProto) -> Path:
    """Write the scored batch of a step; an earlier dump of the step is replaced."""
    folder = dump_folder(dump_dir, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    batch.save(folder)
    return folder


def load_rollout(dump_dir: str | Path, step: int) -> DataProto:
    """The batch that `dump_rollout` wrote for this step."""
    folder = dump_folder(dump_dir, step)
    if not folder.is_dir():
        there = sorted(path.name for path in folder.parent.glob("step-*"))
        found = f"there are {len(there)}, {there[0]} to {there[-1]}" if there else "there are none"
        raise DataError(
            f"rollout_mock: {folder} has no dump for step {step} ({found}). Set max_steps to the steps that were "
            "dumped, or make the dump with rollout_mock.mode=dump"
        )
    return DataProto.load(folder)
