"""Configuration of reinforcement learning from verifiable rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from roll.configs.arguments import GeneratingArguments
from roll.configs.base import (
    AtLeastOne,
    ConfigModel,
    ConfigProblems,
    NonNegative,
    Number,
    Positive,
    Problem,
    Unread,
    did_you_mean,
    wrong,
)
from roll.configs.batch_plan import division_problems
from roll.configs.ppo_config import PPOConfig
from roll.configs.strategy_info import StrategyNames
from roll.configs.worker_config import WorkerConfig

FUNCTION_REWARD_WORKER = "roll.pipeline.rlvr.rewards.function_reward_worker.FunctionRewardWorker"
DatasetFilterConfig = Unread


class RewardFilterConfig(ConfigModel):
    """Drops prompts whose samples teach nothing, so that others are drawn instead."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Judge a prompt by the mean or by the standard deviation of its samples' scores."""

    filter_args: dict[str, Any] = Field(default_factory=dict)
    """`threshold_down`, `threshold_up` or `std_threshold`; a prompt at a bound is dropped too."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        by_type = {
            "mean_filter": ["threshold_down", "threshold_up"],
            "std_filter": ["std_threshold"],
        }
        known = by_type.get(self.type, [key for keys in by_type.values() for key in keys])
        problems = []
        for key, value in self.filter_args.items():
            if key not in known:
                how = did_you_mean(key, known) or f"{self.type} has {', '.join(known)}"
                problems.append(Problem(f"filter_args.{key}", f"unknown key; {how}"))
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                problems.append(wrong(f"filter_args.{key}", value, "a number"))
        if problems:
            raise ConfigProblems(problems)
        return self


class RewardConfig(WorkerConfig):
    """The reward of one domain: a function (`reward_fn`), or a worker class (`worker_cls`)."""

    reward_fn: str | None = None
    """`package.module:score`, or `file.py:score`, looked for here, then beside the config."""

    reward_timeout: Positive = 30.0
    """Seconds that scoring one sample may take once it has begun; then the sample is dropped."""

    reward_memory_mb: AtLeastOne = 4096
    """Megabytes that scoring may add to its process; a sample that needs more is dropped."""

    judge_prompt: str | None = None
    """Name of the prompt of a model that judges."""

    judge_model_type: str | None = None
    """`api` asks a service, `inference` runs the judge here."""

    judge_model_name: str | None = None
    """Name of the judge at the service."""

    judge_api_url: str | None = None
    """Address of the service."""

    judge_api_key: str | None = None
    """Key of the service."""

    format_pattern: str | None = None
    """Regular expression that a well-formed answer matches."""

    reward_type: str | None = None
    """Variant of the reward, by the names of its worker class."""

    response_length_penalty_coef: Number = 0.0
    """Penalty per token of a response."""

    tag_included: list[str] = Field(default_factory=list)
    """Tags of the rows that this reward judges."""

    query_filter_config: RewardFilterConfig = Field(default_factory=RewardFilterConfig)
    """Which prompts are dropped."""

    @field_validator("reward_fn")
    @classmethod
    def _find_beside_the_config(cls, value: str | None, info: ValidationInfo) -> str | None:
        """`context={"folder": ...}` is that of the config file, where else a file may lie."""
        path, colon, name = (value or "").rpartition(":")
        beside = Path((info.context or {}).get("folder", ".")) / path
        if path.endswith(".py") and not Path(path).is_file() and beside.is_file():
            return f"{beside.resolve()}{colon}{name}"
        return value

    @model_validator(mode="after")
    def _function_worker(self) -> Self:
        if self.reward_fn is None:
            return self
        if self.worker_cls not in (None, FUNCTION_REWARD_WORKER):
            expected, fix = "no other worker_cls beside reward_fn", "remove one of the two"
            raise ConfigProblems([wrong("worker_cls", self.worker_cls, expected, fix)])
        path, _, name = self.reward_fn.rpartition(":")
        if not path or not name.isidentifier():
            expected = "file.py:function or package.module:function"
            raise ConfigProblems([wrong("reward_fn", self.reward_fn, expected)])
        self.settle(worker_cls=FUNCTION_REWARD_WORKER)
        return self


class RLVRConfig(PPOConfig):
    """Prompts with a checkable answer: PPO, GRPO, REINFORCE++ and relatives."""

    pipeline: Literal["rlvr"] = "rlvr"
    """Which pipeline this config is for."""

    global_template: str | None = None
    """Chat template of all roles; `actor_train.data_args.template` if left out."""

    tag_to_template: dict[str, str] = Field(default_factory=dict)
    """Chat template of the rows with a tag."""

    num_return_sequences_in_group: AtLeastOne = 1
    """Samples per prompt; they form the group that group estimators compare."""

    max_num_gen_batches: AtLeastOne = 10
    """Rounds of sampling after which a step goes on with the prompts that passed the filters."""

    validation: WorkerConfig | None = None
    """Data and sampling of the validation; null does not validate."""

    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Reward of each domain."""

    difficulty_loss_weight: bool = False
    """Give difficult prompts more weight."""

    length_loss_weight: bool = False
    """Give short responses more weight."""

    rl_loss_coef: NonNegative = 1.0
    """Weight of policy and KL loss."""

    importance_sampling: Literal["token", "seq", "segment", "seq_token", "segment_token"] = "token"
    """Tokens with one ratio: each, a response (GSPO), a run; `_token`: own advantages."""

    val_greedy: bool = False
    """Validate with the most likely tokens."""

    val_n_sample: AtLeastOne = 1
    """Samples per prompt of the validation."""

    max_len_mask: bool = False
    """Leave out responses that were cut off."""

    difficulty_mask: bool = False
    """Leave out prompts that are too easy or too hard."""

    difficulty_low_threshold: Number = 0.0
    """Mean score that a prompt has to exceed."""

    difficulty_high_threshold: Number = 1.0
    """Mean score that a prompt has to stay below."""

    error_max_len_clip: bool = False
    """Leave out wrong responses that are long."""

    error_max_len_threshold: AtLeastOne = 9999999999
    """From how many tokens on `error_max_len_clip` calls a response long."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "actor_infer": "roll.pipeline.base_worker.InferWorker",
        "reference": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "critic": "roll.pipeline.base_worker.CriticWorker",
    }

    def _settle_lengths(self) -> None:
        super()._settle_lengths()
        if self.response_length is None and self.sequence_length > self.prompt_length:
            self.settle(response_length=self.sequence_length - self.prompt_length)

    def _settle_roles(self) -> None:
        super()._settle_roles()
        for name, prefix in (("actor_infer", ""), ("validation", "val_")):
            role: WorkerConfig | None = getattr(self, name)
            if role is None:
                continue
            sampling = role.generating_args or GeneratingArguments()
            prompt, whole = (
                getattr(self, f"{prefix}{key}_length") for key in ("prompt", "sequence")
            )
            limit = {"max_new_tokens": max(whole - prompt, 0)}
            self._change_role(name, generating_args=sampling.model_copy(update=limit))

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        for prefix in ("", "val_"):
            prompt, whole = (
                getattr(self, f"{prefix}{key}_length") for key in ("prompt", "sequence")
            )
            if prompt >= whole:
                expected = (
                    f"less than {prefix}sequence_length = {whole}, to leave room for a response"
                )
                problems.append(wrong(f"{prefix}prompt_length", prompt, expected))
        if 0 < self.async_generation_ratio < 1:
            found = self.async_generation_ratio
            problems.append(wrong("async_generation_ratio", found, "0, or at least 1"))
        problems += division_problems(self.batch_plans().values(), "rollout_batch_size")
        data_args = self.actor_train.data_args
        shares = (data_args.domain_interleave_probs if data_args else None) or {}
        for domain, share in shares.items():
            if share * self.rollout_batch_size < 1 - 1e-9:
                expected = f"enough prompts for domain {domain} to get one (its share is {share:g})"
                problems.append(wrong("rollout_batch_size", self.rollout_batch_size, expected))
            if self.rewards and domain not in self.rewards:
                key = "actor_train.data_args.domain_interleave_probs"
                expected = "a domain of rewards: " + ", ".join(self.rewards)
                problems.append(wrong(key, domain, expected, did_you_mean(domain, self.rewards)))
        seen: dict[str, str] = {}
        for domain, reward in self.rewards.items():
            if reward.worker_cls is None:
                how = "missing; name a function (reward_fn: my_file.py:score) or the class of a "
                key = f"rewards.{domain}.reward_fn"
                problems.append(Problem(key, how + "reward (worker_cls)"))
            for tag in reward.tag_included:
                if tag in seen:
                    expected = f'tags of one domain only; "{tag}" also belongs to {seen[tag]}'
                    problems.append(wrong(f"rewards.{domain}.tag_included", tag, expected))
                seen[tag] = domain
        return problems

    def cautions(self) -> list[str]:
        found = super().cautions()
        known = self.tag_2_domain
        # A domain without tag_included takes rows of any tag: then only the data can tell.
        if self.rewards and all(reward.tag_included for reward in self.rewards.values()):
            for tag in [tag for tag in self.tag_to_template if tag not in known]:
                near = did_you_mean(tag, known) or f"they have {', '.join(known)}"
                found.append(
                    f"without effect, unless rows name their domain in a column: "
                    f"tag_to_template.{tag}; no rewards.DOMAIN.tag_included has this tag; {near}"
                )
        return found

    def all_roles(self) -> dict[str, WorkerConfig]:
        roles: dict[str, WorkerConfig] = super().all_roles()
        roles |= {f"reward-{domain}": reward for domain, reward in self.rewards.items()}
        return roles if self.validation is None else roles | {"validation": self.validation}

    def key_of(self, role_name: str) -> str:
        domain = role_name.removeprefix("reward-")
        return role_name if domain == role_name else f"rewards.{domain}"

    def active_roles(self) -> dict[str, WorkerConfig]:
        return {name: role for name, role in super().active_roles().items() if name != "validation"}

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        roles = self.all_roles().items()
        judges = [name for name, role in roles if name.startswith("reward-") and role.holds_model]
        return super().allowed_strategies() | dict.fromkeys(
            judges, StrategyNames("infers", "generates")
        )

    def missing_for_training(self) -> list[Problem]:
        problems = super().missing_for_training()
        if self.is_replay:
            return problems
        problems += self._missing_file("actor_train", "the file of prompts")
        if self.validation is not None:
            problems += self._missing_file("validation", "the file of prompts")
        if not self.rewards:
            missing = "missing; say how responses are scored, one entry per domain"
            problems.append(Problem("rewards", missing))
        return problems

    def idle_keys(self) -> dict[str, str]:
        idle = super().idle_keys()
        idle.pop("prompt_length", None)  # prompts have a limit of their own
        for key, switch in (
            ("difficulty_low_threshold", "difficulty_mask"),
            ("difficulty_high_threshold", "difficulty_mask"),
            ("error_max_len_threshold", "error_max_len_clip"),
        ):
            if self._is_written(key) and not getattr(self, switch):
                idle[key] = f"{switch} is off"
        return idle

    @property
    def samples_per_prompt(self) -> int:
        return self.num_return_sequences_in_group

    @property
    def domain_2_tag(self) -> dict[str, set[str]]:
        """Tags that each domain's reward judges."""
        return {domain: set(reward.tag_included) for domain, reward in self.rewards.items()}

    @property
    def tag_2_domain(self) -> dict[str, str]:
        """Domain whose reward judges a tag."""
        rewards = self.rewards.items()
        return {tag: domain for domain, reward in rewards for tag in reward.tag_included}
