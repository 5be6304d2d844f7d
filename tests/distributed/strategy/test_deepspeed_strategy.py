"""ZeRO stages 1 to 3 on two real processes: one gradient, one update, exact resume, checkpoints."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_worker import Lab, assert_same
from tiny_models import make_model_folder
from training_setup import (
    LOSSES,
    MODELS,
    PROBES,
    make_batch,
    make_config,
    make_model_folders,
    mode_options,
    pad_batch,
    reference_gradients,
    relative_error,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, DataError, MissingDependencyError, install_hint

pytestmark = pytest.mark.deepspeed

TRAINING = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "gradient_accumulation_steps": 4,  # all rows of a test's batch in one optimizer step
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen2", tied=True)


def make_lab(folder: Path) -> Iterator[Cluster]:
    config = WorkerConfig(name="lab", world_size=2)
    with Cluster("lab", Lab, ResourceManager(0, 1, backend="ray"), config) as cluster:
        # Stage 3 replaces torch.nn.functional.linear for the rest of a process, which then rounds
        # bf16 in another way: only processes with that behind them can be compared bit by bit.
        cluster.execute_all_sync("start", "dpo", zero_config("dpo", folder, 3))
        yield cluster


@pytest.fixture(scope="module")
def lab(folder) -> Iterator[Cluster]:
    yield from make_lab(folder)


@pytest.fixture(scope="module")
def other_lab(folder) -> Iterator[Cluster]:
    """Processes that have not seen what happened in the first."""
    yield from make_lab(folder)


def zero_config(pipeline: str, folder: Path, stage: int | None, **options: Any) -> Any:
    # Threshold 0: by default weights as small as all of these are never taken away.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    options.setdefault("strategy_config", {} if stage is None else {"zero_optimization": zero})
    options.setdefault("workers", 2)
    return make_config(
        pipeline, folder, strategy="deepspeed_train", training_args=TRAINING, **options
    )


def local_worker(pipeline: str, config: Any, role: str = "actor_train") -> Any:
    worker = PROBES[pipeline](getattr(config, role))
    worker.initialize(config)
    return worker


@pytest.mark.parametrize(
    ("pipeline", "stage", "options"),
    [
        ("agentic", 1, {"micro_batch": 3}),
        ("agentic", 2, {"micro_batch": 3, "max_tokens": 28}),
        ("agentic", 3, {"micro_batch": 3, "max_tokens": 28}),
        ("dpo", 1, {"max_tokens": 28}),
        ("dpo", 2, {"micro_batch": 1}),
        ("dpo", 3, {"micro_batch": 1, "gradient_checkpointing": True}),
    ],
)
def test_one_gradient_and_the_update_of_hf_train(lab, folder, pipeline, stage, options):
    """The gradient of a float64 forward of the whole batch; clipped steps end as hf_train's."""
    config = zero_config(pipeline, folder, stage, **options)
    batch = make_batch(pipeline)
    expected = reference_gradients(pipeline, folder, config, batch)
    lab.execute_all_sync("start", pipeline, config)
    for gradients, _ in lab.gradients(pad_batch(batch, left=1, right=2)):
        assert relative_error(gradients, expected) < 1e-5
    # The probe took the gradient and left out the step, so these finite gradients were dropped.
    assert all(step == 0 for state in lab.execute_all_sync("state") for step in state["steps"])

    options["max_grad_norm"] = 0.1
    lab.execute_all_sync("start", pipeline, zero_config(pipeline, folder, stage, **options))
    plain = local_worker(pipeline, make_config(pipeline, folder, training_args=TRAINING, **options))
    for seed in (1, 2):
        metrics, plain_metrics = (
            worker.train_step(make_batch(pipeline, seed=seed)).meta_info["metrics"]
            for worker in (lab, plain)
        )
        (plain_norm,) = plain_metrics["actor_train/grad_norm"]
        assert plain_norm > 0.1
        assert metrics["actor_train/grad_norm"] == pytest.approx([plain_norm] * 2, rel=1e-4)
    expected_weights = dict(plain.strategy.named_weights())
    for weights in lab.execute_all_sync("weights"):
        assert_close(weights, expected_weights, atol=2e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    return make_model_folders(tmp_path_factory.mktemp("all-models"))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("pipeline", "mode"), LOSSES)
def test_one_gradient_for_every_loss_and_head(lab, folders, stage, model, pipeline, mode):
    config = zero_config(pipeline, folders[model], stage, micro_batch=3, **mode_options(mode))
    batch = make_batch(pipeline)
    expected = reference_gradients(pipeline, folders[model], config, batch)
    lab.execute_all_sync("start", pipeline, config)
    for gradients, _ in lab.gradients(pad_batch(batch, left=1, right=2)):
        assert relative_error(gradients, expected) < 1e-5


def assert_close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, atol: float
) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_a_non_finite_step_leaves_everything_alone_and_the_next_one_counts(
    lab, folder, stage, dtype
):
    config = zero_config("agentic", folder, stage, micro_batch=3, model_args={"dtype": dtype})
    lab.execute_all_sync("start", "agentic", config)
    lab.train_step(make_batch("agentic", seed=1))
    before = lab.execute_all_sync("state")
    bad = make_batch("agentic", seed=2)
    bad.batch["advantages"][-1] = float("nan")  # a row of the second rank
    bad.batch["response_mask"][-1, 2:5] = 1
    metrics = lab.train_step(bad).meta_info["metrics"]
    assert metrics["actor_train/skipped_steps@max"] == [1.0, 1.0]
    after = lab.execute_all_sync("state")
    for one, other in zip(before, after, strict=True):
        for key in ("weights", "optimizer", "steps"):
            assert_same(one[key], other[key], key)
    metrics = lab.train_step(make_batch("agentic", seed=3)).meta_info["metrics"]
    assert metrics["actor_train/skipped_steps@max"] == [0.0, 0.0]
    for one, other in zip(after, lab.execute_all_sync("state"), strict=True):
        assert [step + 1 for step in one["steps"]] == other["steps"]
        assert all(torch.isfinite(weight).all() for weight in other["weights"].values())
        assert not all(
            torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"]
        )


def train(cluster: Any, first: int, last: int) -> list[dict[str, Any]]:
    steps = [
        cluster.train_step(make_batch("dpo", seed=seed)).meta_info["metrics"]
        for seed in range(first, last)
    ]
    return [
        {key: value for key, value in metrics.items() if not key.startswith("time/")}
        for metrics in steps
    ]


@pytest.mark.parametrize(("stage", "dtype"), [(2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_exact_resume_in_other_processes(lab, other_lab, folder, tmp_path, stage, dtype):
    config = zero_config("dpo", folder, stage, model_args={"dtype": dtype})
    lab.execute_all_sync("start", "dpo", config)
    whole = train(lab, 0, 3)
    saved = lab.execute_all_sync("state")
    lab.execute_all_sync("save", str(tmp_path / "checkpoint"), 2)
    whole += train(lab, 3, 6)
    other_lab.execute_all_sync("start", "dpo", config)
    assert other_lab.execute_all_sync("load", str(tmp_path / "checkpoint")) == [2, 2]
    assert_same(other_lab.execute_all_sync("state"), saved)
    assert_same(train(other_lab, 3, 6), whole[3:])
    assert_same(other_lab.execute_all_sync("state"), lab.execute_all_sync("state"))
    assert len({metrics["actor/lr"][0] for metrics in whole}) > 3


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_opens_everywhere(lab, folder, tmp_path, stage):
    """In transformers; on one rank, at another stage; in another strategy, which trains on
    alike."""
    lab.execute_all_sync("start", "dpo", zero_config("dpo", folder, stage))
    train(lab, 0, 2)
    saved = tmp_path / "checkpoint"
    lab.execute_all_sync("save", str(saved), 1)
    state, _ = lab.execute_all_sync("state")
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert_same(dict(plain.named_parameters()), state["weights"])
    assert AutoTokenizer.from_pretrained(saved)("ab")["input_ids"]

    alone = Lab(WorkerConfig(name="lab"))
    alone.start("dpo", zero_config("dpo", folder, 5 - stage, workers=1))
    alone.load(str(saved))
    for key in ("weights", "optimizer", "scheduler", "learning_rates"):
        assert_same(alone.state()[key], state[key], key)
    hf = local_worker("dpo", make_config("dpo", folder, training_args=TRAINING))
    hf.strategy.load_checkpoint(saved)
    losses = [train(worker, 2, 4) for worker in (lab, alone, hf)]
    norms = [[metrics["actor_train/grad_norm"][0] for metrics in run] for run in losses]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and norms[2] == pytest.approx(
        norms[0], rel=1e-4
    )
    back = Lab(WorkerConfig(name="lab"))
    back.start("dpo", zero_config("dpo", folder, stage, workers=1))
    hf.strategy.save_checkpoint(tmp_path / "hf", 4)
    assert back.load(str(tmp_path / "hf")) == 4
    assert_same(back.weights(), dict(hf.strategy.named_weights()))
    (tmp_path / "hf" / "training" / "optimizer").rename(tmp_path / "gone")
    with pytest.raises(DataError, match="no optimizer state here"):
        back.load(str(tmp_path / "hf"))


def test_a_checkpoint_of_two_ranks_continues_on_three(lab, folder, tmp_path):
    """Three parts of a weight are of unequal length, and ZeRO pads the last."""
    options: dict[str, Any] = {"model_args": {"dtype": "bf16"}}
    lab.execute_all_sync("start", "dpo", zero_config("dpo", folder, 3, **options))
    train(lab, 0, 2)
    lab.execute_all_sync("save", str(tmp_path / "checkpoint"), 1)
    expected, _ = lab.execute_all_sync("state")
    config = WorkerConfig(name="lab", world_size=3)
    with Cluster("lab", Lab, ResourceManager(0, 1, backend="ray"), config) as three:
        three.execute_all_sync("start", "dpo", zero_config("dpo", folder, 3, workers=3, **options))
        three.execute_all_sync("load", str(tmp_path / "checkpoint"))
        for state in three.execute_all_sync("state"):
            for key in ("weights", "optimizer", "scheduler", "learning_rates"):
                assert_same(state[key], expected[key], key)


@pytest.mark.parametrize("stage", [2, 3])
def test_lora_trains_as_with_hf_train_and_resumes(lab, folder, tmp_path, stage):
    options: dict[str, Any] = {"model_args": {"lora_target": "all-linear", "lora_rank": 3}}
    config = zero_config("dpo", folder, stage, **options)
    lab.execute_all_sync("start", "dpo", config)
    plain = local_worker("dpo", make_config("dpo", folder, training_args=TRAINING, **options))
    for worker in (lab, plain):
        train(worker, 0, 3)
    merged, _ = lab.execute_all_sync("weights")
    assert_close(merged, dict(plain.strategy.named_weights()), atol=1e-5)
    lab.execute_all_sync("save", str(tmp_path / "checkpoint"), 2)
    saved = lab.execute_all_sync("state")
    lab.execute_all_sync("start", "dpo", config)
    lab.execute_all_sync("load", str(tmp_path / "checkpoint"))
    assert_same(lab.execute_all_sync("state"), saved)


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_state_in_host_memory(folder, stage):
    """Alone in this process, where a skipped step must also leave the offloaded state alone."""
    zero = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }
    config = zero_config(
        "agentic",
        folder,
        stage,
        workers=1,
        micro_batch=3,
        strategy_config={"zero_optimization": zero},
    )
    alone = Lab(WorkerConfig(name="lab"))
    alone.start("agentic", config)
    batch = make_batch("agentic")
    gradients, _ = alone.gradients(batch)
    assert relative_error(gradients, reference_gradients("agentic", folder, config, batch)) < 1e-5
    alone.train_step(make_batch("agentic", seed=1))
    before = alone.state()
    bad = make_batch("agentic", seed=2)
    bad.batch["advantages"][2:] = float("inf")
    assert alone.train_step(bad).meta_info["metrics"]["actor_train/skipped_steps@max"] == [1.0]
    for key in ("weights", "optimizer", "steps"):
        assert_same(alone.state()[key], before[key], key)
    alone.train_step(make_batch("agentic", seed=3))
    assert all(torch.isfinite(weight).all() for weight in alone.weights().values())


@pytest.mark.parametrize(("stage", "left"), [(None, 0), (3, 2), (2, 2)])
def test_inference_scores_as_hf_infer(lab, folder, stage, left):
    zero = (
        {}
        if stage is None
        else {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    )
    role = {"model_args": {"dtype": "fp32"}, "infer_batch_size": 2}
    plain, sharded = (
        make_config(
            "dpo", folder, reference={**role, "strategy_args": strategy, "world_size": workers}
        )
        for strategy, workers in (
            ({"strategy_name": "hf_infer"}, 1),
            ({"strategy_name": "deepspeed_infer", "strategy_config": zero}, 2),
        )
    )
    plain = local_worker("dpo", plain, role="reference")
    lab.execute_all_sync("start", "dpo", sharded, "reference")
    batch = pad_batch(make_batch("dpo", rows=10), left=left, right=1)
    inputs = DataProto.from_dict({key: batch.batch[key] for key in ("input_ids", "attention_mask")})
    expected = plain.compute_log_probs(inputs).batch["log_probs"]
    torch.testing.assert_close(
        lab.compute_log_probs(inputs).batch["log_probs"], expected, atol=1e-6, rtol=0
    )
    # New weights, as a weight sync writes them.
    new = {name: weight + 0.01 for name, weight in plain.strategy.named_weights()}
    lab.execute_all_sync("write_weights", new)
    for weights in lab.execute_all_sync("weights"):
        assert_same(weights, new)
    plain.strategy.update_weights(new)
    expected = plain.compute_log_probs(inputs).batch["log_probs"]
    torch.testing.assert_close(
        lab.compute_log_probs(inputs).batch["log_probs"], expected, atol=1e-6, rtol=0
    )


def test_bf16_differs_by_rounding_only(lab, folder):
    config = zero_config("dpo", folder, None, model_args={"dtype": "bf16"})
    batch = make_batch("dpo")
    expected = reference_gradients("dpo", folder, config, batch)
    lab.execute_all_sync("start", "dpo", config)
    for gradients, _ in lab.gradients(batch):
        assert relative_error(gradients, expected) < 0.05


@pytest.mark.parametrize(
    ("stage", "strategy_config", "message"),
    [
        (3, {"linear_logits": True}, r"linear_logits: found true"),
        (2, {"no_such_thing": 1}, r"no_such_thing: DeepSpeed has no such key; remove it"),
        (
            2,
            {"gradient_cliping": 1},
            r'cliping: DeepSpeed has no such key; did you mean "gradient_clipping"',
        ),
        (2, {"gradient_clipping": 3.0}, r"gradient_clipping: found 3\.0, but the run says"),
    ],
)
def test_keys_that_contradict_or_would_be_ignored_are_refused(
    folder, stage, strategy_config, message
):
    strategy_config = {"zero_optimization": {"stage": stage}, **strategy_config}
    config = zero_config("dpo", folder, None, workers=1, strategy_config=strategy_config)
    with pytest.raises(ConfigError, match=message):
        local_worker("dpo", config)


@pytest.mark.parametrize(
    ("stage", "dtype", "more", "runs_at"),
    [
        (0, "fp32", {}, 1),
        (1, "bf16", {}, 2),
        (1, "bf16", {"data_types": {"grad_accum_dtype": "bf16"}}, 1),
    ],
)
def test_low_stages_in_half_precision(folder, stage, dtype, more, runs_at):
    strategy_config = {"zero_optimization": {"stage": stage}, **more}
    options: dict[str, Any] = {"strategy_config": strategy_config, "model_args": {"dtype": dtype}}
    worker = local_worker("dpo", zero_config("dpo", folder, stage, workers=1, **options))
    assert worker.strategy.engine.zero_optimization_stage() == runs_at
    before = {name: weight.clone() for name, weight in worker.strategy.named_weights()}
    train(worker, 0, 2)  # the first has a learning rate of 0
    assert any(
        not torch.equal(weight, before[name]) for name, weight in worker.strategy.named_weights()
    )


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        MissingDependencyError, match=re.escape(install_hint("deepspeed")) + ".*fsdp2_train"
    ):
        local_worker("dpo", zero_config("dpo", folder, None, workers=1))
