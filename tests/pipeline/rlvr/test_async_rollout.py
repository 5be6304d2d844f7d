"""Rollouts beside training, with an engine of threads: abort and continue, versions, staleness, resume."""

import threading
import time
from collections.abc import Iterator

import pytest
from process_checks import eventually
from rlvr_setup import make_values
from tiny_models import tiny_tokenizer

from roll.datasets.prompts import PromptSampler, encode_prompts
from roll.datasets.table import RowsTable
from roll.engines.request import GenerationOutput
from roll.exceptions import DataError
from roll.pipeline.rlvr.async_rollout import AsyncRolloutCollector
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.samples import ScoredSample

TOKENIZER = tiny_tokenizer()
LENGTH = 6  # tokens of every response: 10, 11, 12 ... by position
GROUPS, SAMPLES = 4, 2


class SlowEngine:
    """Answers with one token a tick for all requests, until told to stop. Weights are a version number.

    `holds_at`: the first call waits after so many tokens until it is aborted.
    """

    backend_name = "ray"

    rpc_timeout = 200.0

    def __init__(self, holds_at: int = 0) -> None:
        self.holds_at = holds_at
        self.holds = threading.Event()
        self.version = 0
        self.calls: list[list[str]] = []
        self._aborted = threading.Event()

    def generate_requests(self, requests):
        self.calls.append([request.request_id for request in requests])
        self._aborted.clear()
        rows = [(request, i, []) for request in requests for i in range(request.num_samples)]
        is_done = lambda request, new: len(request.prefix_ids) + len(new) == LENGTH  # noqa: E731
        while not self._aborted.is_set() and not all(is_done(request, new) for request, _, new in rows):
            time.sleep(0.002)
            for request, _, new in rows:
                if not is_done(request, new):
                    new.append(10 + len(request.prefix_ids) + len(new))
            if len(self.calls) == 1 and len(rows[0][2]) == self.holds_at:
                self.holds.set()
                self._aborted.wait()
        outputs = []
        for request, i, new in rows:
            reason = "stop" if is_done(request, new) else "abort"
            outputs.append(GenerationOutput(request.request_id, i, new, [-1.0] * len(new), reason, self.version))
        return outputs

    def abort_requests(self):
        self._aborted.set()


def make(tmp_path, engine, *, score=lambda sample: 1.0, ratio=1.0, **overrides) -> AsyncRolloutCollector:
    values = make_values(
        tmp_path,
        rollout_batch_size=GROUPS,
        num_return_sequences_in_group=SAMPLES,
        async_generation_ratio=ratio,
        rewards={"math": {"reward_fn": "r.py:score"}},
        actor_train={"training_args": {"per_device_train_batch_size": GROUPS * SAMPLES}},
        **overrides,
    )
    rows = [{"prompt": f"q{i}"} for i in range(500)]
    dataset = encode_prompts(
        RowsTable("data", rows), TOKENIZER, max_length=8, template="base", domain_of=lambda row: "math"
    )

    def judge(samples):
        verdicts = [score(sample) for sample in samples]
        return [v if isinstance(v, str) else ScoredSample(s, v, v) for s, v in zip(samples, verdicts, strict=True)]

    sampler = PromptSampler(dataset, seed=0)
    return AsyncRolloutCollector(RLVRConfig(**values), sampler, engine, judge, TOKENIZER)


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


def steps(collector: AsyncRolloutCollector, engine: SlowEngine, num: int, first: int = 0, ahead: int = 0) -> Iterator:
    """The loop of the pipeline: pause, new weights, resume, collect, train until so many groups are ready."""
    for step in range(first, first + num):
        with collector.paused(step):
            engine.version = step
        rollout = collector.collect(step)
        assert eventually(lambda: num_ready(collector) >= ahead)
        yield step, rollout


def num_ready(collector: AsyncRolloutCollector) -> int:
    return sum(map(len, collector._ready.values()))


def num_started(collector: AsyncRolloutCollector) -> int:
    """Prompts that were started, once all that may be were."""
    with collector._changed:
        collector._has_work()
        return collector._next_number


def test_training_overlaps_generation_and_staleness_is_bounded(tmp_path, engine):
    collector = make(tmp_path, engine)
    for step, rollout in steps(collector, engine, 6, ahead=GROUPS):
        assert [len(group.samples) for group in rollout.groups] == [SAMPLES] * GROUPS
        assert rollout.metrics["rollout/staleness/max"] <= 1
        for group in rollout.groups:
            for scored in group.samples:
                assert scored.sample.token_ids == tuple(range(10, 10 + LENGTH)), "continued where it stopped"
                assert len(scored.sample.versions) == len(scored.sample.log_probs) == LENGTH
                assert step - 1 <= min(scored.sample.versions) <= max(scored.sample.versions) <= step
        numbers = [int(group.name) for group in rollout.groups]
        assert numbers == sorted(numbers), "the oldest first"
    assert rollout.metrics["rollout/staleness/max"] == 1, "later steps were answered while this one trained"
    collector.close()
    assert not collector._thread.is_alive()


def test_a_weight_update_interrupts_samples_that_go_on_with_the_new_weights(tmp_path):
    engine = SlowEngine(holds_at=2)
    collector = make(tmp_path, engine)
    with collector.paused(0):
        pass
    engine.holds.wait()  # two tokens of version 0
    with collector.paused(1):
        assert not collector._gate.is_busy
        engine.version = 1
    rollout = collector.collect(1)
    versions = [scored.sample.versions for group in rollout.groups for scored in group.samples]
    assert all(list(row) == sorted(row) and len(row) == LENGTH for row in versions)
    assert any(set(row) == {0, 1} for row in versions), "tokens of both policies in one sample"
    assert rollout.metrics["rollout/continued_samples"] > 0 and rollout.metrics["rollout/mixed_version_samples"] > 0
    # While nothing is generated a prompt is one request; samples that go on are requests of their own.
    assert engine.calls[0][0] == "0" and "0/0" in engine.calls[1]
    collector.close()


def test_no_more_prompts_are_started_than_the_ratio_allows(tmp_path, engine):
    collector = make(tmp_path, engine, ratio=2)
    with collector.paused(0):
        pass
    assert num_started(collector) == GROUPS * 3, "the batch of this step, and two ahead"
    collector.collect(0)
    assert num_started(collector) == GROUPS * 3, "until the next step begins"
    with collector.paused(1):
        pass
    collector.collect(1)
    assert num_started(collector) == GROUPS * 4
    collector.close()


def test_samples_that_got_too_old_are_dropped_and_replaced(tmp_path, engine):
    collector = make(tmp_path, engine)
    with collector.paused(0):
        engine.version = 0
    assert eventually(lambda: num_ready(collector) == 2 * GROUPS)  # of version 0
    with collector.paused(5):  # a run that jumps: weights are five steps further
        engine.version = 5
    rollout = collector.collect(5)
    assert rollout.metrics["rollout/staleness/max"] <= 1
    assert rollout.metrics["rollout/dropped/stale"] == 2 * GROUPS * SAMPLES
    collector.close()


def test_a_failing_reward_reaches_the_main_thread(tmp_path, engine):
    def broken(sample):
        raise RuntimeError("the judge is gone")

    collector = make(tmp_path, engine, score=broken)
    with pytest.raises(RuntimeError, match="the judge is gone"):
        next(steps(collector, engine, 1))
    collector.close()


def test_a_reward_that_drops_everything_does_not_wait_for_ever(tmp_path, engine):
    collector = make(tmp_path, engine, score=lambda sample: "none", max_num_gen_batches=2)
    with pytest.raises(DataError, match=r"samples were dropped and the batch is not full .* none: "):
        next(steps(collector, engine, 1))
    collector.close()


def test_prompts_that_were_started_are_answered_after_a_resume(tmp_path, engine):
    collector = make(tmp_path, engine)
    seen = [group.prompt.index for _, rollout in steps(collector, engine, 2) for group in rollout.groups]
    assert eventually(lambda: len(collector.state_dict()["jobs"]) >= GROUPS)  # ahead for the next step
    with collector.paused(2):
        state = collector.state_dict()
    collector.close()
    assert len(state["jobs"]) >= GROUPS
    resumed = make(tmp_path, engine)
    resumed.load_state_dict(state)
    seen += [group.prompt.index for _, rollout in steps(resumed, engine, 3, first=2) for group in rollout.groups]
    resumed.close()
    expected = make(tmp_path, engine).sampler.take("all", len(seen))
    assert sorted(seen) == sorted(prompt.index for prompt in expected), "none is skipped and none comes twice"
