"""Where a model lies, whether its folder is complete and what it holds; nothing is loaded."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any, Protocol

from roll.exceptions import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")


class ModelSource(Protocol):
    """What is read of `ModelArguments` here."""

    @property
    def model_name_or_path(self) -> str | None: ...
    @property
    def random_init(self) -> bool: ...


def locate_model(name: str | None) -> tuple[str, Path | None]:
    """What `from_pretrained` should be given, and the folder if it is a local one."""
    if not name:
        raise ConfigError(
            "model_name_or_path is not set: give a local folder or the name of a Hugging Face model"
        )
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        path = model_of_run(path)
        return str(path), path
    if path.is_file():
        fix = "give the folder that holds config.json and weights"
        raise ConfigError(f"model_name_or_path: {name} is a file; {fix}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model_name_or_path: the folder {path} does not exist")
    return name, None


def model_of_run(folder: Path) -> Path:
    """Where the model lies in the folder of a run (its newest complete checkpoint) or a checkpoint.

    Any other folder is returned as it is. So `pretrain: output/warm_start` takes that run's model.

    See `roll.models.checkpoint`: its folder `pipeline` makes a checkpoint complete.
    """
    if (folder / "config.json").is_file():
        return folder
    if (folder / "actor_train" / "config.json").is_file():
        return folder / "actor_train"
    complete = [path.parent for path in (folder / "checkpoints").glob("checkpoint-*/pipeline")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return folder if newest is None else newest / "actor_train"


def check_model_files(model_args: ModelSource) -> None:
    """Raises ConfigError for a local model folder without config or weights.

    Lets a run fail before anything is loaded. A Hugging Face name passes: only loading it can tell.
    """
    _, folder = locate_model(model_args.model_name_or_path)
    if folder is None:
        return
    require_config(folder)
    if not model_args.random_init:
        require_weights(folder)


def require_config(folder: Path) -> None:
    """Raises ConfigError for a folder without a config.json that can be read."""
    if not (folder / "config.json").is_file():
        raise ConfigError(_no_model(folder, "config.json"))
    read_json(folder / "config.json")


def require_weights(folder: Path) -> None:
    """Raises ConfigError for a folder without weights, or without files that its index names."""
    if not weight_files(folder):
        raise ConfigError(_no_model(folder, "weights (model*.safetensors)"))
    index = folder / "model.safetensors.index.json"
    named = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    absent = sorted(name for name in named if not (folder / name).is_file())
    if absent and not (folder / "model.safetensors").is_file():
        names = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        are = "is" if len(absent) == 1 else "are"
        raise ConfigError(
            f"model_name_or_path: {index} names {names}, which {are} not there: the model was not "
            "copied completely"
        )


def require_tokenizer(folder: Path) -> None:
    """Raises ConfigError for a folder without any tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model_name_or_path: {folder} has no tokenizer (found: {_listing(folder)}; expected "
            f"one of {', '.join(TOKENIZER_FILES)}). Copy the files of the model's own tokenizer "
            "into it."
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of a model's JSON files."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_name_or_path: {path} could not be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model_name_or_path: {path} could not be read: expected a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, in order."""
    return sorted(file for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern))


def saved_tensors(folder: Path) -> dict[str, int]:
    """Name and number of elements of every tensor in a folder's safetensors files.

    Only headers are read, JSON behind eight bytes with its length; the library would import numpy.
    """
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
        except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
            raise ConfigError(
                f"model_name_or_path: {file} is no safetensors file ({error}); copy it again"
            ) from None
        found |= {
            name: math.prod(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    return found


def cached_snapshot(name: str) -> Path | None:
    """The folder of a Hugging Face model in the local cache, as `HF_HUB_OFFLINE=1` finds it."""
    home = Path(
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = model / "snapshots" / revision
    return folder if folder.is_dir() else None


def _listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"


def _no_model(folder: Path, what: str) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        fix = "It holds a LoRA adapter: give it as adapter_name_or_path, and its base model as "
        fix += "model_name_or_path."
    else:
        fix = "`random_init: true` draws random weights for the architecture in config.json."
    return f"model_name_or_path: {folder} has no {what} (found: {_listing(folder)}). {fix}"
