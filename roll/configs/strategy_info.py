"""What each strategy is, and the keys of its `strategy_config`; known without torch.

A strategy of the user's own says the same of itself, as the attribute `info` of its class, and is
named by its dotted path (docs/custom-strategy.md). DeepSpeed and vLLM check the keys of
`strategy_config` that are theirs when they start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
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
from roll.exceptions import ConfigError

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


@dataclass(frozen=True)
class StrategyInfo:
    """What a strategy can do, and what it needs.

    Attributes:
        trains: takes optimizer steps.
        infers: is for roles that only run forward passes (log-probs, values, rewards).
        generates: has an engine that answers prompts.
        options: the keys of `strategy_config`, with their types and defaults.
        passes_other_keys: a library reads, and checks, the other keys of `strategy_config`.
        package: the package that has to be installed.
        shards: the ranks of a role share one copy of the weights and of the optimizer's state.
        scales_loss: can train in fp16.
        parallel_sizes: keys of `strategy_config` whose product is the number of GPUs of a worker.
        path: where the class of a built-in strategy is.
    """

    trains: bool = False
    infers: bool = False
    generates: bool = False
    options: type[InferOptions] = InferOptions
    passes_other_keys: bool = False
    package: str | None = None
    shards: bool = False
    scales_loss: bool = False
    parallel_sizes: tuple[str, ...] = ()
    path: str = ""


_FOLDER = "roll.distributed.strategy"
STRATEGIES = {
    "hf_train": StrategyInfo(
        trains=True, options=HfTrainOptions, path=f"{_FOLDER}.hf_strategy.HfTrainStrategy"
    ),
    "fsdp2_train": StrategyInfo(
        trains=True,
        options=Fsdp2TrainOptions,
        shards=True,
        path=f"{_FOLDER}.fsdp2_strategy.Fsdp2TrainStrategy",
    ),
    "deepspeed_train": StrategyInfo(
        trains=True,
        options=DeepSpeedTrainOptions,
        passes_other_keys=True,
        package="deepspeed",
        shards=True,
        scales_loss=True,
        path=f"{_FOLDER}.deepspeed_strategy.DeepSpeedTrainStrategy",
    ),
    "hf_infer": StrategyInfo(
        infers=True,
        generates=True,
        options=HfInferOptions,
        path=f"{_FOLDER}.hf_strategy.HfInferStrategy",
    ),
    "fsdp2_infer": StrategyInfo(
        infers=True,
        options=Fsdp2InferOptions,
        shards=True,
        path=f"{_FOLDER}.fsdp2_strategy.Fsdp2InferStrategy",
    ),
    "deepspeed_infer": StrategyInfo(
        infers=True,
        options=DeepSpeedInferOptions,
        passes_other_keys=True,
        package="deepspeed",
        shards=True,
        path=f"{_FOLDER}.deepspeed_strategy.DeepSpeedInferStrategy",
    ),
    "vllm": StrategyInfo(
        generates=True,
        options=VllmOptions,
        passes_other_keys=True,
        package="vllm",
        parallel_sizes=("tensor_parallel_size", "pipeline_parallel_size"),
        path=f"{_FOLDER}.vllm_strategy.VllmStrategy",
    ),
}


def strategy_class(name: str) -> Any:
    """The class of a strategy: the short name of a built-in one, or `package.module.ClassName`."""
    path = STRATEGIES[name].path if name in STRATEGIES else name
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a module of the user's may raise anything while it is imported
        if name in STRATEGIES:
            raise
        raise ConfigError(f"the strategy {name} cannot be imported: {error}") from error
    if not isinstance(getattr(found, "info", None), StrategyInfo):
        raise ConfigError(
            f"{name} is no strategy: expected a class with the attribute `info` "
            "(see docs/custom-strategy.md)"
        )
    return found


def strategy_info(name: str) -> StrategyInfo:
    """What a strategy is. One of the user's own is imported for it, and torch with it."""
    return STRATEGIES[name] if name in STRATEGIES else strategy_class(name).info


class StrategyNames(tuple[str, ...]):
    """The built-in strategies that can do one of these things ("trains", "infers", "generates").

    `in` asks a strategy of the user's own, too.
    """

    abilities: tuple[str, ...]

    def __new__(cls, *abilities: str) -> StrategyNames:
        names = super().__new__(
            cls, [name for name, info in STRATEGIES.items() if _can(info, abilities)]
        )
        names.abilities = abilities
        return names

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _can(strategy_info(name), self.abilities)


def _can(info: StrategyInfo, abilities: tuple[str, ...]) -> bool:
    return any(getattr(info, ability) for ability in abilities)


def options_of(strategy_name: str, strategy_config: Mapping[str, Any]) -> InferOptions:
    """Our part of `strategy_config`, complete with defaults; vllm has none."""
    return strategy_info(strategy_name).options(**_own_part(strategy_name, strategy_config))


def option_problems(strategy_name: str, strategy_config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a `strategy_config`, as far as that is known without the library."""
    if strategy_name == "vllm":
        return [
            Problem(key, f"it follows from {VLLM_SET_ELSEWHERE[key]}; remove it")
            for key in strategy_config
            if key in VLLM_SET_ELSEWHERE
        ]
    cls = strategy_info(strategy_name).options
    values = _own_part(strategy_name, strategy_config)
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return problems_of(error, cls, values)
    return []


def _own_part(strategy_name: str, strategy_config: Mapping[str, Any]) -> dict[str, Any]:
    info = strategy_info(strategy_name)
    known = info.options.model_fields if info.passes_other_keys else strategy_config
    if info.options is VllmOptions:
        known = {}
    return {key: value for key, value in strategy_config.items() if key in known}
