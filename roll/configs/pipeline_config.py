"""What all pipelines share: steps, lengths, files, machines, and how roles get what follows from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from roll.configs.batch_plan import BatchPlan
from roll.configs.config_model import (
    LATE,
    UNUSED_IN_ROLL,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    Late,
    NoEffect,
    Positive,
    Whole,
    is_without_effect,
)
from roll.configs.option_groups import RolloutMockConfig, RouterArguments, TransferBackendArguments
from roll.configs.problems import ConfigProblems, Problem, wrong
from roll.configs.worker_config import EnvironmentVariables, WorkerConfig

# For the pipelines that generate nothing: fields of `BaseConfig` that say how to.
_FIXED_STEP = "a step is per_device_train_batch_size x gradient_accumulation_steps on every rank"
NO_ROLLOUTS = {
    "rollout_batch_size": _FIXED_STEP,
    "val_batch_size": "all rows of the validation are scored",
    "rollout_dump_dir": "nothing is generated",
    "rollout_mock": "nothing is generated",
    "model_update_buffer_size_mb": "weights stay where they are trained",
}
_PROFILER = NoEffect("torch.profiler and the run report replace it")
_ROUTER = NoEffect("engines batch requests themselves, and workers get equal shares")


def _script_name() -> str:
    return Path(sys.argv[0]).stem or "roll"


class ScheduleConfig(ConfigModel):
    """How generation requests are scheduled."""

    generate_opt_level: Annotated[Whole, Field(ge=0, le=1), _ROUTER] = 1
    """0 generates a batch with one call, 1 sends requests one by one as workers become free."""

    is_num_return_sequences_expand: Annotated[bool, _ROUTER] = False
    """Send every sample of a prompt as a request of its own instead of asking the engine for several."""

    max_running_requests: Annotated[AtLeastOne, _ROUTER] = 128
    """Requests that one generating worker runs at the same time."""

    is_use_additional_prompts: Annotated[bool, _ROUTER] = False
    """Keep more prompts in flight than a batch needs, because filters may drop some."""

    max_additional_running_prompts: Annotated[AtLeastZero, _ROUTER] = 16
    """How many more."""

    user_defined_rollout_loop_cls: Annotated[str, NoEffect("subclass the pipeline instead")] = (
        "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"
    )
    """Dotted path of the class that turns a prompt into samples."""

    router_args: Annotated[RouterArguments | None, _ROUTER] = None
    """How requests find a worker; null is the pipeline's own router."""


class BaseConfig(ScheduleConfig):
    """A pipeline: its steps, lengths, files and machines."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"train_batch_size", "track_name", "model_name", "transfer_queue", "use_additional_prompts"}
    )

    pipeline_cls: str | None = None
    """Dotted path of the pipeline class; null is the one that belongs to this config."""

    backend: Literal["auto", "local", "ray"] = "auto"
    """Where workers run: in this process, on Ray, or (auto) on Ray only if a role with a model has several workers."""

    exp_name: str = Field(default_factory=_script_name)
    """Name of the experiment; the config file's name, or the script's, if left out."""

    seed: Whole = 42
    """Seed of everything random; reaches every role's `training_args.seed`."""

    rpc_timeout: Positive = 3600.0
    """Seconds that a call to a worker may take."""

    output_dir: str = "./output"
    """Folder that runs are written to."""

    base_dir: Annotated[str, UNUSED_IN_ROLL] = "./output"
    """A second name for the output folder."""

    logging_dir: Annotated[str, NoEffect("a run's folder has all there is")] = "./output/logs"
    """Folder of log files."""

    rollout_dump_dir: str | None = None
    """Folder that gets every sample with its reward; null writes none."""

    track_with: str | list[str] = "tensorboard"
    """Where metrics are shown besides metrics.jsonl: tensorboard, wandb, trackio, stdout, none, or a list of these."""

    tracker_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the tracker."""

    max_steps: AtLeastOne = 500
    """Steps of the pipeline."""

    save_steps: AtLeastOne = 50
    """Pipeline steps between two checkpoints."""

    max_ckpt_to_keep: AtLeastZero = 0
    """Checkpoints that are kept; 0 keeps all."""

    logging_steps: Annotated[AtLeastOne, NoEffect("every step is logged")] = 1
    """Pipeline steps between two lines of the log."""

    eval_steps: Annotated[Whole, Field(ge=-1)] = 10
    """Pipeline steps between two validations; 0 or -1 never validates."""

    rollout_batch_size: AtLeastOne = 128
    """Prompts (RLVR) or trajectories (agentic) of a pipeline step."""

    val_batch_size: Whole = 128
    """Trajectories of a validation (agentic); -1 runs all of them."""

    local_rank: Annotated[Whole, UNUSED_IN_ROLL] = -1
    """Rank on this machine."""

    resume_from_checkpoint: bool | str = False
    """Folder of a checkpoint to continue from; true takes the newest one."""

    checkpoint_config: Annotated[
        dict[str, Any], NoEffect("checkpoints stay in the run's folder")
    ] = Field(default_factory=dict)
    """Where checkpoints are copied to; reaches every role."""

    prompt_length: AtLeastOne = 1024
    """Longest prompt, in tokens; longer ones are dropped from the data."""

    response_length: AtLeastOne | None = None
    """Longest response, in tokens."""

    sequence_length: Annotated[AtLeastOne, Late] = LATE
    """Longest prompt plus response, in tokens; `prompt_length + response_length` if left out."""

    val_prompt_length: Annotated[AtLeastOne, Late] = LATE
    """`prompt_length` of the validation; given together with `val_sequence_length` or not at all."""

    val_sequence_length: Annotated[AtLeastOne, Late] = LATE
    """`sequence_length` of the validation; given together with `val_prompt_length` or not at all."""

    profiler_timeline: Annotated[bool, _PROFILER] = False
    """Record a timeline."""

    profiler_memory: Annotated[bool, _PROFILER] = False
    """Record memory."""

    report_length_and_rewards: Annotated[bool, _PROFILER] = False
    """Record lengths and rewards of prompts."""

    is_offload_states: bool = False
    """Keep only the models of roles at work on the GPU, the others in the CPU's memory; vLLM keeps what it has."""

    is_offload_optimizer_states_in_train_step: Annotated[bool, NoEffect("it is for Megatron")] = (
        False
    )
    """Move optimizer states to the CPU's memory during forward and backward passes."""

    length_profiler_dir: Annotated[str, _PROFILER] = "./output/profiler"
    """Folder of `report_length_and_rewards`."""

    profiler_output_dir: Annotated[str, _PROFILER] = "./output/profiler"
    """Folder of the profiler."""

    otlp_output_dir: Annotated[str, NoEffect("there are no OpenTelemetry traces")] = "./output/otlp"
    """Folder of traces."""

    system_envs: EnvironmentVariables = Field(default_factory=dict)
    """Environment variables of the roles with a model, unless a role sets its own."""

    model_update_buffer_size_mb: AtLeastOne = 1024
    """Size of the buckets in which weights travel from the trained role to the generating one."""

    num_nodes: AtLeastOne = 1
    """Machines; raised to what the roles' `device_mapping` needs."""

    num_gpus_per_node: AtLeastZero = 8
    """GPUs of one machine."""

    model_download_type: Annotated[
        str | None, NoEffect("models come from a folder or from Hugging Face")
    ] = None
    """Where ROLL downloads models from."""

    rollout_mock: RolloutMockConfig | None = None
    """Record or replay rollouts."""

    transfer_backend: Annotated[
        TransferBackendArguments | None, NoEffect("batches travel with the calls")
    ] = None
    """A store for batches between roles."""

    default_worker_cls: ClassVar[dict[str, str]] = {}
    """Worker class of every role with a model, for those that name none."""

    @field_validator("checkpoint_config", "tracker_kwargs", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _settle_everything(self) -> Self:
        self._settle_lengths()
        self._settle_roles()
        problems = self._problems()
        if problems:
            raise ConfigProblems(problems)
        self._settle_schedules()
        return self

    # What a pipeline adds to. Each extends the one of its base class.

    def _settle_lengths(self) -> None:
        if self.sequence_length is None and self.response_length is None:
            missing = "missing; set it, or response_length, to say how long a sequence may be"
            raise ConfigProblems([Problem("sequence_length", missing)])
        if self.sequence_length is None:
            self.settle(sequence_length=self.prompt_length + (self.response_length or 0))
        elif self.response_length not in (None, self.sequence_length - self.prompt_length):
            expected = (
                f"sequence_length - prompt_length = {self.sequence_length - self.prompt_length}"
            )
            raise ConfigProblems(
                [
                    wrong(
                        "response_length",
                        self.response_length,
                        expected,
                        "remove one of the two lengths",
                    )
                ]
            )
        given = (self.val_prompt_length is not None, self.val_sequence_length is not None)
        if given == (False, False):
            self.settle(
                val_prompt_length=self.prompt_length, val_sequence_length=self.sequence_length
            )
        elif given != (True, True):
            missing = "val_sequence_length" if given[0] else "val_prompt_length"
            if not is_without_effect(type(self).model_fields[missing]):
                raise ConfigProblems(
                    [
                        Problem(
                            missing, "missing; the two lengths of the validation are set together"
                        )
                    ]
                )
            self.settle(**{missing: getattr(self, missing.removeprefix("val_"))})

    def _settle_roles(self) -> None:
        """Give every role its name and what it inherits from the pipeline."""
        for name, role in self.all_roles().items():
            training_args = role.training_args.model_copy(
                update={"seed": self.seed, "output_dir": self.output_dir}
            )
            values: dict[str, Any] = {"name": name, "training_args": training_args}
            if name in self.default_worker_cls:
                values["system_envs"] = {**self.system_envs, **role.system_envs}
                values["worker_cls"] = role.worker_cls or self.default_worker_cls[name]
                model = role.model_args.model_name_or_path or self.default_model(name)
                values["model_args"] = role.model_args.model_copy(
                    update={"model_name_or_path": model}
                )
            self._change_role(name, **values)
        devices = [
            device for role in self.all_roles().values() for device in role.device_mapping or []
        ]
        if devices and self.num_gpus_per_node:
            self.settle(
                num_nodes=max(self.num_nodes, -(-(max(devices) + 1) // self.num_gpus_per_node))
            )

    def _problems(self) -> list[Problem]:
        """Values that do not fit together."""
        problems = []
        for name, strategies in self.allowed_strategies().items():
            role = self.all_roles().get(name)
            if role is not None and role.holds_model and role.strategy_name not in strategies:
                expected = "one of " + ", ".join(strategies)
                problems.append(
                    wrong(
                        f"{self.key_of(name)}.strategy_args.strategy_name",
                        role.strategy_name,
                        expected,
                    )
                )
        several = [
            name
            for name, role in self.active_roles().items()
            if role.holds_model and role.world_size > 1
        ]
        if self.backend == "local" and several:
            sizes = ", ".join(f"{name} has {self.all_roles()[name].world_size}" for name in several)
            expected = f'"ray" or "auto", because roles with a model have several workers ({sizes})'
            problems.append(wrong("backend", "local", expected, "or give each of them one worker"))
        for name, plan in self.batch_plans().items():
            role_key = self.key_of(name)
            problems += plan.schedule_problems(role_key)
            budget = plan.role.max_tokens_per_microbatch_in_train
            if plan.role.use_dynamic_batching_in_train and budget < self.sequence_length:
                expected = (
                    f"at least sequence_length = {self.sequence_length}, or one row may not fit"
                )
                problems.append(
                    wrong(f"{role_key}.max_tokens_per_microbatch_in_train", budget, expected)
                )
        return problems

    def cautions(self) -> list[str]:
        """Settings that do not do together what each says alone: one sentence each, with the names of the keys."""
        return []

    def _settle_schedules(self) -> None:
        """A learning-rate schedule is as long as the run has optimizer steps."""
        for name, plan in self.batch_plans().items():
            training_args = plan.role.training_args.model_copy(
                update={"max_steps": plan.total_optimizer_steps}
            )
            self._change_role(name, training_args=training_args)

    def _change_role(self, role_name: str, /, **values: Any) -> None:
        """Replace a role by a copy with other values; the object that the caller passed in stays as it is."""
        field, _, entry = self.key_of(role_name).partition(".")
        role = self.all_roles()[role_name].model_copy(update=values)
        self.settle(**{field: {**getattr(self, field), entry: role} if entry else role})

    # What a reader asks.

    def all_roles(self) -> dict[str, WorkerConfig]:
        """Every role by its name, used or not."""
        return {}

    def key_of(self, role_name: str) -> str:
        """The key under which a role stands in the config: `train_env` is `train_env_manager`."""
        return role_name

    def default_model(self, role_name: str) -> str | None:
        """The model of a role that names none."""
        return None

    def active_roles(self) -> dict[str, WorkerConfig]:
        """The roles that a run starts."""
        return self.all_roles()

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        """Strategies that make sense for each role."""
        return {}

    def batch_plans(self) -> dict[str, BatchPlan]:
        """The batch arithmetic of every role that is trained and holds a model."""
        return {}

    def missing_for_training(self) -> list[Problem]:
        """What a valid config still lacks before a run can start: a model, a strategy, data."""
        problems = []
        without_model = []
        for name, strategies in self.allowed_strategies().items():
            role = self.active_roles().get(name)
            if role is not None and not role.holds_model:
                missing = f"missing; {name} needs a strategy: strategy_name: {strategies[0]} runs anywhere"
                problems.append(Problem(f"{self.key_of(name)}.strategy_args", missing))
            elif (
                role is not None
                and role.model_args.model_name_or_path is None
                and name in self.default_worker_cls
            ):
                without_model.append(name)
            elif role is not None and role.model_args.model_name_or_path is None:
                key = f"{self.key_of(name)}.model_args.model_name_or_path"
                problems.append(
                    Problem(key, "missing; a folder or a Hugging Face name of the model")
                )
        if without_model:
            roles = ", ".join(without_model)
            problems.append(
                Problem(
                    "pretrain", f"missing; a folder or a Hugging Face name of the model for {roles}"
                )
            )
        return problems

    def idle_keys(self) -> dict[str, str]:
        """Keys that someone wrote and that another key makes useless, with the reason."""
        idle = {}
        trackers = [self.track_with] if isinstance(self.track_with, str) else self.track_with
        if self.tracker_kwargs and set(trackers) <= {"stdout", "jsonl", "none"}:
            idle["tracker_kwargs"] = "no tracker of track_with takes options"
        is_derived = (
            "sequence_length" not in self.model_fields_set
            or "response_length" in self.model_fields_set
        )
        if self._is_written("prompt_length") and not is_derived:
            idle["prompt_length"] = "sequence_length is the limit"
        for name, role in self.all_roles().items():
            for phase in ("train", "infer"):
                budget = f"max_tokens_per_microbatch_in_{phase}"
                if getattr(role, budget) and not getattr(role, f"use_dynamic_batching_in_{phase}"):
                    idle[f"{self.key_of(name)}.{budget}"] = (
                        f"use_dynamic_batching_in_{phase} is off"
                    )
        return idle

    def _is_written(self, key: str) -> bool:
        """Whether a field was given a value other than its default."""
        default = type(self).model_fields[key].get_default(call_default_factory=True)
        return key in self.model_fields_set and getattr(self, key) != default

    @property
    def execution_backend(self) -> Literal["local", "ray"]:
        """Where workers run, decided: Ray if asked for, or if a role with a model has more than one worker."""
        several = any(
            role.holds_model and role.world_size > 1 for role in self.active_roles().values()
        )
        return "ray" if self.backend == "ray" or several else "local"

    def with_max_steps(self, max_steps: int) -> Self:
        """The same config for a run of another length, its schedules included."""
        # Only what was set: the rest follows from it again, and stays known as a default.
        values: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        values["max_steps"] = max_steps
        return type(self)(**values)
