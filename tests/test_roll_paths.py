"""Code written for ROLL finds its imports, wherever the module lives here."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from roll.roll_paths import MOVED

IMPORTS = dict(
    line.split(":")
    for line in (Path(__file__).parent / "roll_imports.txt").read_text().splitlines()
    if not line.startswith("#")
)


@pytest.mark.parametrize("module", IMPORTS)
def test_what_code_for_roll_imports_is_found(module: str) -> None:
    found = importlib.import_module(module)
    missing = []
    for name in IMPORTS[module].split():
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                missing.append(name)
    assert missing == []


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_one_module(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__name__ == module.__spec__.name == MOVED[old]


def test_the_old_path_first_in_a_fresh_interpreter() -> None:
    program = (
        "import roll.configs.data_args as old\n"
        "import roll.configs.arguments as new\n"
        "print(old is new, new.DataArguments.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "roll.configs.arguments"]


def test_classes_of_a_moved_module_can_be_pickled() -> None:
    from roll.pipeline.agentic import agentic_actor_pg_worker  # ROLL's path

    worker = agentic_actor_pg_worker.ActorWorker
    assert pickle.loads(pickle.dumps(worker)) is worker
