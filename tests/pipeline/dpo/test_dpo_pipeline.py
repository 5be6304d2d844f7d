"""The DPO pipeline from files to a model folder: it learns, resumes exactly, and scores the reference in three ways."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.exceptions import ConfigError, DataError
from roll.models.checkpoint import complete_checkpoints
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import ACCURACY, LOSS, DPOPipeline, ValidationHistory
from roll.utils.run_folder import RunFolder
from roll.utils.tracking import read_metrics

EXAMPLES = Path(__file__).parents[3] / "examples" / "dpo"


def write_pairs(path: Path, count: int, offset: int = 0) -> Path:
    rows = [
        {
            "prompt": f"{a + offset} + {a % 7} = ",
            "chosen": str(a + offset + a % 7),
            "rejected": str(3 * a + 11),
        }
        for a in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    """A model folder, 22 pairs to train on (5 batches of 4 and two left over), 7 to validate on."""
    root = tmp_path_factory.mktemp("dpo")
    return {
        "model": str(make_model_folder(root / "model")),
        "train": str(write_pairs(root / "train.jsonl", 22)),
        "validation": str(write_pairs(root / "validation.jsonl", 7, offset=40)),
    }


def make_config(
    inputs, output_dir, *, strategy="hf_train", workers=1, model_args=None, **values
) -> DPOConfig:
    shared = {
        "model_args": {
            "dtype": "fp32",
            "disable_gradient_checkpointing": True,
            **(model_args or {}),
        },
        "world_size": workers,
        "infer_batch_size": 3,
    }
    defaults = {
        "pretrain": inputs["model"],
        "sequence_length": 48,
        "max_steps": 9,
        "save_steps": 100,
        "eval_steps": 4,
        "track_with": "none",
        "exp_name": "exp",
        "beta": 0.5,
    }
    return DPOConfig(
        actor_train={
            **shared,
            "strategy_args": {"strategy_name": strategy},
            "data_args": {"file_name": inputs["train"], "template": "base"},
            "training_args": {
                "per_device_train_batch_size": 4 // workers,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
            },
        },
        reference={
            **shared,
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": strategy.replace("train", "infer")},
        },
        validation={"data_args": {"file_name": inputs["validation"]}},
        output_dir=str(output_dir),
        **{**defaults, **values},
    )


def train(config: DPOConfig, **options) -> DPOPipeline:
    with DPOPipeline(config, progress=options.pop("progress", False)) as pipeline:
        pipeline.run()
    return pipeline


def lines_of(run_dir: Path) -> list[dict[str, float]]:
    """All metrics without those that depend on the clock."""
    clock = ("time", "system/tps")
    return [
        {name: value for name, value in line.items() if not name.startswith(clock)}
        for line in read_metrics(Path(run_dir) / "metrics.jsonl")
    ]


def losses_of(run_dir: Path) -> list[float]:
    return [line["actor/loss"] for line in lines_of(run_dir) if "actor/loss" in line]


def weights_of(pipeline: DPOPipeline) -> dict[str, torch.Tensor]:
    return load_file(pipeline.model_folder() / "model.safetensors")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> DPOPipeline:
    """A run without interruption and with a live reference, that others are compared with."""
    return train(make_config(inputs, tmp_path_factory.mktemp("whole")))


def test_metrics_of_a_run(whole):
    lines = lines_of(whole.run_dir)
    assert [line["step"] for line in lines] == list(range(10))
    first = lines[0]
    # Policy and reference are the same before the first step, but for the order of sums, which is the machine's choice.
    assert first["actor/loss"] == pytest.approx(math.log(2)) and first[LOSS] == pytest.approx(
        math.log(2)
    )
    assert first["actor/margin"] == pytest.approx(0, abs=1e-5) and 0 <= first[ACCURACY] <= 1
    for name in (
        "margin",
        "chosen_reward",
        "reject_reward",
        "chosen_logps",
        "reject_logps",
        "lr",
        "acc",
    ):
        assert f"actor/{name}" in first
    assert first["actor_train/grad_norm"] > 0
    assert first["token/chosen_length/mean"] > 1 and first["token/prompt_length/mean"] > 5
    raw = read_metrics(whole.run_dir / "metrics.jsonl")[0]
    assert {
        "system/tps",
        "time/step_total",
        "time/actor_train",
        "time/cal_ref_log_probs",
        "time/val_step",
    } <= raw.keys()
    assert [line["step"] for line in lines if LOSS in line] == [0, 4, 8, 9]
    assert lines[-1]["step"] == 9 and "actor/loss" not in lines[-1]
    assert lines[4]["system/epoch"] == 1.0 and lines[6]["system/epoch"] == pytest.approx(1 + 8 / 22)


def test_validation_is_the_mean_over_every_pair(whole, inputs):
    """The saved model, scored pair by pair in plain transformers, gives the logged numbers."""
    folder = whole.model_folder()
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(inputs["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def log_prob(model, prompt: str, answer: str) -> float:
        ids = torch.tensor(
            [
                tokenizer(prompt + answer + tokenizer.eos_token, add_special_tokens=False)[
                    "input_ids"
                ]
            ]
        )
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            scores = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        return float(scores[start - 1 :].sum())

    losses, margins = [], []
    for row in map(json.loads, Path(inputs["validation"]).read_text().splitlines()):
        chosen, rejected = (
            log_prob(policy, row["prompt"], row[side])
            - log_prob(reference, row["prompt"], row[side])
            for side in ("chosen", "rejected")
        )
        margins.append(0.5 * (chosen - rejected))
        losses.append(math.log1p(math.exp(-margins[-1])))
    last = lines_of(whole.run_dir)[-1]
    assert last[LOSS] == pytest.approx(sum(losses) / 7, abs=1e-5)
    assert last[ACCURACY] == pytest.approx(sum(margin > 0 for margin in margins) / 7)
    assert last["val/actor/margin"] == pytest.approx(sum(margins) / 7, abs=1e-5)


def test_the_end_says_where_the_model_is_and_what_validation_says(inputs, tmp_path, capsys):
    pipeline = train(make_config(inputs, tmp_path, max_steps=2), progress=None)
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("Validation on 7 pairs: accuracy 0.500 -> ")
    assert f"Model: {tmp_path}/exp/checkpoints/checkpoint-2/actor_train" in output
    info = RunFolder(pipeline.run_dir).info()
    assert info["summary"]["data"]["train"]["kept"] == 22
    assert info["summary"]["validation"]["last"]["step"] == 2


@pytest.mark.parametrize("reference", ["live", "precompute"])
def test_resume_in_the_middle_of_epoch_two_is_bit_equal(
    inputs, tmp_path, whole, reference, monkeypatch
):
    class PowerCut(DPOPipeline):
        def end_step(self, step, metrics):
            super().end_step(step, metrics)
            if step == 7:
                raise RuntimeError("power cut")

    values = {"save_steps": 7, "reference_log_probs": reference}
    with (
        pytest.raises(RuntimeError, match="power cut"),
        PowerCut(make_config(inputs, tmp_path, **values), progress=False) as cut,
    ):
        cut.run()
    assert [path.name for path in complete_checkpoints(tmp_path / "exp")] == ["checkpoint-7"]
    assert 1 < cut.sampler.epoch + cut.sampler.index / 22 < 2
    if reference == "precompute":
        monkeypatch.setattr(
            "roll.pipeline.dpo.dpo_pipeline.compute_pair_log_probs",
            _only_the_policy(cut.datasets["train"]),
        )
    resumed = train(make_config(inputs, tmp_path, resume_from_checkpoint=True, **values))
    assert resumed.run_dir == cut.run_dir
    if reference == "live":
        assert lines_of(resumed.run_dir) == lines_of(whole.run_dir)
        for name, value in weights_of(whole).items():
            assert torch.equal(value, weights_of(resumed)[name]), name
    else:
        assert losses_of(resumed.run_dir) == pytest.approx(losses_of(whole.run_dir), abs=1e-6)


def _only_the_policy(train_data):
    """As the original, failing where the stored log-probs of the reference should be used."""
    from roll.pipeline.dpo.pair_log_probs import compute_pair_log_probs

    def guarded(cluster, dataset, *args, **options):
        assert cluster.cluster_name == "actor_train" and len(dataset) != len(train_data), (
            "scored again"
        )
        return compute_pair_log_probs(cluster, dataset, *args, **options)

    return guarded


def test_precomputed_and_live_reference_agree(inputs, tmp_path, whole):
    stored = train(make_config(inputs, tmp_path, reference_log_probs="precompute"))
    assert stored.reference is None
    assert losses_of(stored.run_dir) == pytest.approx(losses_of(whole.run_dir), abs=1e-6)
    for one, two in zip(lines_of(stored.run_dir), lines_of(whole.run_dir), strict=True):
        for name in (LOSS, "val/actor/margin"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-6)


def test_stored_scores_of_other_pairs_or_weights_are_not_used(inputs, tmp_path):
    first = DPOPipeline(
        make_config(inputs, tmp_path, reference_log_probs="precompute"), progress=False
    )
    first.save_checkpoint()
    first.close()
    scores = first.reference_sums["train"]
    file = first.run_dir / "reference_log_probs.safetensors"
    before = file.read_bytes()

    def again(**other) -> torch.Tensor:
        config = make_config(
            {**inputs, **other},
            tmp_path,
            reference_log_probs="precompute",
            resume_from_checkpoint=True,
        )
        pipeline = DPOPipeline(config, progress=False)
        pipeline.close()
        return pipeline.reference_sums["train"]

    assert torch.equal(again(), scores) and file.read_bytes() == before
    # The same architecture and file sizes, other numbers.
    other = str(make_model_folder(tmp_path / "other", seed=1))
    assert not torch.allclose(again(model=other), scores)
    rows = [json.loads(line) for line in Path(inputs["train"]).read_text().splitlines()]
    rows[3]["chosen"], rows[3]["rejected"] = rows[3]["rejected"], rows[3]["chosen"]
    swapped = tmp_path / "swapped.jsonl"
    swapped.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = scores.clone().view(-1, 2)
    expected[3] = expected[3].flip(0)
    assert torch.allclose(again(train=str(swapped)).view(-1, 2), expected, atol=1e-5)


def test_lora_uses_the_policy_without_its_adapter(inputs, tmp_path, whole):
    pytest.importorskip("peft")
    lora = {
        "model_args": {"lora_target": "q_proj,v_proj,down_proj", "lora_rank": 4},
        "max_steps": 4,
    }
    live = train(make_config(inputs, tmp_path / "live", **lora))
    stored = train(
        make_config(inputs, tmp_path / "stored", reference_log_probs="precompute", **lora)
    )
    assert losses_of(live.run_dir)[0] == pytest.approx(math.log(2))
    assert losses_of(live.run_dir)[1:] != pytest.approx([math.log(2)] * 3, abs=1e-4)
    assert losses_of(stored.run_dir) == pytest.approx(losses_of(live.run_dir), abs=1e-6)
    # The base model, as a reference of its own, says the same.
    reference = DPOPipeline(
        make_config(inputs, tmp_path / "own", reference_log_probs="precompute"), progress=False
    )
    reference.close()
    assert torch.allclose(
        stored.reference_sums["train"], reference.reference_sums["train"], atol=1e-6
    )
    opened = AutoModelForCausalLM.from_pretrained(live.model_folder(), dtype=torch.float32)
    assert any("lora" in name for name, _ in opened.named_parameters())


def test_options_of_the_loss_reach_it(inputs, tmp_path):
    """At the first step policy and reference agree, so the losses are known."""
    cases = [
        ({"loss_type": "hinge"}, 1.0),
        ({"ipo": True, "beta": 0.25}, 4.0),
        ({"loss_type": "sppo_hard", "beta": 0.5}, 2.0),
    ]
    for number, (values, expected) in enumerate(cases):
        pipeline = train(
            make_config(inputs, tmp_path / str(number), max_steps=1, eval_steps=-1, **values)
        )
        assert losses_of(pipeline.run_dir) == pytest.approx([expected], abs=1e-5)
    free = train(make_config(inputs, tmp_path / "free", max_steps=1, reference_free=True))
    line = lines_of(free.run_dir)[0]
    assert line["actor/chosen_reward"] == pytest.approx(0.5 * line["actor/chosen_logps"], rel=1e-5)
    assert free.reference is None and LOSS in line


def test_early_stop_keeps_and_names_the_best_model(inputs, tmp_path, monkeypatch, capsys):
    losses = iter([0.7, 0.5, 0.6, 0.55, 0.4])
    real = DPOPipeline.validate

    def scripted(self, step):
        metrics = real(self, step)
        self.validations.load_state_dict(self._before)
        metrics[LOSS] = next(losses)
        self.validations.add(step, metrics)
        self._before = self.validations.state_dict()
        return metrics

    monkeypatch.setattr(DPOPipeline, "_before", ValidationHistory().state_dict(), raising=False)
    monkeypatch.setattr(DPOPipeline, "validate", scripted)
    config = make_config(
        inputs, tmp_path, eval_steps=2, early_stop_patience=2, save_steps=1, max_ckpt_to_keep=1
    )
    pipeline = train(config, progress=None)
    assert pipeline.global_step == 6
    names = [path.name for path in complete_checkpoints(pipeline.run_dir)]
    assert names == ["checkpoint-2", "checkpoint-6"]
    output = capsys.readouterr().out
    assert "Stopped after 6 of 9 steps: 2 validations without a loss below 0.5000." in output
    assert "best at step 2" in output and "checkpoint-2/actor_train" in output
    assert lines_of(pipeline.run_dir)[-1][LOSS] == 0.55


def test_how_long_a_run_is():
    def steps(per_epoch=10, *, training_args=None, **values) -> int:
        role = {
            "strategy_args": {"strategy_name": "hf_train"},
            "training_args": training_args or {},
        }
        return DPOConfig(sequence_length=8, actor_train=role, **values).num_steps(per_epoch)

    assert steps() == 10  # one epoch
    assert steps(per_epoch=600) == 500  # and ROLL's limit
    assert steps(max_steps=25) == 25
    assert steps(training_args={"num_train_epochs": 3}) == 30
    assert steps(per_epoch=600, training_args={"num_train_epochs": 3}) == 1800
    assert steps(training_args={"num_train_epochs": 3}, max_steps=25) == 25
    assert steps(training_args={"num_train_epochs": 2.5}, max_steps=26) == 25


def test_the_schedule_is_as_long_as_the_run(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    values = {name: getattr(config, name) for name in config.model_fields_set - {"max_steps"}}
    pipeline = DPOPipeline(DPOConfig(**values), progress=False)
    pipeline.close()
    strategy = pipeline.actor_train.workers[0].strategy
    assert isinstance(strategy, TrainStrategy)
    assert pipeline.pipeline_config.max_steps == 5 == strategy.worker_config.training_args.max_steps


def test_too_few_pairs_for_one_step(inputs, tmp_path):
    few = {**inputs, "train": str(write_pairs(tmp_path / "few.jsonl", 3))}
    with pytest.raises(DataError, match="3 rows do not fill one batch of 4"):
        DPOPipeline(make_config(few, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_early_stop_without_validation_is_refused():
    with pytest.raises(ConfigError, match=r"early_stop_patience: found 2 .*nothing is validated"):
        DPOConfig(sequence_length=8, early_stop_patience=2)


# -- bad input, through the command line ------------------------------------------------------------------------------

YAML = """
pipeline: dpo
pretrain: {model}
sequence_length: 48
output_dir: {out}
max_steps: 1
actor_train:
  model_args: {{dtype: fp32}}
  data_args: {{file_name: {train}, template: {template}}}
  training_args: {{per_device_train_batch_size: 2}}
  strategy_args: {{strategy_name: hf_train}}
reference:
  model_args: {{dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer}}
"""
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def bad_inputs(case: str, inputs: dict[str, str], tmp_path: Path) -> tuple[dict[str, str], str]:
    """(what differs from a good config, what the message has to say)"""
    bad = tmp_path / "bad.jsonl"
    if case == "no file":
        return {"train": f"{tmp_path}/nope.jsonl"}, f"no such file or folder: {tmp_path}/nope.jsonl"
    if case == "missing column":
        bad.write_text('{"prompt": "a", "chosen": "b", "loser": "c"}\n')
        return {"train": str(bad)}, "has no column rejected; its columns are: prompt, chosen, loser"
    if case == "not a pair":
        bad.write_text(
            '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": 5, "rejected": "c"}\n'
        )
        return {"train": str(bad)}, f"{bad}:2: is not a pair"
    if case == "no weights":
        return {
            "model": str(make_model_folder(tmp_path / "empty", weights=False))
        }, "has no weights (model*.safetensors)"
    model = make_model_folder(tmp_path / "strict")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(model)
    bad.write_text('{"system": "be kind", "prompt": "a", "chosen": "b", "rejected": "c"}\n')
    expected = "chat template 'native' cannot render a conversation with the roles system, user"
    return {"model": str(model), "train": str(bad), "template": "native"}, expected


@pytest.mark.parametrize(
    "case", ["no file", "missing column", "not a pair", "no weights", "template"]
)
def test_bad_input_is_explained_before_a_model_is_loaded(
    case, inputs, tmp_path, monkeypatch, capsys
):
    from roll import cli

    values, expected = bad_inputs(case, inputs, tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(
        YAML.format(**{**inputs, "template": "base", "out": tmp_path / "out", **values})
    )
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *a, **k: pytest.fail("model loaded"),
    )
    monkeypatch.setattr(sys, "argv", ["roll", "train", str(config)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert expected in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


# -- the same run elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_two_ray_workers_have_the_losses_of_one_in_process(inputs, tmp_path):
    one = train(make_config(inputs, tmp_path / "one", max_steps=10))
    options = {"strategy": "fsdp2_train", "workers": 2}
    two = train(make_config(inputs, tmp_path / "two", max_steps=10, **options))
    assert two.pipeline_config.execution_backend == "ray"
    assert len(losses_of(two.run_dir)) == 10
    assert losses_of(two.run_dir) == pytest.approx(losses_of(one.run_dir), abs=1e-5)
    for ours, theirs in zip(lines_of(two.run_dir), lines_of(one.run_dir), strict=True):
        assert ours.get(LOSS) == pytest.approx(theirs.get(LOSS), abs=1e-5)
    AutoModelForCausalLM.from_pretrained(two.model_folder())


@pytest.mark.slow
def test_the_tiny_example_learns(tmp_path):
    data = tmp_path / "data"
    subprocess.run(
        [sys.executable, str(EXAMPLES / "make_data.py"), str(data), "--model"], check=True
    )
    overrides = [
        f"output_dir={tmp_path}",
        f"pretrain={data}/model",
        f"actor_train.data_args.file_name={data}/train.jsonl",
        f"validation.data_args.file_name={data}/validation.jsonl",
    ]
    command = [
        sys.executable,
        "-m",
        "roll.cli",
        "train",
        str(EXAMPLES / "dpo_tiny.yaml"),
        *overrides,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "dpo_tiny"
    curve = [line[ACCURACY] for line in lines_of(run) if ACCURACY in line]
    assert curve[0] == pytest.approx(0.5, abs=0.1) and curve[-1] >= 0.95
    model = run / "checkpoints" / "checkpoint-150" / "actor_train"
    assert f"Model: {model}" in result.stdout and "accuracy 0.5" in result.stdout
    assert "step 150/150  loss " in result.stderr and " tok/s " in result.stderr
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)
