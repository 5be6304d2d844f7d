"""What the two pipelines that learn from rewards share: roles, rewards, advantages and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from roll.algorithms.estimators import ESTIMATORS, Estimator, RewardNorm, get_estimator
from roll.algorithms.surrogates import POLICY_LOSSES, get_policy_loss
from roll.configs.batch_plan import BatchPlan
from roll.configs.config_model import (
    UNUSED_IN_ROLL,
    AtLeastOne,
    AtLeastZero,
    Fraction,
    NonNegative,
    Number,
    Positive,
)
from roll.configs.generating_args import GeneratingArguments
from roll.configs.option_groups import TrainInferCorrectionConfig
from roll.configs.pipeline_config import BaseConfig
from roll.configs.problems import ConfigProblems, Problem, did_you_mean, wrong
from roll.configs.worker_config import (
    GENERATE_STRATEGIES,
    INFER_STRATEGIES,
    TRAIN_STRATEGIES,
    WorkerConfig,
    is_actor_infer_overlapping_with_any_cluster,
)

ASYNC_CONCURRENCY = 1000  # Ray's own default for workers with async methods


class PPOConfig(BaseConfig):
    """A pipeline that generates, scores and learns from the scores: roles, rewards, advantages and losses."""

    ignored_keys: ClassVar[frozenset[str]] = BaseConfig.ignored_keys | {
        "reward_norm",
        "reward_shift",
        "reward_scale",
    }

    # roles

    pretrain: str | None = None
    """Model of every role that names none."""

    reward_pretrain: str | None = None
    """Model of the critic, if it names none; `pretrain` if left out."""

    actor_train: WorkerConfig = Field(default_factory=WorkerConfig)
    """Trains the policy."""

    actor_infer: WorkerConfig = Field(default_factory=WorkerConfig)
    """Generates with the policy."""

    critic: WorkerConfig = Field(default_factory=WorkerConfig)
    """Trains the value model; started for `adv_estimator: gae`."""

    reference: WorkerConfig = Field(default_factory=WorkerConfig)
    """The policy before training."""

    reward: WorkerConfig | None = Field(default_factory=WorkerConfig)
    """A reward model."""

    async_generation_ratio: NonNegative = 0.0
    """Batches that generation may run ahead of training; 0 takes turns."""

    log_samples_per_step: AtLeastZero | None = 16
    """Samples of a step that are written to the run's `rollouts/`, for the report; null writes all, 0 none."""

    # optimisation

    ppo_epochs: AtLeastOne = 1
    """Passes of the policy over a batch."""

    max_grad_norm: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down."""

    l2: Annotated[Number, UNUSED_IN_ROLL] = 0.0
    """L2 penalty."""

    critic_warmup: AtLeastZero = 0
    """Pipeline steps in which only the critic is trained."""

    # policy loss

    pg_clip: Annotated[Number, Field(ge=0, lt=1)] | None = 0.2
    """The probability ratio is clipped to 1 - pg_clip and 1 + pg_clip."""

    use_pg_clip_range: bool = False
    """Clip to 1 - pg_clip_low and 1 + pg_clip_high instead."""

    pg_clip_low: Annotated[Number, Field(ge=0, lt=1)] = 0.2
    """Lower side of the clip."""

    pg_clip_high: NonNegative = 0.2
    """Upper side of the clip."""

    dual_clip_loss: bool = False
    """Bound the loss of tokens with a negative advantage."""

    dual_clip_c: Annotated[Number, Field(gt=1)] | None = None
    """That bound, as a multiple of the advantage; null is 1 + 2 * pg_clip."""

    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""

    kl_loss_coef: NonNegative = 0.0
    """Weight of that divergence."""

    kl_loss_type: Literal["k3", "low_var_kl", "k2", "mse", "abs", "k3+"] = "k3"
    """Its estimator. On-policy, `k3` has the gradient of KL(reference, policy), `k2` and `k3+` that of the reverse."""

    entropy_loss_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""

    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"
    """How token losses become one number; all counts are those of the whole optimizer step."""

    loss_norm_factor: Positive | None = None
    """The constant of `seq-mean-token-sum-norm`; null is the padded length."""

    value_clip: NonNegative | None = None
    """Largest change of a value that the critic's loss rewards; null does not clip."""

    # KL penalty in the reward

    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "k3", "low_var_kl"] = "kl"
    """Estimator of the divergence from the reference in the reward; `kl_loss_type` is that in the loss."""

    target_kl: Positive | None = None
    """Divergence that an adaptive penalty aims at; null keeps the penalty fixed."""

    init_kl_coef: NonNegative = 0.2
    """Weight of the penalty at the start; above 0 a reference is started."""

    kl_horizon: AtLeastOne = 10000
    """Samples over which an adaptive penalty reacts."""

    add_token_level_kl: bool = False
    """Subtract the penalty from the reward of each token."""

    # rewards and advantages

    use_reward_scaling: Annotated[bool, UNUSED_IN_ROLL] = False
    """Scale rewards."""

    add_len_reward: Annotated[bool, UNUSED_IN_ROLL] = False
    """Reward length."""

    use_reward_norm: Annotated[bool, UNUSED_IN_ROLL] = False
    """Normalise rewards."""

    reward_clip: NonNegative | None = None
    """Rewards are clipped to plus and minus this; null or 0 does not clip."""

    whiten_rewards: bool = False
    """Whiten the token rewards of a batch."""

    whiten_advantages: bool = False
    """Whiten the advantages of a batch."""

    advantage_clip: Positive | None = None
    """Advantages are clipped to plus and minus this; null does not clip."""

    adv_estimator: str = Field("gae", examples=list(ESTIMATORS))
    """How rewards become advantages: one of these names, or the dotted path of an `Estimator` of your own."""

    lambd: Fraction = 0.95
    """Lambda of generalised advantage estimation."""

    gamma: Fraction = 1.0
    """Discount per token."""

    norm_mean_type: Literal["batch", "group", "running"] | None = None
    """Over what the mean is taken that is subtracted from rewards; null subtracts none."""

    norm_std_type: Literal["batch", "group", "running"] | None = None
    """Over what the standard deviation is taken that rewards are divided by; null divides by none."""

    # reference and old log-probabilities

    enable_reference: bool = False
    """Compute log-probabilities under the reference; on whenever `use_kl_loss` or `init_kl_coef` needs them."""

    enable_old_logprobs_recompute: bool = False
    """Compute the policy's log-probabilities before training; on whenever a batch takes several optimizer steps."""

    force_disable_old_logprobs_recompute: bool = False
    """Never compute them."""

    log_probs_at_sampling_temperature: bool = True
    """Divide the logits by the sampling temperature in training too, so that both speak of one distribution."""

    train_infer_correction: TrainInferCorrectionConfig = Field(
        default_factory=TrainInferCorrectionConfig
    )
    """What is done about the difference between sampling and training."""

    first_ratio_tolerance: NonNegative | None = None
    """Largest mean of |ratio - 1| at a step's first update before the run stops; null is 0.001 (bf16: 0.05), 0 off."""

    default_worker_cls: ClassVar[dict[str, str]] = {
        "actor_train": "roll.pipeline.base_worker.ActorWorker",
        "actor_infer": "roll.pipeline.base_worker.InferWorker",
        "reference": "roll.pipeline.base_worker.ActorWorker",
        "critic": "roll.pipeline.base_worker.CriticWorker",
    }

    @field_validator("kl_penalty", "kl_loss_type", mode="before")
    @classmethod
    def _refuse_estimators(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "full":
            raise ValueError(
                "it needs the probabilities of the whole vocabulary under both models, and only those of the sampled "
                "tokens are computed; k3 comes nearest: unbiased and never negative"
            )
        if value in ("kl", "k1") and info.field_name == "kl_loss_type":
            raise ValueError(
                "as a loss its gradient does not depend on the reference, and is 0 in the mean: nothing would hold the "
                "policy; k2 and k3+ have the gradient of the divergence"
            )
        return value

    @field_validator("adv_estimator")
    @classmethod
    def _known_estimator(cls, value: str) -> str:
        try:
            get_estimator(value)
        except ValueError as error:
            expected = f"the dotted path of an Estimator, or one of {', '.join(ESTIMATORS)}"
            fix = str(error.__cause__ or "") or did_you_mean(value, ESTIMATORS)
            raise ConfigProblems([wrong("", value, expected, fix)]) from None
        return value

    def _settle_roles(self) -> None:
        super()._settle_roles()
        infer = self.actor_infer
        sampling = (infer.generating_args or GeneratingArguments()).model_copy(
            update={"num_return_sequences": self.samples_per_prompt}
        )
        concurrency = max(infer.max_concurrency, self.max_running_requests + 1, ASYNC_CONCURRENCY)
        self._change_role("actor_infer", generating_args=sampling, max_concurrency=concurrency)
        self.settle(
            enable_reference=self.enable_reference or self.use_kl_loss or self.init_kl_coef > 0,
            enable_old_logprobs_recompute=self._needs_old_logprobs(),
        )

    def default_model(self, role_name: str) -> str | None:
        return (self.reward_pretrain or self.pretrain) if role_name == "critic" else self.pretrain

    def _needs_old_logprobs(self) -> bool:
        if self.ratio_is_to_sampler:  # the column is the sampler's, so there is nothing to compute
            return True
        if self.force_disable_old_logprobs_recompute:
            return False
        rows_per_rank = (
            self.rollout_batch_size * self.samples_per_prompt // self.actor_train.dp_size
        )
        several_steps = rows_per_rank // self.actor_train.rows_per_optimizer_step > 1
        needed = self.estimator.rows_are_turns or several_steps or self.init_kl_coef > 0
        # With async_pipeline the policy that samples is not the one that is trained, so the loss needs both.
        return needed or self.async_pipeline or self.enable_old_logprobs_recompute

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.async_pipeline and self.generate_opt_level != 1:
            expected = "1, because async_generation_ratio is above 0"
            problems.append(wrong("generate_opt_level", self.generate_opt_level, expected))
        if self.async_pipeline and self.backend == "local":
            expected = '"ray" or "auto", because roles in one process take turns and async_generation_ratio is above 0'
            problems.append(wrong("backend", "local", expected))
        if self.pg_clip is None and not self.use_pg_clip_range:
            problems.append(wrong("pg_clip", None, "a number, because use_pg_clip_range is off"))
        if self.critic_warmup >= self.max_steps:
            expected = f"less than max_steps = {self.max_steps}, or the policy is never trained"
            problems.append(wrong("critic_warmup", self.critic_warmup, expected))
        if self.loss_norm_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            expected = f"null, because loss_agg_mode {self.loss_agg_mode} does not use it"
            problems.append(wrong("loss_norm_factor", self.loss_norm_factor, expected))
        return problems

    def cautions(self) -> list[str]:
        return [*super().cautions(), *self._norm_cautions(), *self._ratio_cautions()]

    def _norm_cautions(self) -> list[str]:
        norms = self.estimator.reward_norm
        written = {"norm_mean_type": self.norm_mean_type, "norm_std_type": self.norm_std_type}
        return [] if norms is None else self._overridden_norms(written, norms)

    def _overridden_norms(self, written: Mapping[str, str | None], norms: RewardNorm) -> list[str]:
        """One sentence about the keys that ask for another normalisation of rewards than the estimator's own."""
        pairs = zip(written.items(), norms, strict=True)
        keys = [f"{key}: {value}" for (key, value), norm in pairs if value not in (None, norm)]
        mean, std = (norm or "none" for norm in norms)
        rule = f"adv_estimator: {self.adv_estimator} normalises rewards by its own rule (mean: {mean}, std: {std})"
        return [f"without effect: {', '.join(keys)}; {rule}"] if keys else []

    def _ratio_cautions(self) -> list[str]:
        """A ratio that tokens share passes on the mean of their advantages, which is news where they differ."""
        key = "ratio_type" if "ratio_type" in type(self).model_fields else "importance_sampling"
        scope = getattr(self, key, "token")
        by_turn = scope == "segment" and self.estimator.turn_advantages
        if (
            scope not in ("seq", "segment")
            or by_turn
            or not getattr(get_policy_loss(self.actor_train.pg_variant), "through_ratio", False)
        ):
            return []
        differ = {
            f"adv_estimator: {self.adv_estimator}": self.estimator.needs_values,
            f"add_token_level_kl: true with init_kl_coef: {self.init_kl_coef:g}": (
                self.add_token_level_kl and self.init_kl_coef > 0
            ),
            f"gamma: {self.gamma:g}": self.gamma < 1,
            "whiten_rewards: true": self.whiten_rewards,
        }
        causes = [cause for cause, is_so in differ.items() if is_so]
        if not causes:
            return []
        unit = "turn" if scope == "segment" else "row"
        return [
            f"{key}: {scope} trains every token on the mean advantage of the {unit}, and {' and '.join(causes)} gives "
            f"tokens advantages of their own; {key}: {scope}_token keeps those"
        ]

    def all_roles(self) -> dict[str, WorkerConfig]:
        roles = {"actor_train": self.actor_train, "actor_infer": self.actor_infer}
        roles |= {"reference": self.reference, "critic": self.critic}
        return roles if self.reward is None else {**roles, "reward": self.reward}

    def active_roles(self) -> dict[str, WorkerConfig]:
        """Without a reference that is not needed or is the policy without its adapter, and without an unused critic. A
        replay of dumped rollouts has only roles that are trained or score: nothing generates, nothing is judged."""
        unused = set()
        if not self.enable_reference or self.actor_train.model_args.is_lora:
            unused.add("reference")
        if not self.estimator.needs_values:
            unused.add("critic")
        used = ("actor_train", "reference", "critic") if self.is_replay else self.all_roles()
        return {
            name: role
            for name, role in self.all_roles().items()
            if name in used and name not in unused
        }

    def allowed_strategies(self) -> dict[str, tuple[str, ...]]:
        return {
            "actor_train": TRAIN_STRATEGIES,
            "actor_infer": GENERATE_STRATEGIES,
            "reference": INFER_STRATEGIES,
            "critic": TRAIN_STRATEGIES,
        }

    def batch_plans(self) -> dict[str, BatchPlan]:
        plans: dict[str, BatchPlan] = {}
        for name, epochs, idle in (
            ("actor_train", self.ppo_epochs, self.critic_warmup),
            ("critic", 1, 0),
        ):
            role = self.active_roles().get(name)
            if role is not None and role.holds_model:
                plans[name] = BatchPlan(
                    role=role,
                    prompts=self.rollout_batch_size,
                    samples_per_prompt=self.samples_per_prompt,
                    sequence_length=self.sequence_length,
                    steps=self.max_steps - idle,
                    epochs=epochs,
                    rows_are_turns=self.rows_are_turns,
                    max_turns=self.max_turns,
                )
        return plans

    def idle_keys(self) -> dict[str, str]:
        idle = super().idle_keys()
        no_critic = f"adv_estimator {self.adv_estimator} has no critic"
        switches: dict[str, tuple[str, bool]] = {
            "pg_clip_low": ("use_pg_clip_range is off", self.use_pg_clip_range),
            "pg_clip_high": ("use_pg_clip_range is off", self.use_pg_clip_range),
            "dual_clip_c": ("dual_clip_loss is off", self.dual_clip_loss),
            "kl_loss_coef": ("use_kl_loss is off", self.use_kl_loss),
            "target_kl": ("add_token_level_kl is off", self.add_token_level_kl),
            "kl_horizon": ("target_kl is null", self.target_kl is not None),
            "lambd": (no_critic, self.estimator.needs_values),
            "value_clip": (no_critic, self.estimator.needs_values),
            "critic_warmup": (no_critic, self.estimator.needs_values),
        }
        idle |= {
            key: why
            for key, (why, is_on) in switches.items()
            if self._is_written(key) and not is_on
        }
        role, used = self.actor_train, get_policy_loss(self.actor_train.pg_variant)
        for loss in POLICY_LOSSES.values():
            for key in getattr(loss, "config_keys", {}).values():
                is_changed = getattr(role, key) != WorkerConfig.model_fields[key].default
                if loss is not used and key in role.model_fields_set and is_changed:
                    idle[f"actor_train.{key}"] = f"pg_variant is {role.pg_variant or 'ppo'}"
        return idle

    @property
    def estimator(self) -> Estimator:
        return get_estimator(self.adv_estimator)

    @property
    def execution_backend(self) -> Literal["local", "ray"]:
        """Where workers run, decided: also on Ray where generation goes on while the policy is trained."""
        return (
            "ray" if self.async_pipeline and self.backend == "auto" else super().execution_backend
        )

    @property
    def samples_per_prompt(self) -> int:
        return 1

    @property
    def rows_are_turns(self) -> bool:
        """Whether a trajectory becomes one row per turn, so that their number is known only after generation."""
        return False

    @property
    def max_turns(self) -> int | None:
        """Longest trajectory in turns, if the config says."""
        return None

    @property
    def log_prob_temperature(self) -> float:
        """What the trained roles divide logits by; 1 where samples are the most likely tokens."""
        sampling = self.actor_infer.generating_args
        if not self.log_probs_at_sampling_temperature or sampling is None or not sampling.do_sample:
            return 1.0
        return sampling.temperature or 1.0

    @property
    def advantage_settings(self) -> dict[str, Any]:
        """What the estimator of advantages is told, under the names of `compute_advantage`'s arguments."""
        names = (
            "gamma",
            "lambd",
            "adv_estimator",
            "advantage_clip",
            "whiten_advantages",
            "whiten_rewards",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def async_pipeline(self) -> bool:
        return self.async_generation_ratio > 0

    @property
    def max_staleness(self) -> int:
        """Steps that the oldest token of a sample may be behind the step that trains on it: those that generation runs
        ahead, and those that the weights of `actor_infer` are behind themselves."""
        return math.ceil(self.async_generation_ratio) + self.actor_infer.model_update_frequency - 1

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance weights or filters treat the gap between sampling and training."""
        correction = self.train_infer_correction
        return correction.is_weight.enabled or any(item.enabled for item in correction.filters)

    @property
    def ratio_is_to_sampler(self) -> bool:
        """Whether the loss takes its ratio against the policies that sampled: they may be older than the one before
        this step's updates, and nothing else corrects for that."""
        return self.async_pipeline and not self.corrects_sampling

    @property
    def ratio_tolerance(self) -> float | None:
        """`first_ratio_tolerance` in effect; None never stops: a correction of the gap is on, or samples are stale."""
        if self.corrects_sampling or self.async_pipeline or self.first_ratio_tolerance == 0:
            return None
        if self.first_ratio_tolerance is not None:
            return self.first_ratio_tolerance
        roles = (self.actor_train, self.actor_infer)
        return 1e-3 if all(role.model_args.dtype == "fp32" for role in roles) else 5e-2

    @property
    def is_replay(self) -> bool:
        """Whether rollouts come from a dump, so that nothing generates and nothing is scored."""
        return (
            self.rollout_mock is not None
            and self.rollout_mock.enable
            and self.rollout_mock.mode == "mock"
        )

    @property
    def is_dump(self) -> bool:
        """Whether rollouts are dumped."""
        return (
            self.rollout_mock is not None
            and self.rollout_mock.enable
            and self.rollout_mock.mode == "dump"
        )

    @property
    def reference_configs(self) -> dict[str, WorkerConfig]:
        return {"default": self.reference}

    @property
    def is_actor_infer_colocated(self) -> bool:
        """Whether `actor_infer` shares GPUs with training, reference or critic."""
        return is_actor_infer_overlapping_with_any_cluster(
            self.actor_infer,
            actor_train=self.actor_train,
            reference=self.reference,
            critic=self.critic,
        )
