"""Rollouts beside training, with an engine of threads: abort and continue, versions, staleness, resume.

Tests wait for what happens, not for a time."""

import threading
from collections.abc import Callable, Iterator

import pytest
from rlvr_setup import make_values
from tiny_models import tiny_tokenizer

from roll.datasets.encoding import encode_prompts
from roll.datasets.sampler import PromptSampler
from roll.datasets.tables import Table
from roll.engines.request import GenerationOutput
from roll.exceptions import DataError
from roll.pipeline.rlvr.async_rollout import AsyncRolloutCollector
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.samples import ScoredSample

TOKENIZER = tiny_tokenizer()
LENGTH = 6  # tokens of every response: 10, 11, 12 ... by position
GROUPS, SAMPLES = 4, 2
LONG = 120.0  # seconds, of waits that end at once unless something is broken


class Engine:
    """Answers at once. Its first call stops after `hold_after` tokens, if that is given, until it is aborted. Weights
    are a version number."""

    backend_name = "ray"

    rpc_timeout = LONG

    def __init__(self, hold_after: int | None = None) -> None:
        self.hold_after = hold_after
        self.version = 0
        self.calls: list[list[str]] = []
        self.holds, self._aborted = threading.Event(), threading.Event()

    def generate_requests(self, requests):
        self.calls.append([request.request_id for request in requests])
        end, reason = LENGTH, "stop"
        if self.hold_after is not None:
            end, reason, self.hold_after = self.hold_after, "abort", None
            self.holds.set()
            assert self._aborted.wait(LONG)
        outputs = []
        for request in requests:
            for i in range(request.num_samples):
                new = list(range(10 + len(request.prefix_ids), 10 + end))
                outputs.append(
                    GenerationOutput(
                        request.request_id, i, new, [-1.0] * len(new), reason, self.version
                    )
                )
        return outputs

    def abort_requests(self):
        self._aborted.set()


def make(
    tmp_path, engine, *, score=lambda sample: 1.0, ratio=1.0, **overrides
) -> AsyncRolloutCollector:
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
        Table("data", rows),
        TOKENIZER,
        max_length=8,
        template="base",
        domain_of=lambda row: "math",
    )

    def judge(samples):
        verdicts = [score(sample) for sample in samples]
        return [
            v if isinstance(v, str) else ScoredSample(s, v, v)
            for s, v in zip(samples, verdicts, strict=True)
        ]

    sampler = PromptSampler(dataset, seed=0)
    return AsyncRolloutCollector(RLVRConfig(**values), sampler, engine, judge, TOKENIZER)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def steps(
    collector: AsyncRolloutCollector, engine: Engine, num: int, first: int = 0, frequency: int = 1
) -> Iterator:
    """The loop of the pipeline: pause, new weights, resume, collect, and train until the next batch is there."""
    for step in range(first, first + num):
        with collector.paused(step):
            engine.version = step - step % frequency
        yield step, collector.collect(step)
        wait_until(collector, lambda: num_ready(collector) >= GROUPS)


def num_ready(collector: AsyncRolloutCollector) -> int:
    return sum(map(len, collector._ready.values()))


def wait_until(collector: AsyncRolloutCollector, condition: Callable[[], bool]) -> None:
    """For another thread to get there."""
    with collector._changed:
        assert collector._changed.wait_for(condition, LONG)


def test_training_overlaps_generation_and_staleness_is_bounded(tmp_path, engine):
    collector = make(tmp_path, engine)
    for step, rollout in steps(collector, engine, 6):
        assert [len(group.samples) for group in rollout.groups] == [SAMPLES] * GROUPS
        assert rollout.metrics["rollout/staleness/max"] <= 1
        for group in rollout.groups:
            for scored in group.samples:
                assert scored.sample.token_ids == tuple(range(10, 10 + LENGTH)), (
                    "continued where it stopped"
                )
                assert len(scored.sample.versions) == len(scored.sample.log_probs) == LENGTH
                assert (
                    step - 1 <= min(scored.sample.versions) <= max(scored.sample.versions) <= step
                )
        numbers = [int(group.name) for group in rollout.groups]
        assert numbers == sorted(numbers), "the oldest first"
    assert rollout.metrics["rollout/staleness/max"] == 1, (
        "later steps were answered while this one trained"
    )
    collector.close()
    assert not collector._thread.is_alive()


def test_a_weight_update_interrupts_samples_that_go_on_with_the_new_weights(tmp_path):
    engine = Engine(hold_after=2)
    collector = make(tmp_path, engine)
    with collector.paused(0):
        pass
    assert engine.holds.wait(LONG)  # two tokens of version 0
    with collector.paused(1):
        assert not collector._gate.is_busy
        engine.version = 1
    rollout = collector.collect(1)
    versions = [scored.sample.versions for group in rollout.groups for scored in group.samples]
    assert versions == [(0, 0, 1, 1, 1, 1)] * GROUPS * SAMPLES, (
        "tokens of both policies in one sample"
    )
    assert rollout.metrics["rollout/mixed_version_samples"] == GROUPS * SAMPLES
    assert rollout.metrics["rollout/continued_samples"] >= GROUPS * SAMPLES
    # While nothing is generated a prompt is one request; samples that go on are requests of their own.
    assert engine.calls[0][0] == "0" and "0/0" in engine.calls[1]
    collector.close()


def test_no_more_prompts_are_started_than_the_ratio_allows(tmp_path, engine):
    collector = make(tmp_path, engine, ratio=2)
    with collector.paused(0):
        pass
    wait_until(collector, lambda: num_ready(collector) == GROUPS * 3)
    assert num_started(collector) == GROUPS * 3, "the batch of this step, and two ahead"
    collector.collect(0)
    assert num_started(collector) == GROUPS * 3, "until the next step begins"
    with collector.paused(1):
        pass
    collector.collect(1)
    assert num_started(collector) == GROUPS * 4
    collector.close()


def num_started(collector: AsyncRolloutCollector) -> int:
    """Prompts, with those that the thread would start now; it may not have got to it yet."""
    with collector._changed:
        collector._has_work()
        return collector._next_number


def test_samples_that_got_too_old_are_dropped_and_replaced(tmp_path, engine):
    collector = make(tmp_path, engine)
    with collector.paused(0):
        engine.version = 0
    wait_until(collector, lambda: num_ready(collector) == 2 * GROUPS)  # of version 0
    with collector.paused(5):  # a run that jumps: weights are five steps further
        engine.version = 5
    rollout = collector.collect(5)
    assert rollout.metrics["rollout/staleness/max"] <= 1
    assert rollout.metrics["rollout/dropped/stale"] == 2 * GROUPS * SAMPLES
    assert [sample.reason for sample in rollout.dropped] == ["stale"] * 2 * GROUPS * SAMPLES
    collector.close()


def test_what_is_dropped_is_replaced_at_once(tmp_path, engine, monkeypatch):
    collector, looked = make(tmp_path, engine), threading.Event()
    has_work = collector._has_work

    def watched():
        looked.set()
        return has_work()

    monkeypatch.setattr(collector, "_has_work", watched)
    with collector.paused(0):
        pass
    wait_until(collector, lambda: num_ready(collector) == 2 * GROUPS)  # as many as may be
    with collector._changed:
        looked.clear()
        collector._changed.notify_all()
    assert looked.wait(LONG)  # from here on the thread waits to hear of something to do
    engine.version = 5
    assert collector.collect(5).metrics["rollout/dropped/stale"] == 2 * GROUPS * SAMPLES
    collector.close()


def test_weights_that_are_copied_rarely_do_not_make_samples_too_old(tmp_path, engine):
    infer = make_values(tmp_path)["actor_infer"]
    collector = make(tmp_path, engine, actor_infer={**infer, "model_update_frequency": 3})
    found = [rollout.metrics for _, rollout in steps(collector, engine, 7, frequency=3)]
    assert [line["rollout/dropped/stale"] for line in found] == [0] * 7
    assert max(line["rollout/staleness/max"] for line in found) == 3, (
        "one step ahead, of weights two steps behind"
    )
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
    with pytest.raises(
        DataError, match=r"samples were dropped and the batch is not full .* none: "
    ):
        next(steps(collector, engine, 1))
    collector.close()


def test_prompts_that_were_started_are_answered_after_a_resume(tmp_path, engine):
    collector = make(tmp_path, engine)
    seen = [
        group.prompt.index for _, rollout in steps(collector, engine, 2) for group in rollout.groups
    ]
    with collector.paused(2):
        state = collector.state_dict()
    collector.close()
    assert len(state["jobs"]) >= GROUPS
    resumed = make(tmp_path, engine)
    resumed.load_state_dict(state)
    seen += [
        group.prompt.index
        for _, rollout in steps(resumed, engine, 3, first=2)
        for group in rollout.groups
    ]
    resumed.close()
    expected = make(tmp_path, engine).sampler.take("all", len(seen))
    assert sorted(seen) == sorted(prompt.index for prompt in expected), (
        "none is skipped and none comes twice"
    )
