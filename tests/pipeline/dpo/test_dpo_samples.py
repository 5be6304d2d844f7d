"""The pairs that a validation leaves in the run's folder: their numbers are those of the metrics and of the models."""

import json
from pathlib import Path

import pytest
import torch
from report_reader import read_data
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM

from roll.pipeline.dpo import pair_log_probs
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import ACCURACY, DPOPipeline
from roll.utils.tracking import read_metrics

BETA = 0.5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_model_folder(folder / "model")
    rows = [
        {"prompt": f"{a} + 1 = ", "chosen": str(a + 1), "rejected": "I do not know" * (a % 3 + 1)}
        for a in range(9)
    ]
    for name, part in (("train", rows[:4]), ("validation", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def train(inputs: Path, output: Path, **values) -> DPOPipeline:
    role = {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "infer_batch_size": 2,
    }
    config = DPOConfig(
        actor_train={
            **role,
            "data_args": {"file_name": str(inputs / "train.jsonl"), "template": "base"},
            "training_args": {"per_device_train_batch_size": 4, "learning_rate": 1e-3},
            "strategy_args": {"strategy_name": "hf_train"},
        },
        reference={**role, "strategy_args": {"strategy_name": "hf_infer"}},
        validation={"data_args": {"file_name": str(inputs / "validation.jsonl")}},
        output_dir=str(output),
        pretrain=str(inputs / "model"),
        exp_name="exp",
        track_with="none",
        **{
            "sequence_length": 64,
            "max_steps": 3,
            "save_steps": 100,
            "eval_steps": 2,
            "beta": BETA,
            **values,
        },
    )
    with DPOPipeline(config, progress=False) as pipeline:
        pipeline.run()
    return pipeline


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> DPOPipeline:
    return train(inputs, tmp_path_factory.mktemp("run"))


def records_of(pipeline: DPOPipeline, step: int) -> list[dict]:
    path = pipeline.run_dir / "rollouts" / f"val-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_validation_leaves_its_pairs(run):
    assert [path.name for path in sorted((run.run_dir / "rollouts").iterdir())] == [
        "val-000000.jsonl",
        "val-000002.jsonl",
        "val-000003.jsonl",
    ]
    records = records_of(run, 0)
    assert len(records) == 18 and [record["group"] for record in records[:3]] == [
        "pair 0",
        "pair 0",
        "pair 1",
    ]
    assert [record["sample"] for record in records[:2]] == ["0 chosen", "0 rejected"]
    assert (records[2]["prompt"], records[2]["response"], records[2]["tag"]) == (
        "1 + 1 = ",
        "2<|im_end|>",
        "chosen",
    )
    assert {record["ranked"] for record in records} == {"tie"}, "the policy is still the reference"
    for record in records:
        tokens, answer = record["tokens"], sum(record["tokens"]["mask"])
        assert "".join(tokens["text"]) == record["prompt"] + record["response"]
        assert tokens["old_log_probs"] == tokens["ref_log_probs"] and record["score"] == 0
        assert tokens["old_log_probs"][:-answer] == [None] * (len(tokens["ids"]) - answer)


def test_the_numbers_are_those_of_the_models_and_the_metrics(run, inputs):
    models = {
        "old_log_probs": AutoModelForCausalLM.from_pretrained(run.model_folder()),
        "ref_log_probs": AutoModelForCausalLM.from_pretrained(inputs / "model"),
    }
    records = records_of(run, 3)
    for record in records:
        tokens = record["tokens"]
        ids, answer = torch.tensor([tokens["ids"]]), sum(tokens["mask"])
        for name, model in models.items():
            expected = (
                model(ids)
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, ids[0, 1:, None])
                .flatten()[-answer:]
            )
            assert tokens[name][-answer:] == pytest.approx(expected.tolist(), abs=1e-4)
        ratios = [
            p - q
            for p, q in zip(tokens["old_log_probs"], tokens["ref_log_probs"], strict=True)
            if p is not None
        ]
        assert record["score"] == record["reward"] == pytest.approx(BETA * sum(ratios), abs=1e-4)
    chosen, rejected = records[0::2], records[1::2]
    for one, other in zip(chosen, rejected, strict=True):
        assert (
            one["ranked"]
            == other["ranked"]
            == ("right" if one["score"] > other["score"] else "wrong")
        )
    last = read_metrics(run.run_dir / "metrics.jsonl")[-1]
    assert last[ACCURACY] == pytest.approx(sum(one["ranked"] == "right" for one in chosen) / 9)
    assert last["val/actor/chosen_reward"] == pytest.approx(
        sum(one["score"] for one in chosen) / 9, abs=1e-5
    )


def test_a_precomputed_reference_and_none_at_all(run, inputs, tmp_path):
    stored = train(inputs, tmp_path / "stored", reference_log_probs="precompute")
    assert stored.reference is None and set(stored.reference_sums) == {"train", "validation"}
    for one, other in zip(records_of(stored, 3), records_of(run, 3), strict=True):
        for name in ("old_log_probs", "ref_log_probs"):
            known = [i for i, flag in enumerate(one["tokens"]["mask"]) if flag]
            values, expected = (
                [record["tokens"][name][i] for i in known] for record in (one, other)
            )
            assert values == pytest.approx(expected, abs=1e-4)
    free = records_of(train(inputs, tmp_path / "free", reference_free=True, max_steps=1), 0)
    assert "ref_log_probs" not in free[0]["tokens"]
    assert free[0]["score"] == pytest.approx(
        BETA * sum(p for p in free[0]["tokens"]["old_log_probs"] if p is not None)
    )


def test_long_data_is_sampled_evenly_and_resuming_writes_the_same(
    run, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr(pair_log_probs, "NUM_SAMPLES", 4)
    cut = train(inputs, tmp_path, max_steps=2)
    records = records_of(cut, 2)
    assert [record["group"] for record in records[::2]] == ["pair 0", "pair 2", "pair 4", "pair 6"]
    whole = {record["sample"]: record for record in records_of(run, 0)}
    assert all(
        record["tokens"] == whole[record["sample"]]["tokens"] for record in records_of(cut, 0)
    )
    later = cut.run_dir / "rollouts" / "val-000009.jsonl"
    later.write_text("")
    train(inputs, tmp_path, max_steps=3, resume_from_checkpoint=True)
    assert not later.exists() and records_of(cut, 2) == records


def test_the_report_lists_the_pairs(run):
    data = run.run_dir / "report" / "data"
    index = read_data(data / "index.js")["runs"][0]
    assert [(step["step"], step["split"]) for step in index["steps"]] == [
        (0, "val"),
        (2, "val"),
        (3, "val"),
    ]
    listing = read_data(data / "run0" / "val-000003.js")
    columns = dict(zip(listing["fields"], listing["rows"], strict=True))
    assert columns["ranked"] == [record["ranked"] for record in records_of(run, 3)]
    assert columns["tag"][:2] == ["chosen", "rejected"] and columns["group"][:4] == [0, 0, 1, 1]
