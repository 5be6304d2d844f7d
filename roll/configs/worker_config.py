"""One role of a pipeline: its workers, their devices, and what each of them holds."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from roll.algorithms.surrogates import POLICY_LOSSES, get_policy_loss
from roll.configs.config_model import (
    LATE,
    UNUSED_IN_ROLL,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    Fraction,
    Late,
    NoEffect,
    NonNegative,
)
from roll.configs.data_args import DataArguments
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.generating_args import GeneratingArguments
from roll.configs.model_args import ModelArguments
from roll.configs.problems import (
    ConfigProblems,
    Problem,
    did_you_mean,
    nearest_multiples,
    show,
    wrong,
)
from roll.configs.strategy_options import Fsdp2Options, option_problems, options_of
from roll.configs.training_args import TrainingArguments
from roll.configs.unsupported import UNSUPPORTED_STRATEGIES

TRAIN_STRATEGIES = ("hf_train", "fsdp2_train", "deepspeed_train")
INFER_STRATEGIES = ("hf_infer", "fsdp2_infer", "deepspeed_infer")
GENERATE_STRATEGIES = ("hf_infer", "vllm")
STRATEGIES = (*TRAIN_STRATEGIES, *INFER_STRATEGIES, "vllm")

_MEGATRON = NoEffect("it is for Megatron")


def _numbers_as_text(value: Any) -> Any:
    # `OMP_NUM_THREADS: 2` means the text "2"; true and false have no such obvious text. Nothing at all is no variable.
    if value is None:
        return {}
    if not isinstance(value, dict):
        return value
    return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}


EnvironmentVariables = Annotated[dict[str, str], BeforeValidator(_numbers_as_text)]
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class StrategyArguments(ConfigModel):
    """Which library runs a role's model, and its own options."""

    strategy_name: str = "fsdp2_train"
    """hf_train, fsdp2_train or deepspeed_train to train; hf_infer, fsdp2_infer, deepspeed_infer or vllm otherwise."""

    strategy_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the strategy, see below; vLLM's engine arguments; a whole DeepSpeed config."""

    @field_validator("strategy_name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in UNSUPPORTED_STRATEGIES:
            nearest = UNSUPPORTED_STRATEGIES[name]
            raise ConfigProblems(
                [
                    Problem(
                        "",
                        f'the strategy "{name}" is not supported; the nearest one is "{nearest}"',
                    )
                ]
            )
        if name not in STRATEGIES:
            guess = did_you_mean(name, STRATEGIES)
            raise ConfigProblems([wrong("", name, "one of " + ", ".join(STRATEGIES), guess)])
        return name

    @field_validator("strategy_config", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _check_options(self) -> StrategyArguments:
        problems = option_problems(self.strategy_name, self.strategy_config)
        if problems:
            raise ConfigProblems([problem.under("strategy_config") for problem in problems])
        return self


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


class RouterReplayConfig(ConfigModel):
    """Replay of expert routing from generation in training; only switched off here."""

    mode: Literal["disable"] = "disable"
    """`disable` is the only mode that exists here."""


class WorkerConfig(ConfigModel):
    """A role. Its number of workers follows from `device_mapping`, else it is `world_size`, else one."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset({"use_remove_padding", "eval_steps"})

    name: str | None = None
    """Name of the role; the pipeline sets it (`actor_train`, `reference` ...)."""

    worker_cls: Any = None
    """Class of the workers, or its dotted path; each pipeline has its own default."""

    pg_variant: str | None = Field(None, examples=list(POLICY_LOSSES))
    """Form of the policy loss: one of these names, or the dotted path of a surrogate; null is `ppo`."""

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
    """Workers of the role; with `device_mapping` it is the number of GPUs over `num_gpus_per_worker`."""

    device_mapping: list[int] | None = None
    """GPUs of the role, counted over all machines: `[0, 1]` or `list(range(0,8))`; null uses no GPU numbers."""

    num_gpus_per_worker: AtLeastZero = 1
    """GPUs of one worker: 1 for all but vLLM, where it is tensor times pipeline parallel size; 0 without GPUs."""

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
    """That number of tokens, padding included."""

    sequence_length_round_in_train: AtLeastOne = 4
    """Micro-batches are padded to a multiple of this."""

    use_dynamic_batching_in_infer: bool = False
    """The same for passes without gradients."""

    max_tokens_per_microbatch_in_infer: AtLeastOne | None = None
    """That number of tokens, padding included."""

    sequence_length_round_in_infer: AtLeastOne = 4
    """Micro-batches are padded to a multiple of this."""

    offload_nccl: Annotated[bool, NoEffect("communicators stay")] = False
    """Free NCCL's buffers between steps."""

    use_sequence_packing: Annotated[bool, _MEGATRON] = False
    """Put several sequences in one row."""

    sequence_packing_args: Annotated[SequencePackingConfig, _MEGATRON] = Field(
        default_factory=SequencePackingConfig
    )
    """How sequences are packed."""

    logits_in_fp32: Annotated[bool, _MEGATRON] = False
    """Make logits float32; here log-probabilities are always computed in float32."""

    router_replay: Annotated[RouterReplayConfig, _MEGATRON] = Field(
        default_factory=RouterReplayConfig
    )
    """Replay of expert routing."""

    apply_loss_scale: Annotated[
        bool, NoEffect("gradients are sums over global counts, so nothing is rescaled")
    ] = True
    """Undo the mean over micro-batches and ranks that a backend takes."""

    mtp_training_mode: Annotated[Literal["disabled"], _MEGATRON] = "disabled"
    """Multi-token prediction heads; only switched off here."""

    tag_included: Annotated[list[str], UNUSED_IN_ROLL] = Field(default_factory=list)
    """Tags of the rows that this role judges; rewards use it."""

    checkpoint_config: Annotated[
        dict[str, Any] | None, NoEffect("checkpoints stay in the run's folder")
    ] = None
    """Where checkpoints go; copied from the pipeline."""

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
        if isinstance(value, str) and not _DOTTED_PATH.fullmatch(value):
            raise ConfigProblems(
                [wrong("", value, "a class or its dotted path such as package.module.ClassName")]
            )
        if value is not None and not isinstance(value, str) and not callable(value):
            raise ConfigProblems(
                [wrong("", value, "a class or its dotted path such as package.module.ClassName")]
            )
        return value

    @field_serializer("worker_cls")
    def _path_of_class(self, value: Any) -> str | None:
        return (
            value
            if value is None or isinstance(value, str)
            else f"{value.__module__}.{value.__qualname__}"
        )

    @model_validator(mode="after")
    def _settle_workers(self) -> WorkerConfig:
        self.settle(num_gpus_per_worker=self._gpus_per_worker())
        problems = self._device_problems() + self._batching_problems()
        if problems:
            raise ConfigProblems(problems)
        if self.device_mapping is not None:
            self.settle(world_size=len(self.device_mapping) // self.num_gpus_per_worker)
        elif self.world_size is None:
            self.settle(world_size=1)
        options = options_of(self.strategy_name or "", self.strategy_config)
        if isinstance(options, Fsdp2Options) and 1 < (options.fsdp_size or 1) < self.world_size:
            expected = f"{self.world_size}, the number of ranks: not built yet: sharding over a part of them"
            key = "strategy_args.strategy_config.fsdp_size"
            raise ConfigProblems([wrong(key, options.fsdp_size, expected, "remove it")])
        dtype = self.model_args.dtype
        precision = {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}
        self.settle(training_args=self.training_args.model_copy(update=precision))
        return self

    def _gpus_per_worker(self) -> int:
        if self.device_mapping is None:
            return 0
        if self.strategy_name == "vllm":
            return self._parallel_size("tensor_parallel_size") * self._parallel_size(
                "pipeline_parallel_size"
            )
        if self.holds_model and self.strategy_name != "hf_infer":
            return 1
        return max(self.num_gpus_per_worker, 1)

    def _parallel_size(self, option: str) -> int:
        size = self.strategy_config.get(option)
        if size is None:
            return 1
        if type(size) is not int or size < 1:
            key = f"strategy_args.strategy_config.{option}"
            raise ConfigProblems([wrong(key, size, "a whole number of at least 1")])
        return size

    def _device_problems(self) -> list[Problem]:
        if self.device_mapping is None or len(self.device_mapping) % self.num_gpus_per_worker == 0:
            return []
        low, high = nearest_multiples(len(self.device_mapping), self.num_gpus_per_worker)
        expected = f"a multiple of the {self.num_gpus_per_worker} GPUs of one worker"
        return [
            wrong("device_mapping", self.device_mapping, expected, f"name {low} or {high} GPUs")
        ]

    def _batching_problems(self) -> list[Problem]:
        problems = []
        for phase, budget in (
            ("train", self.max_tokens_per_microbatch_in_train),
            ("infer", self.max_tokens_per_microbatch_in_infer),
        ):
            if getattr(self, f"use_dynamic_batching_in_{phase}") and not budget:
                expected = f"a number of tokens, because use_dynamic_batching_in_{phase} is on"
                problems.append(
                    wrong(
                        f"max_tokens_per_microbatch_in_{phase}",
                        budget,
                        expected,
                        "twice sequence_length is a start",
                    )
                )
        return problems

    def start_problems(self) -> list[Problem]:
        """What the role's strategy refuses before it loads a model, although the config is a valid one."""
        problems = []
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        if self.strategy_name == "vllm" and any(
            self._parallel_size(option) > 1 for option in sizes
        ):
            why = (
                "a vLLM engine of this strategy runs on one device; set tensor_parallel_size and "
                "pipeline_parallel_size to 1 and use more workers (world_size or device_mapping)"
            )
            problems.append(Problem("strategy_args.strategy_config", why))
        if self.model_args.dtype == "fp16" and self.strategy_name in ("hf_train", "fsdp2_train"):
            why = (
                f"found fp16, expected bf16 or fp32 to train with {self.strategy_name}, which does not scale the loss: "
                "small gradients would vanish. deepspeed_train scales it"
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
