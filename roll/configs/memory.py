"""A rough estimate of the memory that each role needs on each of its devices, from files alone, without torch.

Parameters are counted from the headers of the model's safetensors files. What a strategy keeps for a parameter is known
exactly; activations are estimated from the shape of the model, for attention that does not keep its scores. A run
surely fails where the states and half of the activations do not fit; it may where they and half as many activations
again do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from roll.configs.base import Problem
from roll.configs.model_files import cached_snapshot, model_of_run, read_json, saved_tensors
from roll.configs.pipeline_config import BaseConfig
from roll.configs.strategy_info import strategy_info
from roll.configs.worker_config import WorkerConfig

GIB = 1024**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes of activations that a transformer layer keeps per token and unit of width, in half precision
# (arXiv:2205.05198, equation 2, without dropout masks and attention scores).
LAYER_ACTIVATIONS = 24
# Logits exist in chunks of at most this size (see roll.ops).
LOGITS_CHUNK_BYTES = 512 * 1024**2
MARGIN = 0.5  # how far the activations may be off, to either side
ON_GPU = "on one GPU"
Bytes = Callable[[str], float]


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker: on its device, and in the machine's memory for states that do not stay on the device."""

    states: int  # weights, gradients, optimizer
    activations: int
    offloaded: int = 0

    @property
    def total(self) -> int:
        return self.states + self.activations

    def __str__(self) -> str:
        elsewhere = (
            f", and {_gib(self.offloaded)} in the machine's memory" if self.offloaded else ""
        )
        return f"about {_gib(self.total)} ({_gib(self.states)} states{elsewhere})"


def read_shape(name: str | Path | None) -> ModelShape | None:
    """Size and shape of a model; None where it cannot be told: a name on a hub that is not in the local cache, a folder
    without safetensors files.

    Raises:
        ConfigError: the files are there and cannot be read.
    """
    if name is None:
        return None
    given = Path(name).expanduser()
    folder = model_of_run(given) if given.is_dir() else cached_snapshot(str(name))
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    sizes = [config.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")]
    tensors = saved_tensors(folder)
    if not tensors or None in sizes:
        return None
    return ModelShape(sum(tensors.values()), *sizes)


def estimate_memory(config: BaseConfig) -> dict[str, MemoryEstimate]:
    """The estimate of every role that runs and whose model can be read."""
    found = {}
    for name, role in config.active_roles().items():
        shape = read_shape(role.model_args.model_name_or_path) if role.holds_model else None
        if shape is not None:
            found[name] = _estimate(
                role, shape, config.sequence_length, rows_per_sample=2 if _is_pairs(config) else 1
            )
    return found


def memory_verdict(
    config: BaseConfig,
    estimates: Mapping[str, MemoryEstimate],
    *,
    machine: str,
    gpu_bytes: int | None,
    host_bytes: int | None,
) -> tuple[list[Problem], list[str]]:
    """What does not fit (errors), and what may not (warnings), on a machine with so many bytes; None is not compared.

    Roles that share a GPU, or the machine's memory, add up their states; they compute one after the other, so that only
    the largest of their activations counts. With `is_offload_states` one role at a time is on a GPU, and a reference
    whose scores are precomputed is gone before the policy comes.
    """
    roles = {name: config.active_roles()[name] for name in estimates}
    errors: list[Problem] = []
    warnings: list[str] = []

    def judge(
        where: str, names: list[str], states: Bytes, activations: Bytes, limit: int | None
    ) -> None:
        is_precomputed = getattr(config, "reference_log_probs", "live") == "precompute"
        if where == ON_GPU and config.is_offload_states:
            together = [[name] for name in names]
        elif is_precomputed:  # the reference is gone before the policy comes
            together = [
                [name for name in names if name != "reference"],
                [name for name in names if name == "reference"],
            ]
        else:
            together = [names]
        for group in filter(None, together):
            # In one process, a role that samples may use the very weights of the one that is trained.
            shared = (
                "actor_infer"
                if config.execution_backend == "local" and "actor_train" in group
                else ""
            )
            kept, least = (
                sum(states(name) for name in group if name != left_out) for left_out in ("", shared)
            )
            peak = max(map(activations, group))
            if limit is None or kept + (1 + MARGIN) * peak <= limit:
                continue
            needs = f"estimated {_gib(kept + peak)} {where} for {', '.join(group)}, {machine} has {_gib(limit)}"
            if least + (1 - MARGIN) * peak > limit:
                key = config.key_of(max(group, key=lambda name: estimates[name].total))
                fix = "use more or larger devices, a smaller micro-batch, fewer bits (dtype) or adapters (lora_target)"
                errors.append(
                    Problem(
                        key,
                        f"{needs}; even with {MARGIN:.0%} fewer activations it does not fit: {fix}",
                    )
                )
            else:
                warnings.append(
                    f"{needs}; activations may be {MARGIN:.0%} more or fewer, so it may not fit"
                )
            return

    def states_on_gpu(name: str) -> float:
        return estimates[name].states

    def states_on_host(name: str) -> float:
        on_cpu = 0 if roles[name].device_mapping else estimates[name].states
        return (on_cpu + estimates[name].offloaded) * roles[name].world_size

    gpus = {gpu for role in roles.values() for gpu in role.device_mapping or []}
    crowds = [
        [name for name, role in roles.items() if gpu in (role.device_mapping or [])] for gpu in gpus
    ]
    if crowds:
        fullest = max(crowds, key=lambda names: sum(estimates[name].total for name in names))
        judge(ON_GPU, fullest, states_on_gpu, lambda name: estimates[name].activations, gpu_bytes)
    on_host = [
        name for name, role in roles.items() if not role.device_mapping or estimates[name].offloaded
    ]
    if config.num_nodes == 1:
        judge(
            "of memory",
            on_host,
            states_on_host,
            lambda name: (
                0
                if roles[name].device_mapping
                else estimates[name].activations * roles[name].world_size
            ),
            host_bytes,
        )
    return errors, warnings


def _estimate(
    role: WorkerConfig, shape: ModelShape, sequence_length: int, *, rows_per_sample: int
) -> MemoryEstimate:
    info, width = strategy_info(str(role.strategy_name)), BYTES[role.model_args.dtype]
    is_deepspeed = info.package == "deepspeed"
    shards = role.dp_size if info.shards and not is_deepspeed else 1
    zero = role.strategy_config.get("zero_optimization") if is_deepspeed else None
    zero = zero if isinstance(zero, Mapping) else {}
    if is_deepspeed and zero.get("stage") == 3:
        shards = role.dp_size
    if not info.trains:
        tokens = role.infer_batch_size * rows_per_sample * sequence_length
        activations = tokens * shape.hidden * width * (LAYER_ACTIVATIONS // 2) + _logits(
            tokens, shape
        )
        return _placed(role, math.ceil(shape.parameters * width / shards), activations, zero)
    if role.model_args.is_lora:
        # Frozen weights; the adapters' own states are a rounding error beside them.
        states = math.ceil(shape.parameters * width / shards)
    elif not info.shards:
        states = 4 * shape.parameters * width  # weights, gradients, two moments
    else:
        # Master weights, gradients and two moments in float32, cut over the ranks, and a layer or two in full.
        ranks = role.dp_size
        states = math.ceil(
            16 * shape.parameters / ranks + 2 * width * shape.parameters / shape.layers
        )
    if role.use_dynamic_batching_in_train:
        tokens = role.max_tokens_per_microbatch_in_train
    else:
        tokens = role.training_args.per_device_train_batch_size * rows_per_sample * sequence_length
    per_layer = tokens * shape.hidden * width
    if role.model_args.disable_gradient_checkpointing:
        activations = per_layer * (LAYER_ACTIVATIONS // 2) * shape.layers
    else:
        activations = per_layer * (shape.layers + LAYER_ACTIVATIONS // 2)
    return _placed(role, states, activations + _logits(tokens, shape), zero)


def _placed(
    role: WorkerConfig, states: int, activations: int, zero: Mapping[str, object]
) -> MemoryEstimate:
    """The estimate with the states that the strategy keeps in the machine's memory taken off the device."""
    moved = 0.0
    if role.device_mapping:
        offloads = {
            part for part in ("offload_optimizer", "offload_param") if _is_on_cpu(zero.get(part))
        }
        if role.strategy_config.get("offload_policy"):  # fsdp2
            moved = states
        elif offloads:  # all but the gradients; of parameters alone, those in half precision
            moved = states * (
                0.875 if len(offloads) == 2 else 0.75 if "offload_optimizer" in offloads else 0.125
            )
    return MemoryEstimate(states - int(moved), activations, int(moved))


def _is_on_cpu(offload: object) -> bool:
    return isinstance(offload, Mapping) and offload.get("device", "none") == "cpu"


def _logits(tokens: int, shape: ModelShape) -> int:
    return min(LOGITS_CHUNK_BYTES, tokens * shape.vocabulary * 4)


def _is_pairs(config: BaseConfig) -> bool:
    return getattr(config, "pipeline", None) == "dpo"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.0f} MiB"
