"""What the two pipelines that learn from rewards share: roles, rewards, advantages and losses.

ROLL's import path `roll.configs.base_config` is this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from roll.algorithms.estimators import ESTIMATORS, Estimator, RewardNorm, get_estimator
from roll.algorithms.surrogates import POLICY_LOSSES, get_policy_loss
from roll.configs.arguments import GeneratingArguments
from roll.configs.base import (
    AtLeastOne,
    AtLeastZero,
    BelowOne,
    ConfigModel,
    ConfigProblems,
    Fraction,
    NonNegative,
    Number,
    Positive,
    Problem,
    Unread,
    did_you_mean,
    wrong,
)
from roll.configs.batch_plan import BatchPlan
from roll.configs.pipeline_config import BaseConfig
from roll.configs.worker_config import (
    GENERATE_STRATEGIES,
    INFER_STRATEGIES,
    TRAIN_STRATEGIES,
    WorkerConfig,
)

ASYNC_CONCURRENCY = 1000  # Ray's own default for workers with async methods
Granularity = Literal["token", "segment", "geometric", "sequence"]
RouterArguments = ScheduleConfig = TransferBackendArguments = Unread


class RolloutMockConfig(ConfigModel):
    """Record rollouts, or replay recorded ones, to compare two runs on the same data."""

    enable: bool = False
    """Record or replay."""

    mode: Literal["dump", "mock"] = "dump"
    """`dump` records, `mock` replays."""

    dump_dir: str = "./rollout_mock_dumps"
    """Folder of the recorded batches."""


class TrainInferISWeightConfig(ConfigModel):
    """Weights that correct for sampling with slightly other probabilities than those trained on."""

    enabled: bool = False
    """Multiply the policy loss by the weights."""

    weight_type: Granularity = "token"
    """Tokens that share one ratio: each, a run of response tokens, the sequence (mean or sum)."""

    upper_bound: Positive | None = 1.2
    """Largest weight; null leaves weights as they are."""

    detach: bool = True
    """Send no gradient through the weights."""


class TrainInferFilterConfig(ConfigModel):
    """Leaves out tokens whose training and sampling probabilities are too far apart."""

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
                expected = f"at most {kind}_high = {high:g}"
                problems.append(wrong(f"{kind}_low", low, expected, "no token would be kept"))
        if problems:
            raise ConfigProblems(problems)
        return self


class TrainInferCorrectionConfig(ConfigModel):
    """What is done about the difference between the probabilities of sampling and of training."""

    is_weight: TrainInferISWeightConfig = Field(default_factory=TrainInferISWeightConfig)
    """Importance weights."""

    filters: list[TrainInferFilterConfig] = Field(default_factory=list)
    """Filters, all of which a token has to pass."""


class PPOConfig(BaseConfig):
    """A pipeline that generates, scores and learns from the scores."""

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
    """Trains the value model; started for an `adv_estimator` that needs values, such as gae."""

    reference: WorkerConfig = Field(default_factory=WorkerConfig)
    """The policy before training."""

    async_generation_ratio: NonNegative = 0.0
    """Batches that generation may run ahead of training; 0 takes turns."""

    log_samples_per_step: AtLeastZero | None = 16
    """Samples of a step that the run's `rollouts/` gets, for the report; null is all, 0 none."""

    rollout_batch_size: AtLeastOne = 128
    """Prompts (RLVR) or trajectories (agentic) of a pipeline step."""

    rollout_dump_dir: str | None = None
    """Folder that gets every sample with its reward; null writes none."""

    rollout_mock: RolloutMockConfig | None = None
    """Record or replay rollouts."""

    # optimisation

    ppo_epochs: AtLeastOne = 1
    """Passes of the policy over a batch."""

    max_grad_norm: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down."""

    critic_warmup: AtLeastZero = 0
    """Pipeline steps in which only the critic is trained."""

    # policy loss

    pg_clip: BelowOne | None = 0.2
    """The probability ratio is clipped to 1 - pg_clip and 1 + pg_clip."""

    use_pg_clip_range: bool = False
    """Clip to 1 - pg_clip_low and 1 + pg_clip_high instead."""

    pg_clip_low: BelowOne = 0.2
    """Lower side of the clip."""

    pg_clip_high: NonNegative = 0.2
    """Upper side of the clip."""

    dual_clip_loss: bool = False
    """Bound the loss of tokens with a negative advantage."""

    dual_clip_c: Annotated[Number, Field(gt=1)] | None = None
    """Largest loss with `dual_clip_loss`, in multiples of the advantage; null: 1 + 2 * pg_clip."""

    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""

    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL divergence in the loss."""

    kl_loss_type: Literal["k3", "low_var_kl", "k2", "mse", "abs", "k3+"] = "k3"
    """KL estimator of the loss; the gradient of `k2` and `k3+` is that of KL(policy, reference)."""

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
    """KL estimator of the penalty in the reward; `kl_loss_type` is that of the loss."""

    target_kl: Positive | None = None
    """Divergence that an adaptive penalty aims at; null keeps the penalty fixed."""

    init_kl_coef: NonNegative = 0.2
    """Weight of the penalty at the start; above 0 a reference is started."""

    kl_horizon: AtLeastOne = 10000
    """Samples over which an adaptive penalty reacts."""

    add_token_level_kl: bool = False
    """Subtract the penalty from the reward of each token."""

    # rewards and advantages

    reward_clip: NonNegative | None = None
    """Rewards are clipped to plus and minus this; null or 0 does not clip."""

    whiten_rewards: bool = False
    """Whiten the token rewards of a batch."""

    whiten_advantages: bool = False
    """Whiten the advantages of a batch."""

    advantage_clip: Positive | None = None
    """Advantages are clipped to plus and minus this; null does not clip."""

    adv_estimator: str = Field("gae", examples=list(ESTIMATORS))
    """How rewards become advantages: a name, or the dotted path of an `Estimator` of your own."""

    lambd: Fraction = 0.95
    """Lambda of generalised advantage estimation."""

    gamma: Fraction = 1.0
    """Discount per token."""

    norm_mean_type: Literal["batch", "group", "running"] | None = None
    """Over what the mean is taken that is subtracted from rewards; null: none."""

    norm_std_type: Literal["batch", "group", "running"] | None = None
    """Over what the standard deviation is taken that rewards are divided by; null: none."""

    # reference and old log-probabilities

    enable_reference: bool = False
    """Compute log-probs under the reference; on if `use_kl_loss` or `init_kl_coef` needs them."""

    enable_old_logprobs_recompute: bool = False
    """Compute the policy's log-probs before training; on if a batch takes several updates."""

    force_disable_old_logprobs_recompute: bool = False
    """Never compute the policy's log-probs before training."""

    log_probs_at_sampling_temperature: bool = True
    """Divide the logits by the sampling temperature in training too: one distribution for both."""

    train_infer_correction: TrainInferCorrectionConfig = Field(
        default_factory=TrainInferCorrectionConfig
    )
    """What is done about the difference between sampling and training."""

    first_ratio_tolerance: NonNegative | None = None
    """Mean |ratio - 1| of a first update that stops the run; null: 0.001 (bf16 0.05), 0: off."""

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
                "it needs the probabilities of the whole vocabulary under both models, and only "
                "those of the sampled tokens are computed; k3 comes nearest: unbiased and never "
                "negative"
            )
        if value in ("kl", "k1") and info.field_name == "kl_loss_type":
            raise ValueError(
                "as a loss its gradient does not depend on the reference, and is 0 in the mean: "
                "nothing would hold the policy; k2 and k3+ have the gradient of the divergence"
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
        infer, actor = self.actor_infer, self.actor_train
        sampling = (infer.generating_args or GeneratingArguments()).model_copy(
            update={"num_return_sequences": self.samples_per_prompt}
        )
        concurrency = max(infer.max_concurrency, ASYNC_CONCURRENCY)
        self._change_role("actor_infer", generating_args=sampling, max_concurrency=concurrency)
        rows_per_rank = self.rollout_batch_size * self.samples_per_prompt // actor.dp_size
        needs_old_logprobs = (
            self.enable_old_logprobs_recompute
            or self.estimator.rows_are_turns
            or rows_per_rank // actor.rows_per_optimizer_step > 1
            or self.init_kl_coef > 0
            # The policy that samples is not the one that is trained, so the loss needs both.
            or self.async_pipeline
        )
        if self.force_disable_old_logprobs_recompute:
            needs_old_logprobs = False
        self.settle(
            enable_reference=self.enable_reference or self.use_kl_loss or self.init_kl_coef > 0,
            # Against the sampler the column is the sampler's: it is there, and costs nothing.
            enable_old_logprobs_recompute=needs_old_logprobs or self.ratio_is_to_sampler,
        )

    def default_model(self, role_name: str) -> str | None:
        return (self.reward_pretrain or self.pretrain) if role_name == "critic" else self.pretrain

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.async_pipeline and self.backend == "local":
            expected = (
                '"ray" or "auto", because roles in one process take turns and '
                "async_generation_ratio is above 0"
            )
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
        written = {"norm_mean_type": self.norm_mean_type, "norm_std_type": self.norm_std_type}
        return self._overridden_norms(written, self.estimator.reward_norm)

    def _overridden_norms(
        self, written: Mapping[str, str | None], norms: RewardNorm | None
    ) -> list[str]:
        """About keys that ask for another normalisation of rewards than the estimator's own."""
        if norms is None:
            return []
        pairs = zip(written.items(), norms, strict=True)
        keys = [f"{key}: {value}" for (key, value), norm in pairs if value not in (None, norm)]
        if not keys:
            return []
        rule = f"(mean: {norms.mean or 'none'}, std: {norms.std or 'none'})"
        estimator = f"adv_estimator: {self.adv_estimator}"
        own = f"{estimator} normalises rewards by its own rule {rule}"
        return [f"without effect: {', '.join(keys)}; {own}"]

    def _ratio_cautions(self) -> list[str]:
        """A ratio that tokens share passes on the mean of their advantages: news if they differ."""
        key = "ratio_type" if "ratio_type" in type(self).model_fields else "importance_sampling"
        scope = getattr(self, key, "token")
        by_turn = scope == "segment" and self.estimator.turn_advantages
        loss = get_policy_loss(self.actor_train.pg_variant)
        through_ratio = getattr(loss, "through_ratio", False)
        if scope not in ("seq", "segment") or by_turn or not through_ratio:
            return []
        causes = []
        if self.estimator.needs_values:
            causes.append(f"adv_estimator: {self.adv_estimator}")
        if self.add_token_level_kl and self.init_kl_coef > 0:
            causes.append(f"add_token_level_kl: true with init_kl_coef: {self.init_kl_coef:g}")
        if self.gamma < 1:
            causes.append(f"gamma: {self.gamma:g}")
        if self.whiten_rewards:
            causes.append("whiten_rewards: true")
        if not causes:
            return []
        unit = "turn" if scope == "segment" else "row"
        return [
            f"{key}: {scope} trains every token on the mean advantage of the {unit}, and "
            f"{' and '.join(causes)} gives tokens advantages of their own; {key}: {scope}_token "
            "keeps those"
        ]

    def all_roles(self) -> dict[str, WorkerConfig]:
        roles = {"actor_train": self.actor_train, "actor_infer": self.actor_infer}
        return roles | {"reference": self.reference, "critic": self.critic}

    def active_roles(self) -> dict[str, WorkerConfig]:
        """Without an unused critic, and without a reference that is unused or is the policy without
        its adapter. A replay of dumped rollouts generates nothing and judges nothing."""
        roles = self.all_roles()
        if not self.enable_reference or self.actor_train.model_args.is_lora:
            del roles["reference"]
        if not self.estimator.needs_values:
            del roles["critic"]
        if self.is_replay:
            trained = ("actor_train", "reference", "critic")
            roles = {name: role for name, role in roles.items() if name in trained}
        return roles

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
        for key, (why, is_on) in switches.items():
            if self._is_written(key) and not is_on:
                idle[key] = why
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
        """Also on Ray where generation goes on while the policy is trained."""
        is_ahead = self.async_pipeline and self.backend == "auto"
        return "ray" if is_ahead else super().execution_backend

    @property
    def samples_per_prompt(self) -> int:
        return 1

    @property
    def rows_are_turns(self) -> bool:
        """Whether a trajectory becomes a row per turn, whose number is known after generation."""
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
        """What `compute_advantage` is told, by the names of its arguments."""
        names = ("gamma", "lambd", "adv_estimator", "advantage_clip")
        names += ("whiten_advantages", "whiten_rewards")
        return {name: getattr(self, name) for name in names}

    @property
    def async_pipeline(self) -> bool:
        return self.async_generation_ratio > 0

    @property
    def max_staleness(self) -> int:
        """Steps that the oldest token of a sample may be behind the step that trains on it.

        Generation runs ahead by some of them, and `actor_infer` itself is behind by the others.
        """
        return math.ceil(self.async_generation_ratio) + self.actor_infer.model_update_frequency - 1

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance weights or filters treat the gap between sampling and training."""
        correction = self.train_infer_correction
        return correction.is_weight.enabled or any(item.enabled for item in correction.filters)

    @property
    def ratio_is_to_sampler(self) -> bool:
        """Whether the loss takes its ratio against the policies that sampled.

        They may be older than the one before this step's updates, with no other correction for it.
        """
        return self.async_pipeline and not self.corrects_sampling

    @property
    def ratio_tolerance(self) -> float | None:
        """`first_ratio_tolerance` in effect; None with a correction of the gap or stale samples."""
        if self.corrects_sampling or self.async_pipeline or self.first_ratio_tolerance == 0:
            return None
        if self.first_ratio_tolerance is not None:
            return self.first_ratio_tolerance
        roles = (self.actor_train, self.actor_infer)
        return 1e-3 if all(role.model_args.dtype == "fp32" for role in roles) else 5e-2

    @property
    def is_replay(self) -> bool:
        """Whether rollouts come from a dump, so that nothing generates and nothing is scored."""
        mock = self.rollout_mock
        return mock is not None and mock.enable and mock.mode == "mock"

    @property
    def is_dump(self) -> bool:
        mock = self.rollout_mock
        return mock is not None and mock.enable and mock.mode == "dump"
