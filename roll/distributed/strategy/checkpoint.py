"""What exact resume needs beside the weights: optimizer, schedule and random states, in a folder of their own.

ROLE/                    opens with plain `from_pretrained`: weights in training precision, config, tokenizer
  training/optimizer/    torch.distributed.checkpoint: sharded by rank, loads with any number of ranks
  training/state.json    schedule, counters, and what made this checkpoint
  training/rng-R.pt      random states of rank R
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from roll.exceptions import DataError

FORMAT_VERSION = 1


def save_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool
) -> None:
    """Write the optimizer's state under the names of the parameters. `sharded`: all ranks call this together."""
    state = get_optimizer_state_dict(model, optimizer)
    with _quiet():
        dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=not sharded)


def load_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool
) -> None:
    """Read what `save_optimizer` wrote, from any number of ranks to any number of ranks."""
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no optimizer state here; to start from the weights alone, set `pretrain` to this checkpoint"
        )
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with _quiet():
        dcp.load(state, checkpoint_id=folder, no_dist=not sharded)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a process which says `no_dist` is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def random_states() -> dict[str, Any]:
    """The state of every generator that this process draws from, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            cached,
        ],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def save_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps({"format_version": FORMAT_VERSION, **value}, indent=2) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"{path}: not found; is {path.parent.parent} a checkpoint that roll wrote?"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not valid JSON ({error}); the checkpoint is damaged, use an earlier one"
        ) from None
    if value.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version is {value.get('format_version')!r}, this version of roll reads {FORMAT_VERSION}"
        )
    return value
