"""The examples learn. Each is a minute or two on two cores.

Another processor adds in another order and draws other samples, so the bounds leave room.
"""

import importlib.util
from pathlib import Path

import pytest

from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.registry import load_config
from roll.utils.tracking import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[3] / "examples" / "agentic"


def learn(tmp_path, name, *overrides, warm_steps=25):
    """(successes of sampled episodes by step, successes of the validation), from a model made from nothing."""
    spec = importlib.util.spec_from_file_location("warm_start", EXAMPLES / "warm_start.py")
    assert spec is not None and spec.loader is not None
    warm_start = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(warm_start)
    own = [f"pretrain={tmp_path}/model", f"output_dir={tmp_path}/output", "track_with=none", *overrides]
    warm_start.warm_start(str(EXAMPLES / name), own, warm_steps)
    with AgenticPipeline(load_config(EXAMPLES / name, own).config, progress=False) as pipeline:
        pipeline.run()
    lines = read_metrics(pipeline.run_dir / "metrics.jsonl")
    sampled = [line["env/success"] for line in lines if "env/success" in line]
    return sampled, [line["val/success"] for line in lines if "val/success" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["frozen_lake_gigpo", "frozen_lake_reinforce", "frozen_lake_segment"])
def test_frozen_lake(tmp_path, name):
    sampled, greedy = learn(tmp_path, f"{name}.yaml")
    assert sampled[0] < 0.05 and greedy[0] == 0.0
    assert max(greedy) == 1.0 and max(sampled) >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_guess_the_number(tmp_path):
    sampled, greedy = learn(tmp_path, "guess_number.yaml")
    assert max(sampled) >= 1.7 * sampled[0] and max(greedy) >= 1.5 * greedy[0]
