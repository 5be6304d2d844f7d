"""Every YAML file of the repository loads: configs as configs, shared files (in folders named config) as bases."""

from pathlib import Path

import pytest

from roll.configs.loader import dump_yaml, load_yaml
from roll.pipeline.registry import load_config

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "tests/configs/data").rglob("*.yaml")])
CONFIGS = [path for path in FILES if path.parent.name != "config"]


def test_there_are_examples_of_every_pipeline():
    found = {load_config(path, warn=False).config.pipeline for path in CONFIGS if "examples" in path.parts}
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


@pytest.mark.parametrize("path", [path for path in CONFIGS if "examples" in path.parts], ids=lambda path: path.stem)
def test_examples_have_neither_leftovers_nor_surprises(path):
    assert load_config(path).warnings() == []
