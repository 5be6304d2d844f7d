"""Groups from prompts: each prompt is answered several times and every response is scored.

A response is an episode of one turn whose reward comes from the reward workers. Responses without a
score leave their group, which is smaller then, and a group that a filter of its domain rejects is
replaced by another prompt's.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from roll.datasets.encoding import Prompt, PromptDataset
from roll.datasets.sampler import PromptSampler, domain_sizes
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.exceptions import DataError
from roll.rollout.buffer import STALE, Buffer, EngineGate, staleness_metrics
from roll.rollout.collate import collate
from roll.rollout.metrics import Tally, group_metrics, val_metrics
from roll.rollout.types import Dropped, Group, Rollout, Trajectory, Turn

if TYPE_CHECKING:
    from roll.pipeline.rlvr.rlvr_config import RewardFilterConfig, RLVRConfig


class _Draft:
    """A response in the making, and the request that makes the rest of it."""

    def __init__(self, request: GenerationRequest, trajectory: Trajectory) -> None:
        self.request, self.trajectory = request, trajectory
        self.is_done = False
        self.error: str | None = None
        self.num_parts = 0

    def add(self, output: GenerationOutput) -> None:
        """Take in what a call made of it; an aborted one goes on where it stopped."""
        turn = self.trajectory.turns[0]
        versions = [*(turn.token_versions or ()), *[output.policy_version] * len(output.token_ids)]
        self.trajectory.turns[0] = replace(
            turn,
            response_ids=[*turn.response_ids, *output.token_ids],
            log_probs=[*(turn.log_probs or ()), *output.log_probs],
            token_versions=versions,
            policy_version=min(versions, default=0),
            finish_reason=output.finish_reason,
        )
        self.num_parts += bool(output.token_ids)
        if output.finish_reason == "abort":
            # Its only sample: the number of the response in the call says nothing about its number
            # in the group.
            self.request = self.request.resume(replace(output, sample_index=0))
        else:
            self.is_done, self.error = True, output.error


@dataclass
class _Job:
    """A prompt on its way to a group."""

    name: str
    prompt: Prompt
    drafts: list[_Draft]
    pool: str = ""
    number: int = 0

    @property
    def is_done(self) -> bool:
        return all(draft.is_done for draft in self.drafts)

    def requests(self) -> list[GenerationRequest]:
        """What is left to generate: one request for all samples while none has a token, so that the
        prompt is computed once; else one for each sample that goes on."""
        left = [draft for draft in self.drafts if not draft.is_done]
        if len(left) == len(self.drafts) and not any(draft.num_parts for draft in left):
            keys = tuple(draft.request.keys[0] for draft in left)
            return [
                replace(
                    left[0].request, request_id=self.name, num_samples=len(keys), sample_keys=keys
                )
            ]
        return [draft.request for draft in left]


class PromptSource:
    """Answers and scores prompts: those of a step, those of the validation.

    With `async_pipeline` a `buffer` has it at work on the coming steps while training goes on: a
    response that goes on after a weight change has tokens of several policies, and every token
    keeps the version that made it.
    """

    def __init__(
        self,
        config: RLVRConfig,
        engine: Cluster,
        rewards: Mapping[str, Cluster],
        pad_token_id: int,
        sampler: PromptSampler | None = None,
        val_prompts: PromptDataset | None = None,
    ) -> None:
        assert config.actor_infer.generating_args is not None
        self.config, self.engine, self.rewards = config, engine, rewards
        self.pad_token_id = pad_token_id
        self.sampling = SamplingParams.from_config(
            config.actor_infer.generating_args, seed=config.seed
        )
        self.val_prompts = val_prompts
        self.tally = Tally()
        self.buffer: Buffer | None = None
        self._changed = threading.Condition()
        self._generate = engine.answer_requests
        if sampler is None:  # for validation alone
            return
        self.sampler = sampler
        self.sizes = domain_sizes(config.rollout_batch_size, sampler.shares)
        if config.async_pipeline:
            gate = EngineGate(engine)
            self.buffer = Buffer(
                self,
                gate,
                sizes=self.sizes,
                ratio=config.async_generation_ratio,
                max_staleness=config.max_staleness,
                timeout=engine.rpc_timeout,
            )
            self._changed, self._generate = self.buffer.changed, gate.generate_requests
            self._jobs: dict[int, _Job] = {}  # started and not in the buffer yet, by number
            self._next_number = 0
            self._scorers = ThreadPoolExecutor(1, thread_name_prefix="roll-scoring")

    def collect(self, step: int) -> Rollout:
        """The groups of a step: `rollout_batch_size` prompts, each answered
        `num_return_sequences_in_group` times. Without a buffer they depend on the weights, the
        position in the data and the seed alone."""
        if self.buffer is not None:
            return self._collect_ahead(self.buffer, step)
        self.tally = tally = Tally()
        kept: dict[str, list[Group]] = {pool: [] for pool in self.sizes}
        num_drawn = num_rounds = 0
        while num_rounds < self.config.max_num_gen_batches:
            num_rounds += 1
            jobs = []
            for pool, size in self.sizes.items():
                for prompt in self.sampler.take(pool, size - len(kept[pool])):
                    jobs.append(self._job(f"{step}-{num_drawn}", prompt, pool))
                    num_drawn += 1
            self._answer(jobs)
            for job, group in self._scored(jobs):
                if group is not None and self._passes(group, tally):
                    kept[job.pool].append(group)
            # Without a filter a group is missing only because nothing of it could be scored:
            # another round would cost as much as the first, and a reward that always fails would
            # never end.
            rules = [reward.query_filter_config for reward in self.config.rewards.values()]
            is_full = all(len(kept[pool]) == size for pool, size in self.sizes.items())
            if is_full or all(rule.type == "no_filter" for rule in rules):
                break
        groups = [group for pool in self.sizes for group in kept[pool]]
        metrics = self._metrics(groups, tally, num_drawn) | {
            "rollout/rounds": float(num_rounds),
            "rollout/missing_prompts": float(self.config.rollout_batch_size - len(groups)),
        }
        return Rollout(groups, tally.dropped, metrics)

    def validate(self) -> Rollout:
        """All prompts of the validation, answered and scored, with the metrics of `val_metrics`.
        The random numbers are the same at every validation."""
        sampling, num_samples = val_sampling(self.config)
        jobs = [
            self._job(f"val-{prompt.index}", prompt, sampling=sampling, num_samples=num_samples)
            for prompt in self.val_prompts or ()
        ]
        tally = Tally()
        # Not through the gate: it is closed while the main thread validates.
        self._take_in(
            jobs,
            self.engine.answer_requests([request for job in jobs for request in job.requests()]),
        )
        groups = [group for _, group in self._scored(jobs, tally) if group is not None]
        return Rollout(groups, tally.dropped, val_metrics(groups, tally))

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and, ahead of training, the prompts that were started and not
        trained on: a run that resumes answers them first."""
        with self._changed:  # prompts are being drawn while it is made
            state: dict[str, Any] = {"prompts": self.sampler.state_dict()}
            if self.buffer is None:
                return state
            waiting = {job.number: (job.pool, job.prompt.index) for job in self._jobs.values()}
            for pool, entries in self.buffer.ready.items():
                for number, group in entries:
                    assert group is not None
                    waiting[number] = (pool, group.prompt.index)
            return state | {
                "next_number": self._next_number,
                "num_used": dict(self.buffer.num_used),
                "jobs": [[number, *waiting[number]] for number in sorted(waiting)],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["prompts"])
        if self.buffer is not None:
            self._next_number = int(state["next_number"])
            self.buffer.num_used = {pool: int(count) for pool, count in state["num_used"].items()}
            for number, pool, index in state["jobs"]:
                self._start(number, pool, self.sampler.dataset[index])

    def close(self) -> None:
        """Stop what runs ahead, and end the processes of reward workers that have some; those of a
        reward model, for example, have none."""
        if self.buffer is not None:
            self.buffer.close()
            self._scorers.shutdown(cancel_futures=True)
        for cluster in self.rewards.values():
            if hasattr(cluster.worker_cls, "close"):
                cluster.execute_all_sync("close")

    # -- ahead of training -------------------------------------------------------------------------

    def _collect_ahead(self, buffer: Buffer, step: int) -> Rollout:
        started = monotonic()
        groups = buffer.take(step)
        with buffer.changed:
            tally, self.tally = self.tally, Tally()
        rollout = Rollout(groups, tally.dropped, self._metrics(groups, tally, self._next_number))
        num_stale = sum(item.reason == STALE for item in tally.dropped)
        rollout.metrics |= staleness_metrics(rollout.trajectories, step, num_stale)
        rollout.metrics["rollout/continued_samples"] = float(tally.num_continued)
        rollout.metrics["rollout/wait_seconds"] = monotonic() - started
        return rollout

    def has_work(self) -> bool:
        assert self.buffer is not None
        for pool in self.sizes:
            num_started = sum(job.pool == pool for job in self._jobs.values())
            for prompt in self.sampler.take(pool, max(self.buffer.room(pool) - num_started, 0)):
                self._start(self._next_number, pool, prompt)
                self._next_number += 1
        return any(not job.is_done for job in self._jobs.values())

    def work(self) -> None:
        with self._changed:
            jobs = [job for job in self._jobs.values() if not job.is_done]
        self._answer(jobs)
        done = [job for job in jobs if job.is_done]
        if done:
            self._scorers.submit(self._hand_over, done)

    def drop(self, group: Group, reason: str) -> None:
        self.tally.dropped += [Dropped(item, reason, True) for item in group.trajectories]

    def waiting_for(self) -> str:
        # A reward that always fails, or filters that nothing passes, would keep the run waiting for
        # ever.
        config, dropped = self.config, self.tally.dropped
        num_prompts = config.max_num_gen_batches * config.rollout_batch_size
        if len(dropped) >= num_prompts * config.num_return_sequences_in_group:
            counts = [
                f"{name.rpartition('/')[2]}: {count:.0f}"
                for name, count in self.tally.metrics().items()
            ]
            raise DataError(
                f"{len(dropped)} samples were dropped and the batch is not full "
                f"(max_num_gen_batches={config.max_num_gen_batches}): {', '.join(counts)}. The "
                f"last one was dropped because of {dropped[-1].reason}"
            )
        return f"{len(self._jobs)} prompts are being answered or scored"

    def _start(self, number: int, pool: str, prompt: Prompt) -> None:
        self._jobs[number] = self._job(str(number), prompt, pool, number)

    def _hand_over(self, jobs: Sequence[_Job]) -> None:
        """In the scoring thread: score what is complete and put it into the buffer."""
        assert self.buffer is not None
        try:
            scored = self._scored(jobs)
            with self._changed:
                for job, group in scored:
                    del self._jobs[job.number]
                    if group is not None and self._passes(group, self.tally):
                        self.buffer.put(job.pool, job.number, group)
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the thread's border, as in the buffer's
            self.buffer.fail(error)

    # -- one prompt to one group -------------------------------------------------------------------

    def _job(
        self,
        name: str,
        prompt: Prompt,
        pool: str = "",
        number: int = 0,
        sampling: SamplingParams | None = None,
        num_samples: int | None = None,
    ) -> _Job:
        """The random numbers of a sample follow from its name, NAME/0, NAME/1 ..."""
        drafts = []
        for i in range(num_samples or self.config.num_return_sequences_in_group):
            key = f"{name}/{i}"
            turn = Turn(prompt.ids, [], [], finish_reason="abort")
            drafts.append(
                _Draft(
                    GenerationRequest(
                        key, prompt.ids, sampling or self.sampling, sample_keys=(key,)
                    ),
                    Trajectory(key, name, prompt.tag, i, number, [turn], prompt=prompt),
                )
            )
        return _Job(name, prompt, drafts, pool, number)

    def _answer(self, jobs: Sequence[_Job]) -> None:
        requests = [request for job in jobs for request in job.requests()]
        self._take_in(jobs, self._generate(requests))

    @staticmethod
    def _take_in(jobs: Sequence[_Job], outputs: Sequence[GenerationOutput]) -> None:
        by_name = {job.name: job for job in jobs}
        drafts = {draft.request.request_id: draft for job in jobs for draft in job.drafts}
        for output in outputs:
            draft = drafts.get(output.request_id)
            if draft is None:  # all samples of the prompt were one request
                draft = by_name[output.request_id].drafts[output.sample_index]
            draft.add(output)

    def _scored(
        self, jobs: Sequence[_Job], val_tally: Tally | None = None
    ) -> list[tuple[_Job, Group | None]]:
        """The group of each prompt, None if none of its responses could be scored."""
        usable: list[Trajectory] = []
        with self._changed:
            tally = val_tally or self.tally
            for draft in (draft for job in jobs for draft in job.drafts):
                turn = draft.trajectory.turns[0]
                tally.num_samples += 1
                tally.num_truncated += turn.finish_reason == "length"
                tally.num_continued += draft.num_parts > 1
                if turn.finish_reason != "error" and turn.response_ids:
                    usable.append(draft.trajectory)
                else:
                    reason = f"generation: {draft.error or turn.finish_reason}"
                    tally.dropped.append(Dropped(draft.trajectory, reason))
        reasons = self.score(usable) if usable else []
        groups: dict[str, Group] = {}
        with self._changed:
            tally = val_tally or self.tally  # a step may have taken the other one by now
            for item, reason in zip(usable, reasons, strict=True):
                if reason is not None:
                    tally.dropped.append(Dropped(item, reason))
                else:
                    group = groups.setdefault(item.traj_group_id, Group(item.traj_group_id, []))
                    group.trajectories.append(item)
        return [(job, groups.get(job.name)) for job in jobs]

    def score(self, trajectories: Sequence[Trajectory]) -> list[str | None]:
        """Give each trajectory its reward, from the reward cluster of its domain; all domains work
        at the same time. Returns why one cannot be scored, None where it was: a sample without a
        score is dropped, never a 0."""
        by_domain: dict[str, list[int]] = {}
        for index, item in enumerate(trajectories):
            assert item.prompt is not None
            by_domain.setdefault(item.prompt.domain, []).append(index)
        pending = {}
        for domain, rows in by_domain.items():
            cluster = self.rewards[domain]
            batch = collate([trajectories[row] for row in rows], self.pad_token_id)
            padded, num_extra = pad_dataproto_to_divisor(
                batch, cluster.dp_size if len(batch) < cluster.dp_size else 1
            )
            compute = cluster.compute_rewards
            if len(by_domain) > 1:  # a reward model has no need to step aside
                compute = getattr(cluster, "compute_rewards_aside", compute)
            pending[domain] = (compute(padded, blocking=False), num_extra)
        reasons: list[str | None] = [None] * len(trajectories)
        for domain, (refs, num_extra) in pending.items():
            result = DataProto.materialize_concat(refs, timeout=self.rewards[domain].rpc_timeout)
            result = unpad_dataproto(result, num_extra)
            rewards = result["response_level_rewards"].double().tolist()
            # Workers that only know rewards, such as a reward model, say nothing else.
            scores = result["scores"].double().tolist() if "scores" in result else rewards
            parts = result["reward_parts"] if "reward_parts" in result else [{}] * len(rewards)
            drops = result["drop_reason"] if "drop_reason" in result else [None] * len(rewards)
            for i, row in enumerate(by_domain[domain]):
                if drops[i] or not (math.isfinite(scores[i]) and math.isfinite(rewards[i])):
                    reasons[row] = str(drops[i] or "nan")
                else:
                    item = trajectories[row]
                    item.turns[0].reward, item.reward = scores[i], rewards[i]
                    item.reward_parts = dict(parts[i] or {})
        return reasons

    def _passes(self, group: Group, tally: Tally) -> bool:
        """Whether the filter of the group's domain keeps it; if not, its samples are dropped."""
        rule = self.config.rewards[group.prompt.domain].query_filter_config
        if is_kept(group.scores, rule):
            return True
        tally.num_filtered += 1
        tally.dropped += [Dropped(item, rule.type, True) for item in group.trajectories]
        return False

    def _metrics(self, groups: Sequence[Group], tally: Tally, num_drawn: int) -> dict[str, float]:
        counts = {
            "scheduler/collect_query_count": float(num_drawn),
            "scheduler/query_use_count": float(len(groups)),
            "scheduler/query_filter_count": float(tally.num_filtered),
            "rollout/epoch": self.sampler.epoch,
        }
        return counts | tally.metrics() | group_metrics(groups)


def is_kept(scores: Sequence[float], rule: RewardFilterConfig) -> bool:
    """ROLL's rules, bounds dropped: `mean_filter` keeps threshold_down < mean < threshold_up,
    `std_filter` keeps std > std_threshold (population standard deviation)."""
    if rule.type == "mean_filter":
        low = rule.filter_args.get("threshold_down", -1)
        high = rule.filter_args.get("threshold_up", float("inf"))
        return low < statistics.fmean(scores) < high
    if rule.type == "std_filter":
        return statistics.pstdev(scores) > rule.filter_args.get("std_threshold", -1)
    return True


def val_sampling(config: RLVRConfig) -> tuple[SamplingParams, int]:
    """How the validation samples, and how often each prompt: `validation.generating_args`, with
    `val_greedy` and `val_n_sample` on top."""
    assert config.validation is not None and config.validation.generating_args is not None
    args = config.validation.generating_args
    num_samples = config.val_n_sample if config.val_n_sample > 1 else args.num_return_sequences
    if config.val_greedy:
        args = args.model_copy(update={"temperature": 0.0})
    params = SamplingParams.from_config(args, seed=config.seed)
    return params, 1 if params.is_greedy else num_samples  # the same response twice says no more
