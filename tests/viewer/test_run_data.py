"""Reading a run folder: what is there, and what is wrong with it."""

import json
import math
from pathlib import Path

import pytest
from synthetic_run import write_run

from roll.viewer.run_data import RunData, as_number, as_whole, json_lines, read_run


def run_of(folder: Path, *lines: str) -> RunData:
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return read_run(folder)


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "my-run", steps=12))
    assert run.name == "my-run" and run.info["pipeline"] == "rlvr" and run.config["max_steps"] == 12
    assert run.steps == list(range(12)) and len(run.metrics["critic/kl"]) == 12
    assert "actor/ratio_mean" in run.metrics, "the part after the @ is no part of the name"
    assert [file.step for file in run.rollouts if file.split == "train"] == [0, 2, 4, 6, 8, 10]
    assert run.problems == []


def test_metrics_have_gaps_and_later_values_win(tmp_path: Path) -> None:
    odd = '{"step": 1, "a": "NaN", "b": "-Infinity"}'
    run = run_of(tmp_path, '{"step": 0, "time": 1.0, "a": 1}', odd, '{"step": 1, "c": true}')
    assert run.metrics["b"] == [None, -math.inf] and run.metrics["c"] == [None, 1.0]
    assert run.metrics["a"][0] == 1.0 and math.isnan(run.metrics["a"][1] or 0.0)
    rows = [{"step": 0, "a": 1.0, "b": 1.0}, {"step": 1, "a": 2.0}, {"step": 0, "a": 3.0}]
    run = run_of(tmp_path, *map(json.dumps, rows))
    assert run.steps == [0, 1] and run.metrics == {"a": [3.0, 2.0], "b": [1.0, None]}


def test_odd_lines_become_problems(tmp_path: Path) -> None:
    odd = ("not json", "[1, 2]", '{"a": 2}', '{"step": "x"}', "")
    last = '{"step": 1, "a": [1], "t": "x"}'
    run = run_of(tmp_path, '{"step": 0, "a": 1}', *odd, last, '{"st')
    assert run.steps == [0, 1] and run.metrics == {"a": [1.0, None]}
    found = [problem[:22] for problem in run.problems]
    # The last line is still being written.
    assert found == [f"metrics.jsonl, line {n}:" for n in (2, 3, 4, 5)]
    flood = run_of(tmp_path, *["x"] * 1000, "").problems
    assert len(flood) == 51 and flood[-1].startswith("More problems")


def test_broken_files_become_problems(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "config.yaml").write_text("- a\n- b\n")
    (tmp_path / "rollouts").mkdir()
    for name in ("step-x.jsonl", "step-000001.jsonl.partial", "notes.txt"):
        (tmp_path / "rollouts" / name).write_text("")
    run = run_of(tmp_path)
    assert run.rollouts == []
    unread, odd = run.problems
    assert "run.json cannot be read" in unread and "list instead of a mapping" in odd


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_run(tmp_path)


def test_bytes_that_are_no_text_and_numbers_of_odd_kinds(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff\xfe"}\n\x00\x00\n{"b": 1}\n')
    first, odd, last = [value for _, value in json_lines(tmp_path / "x.jsonl")]
    assert first == {"a": "\ufffd\ufffd"} and isinstance(odd, str) and last == {"b": 1}
    assert as_number("Infinity") == math.inf and as_number("1") is None and as_number(None) is None
    assert as_number(10**400) == math.inf and as_whole(3.0) == 3
    assert as_whole("NaN") is None and as_whole([]) is None
