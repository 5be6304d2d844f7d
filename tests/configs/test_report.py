"""The report of `roll check`."""

import json
from pathlib import Path

import pytest

from roll.configs.report import check_report
from roll.pipeline.registry import load_config

GOOD = Path(__file__).parent / "data" / "good"


def report(name: str, *overrides: str):
    return check_report(load_config(GOOD / f"{name}.yaml", overrides, warn=False))


def cells(name: str, *overrides: str) -> dict[str, list[str]]:
    return dict(report(name, *overrides).rows)


def test_rlvr_has_a_column_for_actor_and_critic():
    result = report("rlvr")
    assert (result.pipeline, result.roles) == ("rlvr", ["actor_train", "critic"])
    assert dict(result.rows) == {
        "prompts per step": ["16", "16"],
        "samples per prompt": ["8", "8"],
        "rows per step": ["128", "128"],
        "ranks (data parallel)": ["4", "2"],
        "rows per rank": ["32", "64"],
        "rows per micro-batch": ["1", "2"],
        "micro-batches per optimizer step": ["8", "8"],
        "optimizer steps per batch": ["8", "4"],  # 2 epochs of 4; the critic makes one
        "optimizer steps in all": ["720", "400"],  # the actor waits for 10 of 100 steps
        "tokens per step, at most": ["786,432", "786,432"],
        "learning rate, first step": ["0", "1e-05"],
        "learning rate, middle step": ["5.14e-07", "5e-06"],
        "learning rate, last step": ["1.43e-09", "2.5e-08"],
    }


def test_dpo_counts_pairs_and_rows():
    table = cells("dpo")
    assert table["pairs per step"] == ["16"] and table["rows per step"] == ["32"]
    assert table["rows per micro-batch"] == ["8"] and table["optimizer steps per batch"] == ["1"]
    assert "samples per prompt" not in table


def test_agentic_counts_trajectories_and_turns_are_a_range():
    table = cells("agentic")
    assert table["trajectories per step"] == ["32"] and table["rows per step"] == ["32"]
    assert table["tokens per step, at most"] == [f"{32 * 1024:,}"]
    table = cells("agentic", "adv_estimator=gigpo")
    assert table["rows per step"] == ["32 to 192"]  # up to 6 turns
    assert table["optimizer steps in all"] == ["80 to 480"]
    assert table["tokens per step, at most"] == [f"{32 * 6 * 1024:,}"]
    table = cells("agentic", "adv_estimator=gigpo", "~custom_envs.Walk.max_steps")
    assert table["rows per step"] == ["at least 32"] and table["tokens per step, at most"] == [
        "unknown"
    ]


def test_micro_batches_by_tokens():
    overrides = ["use_dynamic_batching_in_train=true", "max_tokens_per_microbatch_in_train=4096"]
    table = cells("agentic", *[f"actor_train.{override}" for override in overrides])
    assert (
        table["micro-batches"] == ["of up to 4,096 tokens"] and "rows per micro-batch" not in table
    )


@pytest.mark.parametrize(
    ("name", "overrides", "remark"),
    [
        (
            "dpo",
            (),
            "actor_train: the constant schedule has no warm-up; constant_with_warmup has one",
        ),
        ("rlvr", ("max_steps=12",), "actor_train: the warm-up takes 20 of 16 optimizer steps"),
        (
            "rlvr",
            ("adv_estimator=grpo",),
            "critic has a strategy and is not started, because nothing needs it",
        ),
        (
            "rlvr",
            ("adv_estimator=grpo", "num_return_sequences_in_group=1", "rollout_batch_size=32"),
            "grpo compares the samples of a prompt, and there is one: every advantage will be 0",
        ),
        (
            "rlvr",
            ("actor_infer.strategy_args.strategy_config.max_model_len=4096",),
            "actor_infer: max_model_len 4096 cuts sequences short of sequence_length 6144",
        ),
        (
            "agentic",
            ("adv_estimator=gigpo",),
            "actor_train: every turn is a row; the learning rates are those of the fewest optimizer steps",
        ),
    ],
)
def test_remarks(name, overrides, remark):
    assert remark in report(name, *overrides).remarks


def test_a_sound_config_gives_no_remark():
    assert report("agentic").remarks == []


def test_json_has_numbers_and_the_resolved_config():
    values = json.loads(json.dumps(report("rlvr").as_json()))
    assert values["pipeline"] == "rlvr" and values["backend"] == "ray"
    assert values["plans"]["actor_train"]["total_optimizer_steps"] == 720
    assert values["plans"]["critic"]["learning_rates"]["first"] == 1e-5
    assert values["config"]["actor_train"]["training_args"]["max_steps"] == 720
    assert "validation.eval_steps" in values["ignored"]
    assert values["replaced"] == [
        {"key": "actor_infer.generating_args.max_new_tokens", "written": 1000, "effective": 4096}
    ]
