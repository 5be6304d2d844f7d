"""Instructions whose fulfilment a program can check; see `ifeval_checks`."""

from __future__ import annotations

from typing import Any

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class GeneralRuleRewardWorker(PoolRewardWorker):
    """1 if all instructions of a row are followed; with `reward_type: fraction` the share that is.

    ROLL's files write `reward_type: soft` (or loose, strict) here; as in ROLL they mean 1 or 0, like null.
    """

    function = "roll.pipeline.rlvr.rewards.ifeval_checks:score"
    reward_types = ("fraction", "loose", "soft", "strict")

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {"reward_type": reward_config.reward_type}
