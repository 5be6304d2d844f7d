"""metrics.jsonl is always whole; trackers come and go without stopping a run."""

import json
import logging
import math
import sys

import pytest

from roll.exceptions import install_hint
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.utils import tracking
from roll.utils.tracking import RunLog, Tracker, read_metrics, untagged


def config(**values) -> DPOConfig:
    return DPOConfig(sequence_length=8, **values)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="roll")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_line_a_step_and_numbers_that_json_does_not_have(tmp_path):
    log = RunLog(tmp_path, config(track_with="none"))
    log.log(0, {"actor/loss@sum": 0.5, "a": math.nan})
    log.log(1, {"b": math.inf, "c": -math.inf, "whole": 3})
    log.close()
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()
    ]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times) and times[0] > 1e9
    assert lines == [
        {"step": 0, "actor/loss": 0.5, "a": "NaN"},
        {"step": 1, "b": "Infinity", "c": "-Infinity", "whole": 3.0},
    ]
    back = read_metrics(log.path)
    assert math.isnan(back[0]["a"]) and (back[1]["b"], back[1]["c"]) == (math.inf, -math.inf)


def test_tags_are_left_out():
    names = ("a/b@sum", "a/b", "a@b@max", "@x")
    assert [untagged(name) for name in names] == ["a/b", "a/b", "a@b", "@x"]


def test_resume_cuts_off_what_is_done_again(tmp_path):
    log = RunLog(tmp_path, config(track_with="none"))
    for step in range(5):
        log.log(step, {"a": step, "n": math.nan})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 5, "a"')  # the machine died here
    again = RunLog(tmp_path, config(track_with="none"), first_step=3)
    again.log(3, {"a": 30})
    again.close()
    lines = [(line["step"], line["a"]) for line in read_metrics(again.path)]
    assert lines == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert '"NaN"' in again.path.read_text()


def test_a_run_that_continues_another_one_takes_its_lines_over(tmp_path):
    (tmp_path / "new").mkdir()
    first = RunLog(tmp_path, config(track_with="none"))
    for step in range(3):
        first.log(step, {"a": step})
    first.close()
    RunLog(tmp_path / "new", config(track_with="none"), first_step=2, history=first.path).close()
    assert [line["step"] for line in read_metrics(tmp_path / "new" / "metrics.jsonl")] == [0, 1]
    assert len(read_metrics(first.path)) == 3


class Memory(Tracker):
    name = "memory"
    fails_at: int | None = None

    def __init__(self, run_dir, config, options, first_step):
        self.seen, self.options, self.closed = [], options, False
        Memory.last = self

    def log(self, step, metrics):
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.seen.append((step, dict(metrics)))

    def close(self):
        self.closed = True


def test_a_tracker_that_breaks_is_named_once_and_dropped(tmp_path, monkeypatch, messages):
    monkeypatch.setattr(tracking, "TRACKERS", {"memory": Memory})
    monkeypatch.setattr(Memory, "fails_at", 1)
    log = RunLog(tmp_path, config(track_with=["memory"], tracker_kwargs={"project": "p"}))
    for step in range(4):
        log.log(step, {"a@sum": step})
    log.close()
    assert Memory.last.seen == [(0, {"a": 0.0})] and Memory.last.options == {"project": "p"}
    assert len(read_metrics(log.path)) == 4
    [(level, text)] = messages()
    assert level == "WARNING" and "memory failed and is left out" in text
    assert "ConnectionError: no network" in text


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ({}, "INFO"),
        ({"track_with": "tensorboard"}, "WARNING"),
        ({"track_with": "wandb"}, "WARNING"),
    ],
)
def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch, messages, values, level):
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    log = RunLog(tmp_path, config(**values))
    log.log(0, {"a": 1})
    log.close()
    [(found, text)] = messages()
    assert found == level and install_hint("tracking") in text
    assert len(read_metrics(log.path)) == 1


def test_an_unknown_tracker_is_a_warning_that_lists_the_known_ones(tmp_path, messages):
    RunLog(tmp_path, config(track_with=["swanlab", "none"])).close()
    [(level, text)] = messages()
    assert level == "WARNING" and "no tracker swanlab" in text
    assert "tensorboard, wandb, trackio" in text


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    log = RunLog(
        tmp_path,
        config(track_with="tensorboard", tracker_kwargs={"log_dir": str(tmp_path / "boards")}),
    )
    log.log(0, {"a": 1})
    log.close()
    assert list((tmp_path / "boards" / tmp_path.name).glob("events.*"))


def test_stdout_prints_a_line(tmp_path, messages):
    log = RunLog(tmp_path, config(track_with="stdout"))
    log.log(3, {"a@sum": 0.25, "b": 1e-7})
    log.close()
    assert messages() == [("INFO", "step 3: a=0.25, b=1e-07")]
