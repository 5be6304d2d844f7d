"""The DPO pipeline from files to a model folder: it learns, resumes, and has three references."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from report_reader import read_data
from safetensors.torch import load_file
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll import cli
from roll.distributed.strategy.train_strategy import TrainStrategy
from roll.exceptions import ConfigError, DataError
from roll.models.checkpoint import complete_checkpoints
from roll.pipeline.dpo import pair_log_probs
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import ACCURACY, LOSS, DPOPipeline, ValidationHistory
from roll.utils.run_folder import RunFolder
from roll.utils.tracking import read_metrics

EXAMPLES = Path(__file__).parents[3] / "examples" / "dpo"
BETA = 0.5


def write_pairs(path: Path, count: int, offset: int = 0) -> Path:
    rows = []
    for a in range(count):
        answers = {"chosen": str(a + offset + a % 7), "rejected": str(3 * a + 11)}
        rows.append({"prompt": f"{a + offset} + {a % 7} = ", **answers})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    """A model, 22 pairs to train on (5 batches of 4 and two left over), 7 to validate on."""
    root = tmp_path_factory.mktemp("dpo")
    return {
        "model": str(make_model_folder(root / "model")),
        "train": str(write_pairs(root / "train.jsonl", 22)),
        "validation": str(write_pairs(root / "validation.jsonl", 7, offset=40)),
    }


def make_config(inputs, output_dir, *, strategy="hf_train", workers=1, model_args=(), **values):
    args = {"dtype": "fp32", "disable_gradient_checkpointing": True, **dict(model_args)}
    shared = {"world_size": workers, "infer_batch_size": 3}
    training_args = {
        "per_device_train_batch_size": 4 // workers,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    defaults = {
        "pretrain": inputs["model"],
        "sequence_length": 48,
        "max_steps": 9,
        "save_steps": 100,
        "eval_steps": 4,
        "track_with": "none",
        "exp_name": "exp",
        "beta": BETA,
    }
    return DPOConfig(
        actor_train={
            **shared,
            "model_args": args,
            "strategy_args": {"strategy_name": strategy},
            "data_args": {"file_name": inputs["train"], "template": "base"},
            "training_args": training_args,
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


def train(config: DPOConfig, progress: bool | None = False) -> DPOPipeline:
    with DPOPipeline(config, progress=progress) as pipeline:
        pipeline.run()
    return pipeline


def made(config: DPOConfig) -> DPOPipeline:
    """A pipeline that does not run."""
    pipeline = DPOPipeline(config, progress=False)
    pipeline.close()
    return pipeline


def lines_of(run_dir: Path) -> list[dict[str, float]]:
    """All metrics without those that depend on the clock."""
    lines = read_metrics(Path(run_dir) / "metrics.jsonl")
    clock = ("time", "system/tps")
    return [{name: line[name] for name in line if not name.startswith(clock)} for line in lines]


def losses_of(run_dir: Path) -> list[float]:
    return [line["actor/loss"] for line in lines_of(run_dir) if "actor/loss" in line]


def weights_of(pipeline: DPOPipeline) -> dict[str, torch.Tensor]:
    return load_file(pipeline.model_folder() / "model.safetensors")


def records_of(pipeline: DPOPipeline, step: int) -> list[dict]:
    path = pipeline.run_dir / "rollouts" / f"val-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> DPOPipeline:
    """A run without interruption and with a live reference, that others are compared with."""
    return train(make_config(inputs, tmp_path_factory.mktemp("whole")))


def test_metrics_of_a_run(whole):
    lines = lines_of(whole.run_dir)
    assert [line["step"] for line in lines] == list(range(10))
    first = lines[0]
    # Policy and reference are the same before the first step, but for the order of sums.
    assert first["actor/loss"] == pytest.approx(math.log(2)) == first[LOSS]
    assert first["actor/margin"] == pytest.approx(0, abs=1e-5) and 0 <= first[ACCURACY] <= 1
    names = [
        "margin",
        "chosen_reward",
        "reject_reward",
        "chosen_logps",
        "reject_logps",
        "lr",
        "acc",
    ]
    assert {f"actor/{name}" for name in names} <= first.keys()
    assert first["actor_train/grad_norm"] > 0
    assert first["token/chosen_length/mean"] > 1 and first["token/prompt_length/mean"] > 5
    raw = read_metrics(whole.run_dir / "metrics.jsonl")[0]
    timed = {
        f"time/{name}" for name in ["step_total", "actor_train", "cal_ref_log_probs", "val_step"]
    }
    assert timed | {"system/tps"} <= raw.keys()
    assert [line["step"] for line in lines if LOSS in line] == [0, 4, 8, 9]
    assert "actor/loss" not in lines[-1]
    assert lines[4]["system/epoch"] == 1.0 and lines[6]["system/epoch"] == pytest.approx(1 + 8 / 22)


def test_validation_and_its_samples_are_what_the_models_say(whole, inputs):
    """Each pair scored alone in plain transformers gives the metrics, and the samples' tokens."""
    models = {
        "old_log_probs": AutoModelForCausalLM.from_pretrained(whole.model_folder()),
        "ref_log_probs": AutoModelForCausalLM.from_pretrained(inputs["model"]),
    }
    tokenizer = AutoTokenizer.from_pretrained(whole.model_folder())
    rows = [json.loads(line) for line in Path(inputs["validation"]).read_text().splitlines()]
    records = iter(records_of(whole, 9))
    rewards = []
    for row in rows:
        for side in ("chosen", "rejected"):
            record = next(records)
            text, answer = row["prompt"] + row[side] + tokenizer.eos_token, row[side]
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            prompt_ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            sums = {}
            for name, model in models.items():
                with torch.no_grad():
                    log_probs = model(ids).logits[0, :-1].log_softmax(-1)
                expected = log_probs.gather(-1, ids[0, 1:, None])[len(prompt_ids) - 1 :, 0]
                found = record["tokens"][name]
                assert found[-len(expected) :] == pytest.approx(expected.tolist(), abs=1e-4)
                assert found[: -len(expected)] == [None] * len(prompt_ids)
                sums[name] = float(expected.sum())
            rewards.append(BETA * (sums["old_log_probs"] - sums["ref_log_probs"]))
            assert record["score"] == record["reward"] == pytest.approx(rewards[-1], abs=1e-4)
            assert record["tokens"]["ids"] == ids[0].tolist() and answer in record["response"]
    margins = [rewards[i] - rewards[i + 1] for i in range(0, 14, 2)]
    last = lines_of(whole.run_dir)[-1]
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert last[LOSS] == pytest.approx(sum(losses) / 7, abs=1e-5)
    assert last[ACCURACY] == pytest.approx(sum(margin > 0 for margin in margins) / 7)
    assert last["val/actor/margin"] == pytest.approx(sum(margins) / 7, abs=1e-5)
    ranked = [record["ranked"] for record in records_of(whole, 9)[::2]]
    assert ranked == ["right" if margin > 0 else "wrong" for margin in margins]


def test_every_validation_leaves_its_pairs_in_the_run_and_its_report(whole):
    names = [path.name for path in sorted((whole.run_dir / "rollouts").iterdir())]
    assert names == [f"val-{step:06d}.jsonl" for step in (0, 4, 8, 9)]
    records = records_of(whole, 0)
    assert [record["group"] for record in records[:3]] == ["pair 0", "pair 0", "pair 1"]
    assert [record["sample"] for record in records[:2]] == ["0 chosen", "0 rejected"]
    third = records[2]
    assert (third["prompt"], third["response"], third["tag"]) == (
        "41 + 1 = ",
        "42<|im_end|>",
        "chosen",
    )
    assert {record["ranked"] for record in records} == {"tie"}, "the policy is still the reference"
    for record in records:
        tokens = record["tokens"]
        assert "".join(tokens["text"]) == record["prompt"] + record["response"]
        assert tokens["old_log_probs"] == tokens["ref_log_probs"] and record["score"] == 0
    data = whole.run_dir / "report" / "data"
    steps = read_data(data / "index.js")["runs"][0]["steps"]
    assert [(step["step"], step["split"]) for step in steps] == [(n, "val") for n in (0, 4, 8, 9)]
    rows = read_data(data / "run0" / "val-000009.js")["rows"]
    assert [row["ranked"] for row in rows] == [record["ranked"] for record in records_of(whole, 9)]
    assert [row["tag"] for row in rows[:2]] == ["chosen", "rejected"]
    assert [row["group"] for row in rows[:4]] == [0, 0, 1, 1]


def test_long_data_is_sampled_evenly_and_resuming_writes_the_same(
    whole, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr(pair_log_probs, "NUM_SAMPLES", 3)
    values = {"max_steps": 2, "eval_steps": 2}
    cut = train(make_config(inputs, tmp_path, **values))
    records = records_of(cut, 2)
    assert [record["group"] for record in records[::2]] == ["pair 0", "pair 2", "pair 4"]
    every = {record["sample"]: record["tokens"] for record in records_of(whole, 0)}
    assert all(record["tokens"] == every[record["sample"]] for record in records_of(cut, 0))
    later = cut.run_dir / "rollouts" / "val-000009.jsonl"
    later.write_text("")
    values["max_steps"] = 3
    train(make_config(inputs, tmp_path, resume_from_checkpoint=True, **values))
    assert not later.exists() and records_of(cut, 2) == records


def test_the_end_says_where_the_model_is_and_what_validation_says(inputs, tmp_path, capsys):
    pipeline = train(make_config(inputs, tmp_path, max_steps=2), progress=None)
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("Validation on 7 pairs: accuracy 0.500 -> ")
    assert f"Model: {tmp_path}/exp/checkpoints/checkpoint-2/actor_train" in output
    summary = RunFolder(pipeline.run_dir).info()["summary"]
    assert summary["data"]["train"]["kept"] == 22 and summary["validation"]["last"]["step"] == 2


# --- the reference and resuming -------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["live", "precompute"])
def test_resume_in_the_middle_of_epoch_two(inputs, tmp_path, whole, reference, monkeypatch):
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
    assert 1 < cut.sampler.progress < 2
    real = pair_log_probs.compute_pair_log_probs

    def only_the_policy(cluster, dataset, *args, **options):
        assert cluster.cluster_name == "actor_train" and len(dataset) == 7, "computed again"
        return real(cluster, dataset, *args, **options)

    if reference == "precompute":
        name = "roll.pipeline.dpo.dpo_pipeline.compute_pair_log_probs"
        monkeypatch.setattr(name, only_the_policy)
    resumed = train(make_config(inputs, tmp_path, resume_from_checkpoint=True, **values))
    assert resumed.run_dir == cut.run_dir
    if reference == "live":
        assert lines_of(resumed.run_dir) == lines_of(whole.run_dir)
        for name, value in weights_of(whole).items():
            assert torch.equal(value, weights_of(resumed)[name]), name
    else:
        assert losses_of(resumed.run_dir) == pytest.approx(losses_of(whole.run_dir), abs=1e-6)


def test_precomputed_and_live_reference_agree(inputs, tmp_path, whole):
    stored = train(make_config(inputs, tmp_path, reference_log_probs="precompute"))
    assert stored.reference is None and set(stored.reference_sums) == {"train", "validation"}
    assert losses_of(stored.run_dir) == pytest.approx(losses_of(whole.run_dir), abs=1e-6)
    for one, two in zip(lines_of(stored.run_dir), lines_of(whole.run_dir), strict=True):
        for name in (LOSS, "val/actor/margin"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-6)
    for one, two in zip(records_of(stored, 9), records_of(whole, 9), strict=True):
        answer = sum(one["tokens"]["mask"])
        for name in ("old_log_probs", "ref_log_probs"):
            expected = two["tokens"][name][-answer:]
            assert one["tokens"][name][-answer:] == pytest.approx(expected, abs=1e-4)


def test_stored_log_probs_of_other_pairs_or_weights_are_not_used(inputs, tmp_path):
    def again(**other) -> torch.Tensor:
        values = {"reference_log_probs": "precompute", "resume_from_checkpoint": True}
        return made(make_config({**inputs, **other}, tmp_path, **values)).reference_sums["train"]

    first = DPOPipeline(
        make_config(inputs, tmp_path, reference_log_probs="precompute"), progress=False
    )
    first.save_checkpoint()
    first.close()
    sums = first.reference_sums["train"]
    file = first.run_dir / "reference_log_probs.safetensors"
    before = file.read_bytes()
    assert torch.equal(again(), sums) and file.read_bytes() == before
    # The same architecture and file sizes, other numbers.
    other = str(make_model_folder(tmp_path / "other", seed=1))
    assert not torch.allclose(again(model=other), sums)
    rows = [json.loads(line) for line in Path(inputs["train"]).read_text().splitlines()]
    rows[3]["chosen"], rows[3]["rejected"] = rows[3]["rejected"], rows[3]["chosen"]
    swapped = tmp_path / "swapped.jsonl"
    swapped.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = sums.clone().view(-1, 2)
    expected[3] = expected[3].flip(0)
    assert torch.allclose(again(train=str(swapped)).view(-1, 2), expected, atol=1e-5)


def test_lora_uses_the_policy_without_its_adapter(inputs, tmp_path):
    pytest.importorskip("peft")
    adapter = {"lora_target": "q_proj,v_proj,down_proj", "lora_rank": 4}
    lora = {"model_args": adapter, "max_steps": 4}
    live = train(make_config(inputs, tmp_path / "live", **lora))
    precompute = {"reference_log_probs": "precompute"}
    stored = train(make_config(inputs, tmp_path / "stored", **precompute, **lora))
    assert losses_of(live.run_dir)[0] == pytest.approx(math.log(2))
    assert losses_of(live.run_dir)[1:] != pytest.approx([math.log(2)] * 3, abs=1e-4)
    assert losses_of(stored.run_dir) == pytest.approx(losses_of(live.run_dir), abs=1e-6)
    # The base model, as a reference of its own, says the same.
    own = made(make_config(inputs, tmp_path / "own", **precompute)).reference_sums["train"]
    assert torch.allclose(stored.reference_sums["train"], own, atol=1e-6)
    opened = AutoModelForCausalLM.from_pretrained(live.model_folder(), dtype=torch.float32)
    assert any("lora" in name for name, _ in opened.named_parameters())


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss_type": "hinge"}, 1.0),
        ({"ipo": True, "beta": 0.25}, 4.0),
        ({"loss_type": "sppo_hard", "beta": 0.5}, 2.0),
    ],
)
def test_options_of_the_loss_reach_it(inputs, tmp_path, values, expected):
    """At the first step policy and reference agree, so the losses are known."""
    pipeline = train(make_config(inputs, tmp_path, max_steps=1, eval_steps=-1, **values))
    assert losses_of(pipeline.run_dir) == pytest.approx([expected], abs=1e-5)


def test_a_run_without_a_reference(inputs, tmp_path):
    free = train(make_config(inputs, tmp_path, max_steps=1, reference_free=True))
    line = lines_of(free.run_dir)[0]
    assert line["actor/chosen_reward"] == pytest.approx(BETA * line["actor/chosen_logps"], rel=1e-5)
    assert free.reference is None and LOSS in line
    record = records_of(free, 0)[0]
    assert "ref_log_probs" not in record["tokens"]
    log_probs = [value for value in record["tokens"]["old_log_probs"] if value is not None]
    assert record["score"] == pytest.approx(BETA * sum(log_probs))


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
    values = {"eval_steps": 2, "early_stop_patience": 2, "save_steps": 1, "max_ckpt_to_keep": 1}
    pipeline = train(make_config(inputs, tmp_path, **values), progress=None)
    assert pipeline.global_step == 6
    names = [path.name for path in complete_checkpoints(pipeline.run_dir)]
    assert names == ["checkpoint-2", "checkpoint-6"]
    output = capsys.readouterr().out
    assert "Stopped after 6 of 9 steps: 2 validations without a loss below 0.5000." in output
    assert "best at step 2" in output and "checkpoint-2/actor_train" in output
    assert lines_of(pipeline.run_dir)[-1][LOSS] == 0.55
    with pytest.raises(ConfigError, match=r"early_stop_patience: found 2 .*nothing is validated"):
        DPOConfig(sequence_length=8, early_stop_patience=2)


@pytest.mark.parametrize(
    ("per_epoch", "training_args", "values", "expected"),
    [
        (10, {}, {}, 10),  # one epoch
        (600, {}, {}, 500),  # and ROLL's limit
        (10, {}, {"max_steps": 25}, 25),
        (10, {"num_train_epochs": 3}, {}, 30),
        (600, {"num_train_epochs": 3}, {}, 1800),
        (10, {"num_train_epochs": 3}, {"max_steps": 25}, 25),
        (10, {"num_train_epochs": 2.5}, {"max_steps": 26}, 25),
    ],
)
def test_how_long_a_run_is(per_epoch, training_args, values, expected):
    role = {"strategy_args": {"strategy_name": "hf_train"}, "training_args": training_args}
    config = DPOConfig(sequence_length=8, actor_train=role, **values)
    assert config.num_steps(per_epoch) == expected


def test_the_schedule_is_as_long_as_the_run(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    values = {name: getattr(config, name) for name in config.model_fields_set - {"max_steps"}}
    pipeline = made(DPOConfig(**values))
    strategy = pipeline.actor_train.workers[0].strategy
    assert isinstance(strategy, TrainStrategy)
    assert pipeline.pipeline_config.max_steps == 5 == strategy.worker_config.training_args.max_steps


# --- bad input ------------------------------------------------------------------------------------

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
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ m['content'] }}{% endfor %}"
)
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'


@pytest.mark.parametrize(
    ("case", "rows", "expected"),
    [
        ("no file", None, "no such file or folder: "),
        (
            "column",
            PAIR.replace("rejected", "loser"),
            "has no column rejected; its columns are: prompt, chosen, loser",
        ),
        ("pair", PAIR + PAIR.replace('"b"', "5"), "bad.jsonl:2: is not a pair"),
        ("no weights", PAIR, "has no weights (model*.safetensors)"),
        (
            "template",
            PAIR.replace("{", '{"system": "be kind", '),
            "chat template 'native' cannot render a conversation with the roles system, user",
        ),
    ],
)
def test_bad_input_is_explained_before_a_model_is_loaded(
    case, rows, expected, inputs, tmp_path, monkeypatch, capsys
):
    values = {
        **inputs,
        "train": tmp_path / "bad.jsonl",
        "template": "base",
        "out": tmp_path / "out",
    }
    if rows is not None:
        values["train"].write_text(rows)
    if case == "no weights":
        values["model"] = make_model_folder(tmp_path / "empty", weights=False)
    if case == "template":
        values |= {"model": make_model_folder(tmp_path / "strict"), "template": "native"}
        tokenizer = AutoTokenizer.from_pretrained(values["model"])
        tokenizer.chat_template = NO_SYSTEM
        tokenizer.save_pretrained(values["model"])
    config = tmp_path / "config.yaml"
    config.write_text(YAML.format(**values))
    loader = "transformers.AutoModelForCausalLM.from_pretrained"
    monkeypatch.setattr(loader, lambda *a, **k: pytest.fail("model loaded"))
    monkeypatch.setattr(sys, "argv", ["roll", "train", str(config)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert expected in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


def test_too_few_pairs_for_one_step(inputs, tmp_path):
    few = {**inputs, "train": str(write_pairs(tmp_path / "few.jsonl", 3))}
    with pytest.raises(DataError, match="3 rows do not fill one batch of 4"):
        DPOPipeline(make_config(few, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- the same run elsewhere -----------------------------------------------------------------------


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
    script = [sys.executable, str(EXAMPLES / "make_data.py"), str(data), "--model"]
    subprocess.run(script, check=True)
    command = [sys.executable, "-m", "roll.cli", "train", str(EXAMPLES / "dpo_tiny.yaml")]
    command += [f"output_dir={tmp_path}", f"pretrain={data}/model"]
    command += [f"actor_train.data_args.file_name={data}/train.jsonl"]
    command += [f"validation.data_args.file_name={data}/validation.jsonl"]
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
