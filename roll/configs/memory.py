"""A rough estimate of the memory that each role needs on each device, from files, without torch.

Parameters are counted from the headers of the model's safetensors files. What a strategy keeps for
a parameter is known exactly; activations are estimated from the shape of the model, for attention
that does not keep its scores. A run surely fails where the states and half of the activations do
not fit; it may where they and half as many activations again do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker on its device, and in host memory for what does not stay there."""

    states: int  # weights, gradients, optimizer
    activations: int
    offloaded: int = 0

    @property
    def total(self) -> int:
        return self.states + self.activations

    def __str__(self) -> str:
        moved = f", and {_gib(self.offloaded)} in the machine's memory" if self.offloaded else ""
        return f"about {_gib(self.total)} ({_gib(self.states)} states{moved})"


def read_shape(name: str | Path | None) -> ModelShape | None:
    """Size and shape of a model; None for a hub's name that is not cached, or without safetensors.

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
            row = config.sequence_length * (2 if config.kind == "dpo" else 1)  # a pair is two rows
            found[name] = _estimate(role, shape, row)
    return found


def _estimate(role: WorkerConfig, shape: ModelShape, tokens_per_row: int) -> MemoryEstimate:
    info, width = strategy_info(str(role.strategy_name)), BYTES[role.model_args.dtype]
    zero = role.strategy_config.get("zero_optimization")  # DeepSpeed's
    zero = zero if isinstance(zero, Mapping) else {}
    # DeepSpeed cuts weights only in its third stage; what it trains is cut in any.
    cuts_weights = info.shards and (info.package != "deepspeed" or zero.get("stage") == 3)
    shards = role.dp_size if cuts_weights else 1
    weights = math.ceil(shape.parameters * width / shards)
    if not info.trains:
        tokens, states = role.infer_batch_size * tokens_per_row, weights
        activations = tokens * shape.hidden * width * (LAYER_ACTIVATIONS // 2)
    else:
        if role.model_args.is_lora:
            states = weights  # frozen; the adapters' own states are a rounding error beside them
        elif not info.shards:
            states = 4 * shape.parameters * width  # weights, gradients, two moments
        else:
            # Master weights, gradients and two moments in float32, cut over the ranks, and a layer
            # or two in full.
            layers = 2 * width * shape.parameters / shape.layers
            states = math.ceil(16 * shape.parameters / role.dp_size + layers)
        if role.use_dynamic_batching_in_train:
            tokens = role.max_tokens_per_microbatch_in_train
        else:
            tokens = role.training_args.per_device_train_batch_size * tokens_per_row
        kept = shape.layers + LAYER_ACTIVATIONS // 2  # an input per layer, and one layer in full
        if role.model_args.disable_gradient_checkpointing:
            kept = LAYER_ACTIVATIONS // 2 * shape.layers
        activations = tokens * shape.hidden * width * kept
    activations += min(LOGITS_CHUNK_BYTES, tokens * shape.vocabulary * 4)
    # What the strategy keeps in the machine's memory leaves the device.
    share = 0.0
    if role.device_mapping and role.strategy_config.get("offload_policy"):  # fsdp2
        share = 1.0
    elif role.device_mapping:  # of parameters alone, those in half precision; never the gradients
        for part, size in (("offload_optimizer", 0.75), ("offload_param", 0.125)):
            offload = zero.get(part)
            if isinstance(offload, Mapping) and offload.get("device", "none") == "cpu":
                share += size
    moved = int(states * share)
    return MemoryEstimate(states - moved, activations, moved)


def memory_verdict(
    config: BaseConfig,
    estimates: Mapping[str, MemoryEstimate],
    *,
    machine: str,
    gpu_bytes: int | None,
    host_bytes: int | None,
) -> tuple[list[Problem], list[str]]:
    """What does not fit (errors), and what may not (warnings), into so many bytes; None fits all.

    Roles that share a GPU, or the machine's memory, add up their states; they compute one after the
    other, so that only the largest of their activations counts. With `is_offload_states` one role
    at a time is on a GPU, and a reference that is precomputed is gone before the policy comes.
    """
    roles = {name: config.active_roles()[name] for name in estimates}
    errors: list[Problem] = []
    warnings: list[str] = []
    places: list[tuple[str, int | None, dict[str, tuple[int, int]]]] = []
    # (where, limit, name: (states, activations)) of the fullest GPU, and of the machine
    crowds = []
    for gpu in {gpu for role in roles.values() for gpu in role.device_mapping or []}:
        crowds.append([name for name, role in roles.items() if gpu in (role.device_mapping or [])])
    if crowds:
        names = max(crowds, key=lambda names: sum(estimates[name].total for name in names))
        sizes = {name: (estimates[name].states, estimates[name].activations) for name in names}
        places.append(("on one GPU", gpu_bytes, sizes))
    if config.num_nodes == 1:
        on_host = {}
        for name, role in roles.items():
            estimate, size = estimates[name], role.world_size
            if not role.device_mapping:
                states = estimate.states + estimate.offloaded
                on_host[name] = (states * size, estimate.activations * size)
            elif estimate.offloaded:
                on_host[name] = (estimate.offloaded * size, 0)
        places.append(("of memory", host_bytes, on_host))
    for where, limit, sizes in places:
        together = [list(sizes)]
        if where == "on one GPU" and config.is_offload_states:
            together = [[name] for name in sizes]
        elif getattr(config, "reference_log_probs", "live") == "precompute":
            policy = [name for name in sizes if name != "reference"]
            together = [policy, [name for name in sizes if name == "reference"]]
        for group in filter(None, together):
            kept = least = sum(sizes[name][0] for name in group)
            # In one process, a role that samples may use the very weights of the trained one.
            is_shared = config.execution_backend == "local" and "actor_train" in group
            if is_shared and "actor_infer" in group:
                least -= sizes["actor_infer"][0]
            peak = max(sizes[name][1] for name in group)
            if limit is None or kept + (1 + MARGIN) * peak <= limit:
                continue
            has = f"{machine} has {_gib(limit)}"
            needs = f"estimated {_gib(kept + peak)} {where} for {', '.join(group)}, {has}"
            if least + (1 - MARGIN) * peak > limit:
                key = config.key_of(max(group, key=lambda name: estimates[name].total))
                surely = f"even with {MARGIN:.0%} fewer activations it does not fit"
                fix = "use more or larger devices, a smaller micro-batch, fewer bits (dtype)"
                errors.append(Problem(key, f"{needs}; {surely}: {fix} or adapters (lora_target)"))
            else:
                perhaps = f"activations may be {MARGIN:.0%} more or fewer, so it may not fit"
                warnings.append(f"{needs}; {perhaps}")
            break
    return errors, warnings


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.0f} MiB"
