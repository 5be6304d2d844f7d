"""Which groups of trajectories are learned from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.group_queue import Filter
from roll.rollout.collate import collate
from roll.rollout.types import Trajectory
from roll.utils.import_utils import import_class

if TYPE_CHECKING:
    from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvManagerConfig


class GroupFilter:
    """Keeps every group. A subclass, named by `group_filter_cls`, may drop some; others are played in their place.

    Args:
        mode: train or val.
    """

    def __init__(
        self, config: AgenticConfig, env_manager_config: EnvManagerConfig, mode: str
    ) -> None:
        self.config, self.env_manager_config, self.mode = config, env_manager_config, mode

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        """True drops the group: `group` has the rows of each trajectory, with `episode_scores`, `step_scores` ..."""
        return False


def make_filter(
    config: AgenticConfig, manager: EnvManagerConfig, mode: str, pad_token_id: int
) -> Filter | None:
    """The configured filter as a function of trajectories; None if it keeps everything."""
    filter_cls: Any = import_class(manager.group_filter_cls)
    if filter_cls is GroupFilter:
        return None
    group_filter = filter_cls(config, manager, mode)

    def drop(group_id: int, episode_id: int, trajectories: Sequence[Trajectory]) -> bool:
        rows = [
            collate([item], pad_token_id, per_turn=config.rows_are_turns) for item in trajectories
        ]
        return bool(group_filter.filter(group_id, episode_id, rows))

    return drop
