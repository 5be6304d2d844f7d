"""Choices with partial credit for a boxed answer; see `choice_answers`."""

from __future__ import annotations

from typing import Any

from roll.configs.base import wrong
from roll.exceptions import ConfigError
from roll.pipeline.rlvr.rewards.choice_answers import CROSSTHINK_REWARDS
from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker
from roll.utils.scoring.score import Score


class CrossThinkQARuleRewardWorker(PoolRewardWorker):
    """Scores are 1 or 0; rewards go from -1.5 to 1 by `reward_type` (loose, soft, strict), less what is repeated.

    `response_length_penalty_coef` is a penalty for each token, as everywhere here. (ROLL's reward for length looks at
    the padded width of the batch.)
    """

    function = "roll.pipeline.rlvr.rewards.choice_answers:crossthink_score"

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {"reward_type": reward_config.reward_type}

    @classmethod
    def reward_of(cls, score: Score) -> float | None:
        return None if score.value is None else score.parts["answer"] + score.parts["repetition"]

    @classmethod
    def check(cls, reward_config: Any) -> None:
        if reward_config.reward_type not in CROSSTHINK_REWARDS:
            expected = "one of " + ", ".join(CROSSTHINK_REWARDS)
            raise ConfigError(str(wrong("reward_type", reward_config.reward_type, expected)))
        super().check(reward_config)
