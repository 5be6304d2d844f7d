"""Plays many environments at once: all that are ready are answered by one call of the policy.

    scheduler = RolloutScheduler(config, config.train_env_manager, "train", env_cluster=..., proxy=..., tokenizer=...)
    rollout = scheduler.rollout(global_step, num_trajectories=128)

Each round sends all actions to the environments, waits for their replies (for slow ones at most `env_wait` seconds),
and asks the policy for the next answers of all environments that replied. What is sampled depends on the config's seed,
the step, and the place of the trajectory in the batch; not on time, nor on other environments.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll.datasets.chat_template import get_chat_template
from roll.engines.request import GenerationOutput, SamplingParams
from roll.pipeline.agentic.env import entry_point_of
from roll.pipeline.agentic.env_host import LOST, EnvCall, EnvReply, EnvSpec
from roll.pipeline.agentic.env_manager import BaseEnvManager, Conversation, DriftMonitor, EnvEntry
from roll.pipeline.agentic.group_queue import Episode, Filter, GroupQueue, derive_seed
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, TurnRequest
from roll.pipeline.staleness import is_stale
from roll.rollout.types import Trajectory
from roll.utils.import_utils import import_class
from roll.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.distributed.executor.cluster import Cluster
    from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvManagerConfig

logger = get_logger(__name__)

PROMPT_TOO_LONG, GENERATION = "prompt_too_long", "generation"


@dataclass
class Player:
    """An environment at work on an episode."""

    manager: BaseEnvManager
    episode: Episode
    failures: int = 0
    random_action: str | None = None


@dataclass
class Rollout:
    """The trajectories of a batch, groups together, and what happened on the way.

    Attributes:
        filtered: trajectories of groups that the filter dropped.
        stale: trajectories of groups that were too old for the step.
        failures: how often environments failed, by tag and reason.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    filtered: list[Trajectory] = field(default_factory=list)
    stale: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)


def make_env_entries(config: AgenticConfig, manager: EnvManagerConfig) -> list[EnvEntry]:
    """All environments of a manager: tags in order, groups of a tag together, members of a group together."""
    entries: list[EnvEntry] = []
    group_id = 0
    for tag, num_groups in zip(manager.tags, manager.num_groups_partition, strict=True):
        template = config.env_template(tag)
        for _ in range(num_groups):
            for _ in range(manager.final_group_size):
                entries.append(EnvEntry(len(entries), group_id, tag, template))
            group_id += 1
    return entries


class RolloutScheduler:
    """The environments of one set (training or validation) and the loop that plays them."""

    def __init__(
        self,
        config: AgenticConfig,
        manager_config: EnvManagerConfig,
        mode: Literal["train", "val"],
        *,
        env_cluster: Cluster,
        proxy: BaseLLMProxy,
        tokenizer: PreTrainedTokenizerBase,
        drop: Filter | None = None,
    ) -> None:
        self.config, self.manager_config, self.mode = config, manager_config, mode
        self.env_cluster, self.proxy, self._drop = env_cluster, proxy, drop
        self.conversation = Conversation(get_chat_template(config.global_template, tokenizer))
        self.drift = DriftMonitor(self.conversation)
        self.entries = make_env_entries(config, manager_config)
        sampling = SamplingParams.from_config(manager_config.generating_args, seed=config.seed)
        self.managers: list[BaseEnvManager] = []
        for entry in self.entries:
            make: Any = import_class(entry.template.env_manager_cls)
            manager = make(
                entry, self.conversation, sampling=sampling, sequence_length=config.sequence_length
            )
            self.managers.append(manager)
        self._told: set[tuple[str, str]] = set()
        self._open_envs()

    def _open_envs(self) -> None:
        per_worker = self.manager_config.max_env_num_per_worker
        specs: list[list[EnvSpec]] = [[] for _ in range(self.env_cluster.world_size)]
        for entry in self.entries:
            entry_point, leading = entry_point_of(str(entry.template.env_type))
            options = dict(entry.template.env_config)
            if "seed" in options:
                options["seed"] = self.group_seed(entry.tag, entry.group_id)
            spec = EnvSpec(
                entry.env_id, entry_point, leading, options, self.proxy.needs_random_actions
            )
            specs[entry.env_id // per_worker].append(spec)
        self.env_cluster.execute_all_sync("open_envs", specs)

    def close(self) -> None:
        """End all environments and their processes."""
        self.env_cluster.execute_all_sync("close_envs")

    # -- episodes ------------------------------------------------------------------------------------------------------

    def group_seed(self, tag: str, group_id: int) -> int:
        return derive_seed(self.config.seed, self.mode, tag, group_id)

    def episodes(self, global_step: int, num_trajectories: int) -> list[Episode]:
        """The episodes of a batch: groups take turns, and in each step go on where they were.

        Validation plays the same episodes every time. `num_trajectories` below 0 is one episode of every environment.
        """
        size, num_groups = self.manager_config.group_size, self.manager_config.num_env_groups
        needed = num_groups if num_trajectories < 0 else num_trajectories // size
        first = 0 if self.mode == "val" else global_step * needed
        members: dict[int, list[EnvEntry]] = defaultdict(list)
        for entry in self.entries:
            members[entry.group_id].append(entry)
        episodes = []
        for number in range(first, first + needed):
            episode_id, group_id = divmod(number, num_groups)
            group = members[group_id]
            seed = self.group_seed(group[0].tag, group_id)
            env_ids = tuple(entry.env_id for entry in group)
            episodes.append(Episode(group_id, group[0].tag, episode_id, seed, env_ids))
        return episodes

    # -- the loop ------------------------------------------------------------------------------------------------------

    def rollout(
        self, global_step: int, num_trajectories: int, *, max_staleness: int | None = None
    ) -> Rollout:
        """Play until all groups of the batch are complete; those that are staler than `max_staleness` are replaced."""

        def too_old(group: Sequence[Trajectory]) -> bool:
            return max_staleness is not None and is_stale(
                [it.versions for it in group], global_step, max_staleness
            )

        queue = GroupQueue(
            self.episodes(global_step, num_trajectories),
            group_size=self.manager_config.group_size,
            drop=self._drop,
            is_stale=too_old,
        )
        play = _Play(self, queue)
        started = time.monotonic()
        play.run()
        trajectories = queue.trajectories()
        metrics = play.metrics(trajectories) | {
            f"time/{self.mode}/rollout": time.monotonic() - started
        }
        return Rollout(trajectories, queue.filtered, queue.stale, metrics, play.failures)

    def tell(self, tag: str, reason: str, detail: str) -> None:
        """Warn of a failure, once for each tag and reason."""
        if (tag, reason) not in self._told:
            self._told.add((tag, reason))
            logger.warning(
                "environment %s failed (%s; counted, not repeated here): %s",
                tag,
                reason,
                detail.strip(),
            )


class _Play:
    """The rounds of one batch."""

    def __init__(self, scheduler: RolloutScheduler, queue: GroupQueue) -> None:
        self.scheduler, self.queue = scheduler, queue
        self.config = scheduler.manager_config
        self.players: dict[int, Player] = {}
        self.calls: list[EnvCall] = []
        self.outstanding: set[int] = set()  # environments that owe a reply
        self.failures: Counter[tuple[str, str]] = Counter()
        self.num_restarts = self.num_turns = self.num_generated = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> None:
        for entry in self.scheduler.entries:
            self._next_episode(entry.env_id)
        while not self.queue.is_done:
            ready = self._replies()
            if ready and not self.queue.is_done:
                self._answer(ready)
        self._drain()

    def _replies(self) -> list[Player]:
        """Send the calls, take in the replies; the players that wait for an answer."""
        cluster, per_worker = self.scheduler.env_cluster, self.config.max_env_num_per_worker
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
        replies.sort(key=lambda reply: reply.env_id)  # whatever order they came in
        self.outstanding.difference_update(reply.env_id for reply in replies)
        return [player for reply in replies if (player := self._take(reply)) is not None]

    def _take(self, reply: EnvReply) -> Player | None:
        """Move one player on; itself if it waits for an answer now."""
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

    def _answer(self, players: Sequence[Player]) -> None:
        """Ask the policy for the next answer of each player, and send the actions."""
        started = time.monotonic()
        managers = [player.manager for player in players]
        texts = [manager.next_text() for manager in managers]
        prompts = self.scheduler.conversation.tokenize(
            texts, [manager.last_answer for manager in managers]
        )
        asked: list[Player] = []
        requests: list[TurnRequest] = []
        for player, prompt_ids in zip(players, prompts, strict=True):
            request = player.manager.request(prompt_ids)
            if request is not None:
                asked.append(player)
                messages = (
                    player.manager.transcript() if self.scheduler.proxy.needs_messages else []
                )
                requests.append(TurnRequest(request, messages, player.random_action))
            elif player.manager.turns:
                self._finished(player, "max_length")
            else:
                detail = f"the first prompt has {len(prompt_ids)} tokens, sequence_length is "
                self._failed(
                    player, PROMPT_TOO_LONG, detail + str(self.scheduler.config.sequence_length)
                )
        if not requests:
            return
        asked_at = time.monotonic()
        outputs = self.scheduler.proxy.generate(requests)
        self.seconds["generate"] += time.monotonic() - asked_at
        self.num_turns += len(outputs)
        for player, output in zip(asked, outputs, strict=True):
            self._act(player, output)
        self.seconds["prompts"] += time.monotonic() - started

    def _act(self, player: Player, output: GenerationOutput) -> None:
        if output.error is not None:
            self._failed(player, GENERATION, output.error)
            return
        self.num_generated += len(output.token_ids)
        action = player.manager.answer(output)
        self.calls.append(EnvCall(player.manager.entry.env_id, action=action))

    # -- the ends of episodes ------------------------------------------------------------------------------------------

    def _next_episode(self, env_id: int) -> None:
        episode = self.queue.next_episode(env_id)
        if episode is None:
            self.players.pop(env_id, None)
            return
        self.players[env_id] = Player(self.scheduler.managers[env_id], episode)
        self._reset(self.players[env_id])

    def _reset(self, player: Player) -> None:
        env_id, episode = player.manager.entry.env_id, player.episode
        player.manager.begin(f"{episode.traj_group_id}_{env_id}", episode.traj_group_id)
        self.calls.append(EnvCall(env_id, seed=episode.seed))

    def _finished(self, player: Player, stop_reason: str) -> None:
        manager = player.manager
        if not manager.prompts_are_whole:
            self.scheduler.drift.check(manager.messages, manager.turns)
        self.queue.put(player.episode, manager.entry.env_id, manager.finish(stop_reason))
        self._continue_group(player)

    def _failed(self, player: Player, reason: str, detail: str, *, again: bool = False) -> None:
        """Count a failure; start the episode again if that may help, else the group goes on without it."""
        entry = player.manager.entry
        self.failures[entry.tag, reason] += 1
        if reason == LOST:  # not its fault, so it does not use up a retry
            self.num_restarts += 1
            self._reset(player)
            return
        self.scheduler.tell(entry.tag, reason, detail)
        player.failures += 1
        if again and player.failures <= self.config.env_retries:
            self.num_restarts += 1
            self._reset(player)
            return
        self.queue.put(player.episode, entry.env_id, None)
        self._continue_group(player)

    def _continue_group(self, player: Player) -> None:
        """The environment goes on; so do the others of its group that are idle, if there is a new episode for them."""
        self._next_episode(player.manager.entry.env_id)
        for env_id in player.episode.env_ids:
            if env_id not in self.players:
                self._next_episode(env_id)

    def _drain(self) -> None:
        """Spare environments may still owe replies; they must be read before the next batch begins."""
        cluster = self.scheduler.env_cluster
        while self.outstanding:
            for found in cluster.execute_all_sync("collect", 1.0):
                self.outstanding.difference_update(reply.env_id for reply in found)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        values: dict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            for name, value in trajectory.metrics.items():
                values[f"env/{trajectory.tag}/{name}"].append(value)
            answered = sum(len(turn.response_ids) for turn in trajectory.turns)
            values["env/response_length"].append(float(answered))
        metrics = {name: sum(found) / len(found) for name, found in values.items()}
        for (tag, reason), count in self.failures.items():
            metrics[f"env/{tag}/failed/{reason}"] = float(count)
        queue, drift = self.queue, self.scheduler.drift
        return metrics | {
            "scheduler/env_failures": float(sum(self.failures.values())),
            "scheduler/env_restarts": float(self.num_restarts),
            "scheduler/group_filter_count": float(queue.num_filtered),
            "scheduler/short_groups": float(queue.num_short),
            "scheduler/empty_groups": float(queue.num_empty),
            "scheduler/turns": float(self.num_turns),
            "rollout/template_drift": drift.different / max(drift.checked, 1),
            **{
                f"time/{self.scheduler.mode}/{name}": seconds
                for name, seconds in self.seconds.items()
            },
        }
