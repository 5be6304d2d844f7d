"""Whole runs: the same twice, resumed, replayed; bad input before a model; rewards that
misbehave."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from process_checks import eventually
from rlvr_setup import make_config, make_inputs, make_values, metrics_of, read_rollouts, write_rows

from roll.exceptions import ConfigError, DataError
from roll.models.checkpoint import get_latest_ckpt
from roll.pipeline.policy_pipeline import OffPolicyError
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def run(inputs: Path, output: Path, **overrides) -> RLVRPipeline:
    config = make_config(inputs, output_dir=str(output), **overrides)
    with RLVRPipeline(config, progress=False) as pipeline:
        pipeline.run()
    return pipeline


def weights(pipeline: RLVRPipeline) -> bytes:
    return (pipeline.model_folder() / "model.safetensors").read_bytes()


def with_validation(inputs: Path) -> dict:
    generating = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    data = {"file_name": str(inputs / "test.jsonl")}
    validation = {"data_args": data, "generating_args": generating}
    return {"eval_steps": 2, "val_n_sample": 2, "validation": validation}


def sampling(inputs: Path, **generating) -> dict:
    infer = make_values(inputs)["actor_infer"]
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **generating}
    return {"actor_infer": {**infer, "generating_args": args}}


# -- what a run leaves behind
# ------------------------------------------------------------------------------------------


def test_a_run_reports_what_happened(inputs, tmp_path):
    pipeline = run(inputs, tmp_path, **with_validation(inputs))
    lines = metrics_of(pipeline.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    first = lines[0]
    # On-policy: the first update sees the distribution that was sampled from.
    assert first["actor/first_ratio_error"] < 1e-4 and first["rollout/logprob_gap/max"] < 1e-3
    assert first["actor/backward_steps"] == 2 and first["actor/samples_total"] == 16
    assert first["system/weight_checksum"] != lines[1]["system/weight_checksum"]
    assert first["rollout/truncated_frac"] == first["token/total_response_length/clip"]
    assert {"val_correct/all/mean", "val/pass_at_2/all", "val/score/reverse/mean"} <= first.keys()
    assert ["val/score/all/mean" in line for line in lines] == [True, False, True, True]
    samples = read_rollouts(pipeline.run_dir / "rollouts" / "step-000001.jsonl")
    assert len(samples) == 16 and samples[0]["policy_version"] == 1
    tokens = samples[0]["tokens"]
    assert samples[0]["prompt"].endswith("<")
    assert len(tokens["infer_log_probs"]) == len(tokens["ids"])
    assert len(read_rollouts(pipeline.run_dir / "rollouts" / "val-000002.jsonl")) == 12


def test_evaluation_alone_says_what_the_run_said_at_its_end(inputs, tmp_path):
    pipeline = run(inputs, tmp_path / "a", **with_validation(inputs))
    final = metrics_of(pipeline.run_dir)[-1]
    config = make_config(inputs, **with_validation(inputs))
    for checkpoint in (pipeline.run_dir, pipeline.model_folder().parent, pipeline.model_folder()):
        found = RLVRPipeline.evaluate(config, checkpoint, samples_to=tmp_path / "eval")
        assert found == {key: value for key, value in final.items() if key in found}
    RLVRPipeline.evaluate(config, samples_to=tmp_path / "before")
    trained, before = (
        [
            sample["response"]
            for sample in read_rollouts(tmp_path / name / "rollouts/val-000000.jsonl")
        ]
        for name in ("eval", "before")
    )
    assert len(trained) == 12
    assert before != trained, "without a checkpoint it is the model that the run started from"
    with pytest.raises(ConfigError, match="validation: missing"):
        RLVRPipeline.evaluate(make_config(inputs))


def test_the_same_seed_gives_the_same_run_bit_for_bit(inputs, tmp_path):
    one, two = (run(inputs, tmp_path / name, **with_validation(inputs)) for name in "ab")
    assert metrics_of(one.run_dir) == metrics_of(two.run_dir)
    assert weights(one) == weights(two)
    other = run(inputs, tmp_path / "c", seed=4)
    assert weights(other) != weights(one)


REFERENCE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}}
KILLED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import torch
    from rlvr_setup import make_config
    from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline

    torch.set_num_threads({threads})  # as in the run that it is compared with

    class Killed(RLVRPipeline):
        def train(self, step, batch):
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)  # in the middle of a step: sampled, scored, not trained
            super().train(step, batch)

    Killed(make_config(Path({inputs!r}), output_dir={output!r}, **{options!r}), progress=False).run()
    """
)


@pytest.mark.slow
def test_resume_after_kill_9_in_the_middle_of_a_step(inputs, tmp_path):
    options = {
        "max_steps": 5, "save_steps": 2, "norm_mean_type": "running", "norm_std_type": "running",
        "adv_estimator": "reinforce", "use_kl_loss": True, "kl_loss_coef": 0.1,
        "add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.05, "kl_horizon": 40,
        "reference": REFERENCE,
    }  # fmt: skip
    whole = run(inputs, tmp_path / "whole", **options)
    killed_output = str(tmp_path / "killed")
    tests = str(Path(__file__).parents[2])
    threads = torch.get_num_threads()
    script = KILLED.format(
        tests=tests, inputs=str(inputs), output=killed_output, options=options, threads=threads
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    killed = tmp_path / "killed" / "run"
    assert get_latest_ckpt(killed).name == "checkpoint-2" and metrics_of(killed)[-1]["step"] == 2
    resumed = run(inputs, tmp_path / "killed", **options, resume_from_checkpoint=True)
    assert resumed.run_dir == killed and resumed.global_step == 5
    assert metrics_of(resumed.run_dir) == metrics_of(whole.run_dir)
    assert weights(resumed) == weights(whole)
    files = [
        sorted(path.name for path in (p.run_dir / "rollouts").iterdir()) for p in (resumed, whole)
    ]
    assert files[0] == files[1]


# -- dump and replay
# ---------------------------------------------------------------------------------------------------


def test_a_dump_trains_again_from_itself_alone(inputs, tmp_path):
    dump = {"rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}}
    one = run(inputs, tmp_path / "a", **dump)
    values = make_values(inputs, output_dir=str(tmp_path / "b"))
    for role in ("actor_infer", "rewards"):  # no engine, no reward
        del values[role]
    values["actor_train"] = {**values["actor_train"], "data_args": None}  # and no data
    values["rollout_mock"] = {"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "dump")}
    # Sampling was at temperature 1, which the config of the replay no longer says.
    values["log_probs_at_sampling_temperature"] = False
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    with RLVRPipeline(RLVRConfig(**values), progress=False) as two:
        assert two.actor_infer is None and not two.rewards
        two.run()
    assert weights(one) == weights(two)
    keys = ("actor/pg_loss", "actor/total_loss", "actor_train/grad_norm", "critic/score/mean")
    for old, new in zip(metrics_of(one.run_dir), metrics_of(two.run_dir), strict=True):
        assert [old[key] for key in keys] == [new[key] for key in keys]
    values["max_steps"] = 4
    with (
        RLVRPipeline(RLVRConfig(**values), progress=False) as three,
        pytest.raises(
            DataError, match=r"no dump for step 3 \(there are 3, step-000000 to step-000002\)"
        ),
    ):
        three.run()


# -- variants
# ----------------------------------------------------------------------------------------------------------

CRITIC = {
    "adv_estimator": "gae",
    "critic_warmup": 1,
    "critic": {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
        "strategy_args": {"strategy_name": "hf_train"},
    },
}


def test_ppo_with_a_critic_that_warms_up(inputs, tmp_path):
    pipeline = run(inputs, tmp_path, **CRITIC, whiten_advantages=True, value_clip=0.5)
    first, second, _ = metrics_of(pipeline.run_dir)
    assert "critic/loss" in first and "actor/pg_loss" not in first, (
        "only the critic learns in the first step"
    )
    assert (
        first["system/weight_checksum"] == second["system/weight_checksum"]
        and "actor/pg_loss" in second
    )
    assert (pipeline.model_folder().parent / "critic").is_dir()
    assert {"critic/values/mean", "critic/returns/mean"} <= second.keys()


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "dr_grpo", "reinforce_plus_plus"])
def test_other_estimators_run(inputs, tmp_path, estimator):
    pipeline = run(
        inputs,
        tmp_path,
        adv_estimator=estimator,
        max_steps=1,
        importance_sampling="seq",
        ppo_epochs=2,
    )
    (line,) = metrics_of(pipeline.run_dir)
    assert line["actor/backward_steps"] == 4 and line["actor_train/grad_norm"] > 0


def test_kl_against_a_reference_or_against_the_policy_without_its_adapter(inputs, tmp_path):
    pytest.importorskip("peft")
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "max_steps": 2}
    with_reference = run(inputs, tmp_path / "reference", **kl, reference=REFERENCE)
    first, second = metrics_of(with_reference.run_dir)
    assert abs(first["critic/kl"]) < 1e-6 and second["actor/kl_loss"] > 1e-6
    values = make_values(inputs)
    lora = {
        **values["actor_train"],
        "model_args": {**values["actor_train"]["model_args"], "lora_target": "all-linear"},
    }
    adapter = run(inputs, tmp_path / "lora", **kl, actor_train=lora)
    assert adapter.reference is None
    first, second = metrics_of(adapter.run_dir)
    assert abs(first["critic/kl"]) < 1e-6 and second["actor/kl_loss"] > 1e-6


def test_several_domains_with_their_own_rewards(inputs, tmp_path):
    write_rows(tmp_path / "rows.jsonl", 12, domain="a")
    more = write_rows(tmp_path / "more.jsonl", 12, seed=2, domain="b")
    (tmp_path / "one.py").write_text(
        "def score(prompt, response, ground_truth, **row): return {'len': len(response), 'x': 1}"
    )
    values = make_values(inputs)
    data_args = {
        "file_name": [str(tmp_path / "rows.jsonl"), str(more)],
        "domain_interleave_probs": {"a": 0.75, "b": 0.25},
    }
    pipeline = run(
        inputs,
        tmp_path / "out",
        actor_train={**values["actor_train"], "data_args": data_args},
        rewards={
            "a": values["rewards"]["reverse"],
            "b": {"reward_fn": f"{tmp_path / 'one.py'}:score", "world_size": 2},
        },
        max_steps=2,
    )
    line = metrics_of(pipeline.run_dir)[1]
    assert (
        line["a/critic/score/mean"] != line["b/critic/score/mean"]
        and "b/critic/zero_std_group_frac" in line
    )
    samples = read_rollouts(pipeline.run_dir / "rollouts" / "step-000000.jsonl")
    assert [sample["domain"] for sample in samples] == ["a"] * 12 + ["b"] * 4
    assert samples[-1]["rewards"]["x"] == 1


# -- honesty
# -----------------------------------------------------------------------------------------------------------


def test_truncated_sampling_is_not_on_policy_and_stops(inputs, tmp_path):
    cut = sampling(inputs, top_p=0.7)
    message = r"(?s)more than 0.001 .*tokens are cut off before sampling \(top_p=0.7"
    with pytest.raises(OffPolicyError, match=message):
        run(inputs, tmp_path / "a", **cut)
    pipeline = run(inputs, tmp_path / "b", **cut, first_ratio_tolerance=0, max_steps=1)
    assert metrics_of(pipeline.run_dir)[0]["actor/first_ratio_error"] > 1e-2
    # A correction of the gap says that it is meant.
    correction = {"is_weight": {"enabled": True}}
    run(inputs, tmp_path / "c", **cut, train_infer_correction=correction, max_steps=1)


def test_training_at_the_sampling_temperature_is_on_policy(inputs, tmp_path):
    cool = sampling(inputs, temperature=0.5)
    pipeline = run(inputs, tmp_path / "a", **cool, max_steps=1)
    assert metrics_of(pipeline.run_dir)[0]["actor/first_ratio_error"] < 1e-4
    message = r"temperature 0.5 with log_probs_at_sampling_temperature=false"
    with pytest.raises(OffPolicyError, match=message):
        run(inputs, tmp_path / "b", **cool, log_probs_at_sampling_temperature=False)


MISBEHAVING = """
import os, time
def score(prompt, response, ground_truth, **row):
    kind = int(prompt[0])
    if kind == 1: raise ValueError("cannot read this")
    if kind == 2: time.sleep(3600)
    if kind == 3: return float("nan")
    if kind == 4: return None
    if kind == 5:
        hoard = []
        while True: hoard.append(bytearray(2 ** 24))
    if kind == 6:
        if os.fork() == 0: time.sleep(3600)
    return float(len(response))
"""


@pytest.mark.slow
def test_rewards_that_misbehave_cost_samples_and_nothing_else(tmp_path):
    folder = make_inputs(tmp_path / "inputs", reward=MISBEHAVING)
    rows = [{"prompt": f"{kind}{i}<", "ground_truth": "x"} for i in range(2) for kind in range(7)]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    rewards = {
        "r": {
            "reward_fn": f"{folder / 'reward.py'}:score",
            "reward_timeout": 4,
            "reward_memory_mb": 256,
        }
    }
    before = _children()
    pipeline = run(
        folder,
        tmp_path / "out",
        rewards=rewards,
        rollout_batch_size=14,
        num_return_sequences_in_group=2,
        max_steps=1,
        actor_train={
            **make_values(folder)["actor_train"],
            "training_args": {"per_device_train_batch_size": 14},
        },
    )
    (line,) = metrics_of(pipeline.run_dir)
    for reason in ("exception", "timeout", "nan", "none", "memory"):
        assert line.get(f"rollout/dropped/{reason}") == 4, {
            k: v for k, v in line.items() if "dropped" in k
        }
    assert (
        line["actor/samples_total"] == 28 - line["rollout/dropped_samples"]
        and line["critic/score/min"] > 0
    )
    dropped = [
        s
        for s in read_rollouts(pipeline.run_dir / "rollouts" / "step-000000.jsonl")
        if s["dropped"]
    ]
    assert len(dropped) == line["rollout/dropped_samples"] and all(
        sample["score"] is None for sample in dropped
    )
    assert any("cannot read this" in sample["dropped"] for sample in dropped)
    assert eventually(lambda: not _children() - before), "no process is left"


def _children() -> set[int]:
    psutil = pytest.importorskip("psutil")
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_reward_that_never_works_ends_the_run_with_its_reasons(tmp_path):
    folder = make_inputs(
        tmp_path / "inputs", reward="def score(prompt, response, ground_truth, **row): return None"
    )
    with pytest.raises(
        DataError, match=r"not one sample of the last 3 steps could be used:\n  none: 16 samples"
    ):
        run(folder, tmp_path / "out", max_steps=5)
    assert len(metrics_of(tmp_path / "out" / "run")) == 2


# -- bad input, before a model is loaded
# -------------------------------------------------------------------------------


def test_bad_input_is_found_before_a_model_is_loaded(inputs, tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("roll.pipeline.model_worker.ModelWorker.initialize", no_model)
    values = make_values(inputs)

    def data(*rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data_args = {"file_name": str(path), **options}
        return {"actor_train": {**values["actor_train"], "data_args": data_args}}

    reward = values["rewards"]["reverse"]
    two = {"a": {**reward, "tag_included": ["x"]}, "b": {**reward, "tag_included": ["y"]}}
    nowhere = {"reverse": {"reward_fn": "nowhere.py:score"}}
    table = [
        (DataError, "no column prompt; its columns are: question, answer",
         lambda: data({"question": "a", "answer": "b"})),
        (DataError, "The longest of them has 30 tokens and prompt_length is 8",
         lambda: data({"prompt": "1" * 30})),
        (DataError, r"rows.jsonl:1: domain 'law' has no reward",
         lambda: data({"prompt": "1", "domain": "law"})),
        (DataError, "the columns scores have names that the pipeline uses",
         lambda: data({"prompt": "1", "scores": 1})),
        (DataError, r"tag 'z' belongs to no domain.*a: x; b: y",
         lambda: data({"prompt": "1", "tag": "z"}) | {"rewards": two}),
        (ConfigError, r"(?s)domain_interleave_probs.*reverze.*did you mean",
         lambda: data({"prompt": "1"}, domain_interleave_probs={"reverze": 1.0})),
        (ConfigError, "rewards.reverse.reward_fn", lambda: {"rewards": nowhere}),
        (ConfigError, "rollout_batch_size: found 3", lambda: {"rollout_batch_size": 3}),
        (ConfigError, "rewards: missing", lambda: {"rewards": {}}),
    ]  # fmt: skip
    for error, match, overrides in table:
        with pytest.raises(error, match=match):
            run(inputs, tmp_path, **overrides())
        assert not list(tmp_path.glob("run*")), "nor is there a run"
