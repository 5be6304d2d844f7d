"""DeepSpeed's JSON configuration, completed with what the run's own configuration already says.

`strategy_config` is what a user would put into DeepSpeed's file. Some of its keys repeat settings
of the run (batch sizes, clipping, precision, optimizer, schedule). They may be left out or be
"auto", and may say the same as the run; to say something else is an error, never a silent choice.
Imports no torch: `roll check` asks it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.strategy_info import DeepSpeedTrainOptions
from roll.exceptions import ConfigError

AUTO = "auto"
# DeepSpeed's own 5e8 elements are 2 GB of float32 per rank, taken once for the whole run.
REDUCE_BUCKET_SIZE = 50_000_000


def zero_stage(role: Any, default: int) -> int:
    """`zero_optimization.stage` of a role's `strategy_config`, checked."""
    stage = _get(role.strategy_config, "zero_optimization.stage")
    if stage in (None, AUTO):
        return default
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"{role.name}.strategy_args.strategy_config.zero_optimization.stage: found {stage!r}, "
            "expected 0, 1, 2 or 3"
        )
    return stage


def training_stage(role: Any, default: int) -> int:
    """The stage that training runs at: what was asked for, or the next one that does it right.

    Stage 0 differs from stage 1 in memory alone. Below stage 2, DeepSpeed sums bf16 gradients in
    float32 only with an optimizer of another kind, one that cannot skip a step.
    """
    accumulates = _get(role.strategy_config, "data_types.grad_accum_dtype")
    sums_in_float32 = accumulates in (None, AUTO, "fp32")
    lowest = 2 if role.model_args.dtype == "bf16" and sums_in_float32 else 1
    return max(zero_stage(role, default), lowest)


def complete_config(role: Any, stage: int, max_grad_norm: float) -> dict[str, Any]:
    """The configuration that DeepSpeed gets: the user's, our defaults, and the settings of the run.

    DeepSpeed counts one micro-batch per step: the strategy says itself which one is the last.
    """
    config, args, dtype = role.strategy_config, role.training_args, role.model_args.dtype
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    section = f"{role.name}.strategy_args.strategy_config"
    for key, instead in (
        ("optimizer", "learning_rate, weight_decay, adam_beta1 and adam_beta2"),
        ("scheduler", "lr_scheduler_type and warmup_steps"),
    ):
        if config.get(key) not in (None, AUTO):
            raise ConfigError(
                f"{section}.{key}: found {config[key]!r}, expected nothing: AdamW and its schedule "
                f"come from {role.name}.training_args ({instead}); remove the key"
            )
    of_dtype = f"{role.name}.model_args.dtype"
    of_optimizer = "nothing: the optimizer is torch's AdamW"
    of_training = f"{role.name}.training_args"
    expected: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (rows, f"{of_training}.per_device_train_batch_size"),
        "gradient_accumulation_steps": (steps, f"{of_training}.gradient_accumulation_steps"),
        "train_batch_size": (
            rows * steps * role.world_size,
            f"{of_training} and the number of workers",
        ),
        "gradient_clipping": (max_grad_norm, "max_grad_norm"),
        "bf16.enabled": (dtype == "bf16", of_dtype),
        "fp16.enabled": (dtype == "fp16", of_dtype),
        "zero_allow_untested_optimizer": (True, of_optimizer),
        "zero_force_ds_cpu_optimizer": (False, of_optimizer),
    }
    for key, (value, source) in expected.items():
        found = _get(config, key)
        if found not in (None, AUTO) and found != value:
            raise ConfigError(
                f"{section}.{key}: found {found!r}, but the run says {value!r}, which follows from "
                f"{source}; leave the key out here (or write auto) and change that instead"
            )
    for part in ("offload_optimizer", "offload_param"):
        if _get(config, f"zero_optimization.{part}.device") == "nvme":
            raise ConfigError(
                f"{section}.zero_optimization.{part}.device: found 'nvme', which is not supported "
                "here; expected cpu or none"
            )
    ours = DeepSpeedTrainOptions.model_fields
    complete = _without_auto({key: value for key, value in config.items() if key not in ours})
    zero = complete.setdefault("zero_optimization", {})
    zero["stage"] = stage
    zero.setdefault("reduce_bucket_size", REDUCE_BUCKET_SIZE)
    complete |= {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "train_batch_size": rows * role.world_size,
        "gradient_clipping": max_grad_norm,
        # The optimizer is torch's AdamW, which DeepSpeed calls untested, also for host memory.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {**complete.get("bf16", {}), "enabled": dtype == "bf16"},
        "fp16": {**complete.get("fp16", {}), "enabled": dtype == "fp16"},
    }
    # Micro-batches and ranks are summed in float32; DeepSpeed's default is the weights' dtype.
    complete.setdefault("communication_data_type", "fp32")
    complete["data_types"] = {"grad_accum_dtype": "fp32", **complete.get("data_types", {})}
    return complete


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _without_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the entries that leave the choice to others."""
    return {
        key: _without_auto(inner) if isinstance(inner, Mapping) else inner
        for key, inner in value.items()
        if inner != AUTO
    }
