"""DeepSpeed's JSON configuration, completed with what the run's own configuration already says.

`strategy_config` is what a user would put into DeepSpeed's file: `zero_optimization` and anything else that DeepSpeed
reads. Some of its keys repeat settings of the run (batch sizes, clipping, precision, optimizer, schedule). They may be
left out or be "auto", and may say the same as the run; to say something else is an error, never a silent choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.strategy_options import DeepSpeedTrainOptions
from roll.exceptions import ConfigError

AUTO = "auto"
STAGES = (0, 1, 2, 3)
# DeepSpeed's own 5e8 elements are 2 GB of float32 per rank, taken once for the whole run.
REDUCE_BUCKET_SIZE = 50_000_000
OWN_KEYS = DeepSpeedTrainOptions.model_fields  # keys of roll that stand beside DeepSpeed's


@dataclass(frozen=True)
class RunSettings:
    """What the run's configuration says about the things that DeepSpeed's configuration repeats."""

    role: str
    dtype: str
    world_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float

    def key(self, key: str) -> str:
        return f"{self.role}.strategy_args.strategy_config.{key}"


def zero_stage(config: Mapping[str, Any], role: str, default: int) -> int:
    """`zero_optimization.stage`, checked."""
    stage = _get(config, "zero_optimization.stage")
    if stage in (None, AUTO):
        return default
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(
            f"{role}.strategy_args.strategy_config.zero_optimization.stage: found {stage!r}, expected 0, 1, 2 or 3"
        )
    return stage


def training_stage(config: Mapping[str, Any], stage: int, dtype: str) -> int:
    """The stage that training runs at: what was asked for, or the next one that does the same right.

    Stage 0 differs from stage 1 in memory alone. Below stage 2, DeepSpeed sums bf16 gradients in float32 only with an
    optimizer of another kind, one that cannot skip a step.
    """
    sums_in_float32 = _get(config, "data_types.grad_accum_dtype") in (None, AUTO, "fp32")
    lowest = 2 if dtype == "bf16" and sums_in_float32 else 1
    return max(stage, lowest)


def complete_config(config: Mapping[str, Any], run: RunSettings, stage: int) -> dict[str, Any]:
    """The configuration that DeepSpeed gets: the user's, our defaults, and the settings of the run.

    DeepSpeed counts one micro-batch per step, whatever the run does: the strategy says itself which one is the last.
    """
    _refuse_other_optimizers(config, run)
    _refuse_conflicts(config, run)
    _refuse_nvme(config, run)
    complete = _without_auto({key: value for key, value in config.items() if key not in OWN_KEYS})
    zero = complete.setdefault("zero_optimization", {})
    zero["stage"] = stage
    zero.setdefault("reduce_bucket_size", REDUCE_BUCKET_SIZE)
    complete |= {
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "train_batch_size": run.micro_batch_size * run.world_size,
        "gradient_clipping": run.max_grad_norm,
        # The optimizer is torch's AdamW, which DeepSpeed calls untested, also for states in host memory.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {**complete.get("bf16", {}), "enabled": run.dtype == "bf16"},
        "fp16": {**complete.get("fp16", {}), "enabled": run.dtype == "fp16"},
    }
    # Micro-batches and ranks are summed in float32; DeepSpeed's default is the dtype of the weights.
    complete.setdefault("communication_data_type", "fp32")
    complete["data_types"] = {"grad_accum_dtype": "fp32", **complete.get("data_types", {})}
    return complete


def _refuse_conflicts(config: Mapping[str, Any], run: RunSettings) -> None:
    rows = run.micro_batch_size
    steps = run.gradient_accumulation_steps
    expected: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (
            rows,
            f"{run.role}.training_args.per_device_train_batch_size",
        ),
        "gradient_accumulation_steps": (
            steps,
            f"{run.role}.training_args.gradient_accumulation_steps",
        ),
        "train_batch_size": (
            rows * steps * run.world_size,
            f"{run.role}.training_args and the number of workers",
        ),
        "gradient_clipping": (run.max_grad_norm, "max_grad_norm"),
        "bf16.enabled": (run.dtype == "bf16", f"{run.role}.model_args.dtype"),
        "fp16.enabled": (run.dtype == "fp16", f"{run.role}.model_args.dtype"),
        "zero_allow_untested_optimizer": (True, "nothing: the optimizer is torch's AdamW"),
        "zero_force_ds_cpu_optimizer": (False, "nothing: the optimizer is torch's AdamW"),
    }
    for key, (value, source) in expected.items():
        found = _get(config, key)
        if found not in (None, AUTO) and found != value:
            raise ConfigError(
                f"{run.key(key)}: found {found!r}, but the run says {value!r}, which follows from {source}; leave the "
                "key out here (or write auto) and change that instead"
            )


def _refuse_other_optimizers(config: Mapping[str, Any], run: RunSettings) -> None:
    for key, instead in (
        ("optimizer", "learning_rate, weight_decay, adam_beta1 and adam_beta2"),
        ("scheduler", "lr_scheduler_type and warmup_steps"),
    ):
        if config.get(key) not in (None, AUTO):
            raise ConfigError(
                f"{run.key(key)}: found {config[key]!r}, expected nothing: AdamW and its schedule come from "
                f"{run.role}.training_args ({instead}); remove the key"
            )


def _refuse_nvme(config: Mapping[str, Any], run: RunSettings) -> None:
    for part in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{part}.device"
        if _get(config, key) == "nvme":
            raise ConfigError(
                f"{run.key(key)}: found 'nvme', which is not supported here; expected cpu or none"
            )


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
