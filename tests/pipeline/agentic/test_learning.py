"""The examples learn, from a model made from nothing. What they have to reach, and the ten seeds under five kinds of
arithmetic that leave it a margin, is in benchmarks/learning.py and in the table of benchmarks/README.md."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(1800)]


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


@pytest.mark.parametrize(
    "name", ["frozen_lake_gigpo", "frozen_lake_reinforce", "frozen_lake_segment", "guess_number"]
)
def test_a_game_is_learned(learning, tmp_path, name):
    run = learning.run_game(name, 0, tmp_path, [])
    assert run["greedy"][0] <= 0.5 and run["sampled"][0] <= 0.5, "there is something to learn"
    assert learning.RECIPES[name].learned(run), run
