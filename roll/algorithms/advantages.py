"""Advantage estimators: named combinations of a reward normalisation, a return, and whitening."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.masking import masked_whiten, select
from roll.algorithms.returns import discounted_returns, gae, turn_discounted_returns
from roll.algorithms.rewards import check_clip, clip_symmetric


@dataclass(frozen=True)
class RewardNorm:
    """What the mean and the standard deviation of response-level rewards are taken over; see `normalize_rewards`."""

    mean: str | None
    std: str | None


@dataclass(frozen=True)
class AdvantageEstimator:
    """What an estimator's name stands for."""

    returns: Literal["gae", "token", "turn"]
    """Recurrence over tokens: with a value function, discounted per token, or discounted per turn."""
    reward_norm: RewardNorm | None = None
    """Normalisation of response-level rewards that defines the estimator; None leaves it to the configuration."""
    whiten_advantages: bool = False
    """Whitening over the batch is part of the estimator."""


ADVANTAGE_ESTIMATORS = {
    "gae": AdvantageEstimator("gae"),
    "reinforce": AdvantageEstimator("token"),
    "grpo": AdvantageEstimator("token", RewardNorm("group", "group")),
    # Dividing by the group's standard deviation favours questions that are nearly always or never solved; Dr. GRPO
    # (arXiv:2503.20783) leaves it out. Its other half is loss_agg_mode seq-mean-token-sum-norm.
    "dr_grpo": AdvantageEstimator("token", RewardNorm("group", None)),
    "rloo": AdvantageEstimator("token", RewardNorm("leave_one_out", None)),
    # REINFORCE++ (arXiv:2501.03262): no baseline per prompt, the batch is the baseline.
    "reinforce_plus_plus": AdvantageEstimator("token", whiten_advantages=True),
    "reinforce_plus_plus_baseline": AdvantageEstimator(
        "token", RewardNorm("group", None), whiten_advantages=True
    ),
    # The rewards of these three are per step or per turn and come from roll.pipeline.agentic.utils.
    "gigpo": AdvantageEstimator("token"),
    "step_reinforce": AdvantageEstimator("token"),
    "agentic_reinforce": AdvantageEstimator("turn"),
}


def get_estimator(name: str) -> AdvantageEstimator:
    """The estimator called `name`; ValueError with the known names otherwise."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise ValueError(
            f"unknown adv_estimator {name!r}; known: {', '.join(ADVANTAGE_ESTIMATORS)}"
        )
    return ADVANTAGE_ESTIMATORS[name]


@dataclass(frozen=True)
class Advantages:
    """All tensors (B, T), 0 where masked."""

    advantages: Tensor
    returns: Tensor
    raw_advantages: Tensor
    """Before whitening and clipping."""
    rewards: Tensor
    """The token-level rewards that were used: masked, and whitened if asked for."""
    clip_frac: float
    """Share of the valid tokens whose advantage was clipped."""


def compute_advantages(
    *,
    rewards: Tensor,
    mask: Tensor,
    estimator: str,
    gamma: float,
    lam: float,
    values: Tensor | None = None,
    whiten_rewards: bool = False,
    whiten_advantages: bool = False,
    clip: float | None = None,
) -> Advantages:
    """Token-level rewards to advantages and returns. `rewards`, `mask`, `values`: (B, T); `values` for `gae` only.

    Whitening is over all valid tokens of the batch and is skipped for fewer than two. Whitening rewards also centres
    them, so that tokens without a reward get a negative one: with a single reward at the end, long responses lose.
    """
    preset = get_estimator(estimator)
    check_clip(clip, "advantage_clip")
    rewards = masked_whiten(rewards, mask) if whiten_rewards else select(rewards, mask)
    if preset.returns == "gae":
        if values is None:
            raise ValueError(f"adv_estimator {estimator!r} needs values")
        raw, returns = gae(rewards, values, mask, gamma, lam)
    elif preset.returns == "turn":
        raw = turn_discounted_returns(rewards, mask, gamma)
        returns = raw.clone()  # no two results share memory
    else:
        raw = discounted_returns(rewards, mask, gamma)
        returns = raw.clone()
    advantages = (
        masked_whiten(raw, mask) if whiten_advantages or preset.whiten_advantages else raw.clone()
    )
    advantages, clip_frac = clip_symmetric(advantages, clip, mask)
    return Advantages(advantages, returns, raw, rewards, clip_frac)
