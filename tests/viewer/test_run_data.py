"""Reading a run folder: what is there, and what is wrong with it."""

import json
import math
from pathlib import Path

import pytest
from synthetic_run import write_run

from roll.viewer.run_data import as_number, as_whole, json_lines, read_run


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "my-run", steps=12))
    assert run.name == "my-run" and run.info["pipeline"] == "rlvr" and run.config["max_steps"] == 12
    assert run.steps == list(range(12)) and len(run.metrics["critic/kl"]) == 12
    assert "actor/ratio_mean" in run.metrics, (
        "the tag that says how a metric was reduced is no part of its name"
    )
    assert [file.step for file in run.rollouts if file.split == "train"] == [0, 2, 4, 6, 8, 10]
    assert run.problems == []


def test_metrics_that_are_not_logged_every_step_have_gaps(tmp_path: Path) -> None:
    lines = [
        '{"step": 0, "time": 1.0, "a": 1}',
        '{"step": 1, "a": "NaN", "b": "-Infinity"}',
        '{"step": 1, "c": true}',
    ]
    run = read_run(write(tmp_path, "metrics.jsonl", "\n".join(lines)))
    assert run.metrics["b"] == [None, -math.inf] and run.metrics["c"] == [None, 1.0]
    assert run.metrics["a"][0] == 1.0 and math.isnan(run.metrics["a"][1] or 0.0)


def test_a_step_logged_twice_keeps_the_later_values(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": 1.0, "b": 1.0}, {"step": 1, "a": 2.0}, {"step": 0, "a": 3.0}]
    run = read_run(
        write(tmp_path, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    )
    assert run.steps == [0, 1] and run.metrics == {"a": [3.0, 2.0], "b": [1.0, None]}


def test_odd_lines_become_problems(tmp_path: Path) -> None:
    lines = [
        '{"step": 0, "a": 1}',
        "not json",
        "[1, 2]",
        '{"a": 2}',
        '{"step": "x"}',
        "",
        '{"step": 1, "a": [1], "t": "x"}',
        '{"st',
    ]
    run = read_run(write(tmp_path, "metrics.jsonl", "\n".join(lines)))
    assert run.steps == [0, 1] and run.metrics == {"a": [1.0, None]}
    assert [problem[:22] for problem in run.problems] == [
        f"metrics.jsonl, line {n}:" for n in (2, 3, 4, 5)
    ], "the last line is still being written"


def test_broken_files_become_problems(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", "")
    write(tmp_path, "run.json", "{")
    write(tmp_path, "config.yaml", "- a\n- b\n")
    (tmp_path / "rollouts").mkdir()
    for name in ("step-x.jsonl", "step-000001.jsonl.partial", "notes.txt"):
        write(tmp_path / "rollouts", name, "")
    run = read_run(tmp_path)
    assert run.rollouts == [] and len(run.problems) == 2
    assert (
        "run.json cannot be read" in run.problems[0]
        and "list instead of a mapping" in run.problems[1]
    )


def test_a_flood_of_problems_is_cut_off(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, "metrics.jsonl", "x\n" * 1000))
    assert len(run.problems) == 51 and run.problems[-1].startswith("More problems")


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_run(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff\xfe"}\n\x00\x00\n{"b": 1}\n')
    values = [value for _, value in json_lines(tmp_path / "x.jsonl")]
    assert (
        values[0] == {"a": "\ufffd\ufffd"} and isinstance(values[1], str) and values[2] == {"b": 1}
    )


def test_numbers_of_odd_kinds() -> None:
    assert as_number("Infinity") == math.inf and as_number("1") is None and as_number(None) is None
    assert (
        as_number(10**400) == math.inf
        and as_whole(3.0) == 3
        and as_whole("NaN") is None
        and as_whole([]) is None
    )
