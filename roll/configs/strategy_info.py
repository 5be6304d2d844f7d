"""What each strategy is. The configs have to know it before torch is imported.

A strategy of the user's own says the same of itself, as the attribute `info` of its class, and is
named by its dotted path (docs/custom-strategy.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from roll.configs.strategy_options import (
    DeepSpeedInferOptions,
    DeepSpeedTrainOptions,
    Fsdp2InferOptions,
    Fsdp2TrainOptions,
    HfInferOptions,
    HfTrainOptions,
    InferOptions,
)
from roll.exceptions import ConfigError


@dataclass(frozen=True)
class StrategyInfo:
    """What a strategy can do, and what it needs.

    Attributes:
        trains: takes optimizer steps.
        infers: is for roles that only run forward passes (log-probs, values, rewards).
        generates: has an engine that answers prompts.
        options: the keys of `strategy_config`, with their types and defaults.
        passes_other_keys: the other keys of `strategy_config` belong to a library, which checks them.
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
    except (ImportError, AttributeError) as error:
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
