"""What all pipelines share: steps, lengths, files, machines, and what roles get from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.configs.base import (
    LATE,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    ConfigProblems,
    Late,
    Positive,
    Problem,
    Whole,
    wrong,
)
from roll.configs.batch_plan import BatchPlan
from roll.configs.roll_keys import keys_without_effect
from roll.configs.worker_config import EnvironmentVariables, WorkerConfig


class BaseConfig(ConfigModel):
    """A pipeline: its steps, lengths, files and machines."""

    pipeline_cls: str | None = None
    """Dotted path of the pipeline class; null is the one that belongs to this config."""

    backend: Literal["auto", "local", "ray"] = "auto"
    """Where workers run: in this process, on Ray, or (auto) on Ray if a model has several."""

    exp_name: str = Field(default_factory=lambda: Path(sys.argv[0]).stem or "roll")
    """Name of the experiment; the config file's name, or the script's, if left out."""

    seed: Whole = 42
    """Seed of everything random; reaches every role's `training_args.seed`."""

    rpc_timeout: Positive = 3600.0
    """Seconds that a call to a worker may take."""

    output_dir: str = "./output"
    """Folder that runs are written to."""

    track_with: str | list[str] = "tensorboard"
    """Trackers beside metrics.jsonl: tensorboard, wandb, trackio, stdout, none, or a list."""

    tracker_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the tracker."""

    max_steps: AtLeastOne = 500
    """Steps of the pipeline."""

    save_steps: AtLeastOne = 50
    """Pipeline steps between two checkpoints."""

    max_ckpt_to_keep: AtLeastZero = 0
    """Checkpoints that are kept; 0 keeps all."""

    eval_steps: Annotated[Whole, Field(ge=-1)] = 10
    """Pipeline steps between two validations; 0 or -1 never validates."""

    resume_from_checkpoint: bool | str = False
    """Folder of a checkpoint to continue from; true takes the newest one."""

    prompt_length: AtLeastOne = 1024
    """Longest prompt, in tokens; longer ones are dropped from the data."""

    response_length: AtLeastOne | None = None
    """Longest response, in tokens."""

    sequence_length: Annotated[AtLeastOne, Late] = LATE
    """Longest prompt plus response, in tokens; `prompt_length + response_length` if left out."""

    val_prompt_length: Annotated[AtLeastOne, Late] = LATE
    """`prompt_length` of the validation; given with `val_sequence_length` or not at all."""

    val_sequence_length: Annotated[AtLeastOne, Late] = LATE
    """`sequence_length` of the validation; given with `val_prompt_length` or not at all."""

    is_offload_states: bool = False
    """Keep the models of idle roles in host memory instead of on the GPU; vLLM's stays."""

    system_envs: EnvironmentVariables = Field(default_factory=dict)
    """Environment variables of the roles with a model, unless a role sets its own."""

    model_update_buffer_size_mb: AtLeastOne = 1024
    """Size of the buckets in which weights travel from the trained role to the generating one."""

    num_nodes: AtLeastOne = 1
    """Machines; raised to what the roles' `device_mapping` needs."""

    num_gpus_per_node: AtLeastZero = 8
    """GPUs of one machine."""

    default_worker_cls: ClassVar[dict[str, str]] = {}
    """Worker class of every role with a model, for those that name none."""

    @model_validator(mode="after")
    def _settle_everything(self) -> Self:
        self._settle_lengths()
        self._settle_roles()
        problems = self._problems()
        if problems:
            raise ConfigProblems(problems)
        # A learning-rate schedule is as long as the run has optimizer steps.
        for name, plan in self.batch_plans().items():
            steps = {"max_steps": plan.total_optimizer_steps}
            training_args = plan.role.training_args.model_copy(update=steps)
            self._change_role(name, training_args=training_args)
        return self

    # What a pipeline adds to. Each extends the one of its base class.

    def _settle_lengths(self) -> None:
        if self.sequence_length is None and self.response_length is None:
            missing = "missing; set it, or response_length, to say how long a sequence may be"
            raise ConfigProblems([Problem("sequence_length", missing)])
        if self.sequence_length is None:
            self.settle(sequence_length=self.prompt_length + (self.response_length or 0))
        room = self.sequence_length - self.prompt_length
        if self.response_length not in (None, room):
            expected = f"sequence_length - prompt_length = {room}"
            fix = "remove one of the two lengths"
            raise ConfigProblems([wrong("response_length", self.response_length, expected, fix)])
        lengths = ("prompt_length", "sequence_length")
        given = [key for key in lengths if getattr(self, f"val_{key}") is not None]
        for key in lengths:
            if key in given:
                continue
            if given and f"val_{key}" not in keys_without_effect(type(self)):
                missing = "missing; the two lengths of the validation are set together"
                raise ConfigProblems([Problem(f"val_{key}", missing)])
            self.settle(**{f"val_{key}": getattr(self, key)})

    def _settle_roles(self) -> None:
        """Give every role its name and what it inherits from the pipeline."""
        for name, role in self.all_roles().items():
            shared = {"seed": self.seed, "output_dir": self.output_dir}
            training_args = role.training_args.model_copy(update=shared)
            values: dict[str, Any] = {"name": name, "training_args": training_args}
            if name in self.default_worker_cls:
                values["system_envs"] = {**self.system_envs, **role.system_envs}
                values["worker_cls"] = role.worker_cls or self.default_worker_cls[name]
                model = role.model_args.model_name_or_path or self.default_model(name)
                model_args = role.model_args.model_copy(update={"model_name_or_path": model})
                values["model_args"] = model_args
            self._change_role(name, **values)
        mappings = [role.device_mapping or [] for role in self.all_roles().values()]
        highest = max((device for devices in mappings for device in devices), default=-1)
        if highest >= 0 and self.num_gpus_per_node:
            num_nodes = highest // self.num_gpus_per_node + 1
            self.settle(num_nodes=max(self.num_nodes, num_nodes))

    def _problems(self) -> list[Problem]:
        """Values that do not fit together."""
        problems = []
        for name, strategies in self.allowed_strategies().items():
            role = self.all_roles().get(name)
            if role is not None and role.holds_model and role.strategy_name not in strategies:
                key = f"{self.key_of(name)}.strategy_args.strategy_name"
                problems.append(wrong(key, role.strategy_name, "one of " + ", ".join(strategies)))
        sizes = self._several_workers()
        if self.backend == "local" and sizes:
            has = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            expected = f'"ray" or "auto", because roles with a model have several workers ({has})'
            problems.append(wrong("backend", "local", expected, "or give each of them one worker"))
        for name, plan in self.batch_plans().items():
            role, key, total = plan.role, self.key_of(name), plan.total_optimizer_steps
            warmup = role.training_args.get_warmup_steps(total)
            # A polynomial schedule divides by the steps after its warm-up: there has to be one.
            if role.training_args.lr_scheduler_type == "polynomial" and warmup >= total:
                expected = f"fewer than the {total} optimizer steps of the run"
                expected += " for a polynomial schedule"
                problems.append(wrong(f"{key}.training_args.warmup_steps", warmup, expected))
            budget = role.max_tokens_per_microbatch_in_train
            if role.use_dynamic_batching_in_train and budget < self.sequence_length:
                expected = f"at least sequence_length = {self.sequence_length}"
                expected += ", or one row may not fit"
                key = f"{key}.max_tokens_per_microbatch_in_train"
                problems.append(wrong(key, budget, expected))
        return problems

    def _several_workers(self) -> dict[str, int]:
        roles = self.active_roles().items()
        several = {name: role.world_size for name, role in roles if role.holds_model}
        return {name: size for name, size in several.items() if size > 1}

    def _change_role(self, role_name: str, /, **values: Any) -> None:
        """Replace a role by a changed copy; the object that the caller passed in stays as it is."""
        field, _, entry = self.key_of(role_name).partition(".")
        role = self.all_roles()[role_name].model_copy(update=values)
        self.settle(**{field: {**getattr(self, field), entry: role} if entry else role})

    # What a reader asks.

    @property
    def kind(self) -> str:
        """Which pipeline: dpo, rlvr, agentic or sft. (Only the four have the field `pipeline`.)"""
        return str(getattr(self, "pipeline", ""))

    def cautions(self) -> list[str]:
        """Settings that do not do together what each says alone, one sentence each."""
        return []

    def all_roles(self) -> dict[str, WorkerConfig]:
        """Every role by its name, used or not."""
        return {}

    def key_of(self, role_name: str) -> str:
        """The key under which a role stands in the config: `train_env` is `train_env_manager`."""
        return role_name

    def default_model(self, role_name: str) -> str | None:
        """The model of a role that names none."""
        return getattr(self, "pretrain", None)

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
        missing_model = "missing; a folder or a Hugging Face name of the model"
        for name, strategies in self.allowed_strategies().items():
            role = self.active_roles().get(name)
            if role is None:
                continue
            key = self.key_of(name)
            if not role.holds_model:
                how = f"strategy_name: {strategies[0]} runs anywhere"
                missing = f"missing; {name} needs a strategy: {how}"
                problems.append(Problem(f"{key}.strategy_args", missing))
            elif role.model_args.model_name_or_path is None and name in self.default_worker_cls:
                without_model.append(name)
            elif role.model_args.model_name_or_path is None:
                problems.append(Problem(f"{key}.model_args.model_name_or_path", missing_model))
        if without_model:
            roles = ", ".join(without_model)
            problems.append(Problem("pretrain", f"{missing_model} for {roles}"))
        return problems

    def _missing_file(self, name: str, what: str) -> list[Problem]:
        """A problem if the role `name` has no data."""
        data_args = getattr(self, name).data_args
        if data_args is not None and data_args.files:
            return []
        return [Problem(f"{name}.data_args.file_name", f"missing; name {what}")]

    def idle_keys(self) -> dict[str, str]:
        """Keys that someone wrote and that another key makes useless, with the reason."""
        idle = {}
        trackers = [self.track_with] if isinstance(self.track_with, str) else self.track_with
        if self.tracker_kwargs and set(trackers) <= {"stdout", "jsonl", "none"}:
            idle["tracker_kwargs"] = "no tracker of track_with takes options"
        written = self.model_fields_set
        is_derived = "sequence_length" not in written or "response_length" in written
        if self._is_written("prompt_length") and not is_derived:
            idle["prompt_length"] = "sequence_length is the limit"
        for name, role in self.all_roles().items():
            for phase in ("train", "infer"):
                budget, switch = f"max_tokens_per_microbatch_in_{phase}", "use_dynamic_batching_in_"
                if getattr(role, budget) and not getattr(role, switch + phase):
                    idle[f"{self.key_of(name)}.{budget}"] = f"{switch}{phase} is off"
        return idle

    def _is_written(self, key: str) -> bool:
        """Whether a field was given a value other than its default."""
        default = type(self).model_fields[key].get_default(call_default_factory=True)
        return key in self.model_fields_set and getattr(self, key) != default

    @property
    def execution_backend(self) -> Literal["local", "ray"]:
        """Where workers run, decided: Ray if asked for, or if a model has several workers."""
        return "ray" if self.backend == "ray" or self._several_workers() else "local"

    @property
    def template(self) -> str:
        """The chat template in effect, for rows whose tag has none of its own."""
        actor: WorkerConfig | None = getattr(self, "actor_train", None)
        data_args = None if actor is None else actor.data_args
        own = getattr(self, "global_template", None)
        return own or (data_args.template if data_args else None) or "native"

    def with_max_steps(self, max_steps: int) -> Self:
        """The same config for a run of another length, its schedules included."""
        # Only what was set: the rest follows from it again, and stays known as a default.
        values: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        values["max_steps"] = max_steps
        return type(self)(**values)
