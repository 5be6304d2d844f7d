"""Score functions in processes that can be killed; see `roll.utils.scoring.pool`."""

from roll.utils.scoring.pool import ScorePool, check_reward_fn

__all__ = ["ScorePool", "check_reward_fn"]
