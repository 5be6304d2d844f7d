"""The gate around weight updates, the age of samples, and the thread that works ahead."""

import threading
from pathlib import Path

import pytest

from roll.rollout.buffer import Buffer, EngineGate, is_stale, staleness_metrics
from roll.rollout.types import Group, Trajectory, Turn

LONG = 200.0  # seconds, of waits that end at once unless something is broken


class Engine:
    """Each call lasts until it is aborted. The first abort comes too early and is lost."""

    backend_name = "ray"

    def __init__(self):
        self.began, self.aborted, self.num_aborts = threading.Event(), threading.Event(), 0

    def generate_requests(self, requests):
        self.began.set()
        assert self.aborted.wait(LONG)
        return requests

    def abort_requests(self):
        self.num_aborts += 1
        if self.num_aborts > 1:
            self.aborted.set()


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_pause_aborts_what_runs_and_holds_back_what_comes():
    engine, outputs = Engine(), []
    gate = EngineGate(engine)

    def generate():
        for number in range(2):
            outputs.append(gate.generate_requests([number]))

    thread = in_thread(generate)
    assert engine.began.wait(LONG)
    with gate.paused():
        assert not gate.is_busy and not gate.is_open and engine.num_aborts == 2
        assert outputs in ([], [[0]])  # the thread may not have got that far
    thread.join(LONG)
    assert outputs == [[0], [1]] and gate.is_open and not gate.is_busy


def test_after_close_nothing_is_generated():
    engine = Engine()
    gate = EngineGate(engine)
    thread = in_thread(lambda: gate.generate_requests([]))
    assert engine.began.wait(LONG)
    gate.close()
    thread.join(LONG)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        gate.generate_requests([])


def test_close_ends_a_call_that_waits_at_the_gate():
    gate = EngineGate(Engine())
    errors = []

    def generate():
        with pytest.raises(RuntimeError, match="closed") as caught:
            gate.generate_requests([])
        errors.append(caught.value)

    with gate.paused():
        thread = in_thread(generate)
        gate.close()
        thread.join(LONG)
    assert len(errors) == 1


def made_by(*versions):
    return Trajectory("t", "g", "Tag", 0, 0, [Turn([1], [2], None, token_versions=versions)])


def test_the_oldest_token_of_a_group_counts():
    assert not is_stale([made_by(4, 5), made_by(4)], step=5, max_staleness=1)
    assert is_stale([made_by(4, 5), made_by(3, 5)], step=5, max_staleness=1)
    assert not is_stale([made_by(3)], step=5, max_staleness=2)
    played = Trajectory("t", "g", "Tag", 0, 0, [Turn([1], [2], None, 3, newest_version=5)])
    assert played.versions == {3, 5} and is_stale([played], step=5, max_staleness=1)


def test_metrics_of_age_by_hand():
    samples = [made_by(3, 3, 5), made_by(5), made_by(4), made_by(4, 5)]
    assert staleness_metrics(samples, step=5, num_dropped=2) == {
        "rollout/dropped/stale": 2.0,
        "rollout/staleness/mean": 1.0,  # (2 + 0 + 1 + 1) / 4
        "rollout/staleness/max": 2.0,
        "scheduler/off_policy_ratio": 0.75,
        "rollout/mixed_version_samples": 2.0,
    }
    assert staleness_metrics([], step=5, num_dropped=3) == {"rollout/dropped/stale": 3.0}


class Maker:
    """Makes what it is told to, and nothing else."""

    def __init__(self):
        self.dropped = []

    def has_work(self):
        return False

    def drop(self, group, reason):
        self.dropped.append((group.name, reason))

    def waiting_for(self):
        return "2 prompts are being answered"


def make_buffer(source=None, *, ratio=1.0, timeout=LONG, first_step=0):
    buffer = Buffer(
        source or Maker(),
        EngineGate(Engine()),
        sizes={"all": 2},
        ratio=ratio,
        max_staleness=1,
        timeout=timeout,
        first_step=first_step,
    )
    return buffer


def group(name, *versions):
    return Group(name, [made_by(version) for version in versions or (0,)])


def test_the_oldest_groups_come_first_and_missing_ones_are_not_waited_for():
    buffer = make_buffer()
    for number in (3, 1, 2):
        buffer.put("all", number, group(str(number)))
    assert [item.name for item in buffer.take(0)] == ["1", "2"] and buffer.num_used == {"all": 2}
    buffer.put("all", 4, None)
    assert [item.name for item in buffer.take(1)] == ["3"], "one of the two came to nothing"


@pytest.mark.parametrize(("ratio", "ahead"), [(1, 2), (0.5, 1), (2.25, 4)])
def test_room(ratio, ahead):
    buffer = make_buffer(ratio=ratio, first_step=3)
    assert buffer.room("all") == 2 + ahead
    buffer.put("all", 0, group("a"))
    assert buffer.room("all") == 1 + ahead
    buffer.step = 4
    assert buffer.room("all") == 3 + ahead


def test_stale_groups_leave():
    source = Maker()
    buffer = make_buffer(source)
    for number, version in enumerate((0, 4, 3, 5)):
        buffer.put("all", number, group(str(number), version, 5))
    assert [item.name for item in buffer.take(5)] == ["1", "3"]
    assert source.dropped == [("0", "stale"), ("2", "stale")]


def test_a_wait_ends_with_what_it_waited_for():
    buffer = make_buffer(timeout=0.01)
    buffer.put("all", 0, group("a", 7))
    message = r"no rollout for step 7 within 0.01 s \(rpc_timeout\): 2 prompts .*, 1 of 2 groups"
    with pytest.raises(TimeoutError, match=message):
        buffer.take(7)
    buffer.fail(RuntimeError("the judge is gone"))
    with pytest.raises(RuntimeError, match="the judge is gone"):
        buffer.take(7)


def test_both_pages_state_the_rule_in_the_same_words():
    docs = Path(__file__).parents[2] / "docs"
    rules = set()
    for page in ("rlvr.md", "agentic.md"):
        text = (docs / page).read_text(encoding="utf-8")
        start, end = text.index("Staleness is the step that trains"), text.index("and replaced. ")
        rules.add(text[start:end])
    assert len(rules) == 1 and "`rollout/dropped/stale`" in rules.pop()
