"""Advantage estimators: how rewards become advantages. The only place that knows them by name.

`adv_estimator` in a config is a key of ESTIMATORS or the dotted path of an `Estimator` in a module
of your own (docs/custom-estimator.md). All other modules ask the object for its properties. Configs
do too, so this one imports no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RewardNorm(NamedTuple):
    """What mean and standard deviation of rewards are taken over; see `normalize_rewards`."""

    mean: str | None
    std: str | None


def token_returns(
    rewards_BT: Tensor, mask_BT: Tensor, values_BT: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Discounted per token; the return is the advantage."""
    from roll.algorithms.advantages import discounted_returns

    returns_BT = discounted_returns(rewards_BT, mask_BT, gamma)
    return returns_BT, returns_BT.clone()  # no two results share memory


def turn_returns(
    rewards_BT: Tensor, mask_BT: Tensor, values_BT: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Discounted per turn; the return is the advantage."""
    from roll.algorithms.advantages import turn_discounted_returns

    returns_BT = turn_discounted_returns(rewards_BT, mask_BT, gamma)
    return returns_BT, returns_BT.clone()


def generalised_advantages(
    rewards_BT: Tensor, mask_BT: Tensor, values_BT: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, with the values of a critic."""
    from roll.algorithms.advantages import gae

    assert values_BT is not None
    return gae(rewards_BT, values_BT, mask_BT, gamma, lam)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """What an estimator does and what it needs. All tensors of tokens are (B, T)."""

    advantages: Callable[..., tuple[Tensor, Tensor]] = token_returns
    """(rewards_BT, mask_BT, values_BT, gamma, lam) -> (advantages_BT, returns_BT)."""
    reward_norm: RewardNorm | None = None
    """Normalisation of the responses' rewards; None leaves it to the config."""
    group_rewards: Callable[[Tensor, Tensor], Tensor] | None = None
    """(rewards_B, groups_B) -> rewards_B: a rule that `reward_norm` cannot say; it replaces it."""
    needs_values: bool = False
    """A critic is trained, and its values are given to `advantages`."""
    whiten_advantages: bool = False
    """Whitening of the advantages over the batch is part of the estimator."""
    turn_advantages: bool = False
    """All tokens of a turn have one advantage."""
    rows_are_turns: bool = False
    """A row of an environment is one turn, with the discounted `step_rewards` as its reward."""
    adds_episode_reward: bool = False
    """The normalised reward of the episode is added to that of the turn, which is normalised among
    the rows that were in the same state."""
    trajectories_by_config: bool = False
    """Rows of environments follow `reward_normalization` in spite of `reward_norm`, as in ROLL."""

    @property
    def compares_group(self) -> bool:
        """Whether a reward is measured by those of the same group."""
        scopes = self.reward_norm or ()
        return self.group_rewards is not None or "group" in scopes or "leave_one_out" in scopes

    def trajectory_norm(self) -> RewardNorm | None:
        """`reward_norm` for rows of environments."""
        return None if self.trajectories_by_config else self.reward_norm


ESTIMATORS = {
    "gae": Estimator(advantages=generalised_advantages, needs_values=True),
    "reinforce": Estimator(),
    "grpo": Estimator(reward_norm=RewardNorm("group", "group"), trajectories_by_config=True),
    # GiGPO (arXiv:2505.10978): turns in the same state are compared, and their episodes.
    "gigpo": Estimator(rows_are_turns=True, adds_episode_reward=True),
    "step_reinforce": Estimator(rows_are_turns=True),
    "agentic_reinforce": Estimator(advantages=turn_returns, turn_advantages=True),
    "rloo": Estimator(reward_norm=RewardNorm("leave_one_out", None)),
    # Dividing by the group's standard deviation favours questions that are nearly always or never
    # solved; Dr. GRPO (arXiv:2503.20783) leaves it out. Its other half is loss_agg_mode
    # seq-mean-token-sum-norm.
    "dr_grpo": Estimator(reward_norm=RewardNorm("group", None)),
    # REINFORCE++ (arXiv:2501.03262): no baseline per prompt, the batch is the baseline.
    "reinforce_plus_plus": Estimator(whiten_advantages=True),
    "reinforce_plus_plus_baseline": Estimator(
        reward_norm=RewardNorm("group", None), whiten_advantages=True
    ),
}


def get_estimator(name: str) -> Estimator:
    """The estimator called `name`, or at that dotted path; ValueError if there is none."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    problem = f"unknown adv_estimator {name!r}; known: {', '.join(ESTIMATORS)}"
    found = by_path(name, problem)
    if not isinstance(found, Estimator):
        raise ValueError(f"{problem}, and it is a {type(found).__name__}, not an Estimator")
    return found


def by_path(name: str, problem: str) -> Any:
    """What stands at a dotted path; a ValueError that begins with `problem` if nothing does."""
    if "." not in name:
        raise ValueError(problem)
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # a module of the user's may raise anything while it is imported
        raise ValueError(f"{problem}, and it cannot be imported: {error}") from error
