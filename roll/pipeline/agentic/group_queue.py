"""Which episodes make up a batch: groups of trajectories that start alike, with spare members, retries and a filter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll.rollout.types import Trajectory

MAX_REPLACEMENTS = 10  # episodes that may take the place of one that was dropped

# True drops the group. Arguments: number of the group, of its episode, and its trajectories.
Filter = Callable[[int, int, Sequence[Trajectory]], bool]
IsStale = Callable[[Sequence[Trajectory]], bool]


@dataclass
class Episode:
    """One group's go at one episode: all its environments start from the same seed."""

    group_id: int
    tag: str
    episode_id: int
    group_seed: int
    env_ids: tuple[int, ...]
    attempt: int = 0
    done: dict[int, Trajectory | None] = field(
        default_factory=dict
    )  # None: the environment failed for good
    is_closed: bool = False

    @property
    def seed(self) -> int:
        return derive_seed(self.group_seed, self.episode_id, self.attempt)

    @property
    def traj_group_id(self) -> str:
        again = f"r{self.attempt}" if self.attempt else ""
        return f"{self.tag}_{self.group_id}_{self.episode_id}{again}_{self.group_seed}"

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those that were finished, in the order in which they were."""
        return [trajectory for trajectory in self.done.values() if trajectory is not None]


def derive_seed(*parts: object) -> int:
    """A number below 2^31 that depends on all parts and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class GroupQueue:
    """Episodes that were asked for, and what came of them.

    An episode is over when `group_size` of its environments have finished it, or all have finished or failed. So spare
    environments (`group_size_redundancy`) are not waited for, and failing ones make a group smaller, never late.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        *,
        group_size: int,
        drop: Filter | None = None,
        is_stale: IsStale | None = None,
    ) -> None:
        self.group_size = group_size
        self._drop, self._is_stale = drop, is_stale
        self._todo: dict[int, list[Episode]] = {}
        self._slots: list[Episode] = []
        self.kept: dict[int, Episode] = {}  # by number of the slot
        self.filtered: list[Trajectory] = []
        self.stale: list[Trajectory] = []
        self.num_short = self.num_empty = self.num_filtered = self.num_spare = 0
        for episode in episodes:
            self._slots.append(episode)
            self._hand_out(episode)

    @property
    def is_done(self) -> bool:
        return all(episode.is_closed for episode in self._slots)

    def next_episode(self, env_id: int) -> Episode | None:
        """What an environment that has nothing to do plays next."""
        todo = self._todo.get(env_id, [])
        while todo:
            episode = todo.pop(0)
            if not episode.is_closed:
                return episode
        return None

    def put(self, episode: Episode, env_id: int, trajectory: Trajectory | None) -> None:
        """An environment finished its episode, or (None) failed for good."""
        if episode.is_closed:
            self.num_spare += 1
            return
        episode.done[env_id] = trajectory
        if len(episode.trajectories) >= self.group_size or len(episode.done) == len(
            episode.env_ids
        ):
            self._close(episode)

    def trajectories(self) -> list[Trajectory]:
        """Of all groups that were kept: in the order of the episodes, and within one by environment."""
        return [
            trajectory
            for _, episode in sorted(self.kept.items())
            for trajectory in sorted(
                episode.trajectories[: self.group_size], key=lambda item: item.env_id
            )
        ]

    def _close(self, episode: Episode) -> None:
        episode.is_closed = True
        found = episode.trajectories[: self.group_size]
        slot = next(index for index, other in enumerate(self._slots) if other is episode)
        if not found:
            self.num_empty += 1
            return
        is_stale = self._is_stale is not None and self._is_stale(found)
        drop = None if is_stale else self._drop
        is_filtered = drop is not None and drop(episode.group_id, episode.episode_id, found)
        if is_stale or is_filtered:
            self.num_filtered += is_filtered
            (self.stale if is_stale else self.filtered).extend(found)
            if episode.attempt < MAX_REPLACEMENTS:
                again = Episode(
                    episode.group_id,
                    episode.tag,
                    episode.episode_id,
                    episode.group_seed,
                    episode.env_ids,
                    episode.attempt + 1,
                )
                self._slots[slot] = again
                self._hand_out(again)
            return
        self.num_short += len(found) < self.group_size
        self.kept[slot] = episode

    def _hand_out(self, episode: Episode) -> None:
        for env_id in episode.env_ids:
            self._todo.setdefault(env_id, []).append(episode)
