"""Programs, run against test cases; see `code_answers` and `roll.utils.sandbox`."""

from __future__ import annotations

from typing import Any

from roll.pipeline.rlvr.rewards.pool_reward_worker import PoolRewardWorker


class CodeSandboxRewardWorker(PoolRewardWorker):
    """1 if all test cases pass; with `reward_type: fraction` the share that does. `reward_timeout` covers all cases."""

    function = "roll.pipeline.rlvr.rewards.code_answers:score"
    reward_types = ("fraction",)

    @classmethod
    def options_of(cls, reward_config: Any) -> dict[str, Any]:
        return {"reward_type": reward_config.reward_type}
