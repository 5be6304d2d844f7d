"""ROLL's import path of the configs that pipelines build on."""

from roll.configs.option_groups import (
    RolloutMockConfig,
    RouterArguments,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
    TrainInferISWeightConfig,
    TransferBackendArguments,
)
from roll.configs.pipeline_config import BaseConfig, ScheduleConfig
from roll.configs.ppo_config import PPOConfig

__all__ = [
    "BaseConfig",
    "PPOConfig",
    "RolloutMockConfig",
    "RouterArguments",
    "ScheduleConfig",
    "TrainInferCorrectionConfig",
    "TrainInferFilterConfig",
    "TrainInferISWeightConfig",
    "TransferBackendArguments",
]
