"""Groups from environments: many episodes at once, and all that are ready are answered in one call.

Each round sends all actions to the environments, waits for their replies (for slow ones at most
`env_wait` seconds), and asks the policy for the next responses of all environments that replied.
What is sampled depends on the config's seed, the step, and the place of the trajectory in the
batch; not on time, nor on other environments.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from roll.datasets.chat_template import get_chat_template
from roll.distributed.scheduler.protocol import DataProto
from roll.engines.request import SamplingParams
from roll.pipeline.agentic.env import entry_point_of
from roll.pipeline.agentic.env_host import LOST, EnvCall, EnvReply, EnvSpec
from roll.pipeline.agentic.env_manager import BaseEnvManager, Conversation, DriftMonitor, EnvEntry
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, TurnRequest, create_llm_proxy
from roll.rollout.buffer import STALE, Buffer, is_stale, staleness_metrics
from roll.rollout.collate import collate
from roll.rollout.metrics import validation_metrics
from roll.rollout.types import Dropped, Group, Rollout, Trajectory
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.distributed.executor.cluster import Cluster
    from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvManagerConfig

logger = get_logger(__name__)

MAX_REPLACEMENTS = 10  # episodes that may take the place of one that was dropped
PROMPT_TOO_LONG, GENERATION = "prompt_too_long", "generation"

# Why a group is dropped, None to keep it. Arguments: its number, that of its episode, its members.
Filter = Callable[[int, int, Sequence[Trajectory]], str | None]


class GroupFilter:
    """Keeps every group. A subclass, named by `group_filter_cls`, may drop some; others are played
    in their place.

    Args:
        mode: train or val.
    """

    def __init__(
        self, config: AgenticConfig, env_manager_config: EnvManagerConfig, mode: str
    ) -> None:
        self.config, self.env_manager_config, self.mode = config, env_manager_config, mode

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        """True drops the group: `group` has the rows of each trajectory, with `episode_scores`,
        `step_scores` ..."""
        return False


@dataclass
class Episode:
    """One group's go at one episode: all its environments start from the same seed.

    Attributes:
        attempt: how many before it were dropped and replaced.
        done: by environment; None if it failed for good.
    """

    group_id: int
    tag: str
    episode_id: int
    group_seed: int
    env_ids: tuple[int, ...]
    attempt: int = 0
    done: dict[int, Trajectory | None] = field(default_factory=dict)
    is_closed: bool = False

    @property
    def seed(self) -> int:
        return derive_seed(self.group_seed, self.episode_id, self.attempt)

    @property
    def traj_group_id(self) -> str:
        again = f"r{self.attempt}" if self.attempt else ""
        return f"{self.tag}_{self.group_id}_{self.episode_id}{again}_{self.group_seed}"


def derive_seed(*parts: object) -> int:
    """A number below 2^31 that depends on all parts and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class GroupQueue:
    """Episodes that were asked for, and what came of them.

    An episode is over when `group_size` of its environments have finished it, or all have finished
    or failed. So spare environments (`group_size_redundancy`) are not waited for, and failing ones
    make a group smaller, never late.
    """

    def __init__(
        self, episodes: Sequence[Episode], *, group_size: int, drop: Filter | None = None
    ) -> None:
        self.group_size, self._drop = group_size, drop
        self._slots = list(episodes)
        self._todo: dict[int, list[Episode]] = {}
        self._kept: dict[int, Group] = {}  # by number of the slot
        self.dropped: list[Dropped] = []
        self.num_short = self.num_empty = self.num_filtered = 0
        for episode in episodes:
            self._hand_out(episode)

    @property
    def is_done(self) -> bool:
        return all(episode.is_closed for episode in self._slots)

    @property
    def groups(self) -> list[Group]:
        """Those that were kept, in the order of their episodes; members by environment."""
        return [group for _, group in sorted(self._kept.items())]

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
            return
        episode.done[env_id] = trajectory
        found = [item for item in episode.done.values() if item is not None]
        if len(found) < self.group_size and len(episode.done) < len(episode.env_ids):
            return
        episode.is_closed = True
        slot = next(index for index, other in enumerate(self._slots) if other is episode)
        if not found:
            self.num_empty += 1
            return
        reason = None
        if self._drop is not None:
            reason = self._drop(episode.group_id, episode.episode_id, found)
        if reason is None:
            self.num_short += len(found) < self.group_size
            found.sort(key=lambda item: item.env_id)
            self._kept[slot] = Group(episode.traj_group_id, found)
            return
        self.num_filtered += reason != STALE
        self.dropped += [Dropped(item, reason, True) for item in found]
        if episode.attempt < MAX_REPLACEMENTS:
            again = replace(episode, attempt=episode.attempt + 1, done={}, is_closed=False)
            self._slots[slot] = again
            self._hand_out(again)

    def _hand_out(self, episode: Episode) -> None:
        for env_id in episode.env_ids:
            self._todo.setdefault(env_id, []).append(episode)


class EnvSource:
    """The environments of one set (training or validation), and the episodes that they play.
    Responses come from `proxy`, by default the configured one.

    With `async_pipeline` a `buffer` has it play the coming steps while training goes on, whole
    steps at a time: what is asked of the environments is then the same as without.
    """

    def __init__(
        self,
        config: AgenticConfig,
        mode: Literal["train", "val"],
        env_cluster: Cluster,
        tokenizer: PreTrainedTokenizerBase,
        actor_infer: Cluster | None = None,
        *,
        proxy: BaseLLMProxy | None = None,
        first_step: int = 0,
    ) -> None:
        self.config, self.mode, self.env_cluster = config, mode, env_cluster
        manager_config = config.train_env_manager if mode == "train" else config.val_env_manager
        self.manager_config = manager_config
        self.proxy = proxy or create_llm_proxy(
            manager_config.llm_proxy, actor_infer=actor_infer, tokenizer=tokenizer
        )
        self.pad_token_id = tokenizer.pad_token_id
        self.conversation = Conversation(get_chat_template(config.global_template, tokenizer))
        self.drift = DriftMonitor(self.conversation)
        filter_cls: Any = import_class(manager_config.group_filter_cls)
        self.group_filter: GroupFilter | None = None
        if filter_cls is not GroupFilter:
            self.group_filter = filter_cls(config, manager_config, mode)
        # Tags in order, groups of a tag together, members of a group together.
        self.entries: list[EnvEntry] = []
        group_id = 0
        for tag, num in zip(manager_config.tags, manager_config.num_groups_partition, strict=True):
            for _ in range(num):
                for _ in range(manager_config.final_group_size):
                    template = config.env_template(tag)
                    self.entries.append(EnvEntry(len(self.entries), group_id, tag, template))
                group_id += 1
        sampling = SamplingParams.from_config(manager_config.generating_args, seed=config.seed)
        self.managers: list[BaseEnvManager] = []
        for entry in self.entries:
            make: Any = import_class(entry.template.env_manager_cls)
            manager = make(
                entry, self.conversation, sampling=sampling, sequence_length=config.sequence_length
            )
            self.managers.append(manager)
        self.told: set[tuple[str, str]] = set()
        self._open_envs()
        self.buffer: Buffer | None = None
        if mode == "train" and config.async_pipeline:
            self._size = config.rollout_batch_size // manager_config.group_size
            self._next_step = first_step
            self._played: dict[int, Rollout] = {}
            gate = getattr(self.proxy, "gate", None)
            assert gate is not None, "only the policy can be interrupted"  # the config refuses it
            self.buffer = Buffer(
                self,
                gate,
                sizes={"all": self._size},
                ratio=math.ceil(config.async_generation_ratio),
                max_staleness=config.max_staleness,
                timeout=env_cluster.rpc_timeout,
                first_step=first_step,
            )

    def _open_envs(self) -> None:
        per_worker = self.manager_config.max_env_num_per_worker
        specs: list[list[EnvSpec]] = [[] for _ in range(self.env_cluster.world_size)]
        for entry in self.entries:
            entry_point, leading = entry_point_of(str(entry.template.env_type))
            options = dict(entry.template.env_config)
            if "seed" in options:
                options["seed"] = self._group_seed(entry.tag, entry.group_id)
            spec = EnvSpec(
                entry.env_id, entry_point, leading, options, self.proxy.needs_random_actions
            )
            specs[entry.env_id // per_worker].append(spec)
        self.env_cluster.execute_all_sync("open_envs", specs)

    def close(self) -> None:
        """End all environments and their processes."""
        if self.buffer is not None:
            self.buffer.close()
        self.env_cluster.execute_all_sync("close_envs")

    # -- the rollout of a step ---------------------------------------------------------------------

    def collect(self, step: int) -> Rollout:
        """The episodes of a step, played now or ahead of it."""
        if self.buffer is None:
            rollout = self.rollout(step, self.config.rollout_batch_size)
        else:
            started = time.monotonic()
            self.buffer.take(step)
            rollout = self._played.pop(step)
            num_stale = sum(item.reason == STALE for item in rollout.dropped)
            rollout.metrics |= staleness_metrics(rollout.trajectories, step, num_stale)
            rollout.metrics["rollout/wait_seconds"] = time.monotonic() - started
        successes = [item.success for item in rollout.trajectories if item.success is not None]
        if successes:
            rollout.metrics["env/success"] = sum(successes) / len(successes)
        return rollout

    def validate(self) -> Rollout:
        """Scores, success and the environments' metrics of the validation's episodes, which are the
        same every time."""
        rollout = self.rollout(0, self.config.val_batch_size)
        rollout.metrics = {
            f"val/{name}": value
            for name, value in rollout.metrics.items()
            if not name.startswith("time/")
        }
        if rollout.groups:
            rollout.metrics |= validation_metrics(rollout.trajectories)
        return rollout

    def rollout(self, step: int, num_trajectories: int) -> Rollout:
        """Play until all groups of the batch are complete; those that a filter drops, or that are
        too old for the step, are replaced."""

        def drop(group_id: int, episode_id: int, group: Sequence[Trajectory]) -> str | None:
            if self.buffer is not None and is_stale(group, step, self.buffer.max_staleness):
                return STALE
            if self.group_filter is None:
                return None
            per_turn = self.config.rows_are_turns
            rows = [collate([item], self.pad_token_id, per_turn=per_turn) for item in group]
            return "group filter" if self.group_filter.filter(group_id, episode_id, rows) else None

        queue = GroupQueue(
            self.episodes(step, num_trajectories),
            group_size=self.manager_config.group_size,
            drop=drop,
        )
        play = _Play(self, queue)
        started = time.monotonic()
        play.run()
        play.seconds["rollout"] = time.monotonic() - started
        rollout = Rollout(queue.groups, queue.dropped, {}, play.failures)
        values: dict[str, list[float]] = defaultdict(list)
        for item in rollout.trajectories:
            for name, value in item.metrics.items():
                values[f"env/{item.tag}/{name}"].append(value)
            length = sum(len(turn.response_ids) for turn in item.turns)
            values["env/response_length"].append(float(length))
        rollout.metrics = {name: sum(found) / len(found) for name, found in values.items()}
        for (tag, reason), count in play.failures.items():
            rollout.metrics[f"env/{tag}/failed/{reason}"] = float(count)
        rollout.metrics |= {
            "scheduler/env_failures": float(sum(play.failures.values())),
            "scheduler/env_restarts": float(play.num_restarts),
            "scheduler/group_filter_count": float(queue.num_filtered),
            "scheduler/short_groups": float(queue.num_short),
            "scheduler/empty_groups": float(queue.num_empty),
            "scheduler/turns": float(play.num_turns),
            "rollout/template_drift": self.drift.different / max(self.drift.checked, 1),
        }
        for name, seconds in play.seconds.items():
            rollout.metrics[f"time/{self.mode}/{name}"] = seconds
        return rollout

    def episodes(self, step: int, num_trajectories: int) -> list[Episode]:
        """The episodes of a batch: groups take turns, and in each step go on where they were.

        Validation plays the same episodes every time. `num_trajectories` below 0 is one episode of
        every environment.
        """
        num_groups = self.manager_config.num_env_groups
        needed = num_trajectories // self.manager_config.group_size
        if num_trajectories < 0:
            needed = num_groups
        first = 0 if self.mode == "val" else step * needed
        members: dict[int, list[EnvEntry]] = defaultdict(list)
        for entry in self.entries:
            members[entry.group_id].append(entry)
        episodes = []
        for number in range(first, first + needed):
            episode_id, group_id = divmod(number, num_groups)
            tag = members[group_id][0].tag
            env_ids = tuple(entry.env_id for entry in members[group_id])
            seed = self._group_seed(tag, group_id)
            episodes.append(Episode(group_id, tag, episode_id, seed, env_ids))
        return episodes

    def _group_seed(self, tag: str, group_id: int) -> int:
        return derive_seed(self.config.seed, self.mode, tag, group_id)

    # -- ahead of training -------------------------------------------------------------------------

    def has_work(self) -> bool:
        assert self.buffer is not None
        is_left = self._next_step < self.config.max_steps
        return is_left and self.buffer.room("all") >= self._size

    def work(self) -> None:
        assert self.buffer is not None
        step = self._next_step
        rollout = self._played[step] = self.rollout(step, self.config.rollout_batch_size)
        # Groups may be missing: the step is complete all the same, so that it is not waited for.
        groups = [*rollout.groups, *[None] * self._size][: self._size]
        with self.buffer.changed:
            self._next_step += 1
            for i, group in enumerate(groups):
                self.buffer.put("all", step * self._size + i, group)

    def drop(self, group: Group, reason: str) -> None:
        raise AssertionError("groups are judged for their step when they are complete")

    def waiting_for(self) -> str:
        return f"the episodes of step {self._next_step} are being played"


@dataclass
class _Player:
    """An environment at work on an episode."""

    manager: BaseEnvManager
    episode: Episode
    failures: int = 0
    random_action: str | None = None


class _Play:
    """The rounds of one batch."""

    def __init__(self, source: EnvSource, queue: GroupQueue) -> None:
        self.source, self.queue = source, queue
        self.config = source.manager_config
        self.players: dict[int, _Player] = {}
        self.calls: list[EnvCall] = []
        self.outstanding: set[int] = set()  # environments that owe a reply
        self.failures: Counter[tuple[str, str]] = Counter()
        self.num_restarts = self.num_turns = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> None:
        for entry in self.source.entries:
            self._next_episode(entry.env_id)
        while not self.queue.is_done:
            replies = self._replies()
            ready = [player for reply in replies if (player := self._take(reply)) is not None]
            if ready and not self.queue.is_done:
                self._answer(ready)
        # Spare environments may still owe replies, which must be read before the next batch begins.
        while self.outstanding:
            for found in self.source.env_cluster.execute_all_sync("collect", 1.0):
                self.outstanding.difference_update(reply.env_id for reply in found)

    def _replies(self) -> list[EnvReply]:
        """Send the calls and wait for replies; they come in the order of environments."""
        cluster, per_worker = self.source.env_cluster, self.config.max_env_num_per_worker
        started = time.monotonic()
        if self.calls:
            shares: list[list[EnvCall]] = [[] for _ in range(cluster.world_size)]
            for call in self.calls:
                shares[call.env_id // per_worker].append(call)
            self.outstanding.update(call.env_id for call in self.calls)
            self.calls = []
            cluster.execute_all_sync("submit", shares)
        assert self.outstanding, "episodes are open, but no environment is playing"
        replies: list[EnvReply] = []
        while not replies:
            for found in cluster.execute_all_sync("collect", max(self.config.env_wait, 0.05)):
                replies += found
        self.seconds["environments"] += time.monotonic() - started
        self.outstanding.difference_update(reply.env_id for reply in replies)
        return sorted(replies, key=lambda reply: reply.env_id)

    def _take(self, reply: EnvReply) -> _Player | None:
        """Move one player on; itself if it waits for a response now."""
        player = self.players[reply.env_id]
        if player.episode.is_closed:  # its group has all it needs
            self._next_episode(reply.env_id)
            return None
        if reply.reason is not None:
            self._failed(player, reply.reason, reply.detail, again=True)
            return None
        player.random_action = reply.random_action
        stop_reason = player.manager.observe(reply)
        if stop_reason is None:
            return player
        self._finished(player, stop_reason)
        return None

    def _answer(self, players: Sequence[_Player]) -> None:
        """Ask the policy for the next response of each player, and send the actions."""
        started = time.monotonic()
        proxy, managers = self.source.proxy, [player.manager for player in players]
        prompts = self.source.conversation.tokenize(
            [manager.next_text() for manager in managers],
            [manager.last_answer for manager in managers],
        )
        asked: list[_Player] = []
        requests: list[TurnRequest] = []
        for player, prompt_ids in zip(players, prompts, strict=True):
            request = player.manager.request(prompt_ids)
            if request is not None:
                asked.append(player)
                messages = player.manager.transcript() if proxy.needs_messages else []
                requests.append(TurnRequest(request, messages, player.random_action))
            elif player.manager.turns:
                self._finished(player, "max_length")
            else:
                detail = (
                    f"the first prompt has {len(prompt_ids)} tokens, sequence_length is "
                    f"{self.source.config.sequence_length}"
                )
                self._failed(player, PROMPT_TOO_LONG, detail)
        if not requests:
            return
        asked_at = time.monotonic()
        outputs = proxy.generate(requests)
        self.seconds["generate"] += time.monotonic() - asked_at
        self.num_turns += len(outputs)
        for player, output in zip(asked, outputs, strict=True):
            if output.error is not None:
                self._failed(player, GENERATION, output.error)
            else:
                action = player.manager.answer(output)
                self.calls.append(EnvCall(player.manager.entry.env_id, action=action))
        self.seconds["prompts"] += time.monotonic() - started

    # -- the ends of episodes ----------------------------------------------------------------------

    def _next_episode(self, env_id: int) -> None:
        episode = self.queue.next_episode(env_id)
        if episode is None:
            self.players.pop(env_id, None)
            return
        self.players[env_id] = _Player(self.source.managers[env_id], episode)
        self._reset(self.players[env_id])

    def _reset(self, player: _Player) -> None:
        env_id, episode = player.manager.entry.env_id, player.episode
        player.manager.begin(f"{episode.traj_group_id}_{env_id}", episode.traj_group_id)
        self.calls.append(EnvCall(env_id, seed=episode.seed))

    def _finished(self, player: _Player, stop_reason: str) -> None:
        manager = player.manager
        if not manager.prompts_are_whole:
            self.source.drift.check(manager.messages, manager.turns)
        self._end(player, manager.finish(stop_reason))

    def _failed(self, player: _Player, reason: str, detail: str, *, again: bool = False) -> None:
        """Count a failure; start the episode again if that may help, else the group goes on
        without it."""
        tag = player.manager.entry.tag
        self.failures[tag, reason] += 1
        if reason != LOST:  # which is not its fault, so it does not use up a retry
            if (tag, reason) not in self.source.told:
                self.source.told.add((tag, reason))
                logger.warning(
                    "environment %s failed (%s; counted, not repeated here): %s",
                    tag,
                    reason,
                    detail.strip(),
                )
            player.failures += 1
            if not again or player.failures > self.config.env_retries:
                self._end(player, None)
                return
        self.num_restarts += 1
        self._reset(player)

    def _end(self, player: _Player, trajectory: Trajectory | None) -> None:
        """The environment goes on; so do the others of its group that are idle, if there is a new
        episode for them."""
        env_id = player.manager.entry.env_id
        self.queue.put(player.episode, env_id, trajectory)
        self._next_episode(env_id)
        for other in player.episode.env_ids:
            if other not in self.players:
                self._next_episode(other)
