"""Curves that must not change: what a run logged once, every later version logs again.

`python tests/pipeline/rlvr/test_golden.py` writes the files anew, for a change that is meant to change them.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS.parent / "examples" / "rlvr"))

from make_data import make  # noqa: E402
from rlvr_setup import make_config, make_inputs, metrics_of  # noqa: E402

from roll.pipeline.registry import load_config, pipeline_class  # noqa: E402
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline  # noqa: E402

EXAMPLES = TESTS.parent / "examples" / "rlvr"
SMALL = TESTS / "golden" / "rlvr_small.json"
EXAMPLE = TESTS / "golden" / "reverse_grpo.json"
KEYS = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/total_loss",
    "actor/clipfrac",
    "actor_train/grad_norm",
    "critic/entropy/mean",
    "token/response_length/mean",
    "rollout/no_signal_group_frac",
)


def small_curve(folder: Path) -> list[dict[str, float]]:
    """Six steps of a tiny run: sampling, scoring, advantages, two optimizer steps each."""
    inputs = make_inputs(folder / "inputs")
    config = make_config(inputs, output_dir=str(folder / "output"), max_steps=6, entropy_loss_coef=0.01)
    with RLVRPipeline(config, progress=False) as pipeline:
        pipeline.run()
    return [{key: line[key] for key in KEYS} for line in metrics_of(pipeline.run_dir)]


def example_curve(folder: Path) -> dict[str, list[float]]:
    """The example of reversing digits, from random weights through the warm start to ten steps of GRPO.

    Accuracies and rewards are counts over fixed numbers of samples: equal or not, without a tolerance.
    """
    make(folder / "digits", seed=0)
    paths = {"pretrain": str(folder / "digits" / "model"), "output_dir": str(folder)}
    data = {"actor_train.data_args.file_name": "reverse_train", "validation.data_args.file_name": "reverse_test"}
    paths |= {key: str(folder / "digits" / f"{name}.jsonl") for key, name in data.items()}
    reward = {"rewards.reverse.reward_fn": f"{EXAMPLES / 'exact_match.py'}:score", "max_steps": 10, "eval_steps": 5}
    curve: dict[str, list[float]] = {}
    for name, more in (("reverse_sft", {}), ("reverse_grpo", {**reward, "pretrain": str(folder / "reverse_sft")})):
        overrides = [f"{key}={value}" for key, value in {**paths, "track_with": "none", **more}.items()]
        config = load_config(EXAMPLES / f"{name}.yaml", overrides).config
        with pipeline_class(config)(config, progress=False) as pipeline:
            pipeline.run()
        lines = metrics_of(pipeline.run_dir)
        for key in ("val/exact_match", "val_correct/all/mean", "critic/score/mean"):
            values = [line[key] for line in lines if key in line]
            if values:
                curve[f"{name}: {key}"] = values
    return curve


def test_a_small_run_logs_what_it_always_logged(tmp_path, one_thread):
    golden = json.loads(SMALL.read_text(encoding="utf-8"))
    curve = small_curve(tmp_path)
    assert len(curve) == len(golden) == 6
    for step, (line, expected) in enumerate(zip(curve, golden, strict=True)):
        # Last bits differ between processors; a wrong formula differs by far more.
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-6), f"step {step}"


def machine() -> str:
    """What decides the last bits of a sum, and with them, sooner or later, a sample."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor()}"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else "unknown"


@pytest.mark.slow
def test_the_example_learns_along_the_same_curve(tmp_path, one_thread):
    golden = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    curve = example_curve(tmp_path)
    if golden["machine"] == machine():
        assert curve == golden["curve"]
    else:  # another processor may draw another sample, but learns as well
        name = "reverse_grpo: val_correct/all/mean"
        assert curve[name][-1] == pytest.approx(golden["curve"][name][-1], abs=0.15)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        small = small_curve(Path(name))
    with tempfile.TemporaryDirectory() as name:
        example = {"machine": machine(), "curve": example_curve(Path(name))}
    for path, values in ((SMALL, small), (EXAMPLE, example)):
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
