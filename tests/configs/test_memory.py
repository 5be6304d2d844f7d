"""The memory estimate, on model folders whose numbers are known."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from roll.configs.memory import (
    GIB,
    MemoryEstimate,
    ModelShape,
    estimate_memory,
    memory_verdict,
    read_shape,
)
from roll.exceptions import ConfigError
from roll.pipeline.dpo.dpo_config import DPOConfig


@pytest.fixture
def folder(tmp_path):
    """1,000 + 24 parameters in two files."""
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    save_file(
        {"a": torch.zeros(10, 100)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"}
    )
    save_file({"b": torch.zeros(2, 3, 4)}, tmp_path / "model-2.safetensors")
    return tmp_path


def config_of(folder, dtype="fp32", strategy="hf_train", **role):
    model = {"model_name_or_path": str(folder), "dtype": dtype, **role.pop("model_args", {})}
    training = {"per_device_train_batch_size": 4}
    actor = {
        "model_args": model,
        "strategy_args": {"strategy_name": strategy},
        "training_args": training,
        **role,
    }
    reference = {
        "model_args": model,
        "strategy_args": {"strategy_name": "hf_infer"},
        "infer_batch_size": 1,
    }
    return DPOConfig(actor_train=actor, reference=reference, sequence_length=16)


def test_the_shape_comes_from_the_files(folder):
    assert read_shape(folder) == ModelShape(parameters=1024, layers=2, hidden=8, vocabulary=50)


def test_a_name_on_a_hub_and_a_folder_without_weights_have_no_estimate(tmp_path):
    assert read_shape("Qwen/Qwen2.5-7B") is None
    assert read_shape(None) is None
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 50})
    )
    assert read_shape(tmp_path) is None


def test_one_device_keeps_weights_gradients_and_two_moments(folder):
    estimate = estimate_memory(config_of(folder))["actor_train"]
    assert estimate.states == 4 * 1024 * 4
    tokens = 4 * 2 * 16  # four pairs
    layers = tokens * 8 * 4 * (2 + 12)  # an input per layer, and one layer in full
    assert estimate.activations == layers + tokens * 50 * 4


def test_half_precision_halves_the_states_of_one_device(folder):
    full, half = (
        estimate_memory(config_of(folder, dtype))["actor_train"].states
        for dtype in ("fp32", "bf16")
    )
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
        estimate_memory(config_of(folder, model_args={"disable_gradient_checkpointing": off}))[
            "actor_train"
        ]
        for off in (False, True)
    )
    assert fat.activations > lean.activations


def verdict(config, estimates, gpu=None, host=None):
    sizes = {
        name: MemoryEstimate(states * GIB, activations * GIB)
        for name, (states, activations) in estimates.items()
    }
    limits = {
        "gpu_bytes": None if gpu is None else gpu * GIB,
        "host_bytes": None if host is None else host * GIB,
    }
    errors, warnings = memory_verdict(config, sizes, machine="this machine", **limits)
    return [str(error) for error in errors], warnings


def test_more_than_the_machine_has_is_an_error(folder):
    (error,), warnings = verdict(config_of(folder), {"actor_train": (300, 80)}, host=24)
    assert error.startswith(
        "actor_train: estimated 380.0 GiB of memory for actor_train, this machine has 24.0 GiB; "
    )
    assert warnings == []


@pytest.mark.parametrize(
    ("limit", "kind"), [(39, "error"), (41, "warning"), (79, "warning"), (80, "fits")]
)
def test_activations_may_be_half_or_half_as_much_again(folder, limit, kind):
    """20 of states and 40 of activations: surely more than 40, at most 80."""
    errors, warnings = verdict(config_of(folder), {"actor_train": (20, 40)}, host=limit)
    assert {"error": (1, 0), "warning": (0, 1), "fits": (0, 0)}[kind] == (
        len(errors),
        len(warnings),
    )
    if kind == "warning":
        assert "activations may be 50% more or fewer, so it may not fit" in warnings[0]


def test_what_is_not_known_is_not_compared(folder):
    assert verdict(config_of(folder), {"actor_train": (300, 80)}) == ([], [])


def test_roles_of_a_machine_add_up_their_states_and_take_turns(folder):
    roles = {"actor_train": (20, 10), "reference": (20, 4)}
    assert verdict(config_of(folder), roles, host=44)[0] != []  # 40 + half of 10
    assert verdict(config_of(folder), roles, host=55) == ([], [])  # 40 + 15


def test_roles_that_share_a_gpu_add_up_unless_they_are_offloaded(folder):
    roles = {"actor_train": (50, 0), "reference": (40, 0)}

    def on_gpus(train, reference, **settings):
        config = config_of(folder, device_mapping=train)
        reference = config.reference.model_copy(
            update={"device_mapping": reference, "world_size": 1}
        )
        return config.model_copy(update={"reference": reference, **settings})

    (error,), _ = verdict(on_gpus([0], [0]), roles, gpu=80)
    assert error.startswith(
        "actor_train: estimated 90.0 GiB on one GPU for actor_train, reference, this machine has"
    )
    assert verdict(on_gpus([0], [1]), roles, gpu=80) == ([], [])
    assert verdict(on_gpus([0], [0], is_offload_states=True), roles, gpu=80) == ([], [])


def test_a_reference_that_is_asked_once_makes_room(folder):
    config = config_of(folder).model_copy(update={"reference_log_probs": "precompute"})
    assert verdict(config, {"actor_train": (50, 0), "reference": (40, 0)}, host=60) == ([], [])
    assert verdict(config, {"actor_train": (50, 0), "reference": (70, 0)}, host=60)[0][
        0
    ].startswith("reference: ")


def test_states_that_stay_in_host_memory_leave_the_gpu(folder):
    options = {"strategy_name": "fsdp2_train", "strategy_config": {"offload_policy": True}}
    role = {"strategy_args": options, "device_mapping": [0]}
    config = config_of(folder)
    values = {**config.actor_train.model_dump(exclude_unset=True), **role}
    values.pop("world_size", None)
    moved = DPOConfig(actor_train=values, reference=config.reference, sequence_length=16)
    estimate = estimate_memory(moved)["actor_train"]
    assert estimate.states == 0 and estimate.offloaded >= 16 * 1024
    assert "in the machine's memory" in str(estimate)


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        (["offload_optimizer"], 0.75),
        (["offload_param"], 0.125),
        (["offload_optimizer", "offload_param"], 0.875),
    ],
)
def test_what_deepspeed_offloads_leaves_the_gpu(folder, parts, share):
    zero = {"stage": 3, **{part: {"device": "cpu"} for part in parts}}
    options = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": zero}}
    config = config_of(folder, strategy_args=options, device_mapping=[0])
    estimate = estimate_memory(config)["actor_train"]
    whole = 16 * 1024 + 2 * 4 * 1024 // 2
    assert (estimate.states, estimate.offloaded) == (whole - whole * share, whole * share)


def test_a_run_of_ours_is_read_from_its_newest_checkpoint(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "checkpoints" / "checkpoint-4" / "pipeline").mkdir(parents=True)
    shutil.copytree(folder, run / "checkpoints" / "checkpoint-4" / "actor_train")
    assert read_shape(run) == read_shape(folder)


def test_a_damaged_file_is_named(folder):
    (folder / "model-2.safetensors").write_bytes(b"not a header")
    with pytest.raises(ConfigError, match=r"model-2.safetensors is no safetensors file"):
        read_shape(folder)
