"""The examples learn, from a model made from nothing. What they have to reach, and the ten seeds
under five kinds of arithmetic that leave it a margin, is in benchmarks/learning.py and in the table
of benchmarks/README.md."""

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest

GAMES = ["frozen_lake_gigpo", "frozen_lake_reinforce", "frozen_lake_segment", "guess_number"]


@pytest.fixture(scope="module")
def learning():
    path = Path(__file__).parents[3] / "benchmarks" / "learning.py"
    spec = importlib.util.spec_from_file_location("learning", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", GAMES)
def test_a_game_is_learned(learning, tmp_path, name):
    run = learning.run_game(name, 0, tmp_path, [])
    assert run["greedy"][0] <= 0.5 and run["sampled"][0] <= 0.5, "there is something to learn"
    assert learning.RECIPES[name].learned(run), run


@pytest.mark.parametrize("name", GAMES)
def test_what_is_asked_for_leaves_a_margin_on_ten_seeds(learning, name):
    runs = [run for run in learning.recorded() if run["name"] == name and run["seed"] < 10]
    assert sorted(run["seed"] for run in runs) == list(range(10))
    asked, sampled = learning.RECIPES[name], [statistics.mean(run["sampled"][-5:]) for run in runs]
    assert all(asked.learned(run) for run in runs) and min(sampled) >= asked.sampled + 0.05


def test_the_readme_has_the_table_of_the_results_file(learning):
    assert learning.table() in learning.README.read_text(encoding="utf-8")
