"""Configuration of learning from environments that a model acts in over several turns."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from roll.configs.base_config import PPOConfig
from roll.configs.batch_plan import division_problems
from roll.configs.config_model import (
    LATE,
    UNUSED_IN_ROLL,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    Entries,
    Fraction,
    Late,
    NoEffect,
    NonNegative,
    NotBuilt,
    Number,
    Positive,
    Whole,
)
from roll.configs.generating_args import GeneratingArguments
from roll.configs.problems import ConfigProblems, Problem, did_you_mean, nearest_multiples, wrong
from roll.configs.unsupported import NOT_BUILT_YET, UNSUPPORTED_CLASSES, UNSUPPORTED_ENVIRONMENTS
from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError
from roll.utils.import_utils import import_class

_MANAGERS = "roll.pipeline.agentic.env_manager."
# `prompts_are_whole` of our own managers, for those who ask without torch, which the classes import.
PROMPTS_ARE_WHOLE = {
    _MANAGERS + "traj_env_manager.TrajEnvManager": False,
    _MANAGERS + "step_env_manager.StepEnvManager": True,
    _MANAGERS + "step_concat_env_manager.StepConcatEnvManager": True,
}
# What the proxies that come with the project read of `proxy_config`.
PROXY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "policy": (),
    "random": (),
    "openai": (
        "base_url", "model_name", "api_key", "api_key_env", "max_concurrency", "timeout", "max_retries", "extra_body",
    ),
}  # fmt: skip
NormType = Literal["batch", "group"] | None


class RewardNormalizationConfig(ConfigModel):
    """How the scores of trajectories are made comparable."""

    grouping: str = "batch"
    """Column whose equal values form a group (`traj_group_id`, `tags` ...), or `batch` for one group of all."""

    method: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Older way to choose the two types below: none, the mean only, or both; `asym_clip` is `mean_std`."""

    norm_mean_type: NormType = None
    """Over what the mean is taken that is subtracted; follows `method` unless it is written down, null included."""

    norm_std_type: NormType = None
    """Over what the standard deviation is taken that is divided by; follows `method` unless it is written down."""

    global_scale_factor: Annotated[Number | None, UNUSED_IN_ROLL] = None
    """Factor on all rewards."""

    global_shift_value: Annotated[Number | None, UNUSED_IN_ROLL] = None
    """Shift of all rewards."""

    @model_validator(mode="after")
    def _types_from_method(self) -> Self:
        scope = "batch" if self.grouping == "batch" else "group"
        if "norm_mean_type" not in self.model_fields_set and self.method != "identity":
            self.settle(norm_mean_type=scope)
        if "norm_std_type" not in self.model_fields_set and self.method in (
            "mean_std",
            "asym_clip",
        ):
            self.settle(norm_std_type=scope)
        return self


class LLMProxyConfig(ConfigModel):
    """Who answers in an environment."""

    proxy_type: str = "policy"
    """The policy under training (`policy`), a service (`openai`), or random actions (`random`)."""

    proxy_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the proxy; `policy` and `random` have none."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        known = PROXY_OPTIONS.get(self.proxy_type)
        unknown = [] if known is None else [key for key in self.proxy_config if key not in known]
        if known is not None and unknown:
            has = f"the {self.proxy_type} proxy has " + (", ".join(known) or "no options")
            how = {key: did_you_mean(key, known) or has for key in unknown}
            raise ConfigProblems(
                [Problem(f"proxy_config.{key}", f"unknown key; {how[key]}") for key in unknown]
            )
        return self


_JUDGE = NotBuilt(
    "a role that judges for environments; they judge by themselves, or ask a service of their own",
    None,
)
_ENV_TIMEOUT = NoEffect("environments that hang are ended after env_timeout and counted")


class EnvMonitorConfig(ConfigModel):
    """Watches for environments that no longer answer."""

    enable: Annotated[bool, _ENV_TIMEOUT] = True
    """Watch."""

    monitor_interval: Annotated[Positive, _ENV_TIMEOUT] = 30.0
    """Seconds between two looks."""

    hung_timeout: Annotated[Positive, _ENV_TIMEOUT] = 3600.0
    """Seconds without a sign of life after which an environment is reported."""


class EnvTemplate(ConfigModel):
    """An entry of `custom_envs`: one kind of environment, and what the policy reads in it.

    Placeholders of the templates: {observation} {env_instruction} {suffix} {turn_idx} {actions_left}
    {max_response_length}; with StepEnvManager also {history} {history_length} {step_count} {current_step}
    {current_observation}.
    """

    env_type: str | None = None
    """Id of the environment (frozen_lake, sokoban ...), its dotted path, gymnasium:ID or GEM's own (game:Wordle-v0)."""

    env_config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own options."""

    env_manager_cls: str = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
    """Dotted path of the class that makes prompts: of whole conversations, or (StepEnvManager) of every turn alone."""

    agent_runner_cls: str | None = None
    """Dotted path of a program that asks the policy by itself; not built yet, so that it has to be null."""

    tool_wrapper: dict[str, Any] | None = None
    """Tools that stand between the policy and the environment; not built yet, so that it has to be null."""

    max_steps: AtLeastOne = 100
    """Turns after which an episode ends."""

    max_tokens_per_step: AtLeastOne | None = None
    """Longest answer, in tokens; null is `max_new_tokens` of the sampling."""

    agent_system_template: str | None = None
    """System message; null has none."""

    agent_template: str = "{observation}"
    """Message of a turn."""

    history_length: AtLeastZero = 3
    """Past turns in {history}."""

    use_thread_lock: Annotated[bool, NoEffect("environments do not share a thread")] = False
    """Let one environment step at a time."""

    max_env_step_concurrent: Annotated[
        Whole, NoEffect("max_env_num_per_worker says how many share a process")
    ] = 0
    """Environments of a worker that step at the same time."""

    @field_validator("env_config", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value


def prompts_are_whole(manager: str) -> bool:
    """Whether the manager class at a dotted path makes a row of each turn. Classes that are not ours are imported for
    that; ConfigError if there is no such class."""
    if manager in PROMPTS_ARE_WHOLE:
        return PROMPTS_ARE_WHOLE[manager]
    found = getattr(import_class(manager), "prompts_are_whole", None)
    if not isinstance(found, bool):
        raise ConfigError(
            f"{manager!r} is no environment manager; expected a subclass of {_MANAGERS}base_env_manager.BaseEnvManager"
        )
    return found


class RewardConfig(WorkerConfig):
    """A judge that environments may ask."""

    llm_proxy: LLMProxyConfig = Field(default_factory=LLMProxyConfig)
    """Who judges."""


class EnvManagerConfig(WorkerConfig):
    """A set of environments: groups of equal ones, spread over workers."""

    llm_proxy: LLMProxyConfig = Field(default_factory=LLMProxyConfig)
    """Who answers in the environments."""

    num_env_groups: AtLeastOne = 128
    """Groups of environments; those of one group start from the same seed."""

    group_size: AtLeastOne = 1
    """Trajectories of a group that are trained on."""

    group_size_redundancy: AtLeastZero = 0
    """Further trajectories of a group, so that slow ones need not be waited for."""

    tags: list[str] = Field(default_factory=lambda: ["SimpleSokoban"])
    """Kinds of environments, by their names in `custom_envs`."""

    num_groups_partition: Annotated[list[AtLeastZero], Late] = LATE
    """Groups of each tag; an equal share for each if left out."""

    max_traj_per_env: Whole = -1
    """Trajectories that an environment may give per pipeline step; -1 is as many as the batch needs."""

    format_penalty: Annotated[Number, NoEffect("environments have their own")] = 0.0
    """Penalty for a malformed answer."""

    worker_cls: Any = "roll.pipeline.agentic.environment_worker.EnvironmentWorker"
    """Class of the workers, or its dotted path."""

    max_env_num_per_worker: Whole = 0
    """Environments of one worker; 0 puts all into one."""

    group_filter_cls: str = "roll.pipeline.agentic.agentic_pipeline.GroupFilter"
    """Dotted path of the class that may drop a finished group."""

    env_timeout: Positive = 60.0
    """Seconds that one reset or step may take; an environment that takes longer is ended and counted."""

    env_retries: AtLeastZero = 1
    """Times that an episode is started again after its environment failed; then its group goes on without it."""

    env_isolation: bool = True
    """Play environments in a process per worker, which can be killed; false plays them in this one, for debugging."""

    env_wait: NonNegative = 2.0
    """Seconds that ready environments wait for slower ones, so that the policy answers all of them at once."""

    @model_validator(mode="after")
    def _settle_groups(self) -> Self:
        if self.num_groups_partition is None:
            share, rest = divmod(self.num_env_groups, max(len(self.tags), 1))
            self.settle(
                num_groups_partition=[share + (index < rest) for index in range(len(self.tags))]
            )
        problems = []
        if len(self.num_groups_partition) != len(self.tags):
            expected = f"one number for each of the {len(self.tags)} tags"
            problems.append(wrong("num_groups_partition", self.num_groups_partition, expected))
        elif sum(self.num_groups_partition) != self.num_env_groups:
            expected = f"numbers that add up to num_env_groups = {self.num_env_groups}, not {sum(self.num_groups_partition)}"
            problems.append(wrong("num_groups_partition", self.num_groups_partition, expected))
        if problems:
            raise ConfigProblems(problems)
        per_worker = (
            self.max_env_num_per_worker if self.max_env_num_per_worker > 0 else self.num_envs
        )
        self.settle(
            max_env_num_per_worker=per_worker, world_size=math.ceil(self.num_envs / per_worker)
        )
        return self

    @property
    def final_group_size(self) -> int:
        """Environments of a group, those that may be left behind included."""
        return self.group_size + self.group_size_redundancy

    @property
    def num_envs(self) -> int:
        return self.num_env_groups * self.final_group_size


class AgenticConfig(PPOConfig):
    """Environments, how trajectories are scored, and what of them is trained on."""

    ignored_keys: ClassVar[frozenset[str]] = PPOConfig.ignored_keys | {"default_history_length"}

    inherited_without_effect: ClassVar[Mapping[str, str]] = {
        "val_prompt_length": "validation trajectories have the lengths of the others",
        "val_sequence_length": "validation trajectories have the lengths of the others",
        "norm_mean_type": "reward_normalization has its own",
        "norm_std_type": "reward_normalization has its own",
    }

    pipeline: Literal["agentic"] = "agentic"
    """Which pipeline this config is for."""

    custom_envs: Annotated[dict[str, dict[str, Any]], Entries(EnvTemplate)] = Field(
        default_factory=dict
    )
    """Environments by tag: `env_type`, `env_manager_cls`, `max_steps`, templates and the environment's own options."""

    train_env_manager: EnvManagerConfig = Field(default_factory=EnvManagerConfig)
    """Environments of the training."""

    val_env_manager: EnvManagerConfig = Field(default_factory=EnvManagerConfig)
    """Environments of the validation."""

    render_save_dir: Annotated[str | None, UNUSED_IN_ROLL] = None
    """Folder of rendered frames."""

    # Narrower than in PPOConfig, and frozen.
    reward: Annotated[RewardConfig | None, _JUDGE] = None  # pyrefly: ignore[bad-override]
    """A judge that environments may ask."""

    reward_normalization: RewardNormalizationConfig = Field(
        default_factory=RewardNormalizationConfig
    )
    """How scores are made comparable."""

    env_monitor: Annotated[EnvMonitorConfig, _ENV_TIMEOUT] = Field(default_factory=EnvMonitorConfig)
    """Watches for environments that no longer answer."""

    dirty_data_mask: Annotated[bool, UNUSED_IN_ROLL] = False
    """Mask dirty data."""

    open_feedback_turn: Annotated[bool, UNUSED_IN_ROLL] = False
    """Give feedback after a turn."""

    use_token_reward: Annotated[bool, UNUSED_IN_ROLL] = False
    """Use rewards per token."""

    batch_adjust_mode: Literal["copy", "delete", "auto", "random_sample"] = "copy"
    """Rows that do not divide by the optimizer steps: dealt out (copy, auto), some deleted, or a random part taken."""

    episode_reward_weight: NonNegative = 1.0
    """Weight of the episode's score in GiGPO."""

    step_reward_weight: NonNegative = 1.0
    """Weight of the step's score in GiGPO."""

    step_reward_gamma: Fraction = 0.95
    """Discount of a step's score per turn."""

    ratio_type: Literal["token", "segment", "seq", "segment_token", "seq_token"] = "token"
    """Tokens with one probability ratio: each, those of a turn, of a row; `_token`: trained on their own advantages."""

    exp_mode: Annotated[str, NoEffect("only one of ROLL's sandbox environments reads it")] = "train"
    """Mode of a sandbox."""

    partial_gpu_mode: Annotated[
        bool, NoEffect("roles keep the GPUs that device_mapping gives them")
    ] = True
    """Let training take some of the GPUs of generation for the time it needs them."""

    global_template: str = "native"
    """Chat template of all environments; `native` is the one that comes with the tokenizer."""

    parse_tool_call_parameter_to_dict: Annotated[bool, NoEffect("answers are texts")] = False
    """Parse the parameters of tool calls before the chat template sees them."""

    skip_mock_system_prompt: Annotated[
        bool, NoEffect("later turns are cut out of a rendered conversation")
    ] = False
    """Do not let the chat template add its own system prompt."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.base_worker.ActorWorker",
        "actor_infer": "roll.pipeline.base_worker.InferWorker",
        "reference": "roll.pipeline.base_worker.ActorWorker",
        "critic": "roll.pipeline.base_worker.CriticWorker",
    }

    def _settle_roles(self) -> None:
        given = self.actor_infer.generating_args or self.train_env_manager.generating_args
        if given is not None:
            self._change_role("actor_infer", generating_args=given)
        super()._settle_roles()
        sampling = self.actor_infer.generating_args or GeneratingArguments()
        for name, batch_size in (
            ("train_env", self.rollout_batch_size),
            ("val_env", self.val_batch_size),
        ):
            role = self.all_roles()[name]
            path = role.model_args.model_name_or_path or self.pretrain
            own = (
                role.generating_args if name == "val_env" else None
            )  # validation may be greedy, say
            self._change_role(
                name,
                generating_args=own or sampling,
                model_args=role.model_args.model_copy(update={"model_name_or_path": path}),
                max_traj_per_env=self._trajectories_per_env(name, batch_size),
            )

    def _trajectories_per_env(self, name: str, batch_size: int) -> int:
        manager = self.train_env_manager if name == "train_env" else self.val_env_manager
        if name == "val_env" and batch_size < 0:
            return sys.maxsize
        needed = math.ceil(batch_size / (manager.num_env_groups * manager.group_size))
        is_async = name == "train_env" and self.async_pipeline
        return needed if is_async or manager.max_traj_per_env < 0 else manager.max_traj_per_env

    def _problems(self) -> list[Problem]:
        problems = (
            super()._problems() + self._batch_problems() + self._env_problems("train_env_manager")
        )
        problems += self._template_problems()
        if self.async_pipeline and self.train_env_manager.llm_proxy.proxy_type != "policy":
            found = self.train_env_manager.llm_proxy.proxy_type
            expected = "policy, because async_generation_ratio is above 0"
            problems.append(wrong("train_env_manager.llm_proxy.proxy_type", found, expected))
        if self.eval_steps > 0:
            problems += self._validation_problems() + self._env_problems("val_env_manager")
        return problems

    def _norm_cautions(self) -> list[str]:
        """`reward_normalization` says how; only estimators that ROLL does not have bring a rule of their own."""
        found, norm = [], self.reward_normalization
        unread = [
            key for key in ("norm_mean_type", "norm_std_type") if getattr(self, key) is not None
        ]
        if unread:
            found.append(
                f"without effect: {', '.join(unread)}; agentic pipelines read reward_normalization"
            )
        norms = self.estimator.trajectory_norm()
        if norms is not None:
            types = {"norm_mean_type": norm.norm_mean_type, "norm_std_type": norm.norm_std_type}
            found += self._overridden_norms(
                {f"reward_normalization.{key}": types[key] for key in types}, norms
            )
            if norm.grouping == "batch" and "grouping" in norm.model_fields_set:
                what = f"adv_estimator: {self.adv_estimator} compares the rows of a group, by traj_group_id"
                found.append(f"without effect: reward_normalization.grouping: batch; {what}")
        return found

    def _batch_problems(self) -> list[Problem]:
        """Trajectories come in whole groups, and fill optimizer steps unless their number of rows is not known."""
        group_size = self.train_env_manager.group_size
        plans = [] if self.rows_are_turns else list(self.batch_plans().values())
        if self.rollout_batch_size % group_size == 0:
            return division_problems(plans, "rollout_batch_size", multiple_of=group_size)
        divisor = math.lcm(group_size, *(plan.divisor for plan in plans))
        low, high = nearest_multiples(self.rollout_batch_size, divisor)
        expected = f"a multiple of {divisor}, because train_env_manager.group_size is {group_size}"
        return [
            wrong("rollout_batch_size", self.rollout_batch_size, expected, f"use {low} or {high}")
        ]

    def _validation_problems(self) -> list[Problem]:
        num_envs = self.val_env_manager.num_env_groups * self.val_env_manager.group_size
        if self.val_batch_size == 0:
            return [wrong("val_batch_size", 0, "a positive number, or -1 to run all environments")]
        if self.val_batch_size < 0 or self.val_batch_size % num_envs == 0:
            return []
        low, high = nearest_multiples(self.val_batch_size, num_envs)
        expected = f"a multiple of {num_envs}, the environments of val_env_manager"
        return [wrong("val_batch_size", self.val_batch_size, expected, f"use {low} or {high}")]

    def _env_problems(self, key: str) -> list[Problem]:
        manager: EnvManagerConfig = getattr(self, key)
        batch_key = "rollout_batch_size" if key == "train_env_manager" else "val_batch_size"
        batch_size, num_envs = getattr(self, batch_key), manager.num_env_groups * manager.group_size
        problems = []
        if batch_size > manager.max_traj_per_env * num_envs:
            needed = math.ceil(batch_size / num_envs)
            expected = (
                f"at least {needed}, for {batch_key} = {batch_size} on {num_envs} environments"
            )
            problems.append(
                wrong(
                    f"{key}.max_traj_per_env",
                    manager.max_traj_per_env,
                    expected,
                    "-1 is always enough",
                )
            )
        for tag in [
            tag for tag in manager.tags if self.custom_envs and tag not in self.custom_envs
        ]:
            expected = "names of custom_envs: " + ", ".join(self.custom_envs)
            problems.append(
                wrong(f"{key}.tags", tag, expected, did_you_mean(tag, self.custom_envs))
            )
        return problems

    def env_template(self, tag: str) -> EnvTemplate:
        """The entry of `custom_envs` for a tag, checked."""
        return EnvTemplate(**self.custom_envs[tag])

    def tags_in_use(self) -> list[str]:
        """The entries of `custom_envs` that the run plays: others may be there, and are not judged."""
        managers = [
            self.train_env_manager,
            *([self.val_env_manager] if self.eval_steps > 0 else []),
        ]
        return list(
            dict.fromkeys(
                tag for manager in managers for tag in manager.tags if tag in self.custom_envs
            )
        )

    def _template_problems(self) -> list[Problem]:
        problems = []
        in_use = self.tags_in_use()
        for tag in self.custom_envs:
            try:
                template = self.env_template(tag)
            except ConfigError as error:
                problems.append(Problem(f"custom_envs.{tag}", str(error)))
                continue
            if tag not in in_use:
                continue
            found = {
                "tool_wrapper": template.tool_wrapper,
                "agent_runner_cls": template.agent_runner_cls,
            }
            for name in [name for name, value in found.items() if value is not None]:
                problems.append(
                    Problem(f"custom_envs.{tag}.{name}", f"not built yet: {NOT_BUILT_YET[name]}")
                )
            manager, env_type = template.env_manager_cls, str(template.env_type)
            if manager in UNSUPPORTED_CLASSES:
                why = f"not supported: {UNSUPPORTED_CLASSES[manager]}"
                problems.append(Problem(f"custom_envs.{tag}.env_manager_cls", why))
            else:
                try:
                    prompts_are_whole(manager)
                except ConfigError as error:
                    problems.append(Problem(f"custom_envs.{tag}.env_manager_cls", str(error)))
            if env_type in UNSUPPORTED_ENVIRONMENTS:
                why = f'the environment "{env_type}" is not built yet: {UNSUPPORTED_ENVIRONMENTS[env_type]}'
                problems.append(Problem(f"custom_envs.{tag}.env_type", why))
        return problems

    def all_roles(self) -> dict[str, WorkerConfig]:
        return {
            **super().all_roles(),
            "train_env": self.train_env_manager,
            "val_env": self.val_env_manager,
        }

    def key_of(self, role_name: str) -> str:
        return {"train_env": "train_env_manager", "val_env": "val_env_manager"}.get(
            role_name, role_name
        )

    def active_roles(self) -> dict[str, WorkerConfig]:
        is_validated = self.eval_steps > 0
        return {
            name: role
            for name, role in super().active_roles().items()
            if name != "val_env" or is_validated
        }

    def missing_for_training(self) -> list[Problem]:
        problems = super().missing_for_training()
        if self.is_replay:
            return problems
        if not self.custom_envs:
            problems.append(
                Problem("custom_envs", "missing; define the environments that the tags name")
            )
        for tag in [tag for tag in self.custom_envs if self.env_template(tag).env_type is None]:
            problems.append(
                Problem(
                    f"custom_envs.{tag}.env_type",
                    "missing; the id or dotted path of an environment",
                )
            )
        return problems

    @property
    def rows_are_turns(self) -> bool:
        """True for the estimators that need it, and for environment managers whose prompts stand alone."""
        if self.estimator.rows_are_turns:
            return True
        managers = [
            self.custom_envs.get(tag, {}).get("env_manager_cls")
            for tag in self.train_env_manager.tags
        ]
        try:
            return any(prompts_are_whole(manager) for manager in managers if manager is not None)
        except ConfigError:
            return False  # the config has such a manager among its problems

    @property
    def max_turns(self) -> int | None:
        limits = [
            self.custom_envs.get(tag, {}).get("max_steps") for tag in self.train_env_manager.tags
        ]
        known = [limit for limit in limits if isinstance(limit, int)]
        return max(known) if known and len(known) == len(limits) else None
