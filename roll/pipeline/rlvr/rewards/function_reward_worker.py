"""A score function of the user's own: `rewards: {math: {reward_fn: my_file.py:score}}`."""

from __future__ import annotations

from typing import Any

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class FunctionRewardWorker(PoolRewardWorker):
    """Scores with the function that `reward_fn` names."""

    @classmethod
    def function_of(cls, reward_config: Any) -> str:
        return reward_config.reward_fn
