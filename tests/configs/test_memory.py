"""The memory estimate, on model folders whose numbers are known."""

import json

import pytest
import torch
from safetensors.torch import save_file

from roll.configs.memory import ModelShape, estimate_memory, read_shape
from roll.pipeline.dpo.dpo_config import DPOConfig


@pytest.fixture
def folder(tmp_path):
    """1,000 + 24 parameters in two files."""
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    save_file({"a": torch.zeros(10, 100)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(2, 3, 4)}, tmp_path / "model-2.safetensors")
    return tmp_path


def config_of(folder, dtype="fp32", strategy="hf_train", **role):
    model = {"model_name_or_path": str(folder), "dtype": dtype, **role.pop("model_args", {})}
    training = {"per_device_train_batch_size": 4}
    actor = {"model_args": model, "strategy_args": {"strategy_name": strategy}, "training_args": training, **role}
    reference = {"model_args": model, "strategy_args": {"strategy_name": "hf_infer"}, "infer_batch_size": 1}
    return DPOConfig(actor_train=actor, reference=reference, sequence_length=16)


def test_the_shape_comes_from_the_files(folder):
    assert read_shape(folder) == ModelShape(parameters=1024, layers=2, hidden=8, vocabulary=50)


def test_a_name_on_a_hub_and_a_folder_without_weights_have_no_estimate(tmp_path):
    assert read_shape("Qwen/Qwen2.5-7B") is None
    assert read_shape(None) is None
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 50}))
    assert read_shape(tmp_path) is None


def test_one_device_keeps_weights_gradients_and_two_moments(folder):
    estimate = estimate_memory(config_of(folder))["actor_train"]
    assert estimate.states == 4 * 1024 * 4
    tokens = 4 * 2 * 16  # four pairs
    layers = tokens * 8 * 4 * (2 + 12)  # an input per layer, and one layer in full
    assert estimate.activations == layers + tokens * 50 * 4


def test_half_precision_halves_the_states_of_one_device(folder):
    full, half = (estimate_memory(config_of(folder, dtype))["actor_train"].states for dtype in ("fp32", "bf16"))
    assert full == 2 * half


def test_a_reference_keeps_its_weights_only(folder):
    assert estimate_memory(config_of(folder, "bf16"))["reference"].states == 2 * 1024


def test_adapters_leave_the_weights_without_gradients(folder):
    config = config_of(folder, "bf16", model_args={"lora_target": "q_proj"})
    assert estimate_memory(config)["actor_train"].states == 2 * 1024


def test_sharded_ranks_share_float32_states(folder):
    config = config_of(folder, "bf16", strategy="fsdp2_train", world_size=4)
    assert estimate_memory(config)["actor_train"].states == 16 * 1024 // 4 + 2 * 2 * 1024 // 2


def test_without_checkpointing_every_layer_is_kept(folder):
    lean, fat = (
        estimate_memory(config_of(folder, model_args={"disable_gradient_checkpointing": off}))["actor_train"]
        for off in (False, True)
    )
    assert fat.activations > lean.activations
