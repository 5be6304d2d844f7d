"""The training strategies on one real GPU: the gradient of the CPU's float64, moving states, half
precision."""

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_model_folder
from training_setup import (
    PROBES,
    make_batch,
    make_config,
    pad_batch,
    reference_gradients,
    relative_error,
)

from roll.distributed.executor.worker import WorkerContext, worker_context
from roll.distributed.scheduler.resource_manager import Device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def cuda_worker(pipeline, config):
    with worker_context(WorkerContext(devices=(Device(0, 0),), device_index=0)):
        worker = PROBES[pipeline](config.actor_train)
    worker.initialize(config)
    return worker


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
@pytest.mark.parametrize("linear_logits", [True, False])
def test_one_gradient(tmp_path, lone_process_group, strategy, pipeline, linear_logits):
    folder = make_model_folder(tmp_path)
    config = make_config(
        pipeline, folder, strategy=strategy, strategy_config={"linear_logits": linear_logits}
    )
    batch = make_batch(pipeline)
    worker = cuda_worker(pipeline, config)
    assert next(worker.strategy.model.parameters()).device.type == "cuda"
    gradients, _ = worker.gradients(pad_batch(batch, left=1, right=2))
    assert relative_error(gradients, reference_gradients(pipeline, folder, config, batch)) < 1e-5


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_one_gradient_with_the_head_in_parts_and_shared_prefixes(
    tmp_path, lone_process_group, strategy, pipeline
):
    folder = make_model_folder(tmp_path)
    few = {"keep_logits_gib": 12 * VOCAB_SIZE * 4 / 2**30, "share_prefixes": True}
    config = make_config(pipeline, folder, strategy=strategy, strategy_config=few, micro_batch=8)
    batch = make_batch(pipeline)
    gradients, _ = cuda_worker(pipeline, config).gradients(batch)
    assert relative_error(gradients, reference_gradients(pipeline, folder, config, batch)) < 1e-5


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_states_move_to_the_host_and_back(tmp_path, lone_process_group, strategy):
    config = make_config(
        "dpo", make_model_folder(tmp_path), strategy=strategy, training_args={"learning_rate": 1e-2}
    )
    worker = cuda_worker("dpo", config)
    worker.train_step(make_batch("dpo", seed=0))
    before = torch.cuda.memory_allocated()
    worker.offload_states()
    assert next(worker.strategy.model.parameters()).device.type == "cpu"
    assert torch.cuda.memory_allocated() < before
    worker.load_states()
    metrics = worker.train_step(make_batch("dpo", seed=1)).meta_info["metrics"]
    if strategy == "fsdp2_train":
        torch.distributed.destroy_process_group()
    plain = cuda_worker("dpo", config)
    plain.train_step(make_batch("dpo", seed=0))
    expected = plain.train_step(make_batch("dpo", seed=1)).meta_info["metrics"]
    assert metrics["actor/loss@sum"] == pytest.approx(expected["actor/loss@sum"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_bf16_training_lowers_the_loss(tmp_path, lone_process_group, strategy):
    options = {
        "strategy": strategy,
        "model_args": {"dtype": "bf16"},
        "training_args": {"learning_rate": 3e-3},
    }
    worker = cuda_worker(
        "dpo", make_config("dpo", make_model_folder(tmp_path), max_grad_norm=1.0, **options)
    )
    losses = [
        worker.train_step(make_batch("dpo")).meta_info["metrics"]["actor/loss@sum"]
        for _ in range(8)
    ]
    assert losses[-1] < losses[0]
