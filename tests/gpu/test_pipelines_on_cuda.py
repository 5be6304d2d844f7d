"""Whole runs with training and generation on one real GPU: on-policy, and the losses of the CPU."""

import copy

import pytest
import torch
from agentic_setup import tiny_pipeline_config
from rlvr_setup import make_inputs, make_values, metrics_of

from roll.engines.graph_decoder import GraphDecoder
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GAME = {"Good": "GoodEnv"}


def run(pipeline_class, config):
    with pipeline_class(config, progress=False) as pipeline:
        devices = {strategy.device.type for strategy in strategies_of(pipeline)}
        pipeline.run()
    return metrics_of(pipeline.run_dir), devices


def strategies_of(pipeline):
    return [cluster.workers[0].strategy for cluster in (pipeline.actor_train, pipeline.actor_infer)]


def rlvr_config(folder, output, *, on_gpu, dtype="fp32", response_length=None, **strategy_config):
    values = copy.deepcopy(make_values(folder, output_dir=str(output), num_gpus_per_node=1))
    for name in ("actor_train", "actor_infer"):
        values[name]["device_mapping"] = [0] if on_gpu else None
        values[name]["model_args"]["dtype"] = dtype
        values[name]["strategy_args"]["strategy_config"] = strategy_config
    if response_length is not None:
        values["response_length"] = response_length
    return RLVRConfig(**values)


def test_rlvr_learns_what_it_learns_on_a_cpu(tmp_path):
    folder = make_inputs(tmp_path / "inputs")
    here, _ = run(RLVRPipeline, rlvr_config(folder, tmp_path / "cpu", on_gpu=False))
    there, devices = run(RLVRPipeline, rlvr_config(folder, tmp_path / "gpu", on_gpu=True))
    assert devices == {"cuda"} and len(there) == len(here) == 3
    assert all(
        line["rollout/logprob_gap/max"] < 1e-3 and line["actor/first_ratio_error"] < 1e-4
        for line in there
    )
    # The same samples are drawn, until a last bit decides.
    for key in ("critic/score/mean", "actor/pg_loss", "actor_train/grad_norm"):
        assert there[0][key] == pytest.approx(here[0][key], rel=1e-3, abs=1e-5), key


def test_rlvr_in_half_precision(tmp_path):
    folder = make_inputs(tmp_path / "inputs")
    lines, _ = run(RLVRPipeline, rlvr_config(folder, tmp_path / "out", on_gpu=True, dtype="bf16"))
    assert len(lines) == 3 and all(line["rollout/logprob_gap/mean"] < 0.05 for line in lines)


def test_rlvr_with_compiled_blocks(tmp_path, monkeypatch):
    """Training uses the compiled blocks and generation records its steps without them: it once
    crashed at that."""
    steps = []
    step = GraphDecoder.step
    monkeypatch.setattr(
        GraphDecoder, "step", lambda self, *arguments: steps.append(1) or step(self, *arguments)
    )
    folder = make_inputs(tmp_path / "inputs")
    options = {"on_gpu": True, "response_length": 24}  # long enough to be worth a recording
    plain, _ = run(RLVRPipeline, rlvr_config(folder, tmp_path / "plain", **options))
    steps.clear()
    lines, _ = run(
        RLVRPipeline, rlvr_config(folder, tmp_path / "compiled", compile=True, **options)
    )
    assert steps and len(lines) == len(plain) == 3
    assert all(line["rollout/logprob_gap/max"] < 1e-3 for line in lines)
    for key in ("critic/score/mean", "actor/pg_loss", "actor_train/grad_norm"):
        assert lines[0][key] == pytest.approx(plain[0][key], rel=1e-3, abs=1e-5), key


def test_agentic(tmp_path):
    role = {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "device_mapping": [0],
    }
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-3}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4}
    roles = {
        "actor_train": {
            **role,
            "training_args": training,
            "strategy_args": {"strategy_name": "hf_train"},
        },
        "actor_infer": {
            **role,
            "generating_args": sampling,
            "strategy_args": {"strategy_name": "hf_infer"},
        },
    }
    lines, devices = run(
        AgenticPipeline, tiny_pipeline_config(tmp_path, GAME, num_gpus_per_node=1, **roles)
    )
    assert devices == {"cuda"} and len(lines) == 2
    assert all(line["rollout/logprob_gap/max"] < 1e-3 for line in lines)
