"""From a strategy's name in the config to its class. Libraries are imported only for the strategy that needs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from roll.distributed.strategy.strategy import InferenceStrategy
from roll.exceptions import ConfigError

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

STRATEGIES = {
    "hf_train": "roll.distributed.strategy.hf_strategy.HfTrainStrategy",
    "hf_infer": "roll.distributed.strategy.hf_strategy.HfInferStrategy",
    "fsdp2_train": "roll.distributed.strategy.fsdp2_strategy.Fsdp2TrainStrategy",
    "fsdp2_infer": "roll.distributed.strategy.fsdp2_strategy.Fsdp2InferStrategy",
    "deepspeed_train": "roll.distributed.strategy.deepspeed_strategy.DeepSpeedTrainStrategy",
    "deepspeed_infer": "roll.distributed.strategy.deepspeed_strategy.DeepSpeedInferStrategy",
    "vllm": "roll.distributed.strategy.vllm_strategy.VllmStrategy",
}


def create_strategy(worker: Worker) -> InferenceStrategy:
    """The strategy that `worker.worker_config.strategy_args.strategy_name` names, not yet initialised."""
    config = worker.worker_config
    name = config.strategy_args.strategy_name
    if name not in STRATEGIES:
        raise ConfigError(
            f"strategy_args.strategy_name: found {name!r}, expected one of {', '.join(sorted(STRATEGIES))}"
        )
    problems = [problem.under(str(config.name)) for problem in config.start_problems()]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    module, _, class_name = STRATEGIES[name].rpartition(".")
    return getattr(importlib.import_module(module), class_name)(worker)
