"""Configuration of learning from environments that a model acts in over several turns."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from roll.configs.arguments import GeneratingArguments
from roll.configs.base import (
    LATE,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    ConfigProblems,
    Fraction,
    Late,
    NonNegative,
    Positive,
    Problem,
    Unread,
    Whole,
    did_you_mean,
    nearest_multiples,
    problems_of,
    wrong,
)
from roll.configs.batch_plan import division_problems
from roll.configs.ppo_config import PPOConfig
from roll.configs.roll_keys import NOT_BUILT_YET, UNSUPPORTED_CLASSES, UNSUPPORTED_ENVIRONMENTS
from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError
from roll.utils.import_utils import import_class

EnvMonitorConfig = RewardConfig = Unread
_MANAGERS = "roll.pipeline.agentic.env_manager."
# `prompts_are_whole` of our own managers, without the torch that the classes import.
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
        "base_url", "model_name", "api_key", "api_key_env", "max_concurrency", "timeout",
        "max_retries", "extra_body",
    ),
}  # fmt: skip
NormType = Literal["batch", "group"] | None


class RewardNormalizationConfig(ConfigModel):
    """How the scores of trajectories are made comparable."""

    grouping: str = "batch"
    """Column whose equal values form a group (`traj_group_id`, `tags` ...); `batch`: all."""

    method: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Older way to choose the types: none, the mean, or both; `asym_clip` is `mean_std`."""

    norm_mean_type: NormType = None
    """Over what the mean is taken that is subtracted; follows `method` unless written down."""

    norm_std_type: NormType = None
    """Over what the standard deviation is taken; follows `method` unless written down."""

    @model_validator(mode="after")
    def _types_from_method(self) -> Self:
        scope = "batch" if self.grouping == "batch" else "group"
        if "norm_mean_type" not in self.model_fields_set and self.method != "identity":
            self.settle(norm_mean_type=scope)
        with_std = self.method in ("mean_std", "asym_clip")
        if "norm_std_type" not in self.model_fields_set and with_std:
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
        known = PROXY_OPTIONS.get(self.proxy_type, tuple(self.proxy_config))
        problems = []
        for key in self.proxy_config:
            if key not in known:
                has = f"the {self.proxy_type} proxy has " + (", ".join(known) or "no options")
                message = f"unknown key; {did_you_mean(key, known) or has}"
                problems.append(Problem(f"proxy_config.{key}", message))
        if problems:
            raise ConfigProblems(problems)
        return self


class EnvTemplate(ConfigModel):
    """An entry of `custom_envs`: one kind of environment, and what the policy reads in it.

    Placeholders of the templates: {observation} {env_instruction} {suffix} {turn_idx}
    {actions_left} {max_response_length}; with StepEnvManager also {history} {history_length}
    {step_count} {current_step} {current_observation}.
    """

    env_type: str | None = None
    """Its id (frozen_lake, sokoban ...), dotted path, gymnasium:ID or GEM's (game:Wordle-v0)."""

    env_config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own options."""

    env_manager_cls: str = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
    """Class that makes prompts: of whole conversations, or (StepEnvManager) of every turn alone."""

    agent_runner_cls: str | None = None
    """Dotted path of a program that asks the policy by itself; not built yet: it has to be null."""

    tool_wrapper: dict[str, Any] | None = None
    """Tools between the policy and the environment; not built yet: it has to be null."""

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


def prompts_are_whole(manager: str) -> bool:
    """Whether the manager class at a dotted path makes a row of each turn; imports foreign ones.

    Raises:
        ConfigError: there is no such class.
    """
    if manager in PROMPTS_ARE_WHOLE:
        return PROMPTS_ARE_WHOLE[manager]
    found = getattr(import_class(manager), "prompts_are_whole", None)
    if not isinstance(found, bool):
        base = f"{_MANAGERS}base_env_manager.BaseEnvManager"
        raise ConfigError(f"{manager!r} is no environment manager; expected a subclass of {base}")
    return found


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
    """Trajectories of an environment in a pipeline step; -1 is as many as the batch needs."""

    worker_cls: Any = "roll.pipeline.agentic.environment_worker.EnvironmentWorker"
    """Class of the workers, or its dotted path."""

    max_env_num_per_worker: Whole = 0
    """Environments of one worker; 0 puts all into one."""

    group_filter_cls: str = "roll.pipeline.agentic.agentic_pipeline.GroupFilter"
    """Dotted path of the class that may drop a finished group."""

    env_timeout: Positive = 60.0
    """Seconds that a reset or step may take; one that takes longer is ended and counted."""

    env_retries: AtLeastZero = 1
    """Times that an episode starts again after a failure; then its group goes on without it."""

    env_isolation: bool = True
    """Play in a process per worker, which can be killed; false plays in this one, for debugging."""

    env_wait: NonNegative = 2.0
    """Seconds that ready environments wait for slower ones, to be answered all at once."""

    @model_validator(mode="after")
    def _settle_groups(self) -> Self:
        if self.num_groups_partition is None:
            share, rest = divmod(self.num_env_groups, max(len(self.tags), 1))
            partition = [share + (index < rest) for index in range(len(self.tags))]
            self.settle(num_groups_partition=partition)
        partition, expected = self.num_groups_partition, ""
        if len(partition) != len(self.tags):
            expected = f"one number for each of the {len(self.tags)} tags"
        elif sum(partition) != self.num_env_groups:
            total = f"num_env_groups = {self.num_env_groups}, not {sum(partition)}"
            expected = f"numbers that add up to {total}"
        if expected:
            raise ConfigProblems([wrong("num_groups_partition", partition, expected)])
        per_worker = self.max_env_num_per_worker
        per_worker = per_worker if per_worker > 0 else self.num_envs
        world_size = math.ceil(self.num_envs / per_worker)
        self.settle(max_env_num_per_worker=per_worker, world_size=world_size)
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

    pipeline: Literal["agentic"] = "agentic"
    """Which pipeline this config is for."""

    custom_envs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Environments by tag, see EnvTemplate."""

    train_env_manager: EnvManagerConfig = Field(default_factory=EnvManagerConfig)
    """Environments of the training."""

    val_env_manager: EnvManagerConfig = Field(default_factory=EnvManagerConfig)
    """Environments of the validation."""

    reward_normalization: RewardNormalizationConfig = Field(
        default_factory=RewardNormalizationConfig
    )
    """How scores are made comparable."""

    val_batch_size: Whole = 128
    """Trajectories of a validation; -1 runs all of them."""

    batch_adjust_mode: Literal["copy", "delete", "auto", "random_sample"] = "copy"
    """Rows that do not divide: dealt out (copy, auto), some deleted, or a random part taken."""

    episode_reward_weight: NonNegative = 1.0
    """Weight of the episode's score in GiGPO."""

    step_reward_weight: NonNegative = 1.0
    """Weight of the step's score in GiGPO."""

    step_reward_gamma: Fraction = 0.95
    """Discount of a step's score per turn."""

    ratio_type: Literal["token", "segment", "seq", "segment_token", "seq_token"] = "token"
    """Tokens with one probability ratio: each, a turn's, a row's; `_token`: own advantages."""

    global_template: str = "native"
    """Chat template of all environments; `native` is the one that comes with the tokenizer."""

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
        for name, manager, batch_size in (
            ("train_env", self.train_env_manager, self.rollout_batch_size),
            ("val_env", self.val_env_manager, self.val_batch_size),
        ):
            # Validation may sample in its own way, greedily say.
            own = manager.generating_args if name == "val_env" else None
            model = manager.model_args.model_name_or_path or self.pretrain
            limit = manager.max_traj_per_env
            if name == "val_env" and batch_size < 0:
                limit = sys.maxsize
            elif limit < 0 or (name == "train_env" and self.async_pipeline):
                limit = math.ceil(batch_size / (manager.num_env_groups * manager.group_size))
            self._change_role(
                name,
                generating_args=own or sampling,
                model_args=manager.model_args.model_copy(update={"model_name_or_path": model}),
                max_traj_per_env=limit,
            )

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        # Trajectories come in whole groups, and fill optimizer steps unless their rows are turns.
        size, group_size = self.rollout_batch_size, self.train_env_manager.group_size
        plans = [] if self.rows_are_turns else list(self.batch_plans().values())
        if size % group_size == 0:
            problems += division_problems(plans, "rollout_batch_size", multiple_of=group_size)
        else:
            divisor = math.lcm(group_size, *(plan.divisor for plan in plans))
            low, high = nearest_multiples(size, divisor)
            why = f"because train_env_manager.group_size is {group_size}"
            expected, fix = f"a multiple of {divisor}, {why}", f"use {low} or {high}"
            problems.append(wrong("rollout_batch_size", size, expected, fix))
        problems += self._env_problems("train_env_manager") + self._template_problems()
        proxy = self.train_env_manager.llm_proxy.proxy_type
        if self.async_pipeline and proxy != "policy":
            expected = "policy, because async_generation_ratio is above 0"
            problems.append(wrong("train_env_manager.llm_proxy.proxy_type", proxy, expected))
        if self.eval_steps > 0:
            size = self.val_batch_size
            num_envs = self.val_env_manager.num_env_groups * self.val_env_manager.group_size
            if size == 0:
                expected = "a positive number, or -1 to run all environments"
                problems.append(wrong("val_batch_size", 0, expected))
            elif size > 0 and size % num_envs:
                low, high = nearest_multiples(size, num_envs)
                expected = f"a multiple of {num_envs}, the environments of val_env_manager"
                problems.append(wrong("val_batch_size", size, expected, f"use {low} or {high}"))
            problems += self._env_problems("val_env_manager")
        return problems

    def _env_problems(self, key: str) -> list[Problem]:
        manager: EnvManagerConfig = getattr(self, key)
        batch_key = "rollout_batch_size" if key == "train_env_manager" else "val_batch_size"
        batch_size, num_envs = getattr(self, batch_key), manager.num_env_groups * manager.group_size
        problems = []
        if batch_size > manager.max_traj_per_env * num_envs:
            why = f"for {batch_key} = {batch_size} on {num_envs} environments"
            expected, fix = (
                f"at least {math.ceil(batch_size / num_envs)}, {why}",
                "-1 is always enough",
            )
            found = manager.max_traj_per_env
            problems.append(wrong(f"{key}.max_traj_per_env", found, expected, fix))
        for tag in manager.tags:
            if self.custom_envs and tag not in self.custom_envs:
                expected = "names of custom_envs: " + ", ".join(self.custom_envs)
                guess = did_you_mean(tag, self.custom_envs)
                problems.append(wrong(f"{key}.tags", tag, expected, guess))
        return problems

    def _template_problems(self) -> list[Problem]:
        problems = []
        in_use = self.tags_in_use()
        for tag, entry in self.custom_envs.items():
            key = f"custom_envs.{tag}"
            try:
                template = EnvTemplate.model_validate(entry)
            except ValidationError as error:
                problems += [item.under(key) for item in problems_of(error, EnvTemplate, entry)]
                continue
            if tag not in in_use:
                continue
            for name, reason in NOT_BUILT_YET.items():
                if getattr(template, name) is not None:
                    problems.append(Problem(f"{key}.{name}", f"not built yet: {reason}"))
            manager, env_type = template.env_manager_cls, str(template.env_type)
            try:
                if manager in UNSUPPORTED_CLASSES:
                    raise ConfigError(f"not supported: {UNSUPPORTED_CLASSES[manager]}")
                prompts_are_whole(manager)
            except ConfigError as error:
                problems.append(Problem(f"{key}.env_manager_cls", str(error)))
            if env_type in UNSUPPORTED_ENVIRONMENTS:
                reason = UNSUPPORTED_ENVIRONMENTS[env_type]
                why = f'the environment "{env_type}" is not built yet: {reason}'
                problems.append(Problem(f"{key}.env_type", why))
        return problems

    def _norm_cautions(self) -> list[str]:
        """`reward_normalization` says how, unless the estimator has a rule for trajectories too."""
        norm, norms = self.reward_normalization, self.estimator.trajectory_norm()
        if norms is None:
            return []
        written = {
            "reward_normalization.norm_mean_type": norm.norm_mean_type,
            "reward_normalization.norm_std_type": norm.norm_std_type,
        }
        found = self._overridden_norms(written, norms)
        if norm.grouping == "batch" and "grouping" in norm.model_fields_set:
            estimator = f"adv_estimator: {self.adv_estimator}"
            what = f"{estimator} compares the rows of a group, by traj_group_id"
            found.append(f"without effect: reward_normalization.grouping: batch; {what}")
        return found

    def env_template(self, tag: str) -> EnvTemplate:
        """The entry of `custom_envs` for a tag, checked."""
        return EnvTemplate(**self.custom_envs[tag])

    def part(self, key: str) -> Any:
        if key != "custom_envs":
            return super().part(key)
        return {tag: self.env_template(tag) for tag in self.custom_envs}

    def tags_in_use(self) -> list[str]:
        """The entries of `custom_envs` that the run plays; others may be there unused."""
        tags = list(self.train_env_manager.tags)
        if self.eval_steps > 0:
            tags += self.val_env_manager.tags
        return list(dict.fromkeys(tag for tag in tags if tag in self.custom_envs))

    def all_roles(self) -> dict[str, WorkerConfig]:
        managers = {"train_env": self.train_env_manager, "val_env": self.val_env_manager}
        return {**super().all_roles(), **managers}

    def key_of(self, role_name: str) -> str:
        return f"{role_name}_manager" if role_name in ("train_env", "val_env") else role_name

    def active_roles(self) -> dict[str, WorkerConfig]:
        roles = super().active_roles()
        if self.eval_steps <= 0:
            roles.pop("val_env", None)
        return roles

    def missing_for_training(self) -> list[Problem]:
        problems = super().missing_for_training()
        if self.is_replay:
            return problems
        if not self.custom_envs:
            missing = "missing; define the environments that the tags name"
            problems.append(Problem("custom_envs", missing))
        for tag in self.custom_envs:
            if self.env_template(tag).env_type is None:
                missing = "missing; the id or dotted path of an environment"
                problems.append(Problem(f"custom_envs.{tag}.env_type", missing))
        return problems

    @property
    def rows_are_turns(self) -> bool:
        """For estimators that need it, and environment managers whose prompts stand alone."""
        if self.estimator.rows_are_turns:
            return True
        for tag in self.train_env_manager.tags:
            manager = self.custom_envs.get(tag, {}).get("env_manager_cls")
            try:
                if manager is not None and prompts_are_whole(manager):
                    return True
            except ConfigError:
                return False  # the config has such a manager among its problems
        return False

    @property
    def max_turns(self) -> int | None:
        tags = self.train_env_manager.tags
        limits = [self.custom_envs.get(tag, {}).get("max_steps") for tag in tags]
        known = [limit for limit in limits if isinstance(limit, int)]
        return max(known) if known and len(known) == len(limits) else None
