"""Curves that must not change: what a run logged once, every later version logs again.

Last bits of a sum differ between processors, thread counts and versions of torch, and sooner or
later they change a sample, and with it everything after. So a run is compared to the last bit only
on the machine that recorded it, which the file names. Anywhere else the small run is led along the
recorded samples, and what it computes from them is compared at the scale of the terms that are
added up: a loss is a mean of terms of size 1 that nearly cancel.

`python tests/pipeline/rlvr/test_golden.py` writes the files anew, for a change that is meant to
change them.
"""

import json
import math
import os
import platform
import sys
import tempfile
from dataclasses import replace
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
SMALL = TESTS / "golden" / "rlvr_small.jsonl"
EXAMPLE = TESTS / "golden" / "reverse_grpo.json"
STEPS = 4
# What follows from the samples by counting and by arithmetic on small numbers.
COUNTS = (
    "critic/score/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "token/response_length/mean",
    "rollout/no_signal_group_frac",
    "actor/valid_samples",
    "actor/backward_steps",
)
# Sums without cancellation, which differ by a part of themselves.
SIZES = ("actor_train/grad_norm", "actor/approxkl", "actor/entropy", "critic/entropy/mean")
# Means of a ratio times an advantage of size 1.
LOSSES = ("actor/pg_loss", "actor/total_loss")
# Shares of the 70 to 80 tokens of a step: a ratio at the edge of the clip may fall on either side.
SHARES = ("actor/clipfrac", "actor/ppo_ratio_clipfrac")
# Adam divides a gradient by its size, so that last bits grow to 1e-4 of a gradient within a few
# steps; a wrong formula differs by far more. Losses, means over many tokens, came within 1e-6.
TOLERANCES = {
    COUNTS: {"rel": 1e-5},
    SIZES: {"rel": 1e-3},
    LOSSES: {"abs": 1e-4},
    SHARES: {"abs": 2 / 70},
}


class Recorded:
    """The engine of a run, led along recorded samples: it draws its own, which are kept, and
    answers with those."""

    def __init__(self, engine, steps):
        self.engine, self.steps, self.drawn = engine, iter(steps), []

    def answer_requests(self, requests):
        outputs = self.engine.answer_requests(requests)
        self.drawn.append(
            {
                "prompts": [list(request.prompt_ids) for request in requests],
                "tokens": [output.token_ids for output in outputs],
                "log_probs": [output.log_probs for output in outputs],
                "finish_reasons": [output.finish_reason for output in outputs],
            }
        )
        step = next(self.steps, None)
        if step is None:
            return outputs
        kept = zip(outputs, step["tokens"], step["log_probs"], step["finish_reasons"], strict=True)
        return [
            replace(o, token_ids=ids, log_probs=values, finish_reason=end)
            for o, ids, values, end in kept
        ]


def small_run(folder: Path, recorded=()) -> list[dict]:
    """Four steps of a tiny run: sampling, scoring, advantages, two optimizer steps each. What was
    drawn and logged."""
    inputs = make_inputs(folder / "inputs")
    config = make_config(
        inputs,
        output_dir=str(folder / "output"),
        max_steps=STEPS,
        entropy_loss_coef=0.01,
        first_ratio_tolerance=0,
    )
    with RLVRPipeline(config, progress=False) as pipeline:
        engine = Recorded(pipeline.actor_infer, recorded)
        pipeline.prompts._generate = engine.answer_requests
        pipeline.run()
    lines = [
        {key: line[key] for keys in TOLERANCES for key in keys}
        for line in metrics_of(pipeline.run_dir)
    ]
    return [drawn | {"metrics": line} for drawn, line in zip(engine.drawn, lines, strict=True)]


def example_curve(folder: Path) -> dict[str, list[float]]:
    """The example of reversing digits, from random weights through the warm start to ten steps of
    GRPO.

    Accuracies and rewards are counts over fixed numbers of samples: equal or not, without a
    tolerance.
    """
    make(folder / "digits", seed=0)
    paths = {"pretrain": str(folder / "digits" / "model"), "output_dir": str(folder)}
    data = {
        "actor_train.data_args.file_name": "reverse_train",
        "validation.data_args.file_name": "reverse_test",
    }
    paths |= {key: str(folder / "digits" / f"{name}.jsonl") for key, name in data.items()}
    reward = {
        "rewards.reverse.reward_fn": f"{EXAMPLES / 'exact_match.py'}:score",
        "max_steps": 10,
        "eval_steps": 5,
    }
    curve: dict[str, list[float]] = {}
    for name, more in (
        ("reverse_sft", {}),
        ("reverse_grpo", {**reward, "pretrain": str(folder / "reverse_sft")}),
    ):
        overrides = [
            f"{key}={value}" for key, value in {**paths, "track_with": "none", **more}.items()
        ]
        config = load_config(EXAMPLES / f"{name}.yaml", overrides).config
        with pipeline_class(config)(config, progress=False) as pipeline:
            pipeline.run()
        lines = metrics_of(pipeline.run_dir)
        for key in ("val/exact_match", "val_correct/all/mean", "critic/score/mean"):
            values = [line[key] for line in lines if key in line]
            if values:
                curve[f"{name}: {key}"] = values
    return curve


def machine() -> str:
    """What decides the last bits of a sum, besides the number of threads: the code that is run, and
    what chooses it."""
    info = Path("/proc/cpuinfo")
    lines = (
        (line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines())
        if info.exists()
        else ()
    )
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    words = [
        cpu.get(key, "unknown")
        for key in ("model name", "cpu family", "model", "stepping", "cache size")
    ]
    chosen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("MKL_", "ONEDNN_"))
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join(
        [f"torch {torch.__version__}", platform.machine(), capability, *words, *chosen]
    )


def read_small() -> tuple[str, list[dict]]:
    first, *steps = map(json.loads, SMALL.read_text(encoding="utf-8").splitlines())
    return first["machine"], steps


def test_a_small_run_computes_what_it_always_did(tmp_path):
    _, golden = read_small()
    run = small_run(tmp_path, golden)
    assert len(run) == len(golden) == STEPS
    assert (
        run[0]["tokens"] == golden[0]["tokens"]
        and run[0]["finish_reasons"] == golden[0]["finish_reasons"]
    )
    others = []
    for number, (step, expected) in enumerate(zip(run, golden, strict=True)):
        assert step["prompts"] == expected["prompts"], f"step {number}"
        for i, tokens in enumerate(expected["tokens"]):
            if step["tokens"][i] == tokens:
                found = [math.exp(value) for value in step["log_probs"][i]]
                kept = [math.exp(value) for value in expected["log_probs"][i]]
                assert found == pytest.approx(kept, abs=1e-3), f"step {number}, sample {i}"
            else:
                others.append((number, i))
        for keys, tolerance in TOLERANCES.items():
            found, kept = ({key: line["metrics"][key] for key in keys} for line in (step, expected))
            assert found == pytest.approx(kept, **tolerance), f"step {number}"
    # A random number may fall just beside the edge between two tokens: once in many runs, not four
    # times in one.
    assert len(others) < 4, f"(step, sample) that were drawn differently: {others}"


def test_a_small_run_logs_what_it_always_logged_where_it_was_recorded(tmp_path, one_thread):
    recorder, golden = read_small()
    if recorder != machine():
        pytest.skip(f"recorded on {recorder}; this is {machine()}")
    assert small_run(tmp_path) == golden


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
        small = small_run(Path(name))
    with tempfile.TemporaryDirectory() as name:
        example = {"machine": machine(), "curve": example_curve(Path(name))}
    lines = [json.dumps(line) + "\n" for line in ({"machine": machine()}, *small)]
    SMALL.write_text("".join(lines), encoding="utf-8")
    EXAMPLE.write_text(json.dumps(example, indent=1) + "\n", encoding="utf-8")
