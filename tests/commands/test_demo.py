"""`roll demo`, as a newcomer sees it."""

import io

import pytest
import torch
from metric_names import undocumented
from rich.console import Console

from roll.commands import demo
from roll.utils.machine import Threads
from roll.utils.run_folder import METRICS_FILE
from roll.utils.tracking import read_metrics


def test_a_second_demo_gets_a_folder_of_its_own(tmp_path):
    first = demo._unused(tmp_path / "demo")
    assert first == tmp_path / "demo"
    (first / "digits").mkdir(parents=True)
    assert demo._unused(tmp_path / "demo") == tmp_path / "demo-2"


def test_the_examples_that_it_runs_exist():
    for stage in (*demo.AGENTIC, *demo.DPO):
        assert (demo.examples_folder() / stage.prepare[0]).is_file()
        assert demo._in_examples(stage.config).endswith(".yaml")


def test_it_uses_the_processors_that_are_free_and_says_so(tmp_path, monkeypatch):
    class EnoughError(Exception): ...

    def look(*_):
        seen.append(torch.get_num_threads())
        raise EnoughError

    output, seen, before = io.StringIO(), [], torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(demo, "free_threads", lambda: Threads(1, 2, "the others are busy"))
    monkeypatch.setattr(demo, "_run_project", look)
    try:
        torch.set_num_threads(2)
        with pytest.raises(EnoughError):
            demo.run_demo(tmp_path / "demo", console=Console(file=output, width=120))
    finally:
        torch.set_num_threads(before)
    assert seen == [1] and "It uses 1 of 2 processors: the others are busy.\n" in output.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_learns_and_says_so(tmp_path):
    output = io.StringIO()
    outcomes = demo.run_demo(
        tmp_path / "demo", everything=True, console=Console(file=output, width=120)
    )
    learned = {outcome.stage.name: (outcome.before, outcome.after) for outcome in outcomes}
    assert learned.keys() == {"GRPO", "agentic", "DPO"}
    # The warm start stops at the first validation above 0.35, which may be well above it.
    assert learned["GRPO"][0] <= 0.8 and learned["GRPO"][1] >= 0.85
    assert learned["agentic"][0] <= 0.2 and learned["agentic"][1] == 1.0  # one map, crossed or not
    assert learned["DPO"][0] <= 0.6 and learned["DPO"][1] >= 0.9
    text = output.getvalue()
    assert "answer before" in text and "What was learned" in text
    names = {
        name
        for outcome in outcomes
        for line in read_metrics(outcome.run_dir / METRICS_FILE)
        for name in line
    }
    assert undocumented(name for name in names if "/" in name) == []
    assert all((outcome.run_dir / "report.html").is_file() for outcome in outcomes)
