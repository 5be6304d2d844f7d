"""Configuration of reinforcement learning from verifiable rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from roll.configs.base_config import PPOConfig
from roll.configs.batch_plan import division_problems
from roll.configs.config_model import (
    UNUSED_IN_ROLL,
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    NoEffect,
    NonNegative,
    NotBuilt,
    Number,
    Positive,
)
from roll.configs.generating_args import GeneratingArguments
from roll.configs.problems import ConfigProblems, Problem, did_you_mean, wrong
from roll.configs.worker_config import INFER_STRATEGIES, WorkerConfig

FUNCTION_REWARD_WORKER = "roll.pipeline.rlvr.rewards.function_reward_worker.FunctionRewardWorker"


class DatasetFilterConfig(ConfigModel):
    """A choice of rows by source and difficulty; nothing reads it."""

    source: str | None = None
    """Source to keep."""

    min_difficulty: Number | None = None
    """Lowest difficulty to keep."""

    max_difficulty: Number | None = None
    """Highest difficulty to keep."""

    num_samples: AtLeastZero = 0
    """Rows to keep."""


class RewardFilterConfig(ConfigModel):
    """Drops prompts whose samples teach nothing, so that others are drawn instead."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Judge a prompt by the mean or by the standard deviation of its samples' scores."""

    filter_args: dict[str, Any] = Field(default_factory=dict)
    """`threshold_down` and `threshold_up` of the mean filter, `std_threshold` of the other; bounds are dropped too."""

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
    """The reward of one domain: a function of yours (`reward_fn`), or a worker class (`worker_cls`)."""

    reward_fn: str | None = None
    """Function as `package.module:score`, or `file.py:score`, looked for here and then beside the config file."""

    reward_timeout: Positive = 30.0
    """Seconds that scoring one sample may take, counted from when it begins; then the sample is dropped."""

    reward_memory_mb: AtLeastOne = 4096
    """Megabytes that scoring may add to its process; a sample that needs more is dropped."""

    code_url: Annotated[str | None, NoEffect("code runs in a sandbox on this machine")] = None
    """Address of a code sandbox."""

    use_local: Annotated[bool, NotBuilt("running code at code_url", True)] = True
    """Run code on this machine instead of at `code_url`."""

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

    response_filter_config: Annotated[RewardFilterConfig, UNUSED_IN_ROLL] = Field(
        default_factory=RewardFilterConfig
    )
    """Which responses are dropped."""

    reward_manager_config: Annotated[
        list[dict[str, Any]], NoEffect("there is no remote reward system")
    ] = Field(default_factory=list)
    """Options of a remote reward system."""

    @field_validator("reward_fn")
    @classmethod
    def _find_beside_the_config(cls, value: str | None, info: ValidationInfo) -> str | None:
        """`context={"folder": ...}` is the folder of the config file, where a file not found here may lie."""
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
            expected = "no other worker_cls beside reward_fn"
            raise ConfigProblems(
                [wrong("worker_cls", self.worker_cls, expected, "remove one of the two")]
            )
        path, _, name = self.reward_fn.rpartition(":")
        if not path or not name.isidentifier():
            raise ConfigProblems(
                [wrong("reward_fn", self.reward_fn, "file.py:function or package.module:function")]
            )
        self.settle(worker_cls=FUNCTION_REWARD_WORKER)
        return self


class RLVRConfig(PPOConfig):
    """Prompts with a checkable answer: PPO, GRPO, REINFORCE++ and relatives."""

    ignored_keys: ClassVar[frozenset[str]] = PPOConfig.ignored_keys | {"positive_loss_coef"}
    inherited_without_effect: ClassVar[Mapping[str, str]] = {
        "val_batch_size": "all prompts of the validation are answered",
        "reward": "rewards has an entry for each domain",
    }

    pipeline: Literal["rlvr"] = "rlvr"
    """Which pipeline this config is for."""

    global_template: str | None = None
    """Chat template of all roles; `actor_train.data_args.template` if left out."""

    tag_to_template: dict[str, str] = Field(default_factory=dict)
    """Chat template of the rows with a tag."""

    dataset_filter: Annotated[DatasetFilterConfig, UNUSED_IN_ROLL] = Field(
        default_factory=DatasetFilterConfig
    )
    """A choice of rows."""

    num_return_sequences_in_group: AtLeastOne = 1
    """Samples per prompt; they form the group that group estimators compare."""

    max_num_gen_batches: AtLeastOne = 10
    """Rounds of sampling after which a step goes on with the prompts that passed the filters, however few."""

    save_logging_board_dir: Annotated[
        str | None, NoEffect("the run's folder has the samples, token by token")
    ] = None
    """Folder that gets per-token values of every sample; null writes none."""

    validation: WorkerConfig | None = None
    """Data and sampling of the validation; null does not validate."""

    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Reward of each domain."""

    reward_model: Annotated[WorkerConfig | None, NoEffect("a reward names its own judge")] = None
    """A judge that several rewards share."""

    difficulty_loss_weight: bool = False
    """Give difficult prompts more weight."""

    length_loss_weight: bool = False
    """Give short responses more weight."""

    postive_loss_coef: Annotated[Number, UNUSED_IN_ROLL] = 0.0
    """Weight of a supervised loss on good samples (ROLL's spelling)."""

    use_topr_neg_loss_coef: Annotated[Number, UNUSED_IN_ROLL] = 0.0
    """Weight of bad samples."""

    use_policy_loss_type: Annotated[Literal["PPO", "PG"], UNUSED_IN_ROLL] = "PPO"
    """Form of the policy loss."""

    use_topr_loss: Annotated[bool, UNUSED_IN_ROLL] = False
    """Use the TOPR loss; `actor_train.pg_variant: topr` does."""

    rl_loss_coef: NonNegative = 1.0
    """Weight of policy and KL loss."""

    importance_sampling: Literal["token", "seq", "segment", "seq_token", "segment_token"] = "token"
    """Tokens with one probability ratio: each, a response (GSPO), a run; `_token`: trained on their own advantages."""

    val_greedy: bool = False
    """Validate with the most likely tokens."""

    val_n_sample: AtLeastOne = 1
    """Samples per prompt of the validation."""

    max_len_mask: bool = False
    """Leave out responses that were cut off."""

    mask_type: Annotated[Literal["all", "loss"], UNUSED_IN_ROLL] = "loss"
    """What masks apply to."""

    difficulty_mask: bool = False
    """Leave out prompts that are too easy or too hard."""

    difficulty_low_threshold: Number = 0.0
    """Mean score that a prompt has to exceed."""

    difficulty_high_threshold: Number = 1.0
    """Mean score that a prompt has to stay below."""

    balance_length: Annotated[bool, UNUSED_IN_ROLL] = False
    """Balance lengths."""

    minibatch_data_iter_num: Annotated[AtLeastOne, UNUSED_IN_ROLL] = 1
    """Passes over a batch."""

    error_max_len_clip: bool = False
    """Leave out wrong responses that are long."""

    error_max_len_threshold: AtLeastOne = 9999999999
    """What is long, in tokens."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "actor_infer": "roll.pipeline.base_worker.InferWorker",
        "reference": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "critic": "roll.pipeline.base_worker.CriticWorker",
    }

    @field_validator("rewards", mode="before")
    @classmethod
    def _null_is_no_rewards(cls, value: Any) -> Any:
        return {} if value is None else value

    def _settle_lengths(self) -> None:
        super()._settle_lengths()
        if self.response_length is None and self.sequence_length > self.prompt_length:
            self.settle(response_length=self.sequence_length - self.prompt_length)

    def _settle_roles(self) -> None:
        super()._settle_roles()
        sampling = self.actor_infer.generating_args or GeneratingArguments()
        room = max(self.sequence_length - self.prompt_length, 0)
        self._change_role(
            "actor_infer", generating_args=sampling.model_copy(update={"max_new_tokens": room})
        )
        if self.validation is not None:
            sampling = self.validation.generating_args or GeneratingArguments()
            room = max(self.val_sequence_length - self.val_prompt_length, 0)
            self._change_role(
                "validation", generating_args=sampling.model_copy(update={"max_new_tokens": room})
            )
        if self.reward_model is not None and self.reward_model.worker_cls is None:
            self._change_role("reward_model", worker_cls="roll.pipeline.base_worker.InferWorker")

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        for prompt, sequence in (
            ("prompt_length", "sequence_length"),
            ("val_prompt_length", "val_sequence_length"),
        ):
            if getattr(self, prompt) >= getattr(self, sequence):
                expected = f"less than {sequence} = {getattr(self, sequence)}, to leave room for a response"
                problems.append(wrong(prompt, getattr(self, prompt), expected))
        if 0 < self.async_generation_ratio < 1:
            problems.append(
                wrong("async_generation_ratio", self.async_generation_ratio, "0, or at least 1")
            )
        problems += division_problems(self.batch_plans().values(), "rollout_batch_size")
        data_args = self.actor_train.data_args
        shares = (data_args.domain_interleave_probs if data_args else None) or {}
        for domain, share in shares.items():
            if share * self.rollout_batch_size < 1 - 1e-9:
                expected = f"enough prompts for domain {domain} to get one (its share is {share:g})"
                problems.append(wrong("rollout_batch_size", self.rollout_batch_size, expected))
        return problems + self._reward_problems()

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

    def _reward_problems(self) -> list[Problem]:
        problems = []
        seen: dict[str, str] = {}
        for domain, reward in self.rewards.items():
            if reward.worker_cls is None:
                how = "missing; name a function (reward_fn: my_file.py:score) or the class of a reward (worker_cls)"
                problems.append(Problem(f"rewards.{domain}.reward_fn", how))
            for tag in reward.tag_included:
                if tag in seen:
                    expected = f'tags of one domain only; "{tag}" also belongs to {seen[tag]}'
                    problems.append(wrong(f"rewards.{domain}.tag_included", tag, expected))
                seen[tag] = domain
        shares = (
            self.actor_train.data_args.domain_interleave_probs
            if self.actor_train.data_args
            else None
        ) or {}
        if self.rewards:
            for domain in [domain for domain in shares if domain not in self.rewards]:
                guess = did_you_mean(domain, self.rewards)
                expected = "a domain of rewards: " + ", ".join(self.rewards)
                problems.append(
                    wrong("actor_train.data_args.domain_interleave_probs", domain, expected, guess)
                )
        return problems

    def all_roles(self) -> dict[str, WorkerConfig]:
        roles: dict[str, WorkerConfig] = super().all_roles()
        roles |= {f"reward-{domain}": reward for domain, reward in self.rewards.items()}
        optional = {"reward_model": self.reward_model, "validation": self.validation}
        return roles | {name: role for name, role in optional.items() if role is not None}

    def key_of(self, role_name: str) -> str:
        return (
            role_name.replace("reward-", "rewards.", 1)
            if role_name.startswith("reward-")
            else role_name
        )

    def active_roles(self) -> dict[str, WorkerConfig]:
        return {name: role for name, role in super().active_roles().items() if name != "validation"}

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        judges = [
            name for name, role in self.all_roles().items() if "reward" in name and role.holds_model
        ]
        return super().allowed_strategies() | dict.fromkeys(judges, (*INFER_STRATEGIES, "vllm"))

    def missing_for_training(self) -> list[Problem]:
        problems = super().missing_for_training()
        if self.is_replay:
            return problems
        if self.actor_train.data_args is None or not self.actor_train.data_args.files:
            problems.append(
                Problem("actor_train.data_args.file_name", "missing; name the file of prompts")
            )
        if self.validation is not None and not (
            self.validation.data_args and self.validation.data_args.files
        ):
            problems.append(
                Problem("validation.data_args.file_name", "missing; name the file of prompts")
            )
        if not self.rewards:
            problems.append(
                Problem("rewards", "missing; say how responses are scored, one entry per domain")
            )
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
    def template(self) -> str:
        """The chat template in effect, for rows whose tag has none of its own."""
        data_args = self.actor_train.data_args
        return self.global_template or (data_args.template if data_args else None) or "native"

    @property
    def domain_2_tag(self) -> dict[str, set[str]]:
        """Tags that each domain's reward judges."""
        return {domain: set(reward.tag_included) for domain, reward in self.rewards.items()}

    @property
    def tag_2_domain(self) -> dict[str, str]:
        """Domain whose reward judges a tag."""
        return {
            tag: domain for domain, reward in self.rewards.items() for tag in reward.tag_included
        }
