"""`roll new PROJECT`: configs, a reward function, data and a tiny model that train as they are."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from roll.exceptions import ConfigError

TEMPLATE = Path(__file__).with_name("project")
CHARACTERS = "0123456789<"
DIGITS = 5
NUM_TRAIN, NUM_TEST = 20_000, 500


def new_project(folder: Path, *, seed: int = 0) -> Path:
    """Write the project. A folder that has something in it is left alone.

    Raises:
        ConfigError: `folder` exists and is not empty, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another one")
    # The model needs torch, which takes seconds to import: bad names are refused first.
    from roll.models.tiny import make_tiny_model

    shutil.copytree(
        TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    # Different prompts like `12345<`, whose right answer is `54321`.
    numbers = random.Random(seed).sample(range(10**DIGITS), NUM_TRAIN + NUM_TEST)
    lines = []
    for number in numbers:
        text = f"{number:0{DIGITS}d}"
        row = {"prompt": f"{text}<", "ground_truth": text[::-1], "tag": "digits"}
        lines.append(json.dumps(row) + "\n")
    (folder / "data").mkdir(exist_ok=True)
    for name, part in (("test", lines[:NUM_TEST]), ("train", lines[NUM_TEST:])):
        (folder / "data" / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    make_tiny_model(folder / "model", CHARACTERS, seed=seed)
    return folder
