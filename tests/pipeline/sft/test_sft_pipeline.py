"""Supervised runs: they learn, stop at their goal, resume exactly, refuse what they cannot read."""

import json
from pathlib import Path

import pytest
import torch
from rlvr_setup import CHARACTERS, metrics_of, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.exceptions import ConfigError, DataError
from roll.models.tiny import make_tiny_model
from roll.pipeline.sft.sft_config import SFTConfig
from roll.pipeline.sft.sft_pipeline import SFTPipeline


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_tiny_model(folder / "model", CHARACTERS, hidden=32, heads=1)
    write_rows(folder / "train.jsonl", 32, digits=1)
    write_rows(folder / "test.jsonl", 8, seed=1, digits=1)
    return folder


def make_config(inputs: Path, output: Path, **overrides) -> SFTConfig:
    def data(name: str) -> dict:
        return {"file_name": str(inputs / name), "prompt": "prompt", "response": "ground_truth"}

    values = {
        "exp_name": "sft",
        "output_dir": str(output),
        "track_with": "none",
        "pretrain": str(inputs / "model"),
        "prompt_length": 4,
        "response_length": 4,
        "global_template": "base",
        "max_steps": 6,
        "save_steps": 100,
        "eval_steps": 2,
        "actor_train": {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            "data_args": data("train.jsonl"),
            "training_args": {
                "learning_rate": 1e-2,
                "per_device_train_batch_size": 8,
                "lr_scheduler_type": "constant",
            },
            "strategy_args": {"strategy_name": "hf_train"},
        },
        "validation": {"data_args": data("test.jsonl")},
    }
    return SFTConfig(**{**values, **overrides})


def run(config: SFTConfig) -> SFTPipeline:
    with SFTPipeline(config, progress=False) as pipeline:
        pipeline.run()
    return pipeline


def test_the_loss_is_the_cross_entropy_of_the_answers(inputs, tmp_path):
    pipeline = run(make_config(inputs, tmp_path, max_steps=1))
    line, final = metrics_of(pipeline.run_dir)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    losses, exact = [], []
    lines = (pipeline.run_dir / "rollouts" / "val-000000.jsonl").read_text().splitlines()
    samples = [json.loads(text) for text in lines]
    for row in map(json.loads, (inputs / "test.jsonl").read_text().splitlines()):
        ids = torch.tensor(
            [tokenizer(row["prompt"] + row["ground_truth"] + tokenizer.eos_token)["input_ids"]]
        )
        log_probs = model(ids).logits.log_softmax(-1)[0, 1:-1]  # of the answer's digit and the end
        losses.append(-log_probs.gather(-1, ids[0, 2:, None]).detach())
        exact.append(bool((log_probs.argmax(-1) == ids[0, 2:]).all()))
    for sample, log_probs, is_exact in zip(samples, losses, exact, strict=True):
        assert sample["tokens"]["old_log_probs"][-2:] == pytest.approx(
            (-log_probs).flatten().tolist(), abs=1e-4
        )
        assert sample["score"] == is_exact and sample["tokens"]["mask"] == [0, 0, 1, 1]
    assert line["val/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert line["val/exact_match"] == sum(exact) / len(exact)
    assert final["val/loss"] < line["val/loss"], "one step helps"


def test_it_learns_and_stops_at_its_goal(inputs, tmp_path):
    pipeline = run(
        make_config(inputs, tmp_path, max_steps=300, stop_at_exact_match=0.9, eval_steps=5)
    )
    assert pipeline.global_step < 300 and pipeline.global_step % 5 == 0
    assert metrics_of(pipeline.run_dir)[-1]["val/exact_match"] >= 0.9
    assert (pipeline.model_folder() / "model.safetensors").is_file()
    # A run's folder is a model to start from.
    again = run(
        make_config(inputs, tmp_path, exp_name="next", pretrain=str(pipeline.run_dir), max_steps=1)
    )
    assert metrics_of(again.run_dir)[0]["val/exact_match"] >= 0.9


def test_resume_is_exact(inputs, tmp_path):
    whole = run(make_config(inputs, tmp_path / "a"))
    part = make_config(inputs, tmp_path / "b", save_steps=4)
    with SFTPipeline(part, progress=False) as pipeline:
        steps = pipeline.end_step

        def stop_early(step, metrics):
            steps(step, metrics)
            if step == 4:
                raise KeyboardInterrupt

        pipeline.end_step = stop_early
        with pytest.raises(KeyboardInterrupt):
            pipeline.run()
    resumed = run(make_config(inputs, tmp_path / "b", resume_from_checkpoint=True))
    assert metrics_of(resumed.run_dir) == metrics_of(whole.run_dir)
    weights = [(p.model_folder() / "model.safetensors").read_bytes() for p in (resumed, whole)]
    assert weights[0] == weights[1]


def test_bad_input(inputs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"stop_at_exact_match: found 0.5 .* because there is no validation"
    ):
        make_config(inputs, tmp_path, validation=None, stop_at_exact_match=0.5)
    with pytest.raises(ConfigError, match=r"actor_train.data_args.file_name: missing"):
        run(
            make_config(
                inputs, tmp_path, actor_train={"strategy_args": {"strategy_name": "hf_train"}}
            )
        )
    config = make_config(inputs, tmp_path)
    data_args = config.actor_train.data_args.model_copy(update={"response": "answer"})
    wrong = config.model_copy(
        update={"actor_train": config.actor_train.model_copy(update={"data_args": data_args})}
    )
    with pytest.raises(
        DataError, match="has no column answer; its columns are: prompt, ground_truth, tag"
    ):
        run(wrong)
    assert not (tmp_path / "sft").exists()
