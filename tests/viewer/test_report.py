"""The files of a report."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_reader import read_data
from synthetic_run import write_hostile_run, write_rollouts, write_run

from roll.viewer import build_report, report, view


def test_a_report_lies_in_the_run_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=12)
    page = build_report([run])
    assert page == run / "report.html"
    html = page.read_text()
    for name in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert name.startswith("data:") or (run / name).is_file(), name
    assert not re.search(r"https?://", html), "the page names nothing on a network"
    index = read_data(run / "report" / "data" / "index.js")
    (entry,) = index["runs"]
    assert (
        entry["name"] == "digits"
        and entry["logged"] == 12
        and entry["problems"] == []
        and index["live"] is False
    )
    assert len(entry["health"]) == 13
    metrics = read_data(run / "report" / "data" / "run0" / "metrics.js")
    assert metrics["steps"] == list(range(12)) and len(metrics["metrics"]["critic/kl"]) == 12
    step = read_data(run / "report" / "data" / f"{entry['steps'][0]['key']}.js")
    assert len(step["rows"][0]) == 33
    assert any(
        row["kind"] == "changed"
        for row in read_data(run / "report" / "data" / "run0" / "config.js")["rows"]
    )


def test_no_path_of_this_machine_is_in_the_page(tmp_path: Path) -> None:
    page = build_report([write_run(tmp_path / "digits", steps=4)])
    data = read_data(page.parent / "report" / "data" / "index.js")
    assert str(tmp_path) not in json.dumps(data) and str(tmp_path) not in page.read_text()


def test_only_what_changed_is_made_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=8)
    build_report([run])
    data = run / "report" / "data"
    before = {path.name: path.stat().st_mtime_ns for path in (data / "run0").iterdir()}
    write_rollouts(run, 2, [{"sample": "new", "prompt": "p", "response": "r"}])
    (run / "rollouts" / "step-000006.jsonl").unlink()
    build_report([run])
    after = {path.name: path.stat().st_mtime_ns for path in (data / "run0").iterdir()}
    assert (
        after["train-000000.js"] == before["train-000000.js"]
        and after["train-000002.js"] != before["train-000002.js"]
    )
    assert before.keys() - after.keys() == {
        "train-000002-1.js",
        *(f"train-000006{piece}.js" for piece in ("", "-0", "-1")),
    }
    assert len(read_data(data / "run0" / "train-000002.js")["rows"][0]) == 1


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


def test_a_page_of_another_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=4)
    page = build_report([run], tmp_path / "pages" / "first.html")
    assert (
        page.is_file()
        and (tmp_path / "pages" / "first" / "core.js").is_file()
        and 'src="first/core.js"' in page.read_text()
    )
    with pytest.raises(ValueError, match=r"\.html"):
        build_report([run], tmp_path / "pages")
    with pytest.raises(ValueError, match="at least one"):
        build_report([])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        build_report([tmp_path / "pages"])


def test_a_run_that_has_only_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "pipeline": "rlvr"}')
    build_report([tmp_path])
    (entry,) = read_data(tmp_path / "report" / "data" / "index.js")["runs"]
    assert entry["logged"] == 0 and entry["last"] is None and entry["steps"] == []


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", '{"pipeline": ["x"], "status": {"a": 1}, "command": 5}', "\x00\x01"]
)
def test_odd_files_never_raise(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "odd", steps=4)
    for name in (
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "rollouts/step-000000.jsonl",
        "rollouts/val-000000.jsonl",
    ):
        (run / name).write_text(text)
    (run / "rollouts" / "step-000099.jsonl").mkdir()
    assert build_report([run]).is_file()


def test_a_hostile_run_makes_data_files_of_plain_characters(tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path / "hostile")
    build_report([run])
    for path in (run / "report" / "data").rglob("*.js"):
        assert re.fullmatch(r'R\.put\("[\w/-]+","[A-Za-z0-9+/=]*"\);\n', path.read_text()), path


def test_without_plotly_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "digits", steps=4)
    monkeypatch.setattr(report, "plotly_script", lambda: None)
    build_report([run])
    assert read_data(run / "report" / "data" / "index.js")["plotly"] is False
    assert not (run / "report" / "plotly.min.js").exists()


def test_view_writes_the_page_and_checks_its_arguments(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=4)
    assert view([run], open_browser=False, out=tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ValueError, match="exactly one run"):
        view([run, run], live=True)


def test_the_report_needs_neither_torch_nor_plotly_to_be_imported() -> None:
    heavy = ("torch", "transformers", "plotly", "ray")
    code = f"import sys, roll.viewer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "digits", steps=4)
    (run / "report").write_text("a file in the way")
    with pytest.raises(NotADirectoryError, match="report"):
        build_report([run])


def test_moving_the_folder_keeps_the_report(tmp_path: Path) -> None:
    build_report([write_run(tmp_path / "digits", steps=4)])
    moved = shutil.move(tmp_path / "digits", tmp_path / "elsewhere")
    html = (Path(moved) / "report.html").read_text()
    assert all(not os.path.isabs(name) for name in re.findall(r'(?:src|href)="([^"#]+)"', html))
