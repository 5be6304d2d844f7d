"""Separate rollout and training workers on a real Ray: the numbers of one process, and generation
beside training."""

from pathlib import Path

import pytest
from agentic_setup import tiny_pipeline_config
from rlvr_setup import make_config, make_inputs, make_values, metrics_of, read_rollouts

from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.utils.tracking import read_metrics

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def run(inputs: Path, output: Path, **overrides) -> RLVRPipeline:
    with RLVRPipeline(
        make_config(inputs, output_dir=str(output), **overrides), progress=False
    ) as pipeline:
        pipeline.run()
    return pipeline


def workers(inputs: Path, *, train: int, infer: int, rows: int) -> dict:
    values = make_values(inputs)
    training = {**values["actor_train"]["training_args"], "per_device_train_batch_size": rows}
    return {
        "actor_train": {**values["actor_train"], "world_size": train, "training_args": training},
        "actor_infer": {**values["actor_infer"], "world_size": infer},
    }


def mock(folder: Path, mode: str) -> dict:
    return {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder)}}


def test_two_and_two_workers_give_the_losses_of_one_process(inputs, tmp_path):
    """One process dumps, two training ranks replay; then 2 rollout and 2 training workers dump, one
    process replays."""
    keys = ("actor/pg_loss", "actor/total_loss", "actor_train/grad_norm", "actor/approxkl")

    def same(one: RLVRPipeline, two: RLVRPipeline) -> None:
        for old, new in zip(metrics_of(one.run_dir), metrics_of(two.run_dir), strict=True):
            for key in keys:
                assert new[key] == pytest.approx(old[key], abs=1e-5, rel=1e-4), (old["step"], key)

    two_and_two = workers(inputs, train=2, infer=2, rows=4)
    local = run(inputs, tmp_path / "local", **mock(tmp_path / "dump", "dump"))
    ray = run(inputs, tmp_path / "ray", **mock(tmp_path / "dump", "mock"), **two_and_two)
    assert ray.actor_train.backend_name == "ray" and ray.actor_train.dp_size == 2
    same(local, ray)

    both = run(
        inputs,
        tmp_path / "both",
        **mock(tmp_path / "dump2", "dump"),
        **workers(inputs, train=2, infer=2, rows=4),
    )
    assert both.actor_infer is not None and both.actor_infer.world_size == 2
    lines = metrics_of(both.run_dir)
    assert all(line["actor/first_ratio_error"] < 1e-4 for line in lines), (
        "weights arrived before every rollout"
    )
    assert len({line["system/weight_checksum"] for line in lines}) == len(lines)
    same(both, run(inputs, tmp_path / "again", **mock(tmp_path / "dump2", "mock")))


@pytest.mark.slow
def test_asynchronous_rollouts_train_and_report_their_staleness(inputs, tmp_path):
    pipeline = run(
        inputs,
        tmp_path,
        async_generation_ratio=1,
        max_steps=6,
        save_steps=3,
        **workers(inputs, train=1, infer=2, rows=8),
    )
    lines = metrics_of(pipeline.run_dir)
    assert [line["step"] for line in lines] == list(range(6))
    assert all(line["rollout/staleness/max"] <= 1 for line in lines)
    assert any(line["rollout/staleness/max"] == 1 for line in lines), (
        "some steps train on samples of older weights"
    )
    assert [line["actor/samples_total"] for line in lines] == [16] * 6
    assert sum(line["actor_train/grad_norm"] for line in lines) > 0
    versions = [
        sample["policy_version"]
        for sample in read_rollouts(pipeline.run_dir / "rollouts" / "step-000005.jsonl")
    ]
    assert set(versions) <= {4, 5}
    resumed = run(
        inputs,
        tmp_path,
        async_generation_ratio=1,
        max_steps=7,
        resume_from_checkpoint=True,
        **workers(inputs, train=1, infer=2, rows=8),
    )
    assert resumed.global_step == 7


@pytest.mark.parametrize("ratio", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_environments_on_ray(tmp_path, ratio):
    val = {"num_env_groups": 2, "tags": ["Good"]}
    config = tiny_pipeline_config(
        tmp_path, {"Good": "GoodEnv"}, async_generation_ratio=ratio, backend="ray", max_steps=3,
        adv_estimator="gigpo", eval_steps=2, val_env_manager=val, val_batch_size=2,
    )  # fmt: skip
    with AgenticPipeline(config, progress=False) as pipeline:
        pipeline.run()
    lines = read_metrics(pipeline.run_dir / "metrics.jsonl")
    assert pipeline.global_step == 3 and "val/success" in lines[2]
    if ratio:
        for line in lines[:3]:
            assert line["rollout/staleness/max"] <= 1 and line["rollout/dropped/stale"] == 0
            assert 0 <= line["scheduler/off_policy_ratio"] <= 1
            assert line["rollout/wait_seconds"] >= 0
            assert "critic/entropy/mean" not in line, "old log-probabilities are the sampler's"
