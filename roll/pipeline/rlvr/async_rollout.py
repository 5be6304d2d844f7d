"""Rollouts while training goes on: a thread of the driver keeps the generating workers busy with the coming steps.

    version (= step)   3                     4                     5
    trainer            trains on step 3      trains on step 4      trains on step 5 ...
    engine             answers for step 4 .. | .. and step 5 ..    |
                                             weights change: running samples are aborted and go on with the new ones

A sample that goes on after a weight change has tokens of several policies, and every token keeps the version that made
it. Prompts are started at most `async_generation_ratio` batches ahead, and what got too old all the same leaves by the
rule of `roll.pipeline.staleness`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from roll.datasets.encoding import Prompt
from roll.datasets.sampler import PromptSampler, domain_sizes
from roll.distributed.executor.cluster import Cluster
from roll.engines.request import GenerationOutput, GenerationRequest
from roll.exceptions import DataError
from roll.pipeline.engine_gate import EngineGate
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rollout import Rollout, RolloutCollector, Tally, group_samples
from roll.pipeline.rlvr.samples import Group, Sample
from roll.pipeline.rlvr.scoring import Scorer
from roll.pipeline.staleness import STALE, is_stale, staleness_metrics


@dataclass
class Draft:
    """A sample in the making: what it has so far, and the request that makes the rest."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_parts: int = 0

    def add(self, output: GenerationOutput) -> None:
        """Take in what a call made of it; an aborted one goes on where it stopped."""
        self.token_ids += output.token_ids
        self.log_probs += output.log_probs
        self.versions += [output.policy_version] * len(output.token_ids)
        self.num_parts += bool(output.token_ids)
        if output.finish_reason == "abort":
            # Its only sample: the number of the answer in the call says nothing about its number in the group.
            self.request = self.request.resume(replace(output, sample_index=0))
        else:
            self.finish_reason, self.error = output.finish_reason, output.error


@dataclass
class Job:
    """One prompt on its way to a group: a draft for each of its samples."""

    number: int
    pool: str
    prompt: Prompt
    drafts: list[Draft]

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def is_done(self) -> bool:
        return all(draft.finish_reason is not None for draft in self.drafts)

    def samples(self) -> list[Sample]:
        return [
            Sample(
                prompt=self.prompt,
                group=self.name,
                number=number,
                token_ids=tuple(draft.token_ids),
                log_probs=tuple(draft.log_probs),
                finish_reason=draft.finish_reason or "abort",
                versions=tuple(draft.versions),
            )
            for number, draft in enumerate(self.drafts)
        ]


class AsyncRolloutCollector(RolloutCollector):
    """Keeps generating until `close`. The main thread pauses it around weight updates and takes batches from it."""

    def __init__(
        self,
        config: RLVRConfig,
        sampler: PromptSampler,
        engine: Cluster,
        score: Scorer,
        tokenizer: Any,
    ) -> None:
        super().__init__(config, sampler, engine, score, tokenizer)
        self.sizes = domain_sizes(config.rollout_batch_size, sampler.shares)
        self._jobs: dict[int, Job] = {}  # started and not in `_ready` yet, by number
        self._ready: dict[str, list[tuple[int, Group]]] = {pool: [] for pool in self.sizes}
        self._num_used = dict.fromkeys(
            self.sizes, 0
        )  # prompts that a step has taken, or that were taken out
        self._next_number = 0
        self._step = 0
        self._tally = Tally(tokenizer)
        self._num_continued = 0
        self._changed = threading.Condition()
        self._gate = EngineGate(engine, self._changed)
        self._is_closed = False
        self._error: BaseException | None = None
        self._scorers = ThreadPoolExecutor(1, thread_name_prefix="roll-scoring")
        self._thread = threading.Thread(target=self._run, name="roll-async-rollout", daemon=True)

    # -- the main thread's side ----------------------------------------------------------------------------------------

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Nothing is generated inside: running samples are aborted and go on afterwards, for `step`."""
        with self._gate.paused():
            yield
            self._step = step
        with self._changed:
            if not self._thread.is_alive() and not self._is_closed:
                self._thread.start()
            self._changed.notify_all()

    def collect(self, step: int) -> Rollout:
        """The oldest groups that are ready, as many as a step trains on; waits until there are enough."""
        started = monotonic()
        groups: list[Group] = []
        with self._changed:
            for pool, size in self.sizes.items():
                while True:
                    self._drop_stale(pool, step)
                    if len(self._ready[pool]) >= size:
                        break
                    if not self._changed.wait(self.engine.rpc_timeout) and self._error is None:
                        raise TimeoutError(
                            f"no rollout within {self.engine.rpc_timeout:g} s (rpc_timeout): {len(self._jobs)} prompts "
                            f"are being answered or scored, {len(self._ready[pool])} of {size} groups are ready"
                        )
                    if self._error is not None:
                        raise self._error
                    self._check_that_some_pass()
                taken, self._ready[pool] = self._ready[pool][:size], self._ready[pool][size:]
                self._num_used[pool] += size
                groups += [group for _, group in taken]
            tally, self._tally = self._tally, Tally(self.tokenizer)
            num_continued, self._num_continued = self._num_continued, 0
            self._changed.notify_all()
        versions = [scored.sample.versions for group in groups for scored in group.samples]
        num_stale = sum(sample.reason == STALE for sample in tally.dropped)
        metrics = self.metrics_of(groups, tally, self._next_number) | staleness_metrics(
            versions, step, num_stale
        )
        metrics |= {
            "rollout/continued_samples": float(num_continued),
            "rollout/wait_seconds": monotonic() - started,
        }
        return Rollout(groups, tally.dropped, metrics)

    def close(self) -> None:
        """Stop generating; what is under way is thrown away. Safe to call again."""
        self._is_closed = True
        self._gate.close()
        if self._thread.is_alive():
            self._thread.join()
        self._scorers.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the prompts that were started and not trained on: a run that resumes answers
        them first. One call, because prompts are being drawn while it is made."""
        with self._changed:
            waiting = {job.number: (job.pool, job.prompt.index) for job in self._jobs.values()}
            for pool, entries in self._ready.items():
                waiting |= {number: (pool, group.prompt.index) for number, group in entries}
            jobs = [[number, *waiting[number]] for number in sorted(waiting)]
            return super().state_dict() | {
                "next_number": self._next_number,
                "num_used": dict(self._num_used),
                "jobs": jobs,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_number = int(state["next_number"])
        self._num_used = {pool: int(count) for pool, count in state["num_used"].items()}
        for number, pool, index in state["jobs"]:
            self._jobs[number] = self._new_job(number, pool, self.sampler.dataset[index])

    # -- the thread that generates -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closed or (self._gate.is_open and self._has_work())
                    )
                    if self._is_closed:
                        return
                    jobs = [job for job in self._jobs.values() if not job.is_done]
                    requests = [request for job in jobs for request in requests_of(job)]
                self._take_in(jobs, self._gate.generate_requests(requests))
        except BaseException as error:  # noqa: BLE001 - the thread's border: `collect` raises it in the main thread
            self._fail(error)

    def _has_work(self) -> bool:
        """Start as many prompts as may be ahead, and say whether there is anything to answer."""
        for pool, size in self.sizes.items():
            outstanding = sum(job.pool == pool for job in self._jobs.values()) + len(
                self._ready[pool]
            )
            allowed = (
                size * (self._step + 1 + self.config.async_generation_ratio) - self._num_used[pool]
            )
            for prompt in self.sampler.take(pool, max(int(allowed) - outstanding, 0)):
                self._jobs[self._next_number] = self._new_job(self._next_number, pool, prompt)
                self._next_number += 1
        return any(not job.is_done for job in self._jobs.values())

    def _new_job(self, number: int, pool: str, prompt: Prompt) -> Job:
        drafts = [
            Draft(
                GenerationRequest(
                    f"{number}/{i}", prompt.ids, self.sampling, sample_keys=(f"{number}/{i}",)
                )
            )
            for i in range(self.config.num_return_sequences_in_group)
        ]
        return Job(number, pool, prompt, drafts)

    def _take_in(self, jobs: Sequence[Job], outputs: Sequence[GenerationOutput]) -> None:
        drafts = {draft.request.request_id: draft for job in jobs for draft in job.drafts}
        by_name = {job.name: job for job in jobs}
        for output in outputs:
            draft = drafts.get(output.request_id)
            if draft is None:  # all samples of the prompt were one request
                draft = by_name[output.request_id].drafts[output.sample_index]
            draft.add(output)
        done = [job for job in jobs if job.is_done]
        if done:
            self._scorers.submit(self._finish, done)

    def _finish(self, jobs: Sequence[Job]) -> None:
        """In the scoring thread: score what is complete and put it where `collect` finds it."""
        try:
            usable: list[Sample] = []
            with self._changed:
                for job in jobs:
                    for sample, draft in zip(job.samples(), job.drafts, strict=True):
                        self._num_continued += draft.num_parts > 1
                        if self._tally.is_usable(sample, draft.error):
                            usable.append(sample)
            verdicts = self.score(usable) if usable else []
            with self._changed:
                by_name = {
                    group.name: group for group in group_samples(usable, verdicts, self._tally)
                }
                for job in jobs:
                    del self._jobs[job.number]
                    group = by_name.get(job.name)
                    if group is not None and self._tally.passes(
                        group, self.filters[job.prompt.domain]
                    ):
                        self._ready[job.pool].append((job.number, group))
                for entries in self._ready.values():
                    entries.sort(key=lambda entry: entry[0])
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - as in `_run`
            self._fail(error)

    def _drop_stale(self, pool: str, step: int) -> None:
        fresh = []
        for number, group in self._ready[pool]:
            versions = [scored.sample.versions for scored in group.samples]
            if not is_stale(versions, step, self.config.max_staleness):
                fresh.append((number, group))
                continue
            for scored in group.samples:
                self._tally.drop(scored.sample, STALE, scored)
            self._changed.notify_all()  # another prompt may be started
        self._ready[pool] = fresh

    def _check_that_some_pass(self) -> None:
        """A reward that always fails, or filters that nothing passes, would keep the run waiting for ever."""
        config, dropped = self.config, self._tally.dropped
        limit = (
            config.max_num_gen_batches
            * config.rollout_batch_size
            * config.num_return_sequences_in_group
        )
        if len(dropped) >= limit:
            reasons = ", ".join(
                f"{name.rpartition('/')[2]}: {count:.0f}"
                for name, count in self._tally.metrics().items()
            )
            raise DataError(
                f"{len(dropped)} samples were dropped and the batch is not full (max_num_gen_batches="
                f"{config.max_num_gen_batches}): {reasons}. The last one was dropped because of {dropped[-1].reason}"
            )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def requests_of(job: Job) -> list[GenerationRequest]:
    """What is left to generate of a prompt: one request for all samples while none has a token, so that the prompt is
    computed once; else one for each sample that goes on."""
    open_drafts = [draft for draft in job.drafts if draft.finish_reason is None]
    if len(open_drafts) == len(job.drafts) and not any(draft.token_ids for draft in job.drafts):
        keys = tuple(draft.request.keys[0] for draft in job.drafts)
        first = job.drafts[0].request
        return [replace(first, request_id=job.name, num_samples=len(job.drafts), sample_keys=keys)]
    return [draft.request for draft in open_drafts]
