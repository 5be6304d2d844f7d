"""Every YAML file of the repository loads: configs as configs, shared files (in folders named
config) as bases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.configs.load import dump_yaml, load_yaml
from roll.models.tiny import make_tiny_model
from roll.pipeline.preflight import examine
from roll.pipeline.registry import load_config
from roll.utils.machine import parse_machine

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "tests/configs/data").rglob("*.yaml")]
)
CONFIGS = [path for path in FILES if path.parent.name != "config"]


def test_there_are_examples_of_every_pipeline():
    found = {
        load_config(path, warn=False).config.pipeline
        for path in CONFIGS
        if "examples" in path.parts
    }
    assert found == {"dpo", "rlvr", "agentic", "sft"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_composes(path):
    assert load_yaml(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_is_ready_to_train_and_survives_a_round_trip(path, tmp_path):
    config = load_config(path, warn=False).config
    assert config.missing_for_training() == []
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(copy, warn=False).config == config


EXAMPLES = [path for path in CONFIGS if "examples" in path.parts]
# What a reader brings, in the form that the examples' comments give.
BROUGHT = {
    "data/math": {
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "ground_truth": "2",
        "tag": "math",
    },
    "data/preferences": {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder in which the scripts of the examples have made what they make, and readers have put
    their own data."""
    folder = tmp_path_factory.mktemp("clone")
    for script, *arguments in (
        ["rlvr/make_data.py"],
        ["dpo/make_data.py", "output/dpo_data", "--model"],
    ):
        command = [sys.executable, str(ROOT / "examples" / script), *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=200)
    (folder / "data").mkdir()
    for prefix, row in BROUGHT.items():
        for split in ("train", "test"):
            (folder / f"{prefix}_{split}.jsonl").write_text((json.dumps(row) + "\n") * 512)
    for path in EXAMPLES:
        pretrain = load_config(path, warn=False).config.pretrain
        if (
            pretrain.startswith("output/") and not (folder / pretrain).exists()
        ):  # a warm start, or an earlier run
            make_tiny_model(folder / pretrain)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_once_its_data_are_made(path, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # some name models of a hub
    checked = examine(path, (), parse_machine("8xH200"))
    assert checked.errors == []
    assert [text for text in checked.warnings if "which is not installed here" not in text] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_without_its_data_names_the_file_that_is_missing(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    checked = examine(path, (), parse_machine("8xH200"))
    assert all("does not exist" in error or "no such file" in error for error in checked.errors)
    assert checked.errors or "hub" in path.read_text().lower() or path.stem == "games_single_gpu"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_have_neither_leftovers_nor_surprises(path):
    assert load_config(path).warnings() == []
