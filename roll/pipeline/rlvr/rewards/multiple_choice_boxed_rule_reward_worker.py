r"""Multiple choice: the letter in the last `\boxed{...}`; see `choice_answers`."""

from __future__ import annotations

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class MultipleChoiceBoxedRuleRewardWorker(PoolRewardWorker):
    """1 for the right choice, 0 for a wrong one or none."""

    function = "roll.pipeline.rlvr.rewards.choice_answers:score"
