"""Benchmarks with one right choice, for validation; see `choice_answers`."""

from __future__ import annotations

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class GeneralValRuleRewardWorker(PoolRewardWorker):
    """1 for the right choice, 0 for a wrong one or none; rows of other tags are dropped."""

    function = "roll.pipeline.rlvr.rewards.choice_answers:general_val_score"
