"""ZeRO stages 1 to 3 on two real processes: one gradient, one update, exact resume, weights that others can read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_setup import Lab, assert_same
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config, pad_batch, reference_gradients, relative_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, DataError

pytestmark = pytest.mark.deepspeed

TRAINING = {"learning_rate": 1e-2, "warmup_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1}


def make_lab() -> Iterator[Cluster]:
    config = WorkerConfig(name="lab", world_size=2)
    with Cluster("lab", Lab, ResourceManager(0, 1, backend="ray"), config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    yield from make_lab()


@pytest.fixture(scope="module")
def other_lab() -> Iterator[Cluster]:
    """Processes that have not seen what happened in the first."""
    yield from make_lab()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen2", tied=True)


def zero_config(pipeline: str, folder: Path, stage: int | None, **options: Any) -> Any:
    # Threshold 0: by default weights as small as all of these are never taken away.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    options.setdefault("strategy_config", {} if stage is None else {"zero_optimization": zero})
    options.setdefault("workers", 2)
    return make_config(pipeline, folder, strategy="deepspeed_train", training_args=TRAINING, **options)


def local_worker(pipeline: str, config: Any, role: str = "actor_train") -> Any:
    worker = PROBES[pipeline](getattr(config, role))
    worker.initialize(config)
    return worker


@pytest.mark.parametrize(
    ("pipeline", "stage", "options"),
    [
        ("agentic", 1, {"micro_batch": 3}),
        ("agentic", 2, {"max_tokens": 28}),
        ("agentic", 3, {"max_tokens": 28}),
        ("dpo", 1, {"max_tokens": 28}),
        ("dpo", 2, {"micro_batch": 1}),
        ("dpo", 3, {"micro_batch": 1, "gradient_checkpointing": True}),
    ],
)
def test_one_gradient_and_the_update_of_hf_train(lab, folder, pipeline, stage, options):
    """The gradient is that of a float64 forward of the whole batch; clipped steps with decay move weights as hf_train."""
    config = zero_config(pipeline, folder, stage, max_grad_norm=1e9, **options)
    batch = make_batch(pipeline)
    expected = reference_gradients(pipeline, folder, config, batch)
    lab.execute_all_sync("start", pipeline, config)
    for gradients, _ in lab.gradients(pad_batch(batch, left=1, right=2)):
        assert relative_error(gradients, expected) < 1e-5

    options = {**options, "max_grad_norm": 0.1, "training_args": TRAINING}
    lab.execute_all_sync("start", pipeline, zero_config(pipeline, folder, stage, max_grad_norm=0.1, **options_of(options)))
    plain = local_worker(pipeline, make_config(pipeline, folder, **options))
    for seed in (1, 2):
        norm = lab.train_step(make_batch(pipeline, seed=seed)).meta_info["metrics"]["actor_train/grad_norm"]
        plain_norm = plain.train_step(make_batch(pipeline, seed=seed)).meta_info["metrics"]["actor_train/grad_norm"]
        assert norm == pytest.approx(plain_norm, rel=1e-4) and plain_norm > 0.1
    expected_weights = dict(plain.strategy.named_weights())
    for weights in lab.execute_all_sync("weights"):
        assert_close(weights, expected_weights, atol=2e-5)


def options_of(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("max_grad_norm", "training_args")}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, atol: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0, msg=name)
