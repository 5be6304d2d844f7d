"""The keys of `strategy_config`, by strategy.

hf_* and fsdp2_* have a class each. deepspeed_* takes a few keys of ours beside DeepSpeed's own
configuration, and vllm takes vLLM's engine arguments; the libraries check theirs at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError

from roll.configs.base import (
    AtLeastOne,
    ConfigModel,
    NonNegative,
    Problem,
    Whole,
    problems_of,
)
from roll.configs.roll_keys import WITHOUT_EFFECT

# Engine arguments of vLLM that follow from other settings, and which.
VLLM_SET_ELSEWHERE: Mapping[str, str] = {
    "model": "model_args.model_name_or_path",
    "tokenizer": "model_args.model_name_or_path",
    "dtype": "model_args.dtype",
    "trust_remote_code": "model_args.trust_remote_code",
    "hf_overrides": "model_args.model_config_kwargs",
    "seed": "seed",
    "data_parallel_size": "world_size or device_mapping",
    "distributed_executor_backend": "backend",
    "logprobs_mode": "nothing: log-probabilities are always those of the sampled distribution",
    "worker_cls": "nothing",
    "worker_extension_cls": "nothing",
}
VLLM_IGNORED = frozenset(WITHOUT_EFFECT["VllmOptions"])
_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"],
    BeforeValidator(lambda name: _SHORT_NAMES.get(name, name) if isinstance(name, str) else name),
]


class InferOptions(ConfigModel):
    """Options of every strategy that computes log-probs with a model of transformers."""

    linear_logits: bool = True
    """Never build a logits tensor; log-probabilities come from the hidden states and the head."""

    share_prefixes: bool | None = None
    """Compute tokens once that rows have in common; null does so where the model allows it."""


class TrainOptions(InferOptions):
    """Options of every strategy that trains a model of transformers."""

    keep_logits_gib: NonNegative | None = None
    """GiB of a micro-batch's logits that may wait for backward; null: 2% of the GPU, or 1 GiB."""


class HfInferOptions(InferOptions):
    """`strategy_config` of hf_infer."""

    compile: bool = False
    """Let torch.compile fuse what lies between the matrix products of each block."""

    max_batch_size: AtLeastOne | None = None
    """Sequences that generation works on at a time; null is all of them."""


class HfTrainOptions(TrainOptions):
    """`strategy_config` of hf_train."""

    compile: bool = False
    """Let torch.compile fuse what lies between the matrix products of each block."""


class Fsdp2Options(InferOptions):
    """What fsdp2_infer and fsdp2_train have in common."""

    param_dtype: Dtype | None = None
    """What layers compute in: bf16, fp16 or fp32; null is `model_args.dtype`."""

    reshard_after_forward: bool | None = None
    """Free a layer's gathered weights after its forward pass; null is true."""

    offload_policy: bool = False
    """Keep shards in host memory and copy them to the device layer by layer."""

    fsdp_size: Whole | None = None
    """Ranks that share one copy of the weights: all; null, 1 or less, or their number say so."""


class Fsdp2InferOptions(Fsdp2Options):
    """`strategy_config` of fsdp2_infer."""


class Fsdp2TrainOptions(Fsdp2Options, TrainOptions):
    """`strategy_config` of fsdp2_train."""

    reduce_dtype: Dtype = "fp32"
    """What gradients are summed in: bf16, fp16 or fp32."""

    reduce_scatter_during_grad_accumulation: bool = True
    """Sum gradients over ranks after every micro-batch; false: once a step, with more memory."""


class DeepSpeedInferOptions(InferOptions):
    """`strategy_config` of deepspeed_infer, beside DeepSpeed's own configuration."""


class DeepSpeedTrainOptions(TrainOptions):
    """`strategy_config` of deepspeed_train, beside DeepSpeed's own configuration."""


class VllmOptions(InferOptions):
    """Nothing of ours: `strategy_config` of vllm holds vLLM's engine arguments."""


OPTIONS: Mapping[str, type[InferOptions]] = {
    "hf_infer": HfInferOptions,
    "hf_train": HfTrainOptions,
    "fsdp2_infer": Fsdp2InferOptions,
    "fsdp2_train": Fsdp2TrainOptions,
    "deepspeed_infer": DeepSpeedInferOptions,
    "deepspeed_train": DeepSpeedTrainOptions,
}


def options_of(strategy_name: str, strategy_config: Mapping[str, Any]) -> InferOptions:
    """Our part of `strategy_config`, complete with defaults; vllm has none."""
    return OPTIONS.get(strategy_name, VllmOptions)(**_own_part(strategy_name, strategy_config))


def option_problems(strategy_name: str, strategy_config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a `strategy_config`, as far as that is known without the library."""
    if strategy_name == "vllm":
        return [
            Problem(key, f"it follows from {VLLM_SET_ELSEWHERE[key]}; remove it")
            for key in strategy_config
            if key in VLLM_SET_ELSEWHERE
        ]
    cls, values = OPTIONS[strategy_name], _own_part(strategy_name, strategy_config)
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return problems_of(error, cls, values)
    return []


def _own_part(strategy_name: str, strategy_config: Mapping[str, Any]) -> dict[str, Any]:
    # DeepSpeed and vLLM read, and check, the keys that are not ours.
    if strategy_name.startswith(("hf_", "fsdp2_")):
        return dict(strategy_config)
    known = OPTIONS[strategy_name].model_fields if strategy_name in OPTIONS else {}
    return {key: value for key, value in strategy_config.items() if key in known}
