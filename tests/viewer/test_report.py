"""The files of a report, and the config of a run beside the defaults."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_reader import read_data
from synthetic_run import write_hostile_run, write_rollouts, write_run

from roll.pipeline.registry import load_config
from roll.viewer import build_report, report, view
from roll.viewer.config_diff import config_rows
from roll.viewer.report import finite_json

GOOD = Path(__file__).parents[1] / "configs" / "data" / "good"
LINKS = re.compile(r'(?:src|href)="([^"#]+)"')


def test_a_report_lies_in_the_run_folder_and_may_be_moved(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=12)
    page = build_report([run])
    assert page == run / "report.html"
    data = run / "report" / "data"
    index = read_data(data / "index.js")
    (entry,) = index["runs"]
    assert (entry["name"], entry["logged"], entry["problems"]) == ("digits", 12, [])
    assert index["live"] is False and len(entry["health"]) == 13
    metrics = read_data(data / "run0" / "metrics.js")
    assert metrics["steps"] == list(range(12)) and len(metrics["metrics"]["critic/kl"]) == 12
    assert len(read_data(data / f"{entry['steps'][0]['key']}.js")["rows"]) == 33
    kinds = {row["kind"] for row in read_data(data / "run0" / "config.js")["rows"]}
    assert "changed" in kinds
    assert str(tmp_path) not in json.dumps(index) and str(tmp_path) not in page.read_text()
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    html = (moved / "report.html").read_text()
    for name in LINKS.findall(html):
        assert name.startswith("data:") or (not os.path.isabs(name) and (moved / name).is_file())
    assert not re.search(r"https?://", html), "the page names nothing on a network"


def test_only_what_changed_is_made_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=8)
    build_report([run])
    data = run / "report" / "data" / "run0"
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    write_rollouts(run, 2, [{"sample": "new", "prompt": "p", "response": "r"}])
    (run / "rollouts" / "step-000006.jsonl").unlink()
    build_report([run])
    after = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    assert after["train-000000.js"] == before["train-000000.js"]
    assert after["train-000002.js"] != before["train-000002.js"]
    gone = {f"train-000006{piece}.js" for piece in ("", "-0", "-1")}
    assert before.keys() - after.keys() == {"train-000002-1.js", *gone}
    assert len(read_data(data / "train-000002.js")["rows"]) == 1


def test_data_of_another_format_is_made_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=2)
    build_report([run])
    step = run / "report" / "data" / "run0" / "train-000000.js"
    cache = run / "report" / "data" / "cache.json"
    step.write_text("of an older version")
    cache.write_text(cache.read_text().replace('"format": 2', '"format": 1'))
    build_report([run])
    assert len(read_data(step)["rows"]) == 33


def test_problems_of_unchanged_files_are_not_forgotten(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=4)
    (run / "rollouts" / "step-000000.jsonl").write_text("nonsense\n")
    for _ in range(2):
        build_report([run])
        (problem,) = read_data(run / "report" / "data" / "index.js")["runs"][0]["problems"]
        assert problem.startswith("step-000000.jsonl, line 1")


def test_several_runs_beside_each_other(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", steps=4), write_run(tmp_path / "two", steps=6, seed=1)
    page = build_report([one, two])
    assert page == one / "compare.html" and not (one / "report.html").exists()
    runs = read_data(one / "compare" / "data" / "index.js")["runs"]
    assert [(run["name"], run["logged"]) for run in runs] == [("one", 4), ("two", 6)]
    assert (one / "compare" / "data" / "run1" / "train-000004.js").is_file()


def test_a_page_of_another_name_and_wrong_arguments(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=4)
    page = view([run], open_browser=False, out=tmp_path / "pages" / "first.html")
    assert page == tmp_path / "pages" / "first.html" and 'src="first/core.js"' in page.read_text()
    assert (tmp_path / "pages" / "first" / "core.js").is_file()
    with pytest.raises(ValueError, match=r"\.html"):
        build_report([run], tmp_path / "pages")
    with pytest.raises(ValueError, match="at least one"):
        build_report([])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        build_report([tmp_path / "pages"])
    with pytest.raises(ValueError, match="exactly one run"):
        view([run, run], live=True)
    (run / "report").write_text("a file in the way")
    with pytest.raises(NotADirectoryError, match="report"):
        build_report([run])


def test_a_run_that_has_only_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "pipeline": "rlvr"}')
    build_report([tmp_path])
    (entry,) = read_data(tmp_path / "report" / "data" / "index.js")["runs"]
    assert entry["logged"] == 0 and entry["last"] is None and entry["steps"] == []


ODD = ["[]", "null", "{", '{"pipeline": ["x"], "status": {"a": 1}, "command": 5}', "\x00\x01"]


@pytest.mark.parametrize("text", ODD)
def test_odd_files_never_raise(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "odd", steps=4)
    rollouts = ("rollouts/step-000000.jsonl", "rollouts/val-000000.jsonl")
    for name in ("run.json", "config.yaml", "metrics.jsonl", *rollouts):
        (run / name).write_text(text)
    (run / "rollouts" / "step-000099.jsonl").mkdir()
    assert build_report([run]).is_file()


def test_a_hostile_run_makes_data_files_of_plain_characters(tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path / "hostile")
    build_report([run])
    for path in (run / "report" / "data").rglob("*.js"):
        assert re.fullmatch(r'R\.put\("[\w/-]+","[A-Za-z0-9+/=]*"\);\n', path.read_text()), path


def test_json_that_no_browser_would_read_is_named() -> None:
    value = {"a": [math.nan, -math.inf, 1.5], 3: (True, None, 2**70), "path": {1: object}}
    plain = finite_json(value)
    assert plain["a"] == ["NaN", "-Infinity", 1.5] and plain["3"] == [True, None, 2**70]
    assert plain["path"] == {"1": "<class 'object'>"}


def test_without_plotly_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "digits", steps=4)
    monkeypatch.setattr(report, "plotly_script", lambda: None)
    build_report([run])
    assert read_data(run / "report" / "data" / "index.js")["plotly"] is False
    assert not (run / "report" / "plotly.min.js").exists()


def test_the_report_needs_neither_torch_nor_plotly_to_be_imported() -> None:
    heavy = ("torch", "transformers", "plotly", "ray")
    code = f"import sys, roll.viewer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- the config ------------------------------------------------------------------------------------


def kinds(pipeline: str) -> dict[str, tuple[str, object, object]]:
    values = load_config(GOOD / f"{pipeline}.yaml", warn=False).config.to_dict()
    return {row.key: (row.kind, row.value, row.default) for row in config_rows(values, pipeline)}


def test_what_a_file_changes_is_told_from_what_it_leaves() -> None:
    rows = kinds("rlvr")
    assert rows["max_steps"] == ("changed", 100, 500)
    assert rows["actor_train.training_args.learning_rate"] == ("changed", 1e-6, 5e-5)
    assert rows["seed"] == ("default", 42, 42)
    assert rows["actor_train.worker_cls"][0] == "default", "what every such config derives"
    assert rows["pretrain"] == ("set", "some/model", None)
    found = rows["rewards.math_rule.query_filter_config.type"]
    assert found == ("changed", "mean_filter", "no_filter")
    rows = kinds("dpo")
    assert rows["seed"] == ("changed", 1, 42)
    assert rows["actor_train.training_args.seed"][0] in ("follows", "default")


@pytest.mark.parametrize("pipeline", ["dpo", "rlvr", "agentic"])
def test_few_of_many_keys_differ(pipeline: str) -> None:
    rows = kinds(pipeline)
    different = [key for key, (kind, _, _) in rows.items() if kind in ("changed", "set")]
    assert 5 < len(different) < 0.25 * len(rows)
    assert all(kind != "unknown" for kind, _, _ in rows.values())


def test_configs_without_a_class_or_that_no_longer_fit_it_have_rows() -> None:
    rows = config_rows({"a": {"b": 1, "c": {}}, "d": [1]}, "knitting")
    found = [(row.key, row.value, row.kind) for row in rows]
    assert found == [("a.b", 1, "unknown"), ("a.c", {}, "unknown"), ("d", [1], "unknown")]
    rows = config_rows({"max_steps": 7, "gone": {"x": 1}, "rewards": 5}, "rlvr")
    by_key = {row.key: row.kind for row in rows}
    assert by_key["max_steps"] == "changed" and by_key["gone.x"] == "set"
