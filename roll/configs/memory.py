"""A rough estimate of the memory that each role needs on each of its devices, from files alone, without torch.

Parameters are counted from the headers of the model's safetensors files. What a strategy keeps for a parameter is known
exactly; activations are estimated from the shape of the model, for attention that does not keep its scores.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from roll.configs.pipeline_config import BaseConfig
from roll.configs.worker_config import WorkerConfig

GIB = 1024**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes of activations that a transformer layer keeps per token and unit of width, in half precision
# (arXiv:2205.05198, equation 2, without dropout masks and attention scores).
LAYER_ACTIVATIONS = 24
# Logits exist in chunks of at most this size (see roll.ops).
LOGITS_CHUNK_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    states: int  # weights, gradients, optimizer
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations

    def __str__(self) -> str:
        return f"about {_gib(self.total)} ({_gib(self.states)} states)"


def read_shape(folder: str | Path | None) -> ModelShape | None:
    """Size and shape of the model in a folder; None where it cannot be told (a name on a hub, other file formats)."""
    if folder is None or not (Path(folder) / "config.json").is_file():
        return None
    files = sorted(Path(folder).glob("*.safetensors"))
    config = json.loads((Path(folder) / "config.json").read_text())
    config = config.get("text_config", config)
    sizes = [config.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if not files or None in sizes:
        return None
    return ModelShape(sum(map(_count, files)), *sizes)


def estimate_memory(config: BaseConfig) -> dict[str, MemoryEstimate]:
    """The estimate of every role that runs and whose model can be read."""
    found = {}
    for name, role in config.active_roles().items():
        shape = read_shape(role.model_args.model_name_or_path) if role.holds_model else None
        if shape is not None:
            found[name] = _estimate(role, shape, config.sequence_length, rows_per_sample=2 if _is_pairs(config) else 1)
    return found


def _estimate(role: WorkerConfig, shape: ModelShape, sequence_length: int, *, rows_per_sample: int) -> MemoryEstimate:
    strategy, width = role.strategy_name or "", BYTES[role.model_args.dtype]
    trains = strategy.endswith("_train")
    shards = role.dp_size if strategy.startswith("fsdp2") else 1
    if not trains:
        tokens = role.infer_batch_size * rows_per_sample * sequence_length
        activations = tokens * shape.hidden * width * (LAYER_ACTIVATIONS // 2) + _logits(tokens, shape)
        return MemoryEstimate(math.ceil(shape.parameters * width / shards), activations)
    if role.model_args.is_lora:
        # Frozen weights; the adapters' own states are a rounding error beside them.
        states = math.ceil(shape.parameters * width / shards)
    elif strategy == "hf_train":
        states = 4 * shape.parameters * width  # weights, gradients, two moments
    else:
        # Master weights, gradients and two moments in float32, cut over the ranks, and a layer or two in full.
        ranks = role.dp_size
        states = math.ceil(16 * shape.parameters / ranks + 2 * width * shape.parameters / shape.layers)
    if role.use_dynamic_batching_in_train:
        tokens = role.max_tokens_per_microbatch_in_train
    else:
        tokens = role.training_args.per_device_train_batch_size * rows_per_sample * sequence_length
    per_layer = tokens * shape.hidden * width
    if role.model_args.disable_gradient_checkpointing:
        activations = per_layer * (LAYER_ACTIVATIONS // 2) * shape.layers
    else:
        activations = per_layer * (shape.layers + LAYER_ACTIVATIONS // 2)
    return MemoryEstimate(states, activations + _logits(tokens, shape))


def _logits(tokens: int, shape: ModelShape) -> int:
    return min(LOGITS_CHUNK_BYTES, tokens * shape.vocabulary * 4)


def _is_pairs(config: BaseConfig) -> bool:
    return getattr(config, "pipeline", None) == "dpo"


def _count(file: Path) -> int:
    """Elements of all tensors of a safetensors file, whose header is JSON behind eight bytes with its length."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.0f} MiB"
