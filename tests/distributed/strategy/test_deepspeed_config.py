from types import SimpleNamespace

import pytest

from roll.distributed.strategy.deepspeed_config import complete_config, training_stage, zero_stage
from roll.exceptions import ConfigError


def role(config, *, dtype="bf16"):
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    return SimpleNamespace(
        name="actor_train",
        strategy_config=config,
        training_args=args,
        model_args=SimpleNamespace(dtype=dtype),
        world_size=4,
    )


def test_the_run_fills_what_the_user_left_out():
    user = {"zero_optimization": {"overlap_comm": True}, "linear_logits": True}
    config = complete_config(role(user), 2, 0.5)
    zero = {"overlap_comm": True, "stage": 2, "reduce_bucket_size": 50_000_000}
    assert config["zero_optimization"] == zero
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["train_micro_batch_size_per_gpu"] == 2
    # One micro-batch per step as far as DeepSpeed is concerned, so that it divides by nothing.
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (1, 8)
    assert config["gradient_clipping"] == 0.5
    assert config["communication_data_type"] == config["data_types"]["grad_accum_dtype"] == "fp32"
    assert "linear_logits" not in config


def test_auto_means_left_out_at_any_depth():
    zero = {"stage": "auto", "stage3_prefetch_bucket_size": "auto", "offload_param": {"x": "auto"}}
    user = {
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "scheduler": "auto",
    }
    config = complete_config(role(user), 3, 0.5)
    expected = {"stage": 3, "reduce_bucket_size": 50_000_000, "offload_param": {}}
    assert config["zero_optimization"] == expected
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    assert "scheduler" not in config
    assert zero["stage"] == "auto"


def test_values_that_agree_with_the_run_are_welcome():
    user = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
    }
    config = complete_config(role(user), 1, 0.5)
    assert config["communication_data_type"] == "bf16"
    assert config["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 1},
            r"train_micro_batch_size_per_gpu: found 1, but the run says 2.*per_device_train",
        ),
        (
            {"gradient_accumulation_steps": 1},
            r"gradient_accumulation_steps: found 1, but the run says 8",
        ),
        ({"train_batch_size": 8}, r"train_batch_size: found 8, but the run says 64"),
        (
            {"gradient_clipping": 1.0},
            r"gradient_clipping: found 1\.0, but the run says 0\.5.*max_grad_norm",
        ),
        (
            {"bf16": {"enabled": False}},
            r"bf16\.enabled: found False, but the run says True.*model_args\.dtype",
        ),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled: found True"),
        (
            {"optimizer": {"type": "Adam"}},
            r"optimizer: found \{'type': 'Adam'\}, expected nothing.*learning_rate",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, r"scheduler: found.*lr_scheduler_type"),
        ({"zero_force_ds_cpu_optimizer": True}, r"zero_force_ds_cpu_optimizer: found True"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            r".*offload_optimizer\.device: found 'nvme'",
        ),
    ],
)
def test_a_key_that_contradicts_the_run_is_named(user, message):
    where = r"^actor_train\.strategy_args\.strategy_config\."
    with pytest.raises(ConfigError, match=where + message):
        complete_config(role(user), 2, 0.5)


@pytest.mark.parametrize(
    ("zero", "stage"), [({}, 2), ({"stage": "auto"}, 2), ({"stage": 0}, 0), ({"stage": 3}, 3)]
)
def test_the_stage(zero, stage):
    assert zero_stage(role({"zero_optimization": zero}), default=2) == stage
    assert zero_stage(role({}), default=2) == 2


@pytest.mark.parametrize("stage", [4, -1, "2", True])
def test_a_stage_that_does_not_exist(stage):
    message = r"actor_train.*zero_optimization\.stage: found .*, expected 0, 1, 2 or 3"
    with pytest.raises(ConfigError, match=message):
        zero_stage(role({"zero_optimization": {"stage": stage}}), default=2)


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulate", "runs_at"),
    [
        (0, "fp32", None, 1),
        (1, "fp32", None, 1),
        (0, "fp16", None, 1),
        (0, "bf16", None, 2),
        (1, "bf16", "auto", 2),
        (1, "bf16", "fp32", 2),
        (1, "bf16", "bf16", 1),
        (3, "bf16", None, 3),
    ],
)
def test_the_stage_of_training(stage, dtype, accumulate, runs_at):
    config = {"zero_optimization": {"stage": stage}}
    if accumulate is not None:
        config["data_types"] = {"grad_accum_dtype": accumulate}
    assert training_stage(role(config, dtype=dtype), default=2) == runs_at
