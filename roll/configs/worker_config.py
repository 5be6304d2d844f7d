"""One role of a pipeline: its workers, their devices, and what each of them holds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from roll.algorithms.surrogates import POLICY_LOSSES, get_policy_loss
from roll.configs.arguments import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    TrainingArguments,
    parse_device_mapping,
)
from roll.configs.base import (
    LATE,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    ConfigProblems,
    Fraction,
    Late,
    NonNegative,
    Problem,
    Unread,
    did_you_mean,
    nearest_multiples,
    show,
    wrong,
)
from roll.configs.roll_keys import UNSUPPORTED_STRATEGIES, keys_without_effect
from roll.configs.strategy_info import (
    STRATEGIES,
    Fsdp2Options,
    StrategyNames,
    option_problems,
    options_of,
    strategy_info,
)
from roll.exceptions import ConfigError

TRAIN_STRATEGIES = StrategyNames("trains")
INFER_STRATEGIES = StrategyNames("infers")
GENERATE_STRATEGIES = StrategyNames("generates")
RouterReplayConfig = Unread
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _numbers_as_text(value: Any) -> Any:
    # `OMP_NUM_THREADS: 2` means the text "2"; true and false have no such obvious text.
    if not isinstance(value, dict):
        return value
    return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}


EnvironmentVariables = Annotated[dict[str, str], BeforeValidator(_numbers_as_text)]


class StrategyArguments(ConfigModel):
    """Which library runs a role's model, and its own options."""

    strategy_name: str = "fsdp2_train"
    """hf_train, fsdp2_train, deepspeed_train, hf_infer ..., vllm, or the dotted path of a class."""

    strategy_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the strategy, see below; vLLM's engine arguments; a whole DeepSpeed config."""

    @field_validator("strategy_name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in UNSUPPORTED_STRATEGIES:
            nearest = UNSUPPORTED_STRATEGIES[name]
            why = f'the strategy "{name}" is not supported; the nearest one is "{nearest}"'
            raise ConfigProblems([Problem("", why)])
        if name not in STRATEGIES and "." not in name:
            guess = did_you_mean(name, STRATEGIES)
            raise ConfigProblems([wrong("", name, "one of " + ", ".join(STRATEGIES), guess)])
        try:
            strategy_info(name)
        except ConfigError as error:
            raise ConfigProblems([Problem("", str(error))]) from None
        return name

    @model_validator(mode="after")
    def _check_options(self) -> StrategyArguments:
        problems = option_problems(self.strategy_name, self.strategy_config)
        if problems:
            raise ConfigProblems([problem.under("strategy_config") for problem in problems])
        idle = keys_without_effect(type(options_of(self.strategy_name, self.strategy_config)))
        kept = {key: value for key, value in self.strategy_config.items() if key not in idle}
        self.settle(strategy_config=kept)
        return self

    def part(self, key: str) -> Any:
        if key != "strategy_config":
            return super().part(key)
        return options_of(self.strategy_name, self.strategy_config)


class SequencePackingConfig(ConfigModel):
    """Several sequences in one row, for the strategies that can."""

    algorithm: Literal["none", "load_balance"] = "none"
    """How sequences are distributed over rows."""

    max_packed_sequence_length_forward: AtLeastOne | None = None
    """Longest packed row without gradients."""

    max_packed_sequence_length_train: AtLeastOne | None = None
    """Longest packed row with gradients."""

    min_num_micro_batches_forward: AtLeastOne = 1
    """Fewest micro-batches without gradients."""

    min_num_micro_batches_train: AtLeastOne = 1
    """Fewest micro-batches of an optimizer step."""


class WorkerConfig(ConfigModel):
    """A role. It has workers as `device_mapping` says, else `world_size`, else one."""

    name: str | None = None
    """Name of the role; the pipeline sets it (`actor_train`, `reference` ...)."""

    worker_cls: Any = None
    """Class of the workers, or its dotted path; each pipeline has its own default."""

    pg_variant: str | None = Field(None, examples=list(POLICY_LOSSES))
    """Form of the policy loss: a name, or the dotted path of a surrogate; null is `ppo`."""

    model_args: ModelArguments = Field(default_factory=ModelArguments)
    """The model."""

    training_args: TrainingArguments = Field(default_factory=TrainingArguments)
    """Optimizer and schedule."""

    data_args: DataArguments | None = None
    """Data."""

    generating_args: GeneratingArguments | None = None
    """Sampling."""

    strategy_args: StrategyArguments | None = None
    """How the model runs; null means that the role holds no model."""

    world_size: Annotated[AtLeastOne, Late] = LATE
    """Workers of the role; with `device_mapping`, its GPUs over `num_gpus_per_worker`."""

    device_mapping: list[int] | None = None
    """GPUs of the role, counted over all machines: `[0, 1]` or `list(range(0,8))`; null: none."""

    num_gpus_per_worker: AtLeastZero = 1
    """GPUs of one worker: 1, or with vLLM tensor times pipeline parallel size; 0 without GPUs."""

    model_update_frequency: AtLeastOne = 1
    """Pipeline steps between two copies of the trained weights to this role."""

    infer_batch_size: AtLeastOne = 16
    """Rows of a micro-batch without gradients; DPO counts pairs."""

    backend_timeout: AtLeastOne = 30
    """Minutes that a collective may take."""

    system_envs: EnvironmentVariables = Field(default_factory=dict)
    """Environment variables of the workers."""

    topr_positive_weight: NonNegative = 1.0
    """Weight of positive samples in the TOPR loss."""

    topr_negative_weight: NonNegative = 1.0
    """Weight of negative samples in the TOPR loss."""

    tis_lower_bound: NonNegative = 0.0
    """Smallest weight of the truncated importance sampling loss."""

    tis_upper_bound: NonNegative = 1.0
    """Largest weight of the truncated importance sampling loss."""

    cispo_epsilon_low: Fraction = 0.1
    """The weights of the CISPO loss are at least 1 minus this."""

    cispo_epsilon_high: NonNegative = 0.1
    """The weights of the CISPO loss are at most 1 plus this."""

    cispo_use_unified_mask: bool = False
    """Leave out the tokens that PPO would clip from the CISPO loss."""

    kimi15_tau: NonNegative = 0.1
    """Strength of the pull towards the old policy in the Kimi 1.5 loss."""

    max_concurrency: AtLeastOne = 1
    """Calls that a worker with async methods answers at the same time."""

    use_dynamic_batching_in_train: bool = False
    """Fill micro-batches up to a number of tokens instead of a number of rows."""

    max_tokens_per_microbatch_in_train: AtLeastZero = 0
    """Tokens of a micro-batch, padding included; for `use_dynamic_batching_in_train`."""

    sequence_length_round_in_train: AtLeastOne = 4
    """Micro-batches in training are padded to a multiple of this."""

    use_dynamic_batching_in_infer: bool = False
    """Fill micro-batches without gradients up to a number of tokens."""

    max_tokens_per_microbatch_in_infer: AtLeastOne | None = None
    """Tokens of a micro-batch without gradients; for `use_dynamic_batching_in_infer`."""

    sequence_length_round_in_infer: AtLeastOne = 4
    """Micro-batches without gradients are padded to a multiple of this."""

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> Any:
        if value is None:
            return None
        try:
            return parse_device_mapping(value)
        except ValueError as error:
            raise ConfigProblems([Problem("", f"found {show(value)}, {error}")]) from None

    @field_validator("pg_variant")
    @classmethod
    def _known_policy_loss(cls, value: str | None) -> str | None:
        try:
            get_policy_loss(value)
        except ValueError as error:
            expected = f"the dotted path of a surrogate, or one of {', '.join(POLICY_LOSSES)}"
            fix = str(error.__cause__ or "") or did_you_mean(str(value), POLICY_LOSSES)
            raise ConfigProblems([wrong("", value, expected, fix)]) from None
        return value

    @field_validator("worker_cls")
    @classmethod
    def _class_or_path(cls, value: Any) -> Any:
        is_path = isinstance(value, str) and _DOTTED_PATH.fullmatch(value)
        if value is None or is_path or (callable(value) and not isinstance(value, str)):
            return value
        expected = "a class or its dotted path such as package.module.ClassName"
        raise ConfigProblems([wrong("", value, expected)])

    @field_serializer("worker_cls")
    def _path_of_class(self, value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return f"{value.__module__}.{value.__qualname__}"

    @model_validator(mode="after")
    def _settle_workers(self) -> WorkerConfig:
        problems = []
        for phase in ("train", "infer"):
            key = f"max_tokens_per_microbatch_in_{phase}"
            if getattr(self, f"use_dynamic_batching_in_{phase}") and not getattr(self, key):
                expected = f"a number of tokens, because use_dynamic_batching_in_{phase} is on"
                fix = "twice sequence_length is a start"
                problems.append(wrong(key, getattr(self, key), expected, fix))
        devices, gpus = self.device_mapping, max(self.num_gpus_per_worker, 1)
        if devices is None:
            self.settle(num_gpus_per_worker=0, world_size=self.world_size or 1)
        else:
            if self.strategy_name is not None:
                info = strategy_info(self.strategy_name)
                if info.parallel_sizes:
                    gpus = math.prod(self._parallel_sizes())
                elif not info.generates:
                    gpus = 1
            self.settle(num_gpus_per_worker=gpus, world_size=len(devices) // gpus)
            if len(devices) % gpus:
                low, high = nearest_multiples(len(devices), gpus)
                expected = f"a multiple of the {gpus} GPUs of one worker"
                fix = f"name {low} or {high} GPUs"
                problems.append(wrong("device_mapping", devices, expected, fix))
        if problems:
            raise ConfigProblems(problems)
        options = (
            options_of(self.strategy_name, self.strategy_config) if self.strategy_name else None
        )
        if isinstance(options, Fsdp2Options) and 1 < (options.fsdp_size or 1) < self.world_size:
            key = "strategy_args.strategy_config.fsdp_size"
            why = "the number of ranks: not built yet: sharding over a part of them"
            expected = f"{self.world_size}, {why}"
            raise ConfigProblems([wrong(key, options.fsdp_size, expected, "remove it")])
        dtype = self.model_args.dtype
        precision = {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}
        self.settle(training_args=self.training_args.model_copy(update=precision))
        return self

    def _parallel_sizes(self) -> list[int]:
        """Factors of the number of GPUs that one engine has: tensor and pipeline parallel size."""
        sizes = []
        for option in strategy_info(str(self.strategy_name)).parallel_sizes:
            size = self.strategy_config.get(option)
            sizes.append(1 if size is None else size)
            if type(sizes[-1]) is not int or sizes[-1] < 1:
                key = f"strategy_args.strategy_config.{option}"
                raise ConfigProblems([wrong(key, size, "a whole number of at least 1")])
        return sizes

    def start_problems(self) -> list[Problem]:
        """What the strategy refuses before it loads a model, although the config is valid."""
        problems: list[Problem] = []
        if not self.holds_model:
            return problems
        if self.strategy_name == "vllm" and max(self._parallel_sizes()) > 1:
            why = (
                "a vLLM engine of this strategy runs on one device; set tensor_parallel_size and "
                "pipeline_parallel_size to 1 and use more workers (world_size or device_mapping)"
            )
            problems.append(Problem("strategy_args.strategy_config", why))
        info = strategy_info(str(self.strategy_name))
        if self.model_args.dtype == "fp16" and info.trains and not info.scales_loss:
            why = (
                f"found fp16, expected bf16 or fp32 to train with {self.strategy_name}, which does "
                "not scale the loss: small gradients would vanish. deepspeed_train scales it"
            )
            problems.append(Problem("model_args.dtype", why))
        return problems

    @property
    def holds_model(self) -> bool:
        """Whether the role's workers hold a model."""
        return self.strategy_args is not None

    @property
    def strategy_name(self) -> str | None:
        return None if self.strategy_args is None else self.strategy_args.strategy_name

    @property
    def strategy_config(self) -> dict[str, Any]:
        return {} if self.strategy_args is None else self.strategy_args.strategy_config

    @property
    def dp_size(self) -> int:
        """Workers that see different rows: all of them."""
        return self.world_size

    @property
    def rows_per_optimizer_step(self) -> int:
        """Rows (pairs for DPO) that one rank contributes to one optimizer step."""
        return (
            self.training_args.per_device_train_batch_size
            * self.training_args.gradient_accumulation_steps
        )


def is_actor_infer_overlapping_with_any_cluster(
    actor_infer: WorkerConfig,
    actor_train: WorkerConfig | None = None,
    reference: WorkerConfig | None = None,
    critic: WorkerConfig | None = None,
) -> bool:
    """Whether `actor_infer` shares a GPU with any of the other roles."""
    others = [role for role in (actor_train, reference, critic) if role is not None]
    taken = {device for role in others for device in role.device_mapping or []}
    return bool(taken & set(actor_infer.device_mapping or []))
