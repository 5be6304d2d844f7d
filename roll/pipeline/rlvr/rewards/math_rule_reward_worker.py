"""Mathematical answers, compared by value; see `roll.utils.scoring.math_answers`."""

from __future__ import annotations

from typing import Any

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class MathRuleRewardWorker(PoolRewardWorker):
    """1 for the right answer, 0 for a wrong one; with `format_pattern`, 0 for one that does not match it."""

    function = "roll.utils.scoring.math_answers:score"

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {"format_pattern": reward_config.format_pattern}
