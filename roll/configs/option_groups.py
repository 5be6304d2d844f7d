"""Small groups of options that belong to a pipeline rather than to a role."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from roll.configs.config_model import AtLeastOne, ConfigModel, NonNegative, Number, Positive
from roll.configs.problems import ConfigProblems, Problem, wrong

Granularity = Literal["token", "segment", "geometric", "sequence"]


class RouterArguments(ConfigModel):
    """How requests find a generating worker."""

    router_name: str | None = None
    """Router class; null is the pipeline's own."""

    router_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the router."""

    max_running_requests: AtLeastOne = 128
    """Requests that one worker runs at the same time."""


class RolloutMockConfig(ConfigModel):
    """Record rollouts, or replay recorded ones, to compare two runs on the same data."""

    enable: bool = False
    """Record or replay."""

    mode: Literal["dump", "mock"] = "dump"
    """`dump` records, `mock` replays."""

    dump_dir: str = "./rollout_mock_dumps"
    """Folder of the recorded batches."""


class TransferBackendArguments(ConfigModel):
    """A store outside Ray for batches between roles."""

    backend_name: str | None = None
    """Name of the store; null sends batches with the calls."""

    backend_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the store."""


class TrainInferISWeightConfig(ConfigModel):
    """Weights that correct for sampling with slightly other probabilities than those trained on."""

    enabled: bool = False
    """Multiply the policy loss by the weights."""

    weight_type: Granularity = "token"
    """Tokens that share one ratio: each alone, a run of response tokens, or the sequence (its mean or its sum)."""

    upper_bound: Positive | None = 1.2
    """Largest weight; null leaves weights as they are."""

    detach: bool = True
    """Send no gradient through the weights."""


class TrainInferFilterConfig(ConfigModel):
    """Leaves out tokens whose training and sampling probabilities are too far apart. Bounds are inclusive."""

    enabled: bool = False
    """Apply this filter."""

    agg_type: Granularity = "token"
    """Tokens that are judged together."""

    ratio_enabled: bool = True
    """Judge the ratio of the two probabilities."""

    ratio_low: NonNegative = 0.8
    """Smallest ratio that is kept."""

    ratio_high: NonNegative = 1.2
    """Largest ratio that is kept."""

    diff_enabled: bool = False
    """Judge the difference of the two probabilities."""

    diff_low: Number = -0.2
    """Smallest difference that is kept."""

    diff_high: Number = 0.2
    """Largest difference that is kept."""

    @model_validator(mode="after")
    def _check_bounds(self) -> TrainInferFilterConfig:
        problems: list[Problem] = []
        for kind in ("ratio", "diff"):
            low, high = getattr(self, f"{kind}_low"), getattr(self, f"{kind}_high")
            if low > high:
                problems.append(
                    wrong(
                        f"{kind}_low",
                        low,
                        f"at most {kind}_high = {high:g}",
                        "no token would be kept",
                    )
                )
        if problems:
            raise ConfigProblems(problems)
        return self


class TrainInferCorrectionConfig(ConfigModel):
    """What is done about the difference between the probabilities of sampling and of training."""

    is_weight: TrainInferISWeightConfig = Field(default_factory=TrainInferISWeightConfig)
    """Importance weights."""

    filters: list[TrainInferFilterConfig] = Field(default_factory=list)
    """Filters, all of which a token has to pass."""
