"""`roll new` writes a project that checks, and that trains with the command of its own README."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll.commands.new_project import NUM_TEST, NUM_TRAIN, new_project
from roll.exceptions import ConfigError
from roll.pipeline.registry import load_config
from roll.utils.tracking import read_metrics


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return new_project(tmp_path_factory.mktemp("new") / "project")


def test_it_is_complete(project, monkeypatch):
    named = re.findall(r"^\| `([^`]+)` \|", (project / "README.md").read_text(), flags=re.MULTILINE)
    assert {"reward.py", "grpo.yaml", "warm_start.yaml"} <= set(named)
    assert [name for name in named if not (project / name).exists()] == ["runs/"]
    monkeypatch.chdir(project)
    for name in ("warm_start.yaml", "grpo.yaml"):
        assert load_config(name, warn=False).config.missing_for_training() == []


def test_its_data_are_right_and_separate(project):
    files = [project / "data" / name for name in ("train.jsonl", "test.jsonl")]
    train, test = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert (len(train), len(test)) == (NUM_TRAIN, NUM_TEST)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert train[0]["prompt"] == train[0]["ground_truth"][::-1] + "<"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        new_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_of_its_readme_trains(project):
    [command] = re.findall(
        r"^```\n(.*?)\n```", (project / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=project, env={**os.environ, "PATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    metric = "val_correct/all/mean"
    values = [
        line[metric] for line in read_metrics(project / "runs/grpo/metrics.jsonl") if metric in line
    ]
    assert (
        values[0] <= 0.8 and values[-1] >= 0.85
    )  # the warm start may stop well above its goal of 0.35
    assert (project / "runs/grpo/report.html").is_file()
