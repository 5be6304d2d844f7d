"""Whole runs of a tiny model in environments, in process."""

import json
import math

import numpy as np
import pytest
import torch
from agentic_setup import STEP, tiny_pipeline_config
from safetensors.torch import load_file

from roll.configs.ppo_config import RolloutMockConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError, DataError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.agentic_pipeline import (
    AgenticPipeline,
    GroupFilter,
    adjust_batch,
    optimizer_steps,
)
from roll.pipeline.model_worker import local_rows_of_steps
from roll.utils.tracking import read_metrics

pytestmark = pytest.mark.usefixtures("nothing_is_left")

GOOD = {"Good": "GoodEnv"}


def train(folder, envs=GOOD, **options):
    """(pipeline, lines of metrics, weights at the end)."""
    config = tiny_pipeline_config(folder, envs, **options)
    with AgenticPipeline(config, progress=False) as pipeline:
        pipeline.run()
    model = pipeline.model_folder()
    assert model is not None
    lines = read_metrics(pipeline.run_dir / "metrics.jsonl")
    return pipeline, lines, load_file(model / "model.safetensors")


def without(lines, *prefixes):
    """The metrics of runs that are to be equal: no times, nor what begins with `prefixes`."""
    prefixes = ("time", "system/tps", *prefixes)
    return [{k: v for k, v in line.items() if not k.startswith(prefixes)} for line in lines]


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


BY_GROUP = {"grouping": "traj_group_id", "method": "mean_std"}
BY_TAG = {"grouping": "tags", "method": "mean"}
STEPS = {"Good": {"env_type": "bad_envs:GoodEnv", "env_manager_cls": STEP}}


EXPECTED = """
rollout/score/mean rollout/response_length/max critic/score/mean critic/advantages/mean
critic/returns/min tokens/prompt_length/mean env/Good/success env/Good/num_actions
env/response_length scheduler/group_filter_count actor/pg_loss actor/lr actor/ratio_mean
system/samples system/tps time/step_total time/step_rollout time/step_train time/step_adv
time/step_model_update time/step_cal_norm_rewards time/step_cal_token_reward system/batch_add_count
"""


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("grpo", {"ratio_type": "segment", "reward_normalization": BY_GROUP}),
        ("reinforce", {"whiten_advantages": True, "use_kl_loss": True, "kl_loss_coef": 0.1}),
        ("agentic_reinforce", {"gamma": 0.9, "reward_normalization": BY_TAG}),
        ("gae", {"add_token_level_kl": True, "init_kl_coef": 0.1, "ppo_epochs": 2}),
        ("gigpo", {"custom_envs": STEPS}),
        ("step_reinforce", {"batch_adjust_mode": "delete"}),
    ],
)
def test_every_estimator(tmp_path, estimator, options):
    options |= {"adv_estimator": estimator, "log_samples_per_step": 4}
    pipeline, lines, weights = train(tmp_path, **options)
    first = lines[0]
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], weights[name]) for name in weights)
    for name in EXPECTED.split():
        assert name in first and math.isfinite(first[name]), name
    assert first["rollout/logprob_gap/max"] < 1e-3  # sampling and training speak of one policy
    if estimator == "gae":
        assert "critic/loss" in first and "critic/values/mean" in first
    if estimator == "gigpo":
        assert "critic/step_rewards_norm/mean" in first and "system/state_batch_size/mean" in first
    written = (pipeline.run_dir / "rollouts" / "step-000000.jsonl").read_text()
    samples = [json.loads(line) for line in written.splitlines()]
    assert samples[0]["turns"] and samples[0]["tag"] == "Good"
    assert "advantages" in samples[0]["tokens"]


def test_the_same_seed_twice_is_bit_equal(tmp_path):
    options = {"adv_estimator": "gigpo", "max_steps": 2}
    _, lines, weights = train(tmp_path, exp_name="one", **options)
    _, again, others = train(tmp_path, exp_name="two", **options)
    assert without(lines) == without(again)
    assert_equal(weights, others)


def test_resume_is_exact(tmp_path):
    options = {"adv_estimator": "grpo", "max_steps": 4, "save_steps": 2}
    options |= {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1}
    _, whole, weights = train(tmp_path, exp_name="whole", **options)
    config = tiny_pipeline_config(tmp_path, GOOD, exp_name="parts", **options)
    with AgenticPipeline(config, progress=False) as pipeline:
        for step in pipeline.steps():  # the first half of run(), then the power goes out
            pipeline.update_engine(step)
            batch, _ = pipeline.collect(step)
            assert batch is not None
            batch = pipeline.add_old_log_probs(pipeline.add_values(pipeline.add_reference(batch)))
            batch = pipeline.add_advantages(batch)
            pipeline.train(step, batch)
            pipeline.end_step(step, {})
            if step == 1:
                break
    _, rest, resumed = train(tmp_path, exp_name="parts", resume_from_checkpoint=True, **options)
    assert_equal(weights, resumed)
    ignored = "system/weight_checksum"
    assert without(whole[2:4], ignored) == without(rest[2:4], ignored)


@pytest.mark.parametrize("estimator", ["grpo", "gigpo"])
def test_a_dump_trains_again_from_itself_alone(tmp_path, estimator):
    mock = {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}
    options = {"adv_estimator": estimator, "batch_adjust_mode": "random_sample"}
    options |= {"init_kl_coef": 0.1, "ppo_epochs": 2}
    _, lines, weights = train(tmp_path, exp_name="dumped", rollout_mock=mock, **options)
    mock["mode"] = "mock"
    # No engine and no environments: what they sampled with is known from the role's settings.
    replay = {**options, "custom_envs": {}, "rollout_mock": mock}
    replay |= {"eval_steps": 1, "val_batch_size": 256}
    config = tiny_pipeline_config(tmp_path, GOOD, exp_name="replayed", **replay)
    assert "actor_infer" not in config.active_roles() and "train_env" not in config.active_roles()
    pipeline, again, replayed = train(tmp_path, exp_name="replayed", **replay)
    assert pipeline.actor_infer is None and pipeline.source is None
    assert_equal(weights, replayed)
    # Nothing samples, so nothing is said of it.
    sampling = ("env/", "scheduler/", "rollout/template_drift", "system/weight_checksum")
    assert without(lines, *sampling) == without(again)
    message = r"no dump for step 2 \(there are 2, step-000000 to step-000001\)"
    with pytest.raises(DataError, match=message):
        train(tmp_path, exp_name="longer", **{**replay, "max_steps": 3})
    other = {"grpo": "step_reinforce", "gigpo": "reinforce"}[estimator]
    rows = {"grpo": "episodes, expected turns", "gigpo": "turns, expected episodes"}[estimator]
    message = f"found a dump whose rows are {rows}, because of adv_estimator={other}"
    with pytest.raises(DataError, match=message):
        train(tmp_path, exp_name="other", **{**replay, "adv_estimator": other})


def test_a_folder_gets_every_sample(tmp_path):
    val = {"num_env_groups": 2, "tags": ["Good"]}
    options = {"eval_steps": 1, "val_env_manager": val, "val_batch_size": 2}
    options["log_samples_per_step"] = 2
    pipeline, _, _ = train(tmp_path, rollout_dump_dir=str(tmp_path / "samples"), **options)
    folders = [tmp_path / "samples" / "rollouts", pipeline.run_dir / "rollouts"]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert {"step-000000.jsonl", "step-000001.jsonl", "val-000000.jsonl"} <= set(names[0])
    texts = [(folder / "step-000001.jsonl").read_text() for folder in folders]
    assert [text.count("\n") for text in texts] == [4, 2]
    options = {"log_samples_per_step": 0, "max_steps": 1}
    train(tmp_path, exp_name="only", rollout_dump_dir=str(tmp_path / "only"), **options)
    assert (tmp_path / "only" / "rollouts" / "step-000000.jsonl").exists()
    assert not (tmp_path / "output" / "only" / "rollouts").exists()


def test_a_run_in_which_everything_fails_stops_with_the_reason(tmp_path):
    manager = {"env_retries": 0}
    pipeline, lines, _ = train(tmp_path, {"Raising": "RaisingEnv"}, manager=manager, max_steps=10)
    assert pipeline.global_step == 3
    info = json.loads((pipeline.run_dir / "run.json").read_text())
    assert info["last_step"] == 3 and lines[2]["env/Raising/failed/exception"] == 4


def test_validation_is_on_fixed_seeds_and_greedy_if_asked(tmp_path):
    greedy = {"do_sample": False, "max_new_tokens": 4}
    val = {"num_env_groups": 2, "tags": ["Good"], "generating_args": greedy}
    options = {"eval_steps": 1, "val_env_manager": val, "val_batch_size": 2, "max_steps": 1}
    pipeline, lines, _ = train(tmp_path, log_samples_per_step=None, **options)
    expected = {"val/score/mean", "val/Good/score/mean", "val/env/Good/success", "val/success"}
    assert expected <= lines[0].keys()
    assert "val/success" in lines[1]  # the end is validated, too
    config = pipeline.pipeline_config.model_copy(update={"eval_steps": 0})
    found = AgenticPipeline.evaluate(config, pipeline.run_dir, samples_to=tmp_path / "eval")
    assert found == {key: value for key, value in lines[1].items() if key in found}
    assert (tmp_path / "eval" / "rollouts" / "val-000000.jsonl").stat().st_size > 0
    replay = config.model_copy(update={"rollout_mock": RolloutMockConfig(enable=True, mode="mock")})
    assert AgenticPipeline.evaluate(replay, pipeline.run_dir) == found
    unknown = config.val_env_manager.model_copy(update={"tags": ["Gone"]})
    with pytest.raises(
        ConfigError, match=r"val_env_manager.tags: found .*Gone.*, expected names of"
    ):
        wrong = config.model_copy(update={"val_env_manager": unknown})
        AgenticPipeline.evaluate(wrong, pipeline.run_dir)
    prompts = []
    for step in (0, 1):
        text = (pipeline.run_dir / "rollouts" / f"val-{step:06d}.jsonl").read_text()
        prompts.append([json.loads(line)["prompt"][:30] for line in text.splitlines()])
    assert prompts[0] == prompts[1]


class OnlyWinners(GroupFilter):
    """Drops groups without a positive score."""

    def filter(self, group_id, episode_id, group):
        return all(data["episode_scores"][0] <= 0 for data in group)


def test_a_filter_of_ones_own(tmp_path):
    manager = {"group_filter_cls": f"{__name__}.OnlyWinners"}
    _, lines, _ = train(tmp_path, manager=manager, max_steps=1)
    assert lines[0]["scheduler/group_filter_count"] > 0


def test_what_is_missing_is_said_before_a_run_has_a_folder(tmp_path):
    config = tiny_pipeline_config(tmp_path, {"Good": {"max_steps": 3}})
    with pytest.raises(ConfigError, match=r"custom_envs\.Good\.env_type: missing"):
        AgenticPipeline(config, progress=False)
    assert not (tmp_path / "output").exists()


# -- rows whose number is known only after the episodes --------------------------------------------


def adjusting(mode="copy"):
    sizes = {"per_device_train_batch_size": 4}
    role = {"strategy_args": {"strategy_name": "hf_train"}, "training_args": sizes}
    return AgenticConfig(
        actor_train=role,
        rollout_batch_size=16,
        sequence_length=64,
        train_env_manager={"num_env_groups": 16},
        adv_estimator="gigpo",
        batch_adjust_mode=mode,
        ppo_epochs=2,
        eval_steps=0,
    )


def numbered(rows):
    ids = np.arange(rows).astype(object)
    return DataProto.from_dict({"x": torch.arange(rows)}, non_tensors={"id": ids})


MODES = [("copy", 101, 101), ("auto", 101, 101), ("delete", 101, 100), ("delete", 3, 3)]


@pytest.mark.parametrize(("mode", "rows", "kept"), [*MODES, ("random_sample", 101, 4)])
def test_modes(mode, rows, kept):
    adjusted, metrics = adjust_batch(numbered(rows), adjusting(mode), seed=1)
    assert len(adjusted) == kept and metrics["system/batch_remove_count"] == rows - kept
    assert metrics["system/batch_add_count"] == 0 and len(set(adjusted["x"].tolist())) == kept
    again, _ = adjust_batch(numbered(rows), adjusting(mode), seed=1)
    assert torch.equal(adjusted["x"], again["x"])


def test_every_row_has_the_same_weight_in_its_step():
    """16 trajectories by 4 are 4 optimizer steps an epoch, whatever the number of rows."""
    assert optimizer_steps(adjusting()) == {"actor_train": 4}
    sizes = {"rows_per_step": 4, "seed": 0, "num_steps": 4}
    steps = list(local_rows_of_steps(range(101), num_global=101, epochs=2, **sizes))
    assert [len(rows) for rows in steps] == [26, 25, 25, 25] * 2
    assert sorted(row for rows in steps[:4] for row in rows) == list(range(101))
    assert steps[:4] != steps[4:]
    few = list(local_rows_of_steps(range(2), num_global=2, epochs=1, **sizes))
    assert sorted(map(len, few)) == [1, 1]
