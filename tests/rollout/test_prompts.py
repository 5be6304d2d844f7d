"""Groups of prompts: filters sample again, failures leave their group, and everything is counted;
then the same beside training, with an engine of threads. Tests wait for what happens, not for a
time.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from types import SimpleNamespace

import pytest
from rlvr_setup import make_config, make_values
from tiny_models import tiny_tokenizer

from roll.datasets.encoding import encode_prompts
from roll.datasets.sampler import PromptSampler
from roll.datasets.tables import Table
from roll.engines.request import GenerationOutput
from roll.exceptions import DataError
from roll.pipeline.rlvr.rlvr_config import RewardFilterConfig, RLVRConfig
from roll.rollout.metrics import Tally, pass_at_k, val_metrics
from roll.rollout.prompts import PromptSource, is_kept, val_sampling
from roll.rollout.types import Dropped, Group, Trajectory, Turn

TOKENIZER = tiny_tokenizer()


def make_source(tmp_path, engine, score, *, num_rows=20, rewards=None, **overrides) -> PromptSource:
    """`score(prompt_text, number)` gives a score, or why there is none."""
    rewards = rewards or {"math": {"reward_fn": "r.py:score"}}
    config = RLVRConfig(**make_values(tmp_path, rewards=rewards, **overrides))
    rows = [{"prompt": f"q{i}", "domain": list(rewards)[i % len(rewards)]} for i in range(num_rows)]
    table = Table("data", rows)
    dataset = encode_prompts(
        table, TOKENIZER, max_length=8, template="base", domain_of=lambda row: row["domain"]
    )
    shares = {domain: 1 / len(rewards) for domain in rewards} if len(rewards) > 1 else {}
    sampler = PromptSampler(dataset, seed=0, shares=shares)
    source = PromptSource(config, engine, {}, 0, sampler)

    def judge(trajectories):
        reasons = []
        for item in trajectories:
            value = score(item.prompt.text, item.env_id)
            reasons.append(value if isinstance(value, str) else None)
            if not isinstance(value, str):
                item.turns[0].reward = item.reward = value
        return reasons

    source.score = judge
    return source


def collect(tmp_path, answer, score, **options):
    """`answer(prompt_text, number)` gives a response and its finish reason."""

    def generate(requests):
        outputs = []
        for request in requests:
            text = TOKENIZER.decode(list(request.prompt_ids))
            for number in range(request.num_samples):
                reply, reason = answer(text, number)
                ids = TOKENIZER(reply)["input_ids"]
                error = "engine: it broke" if reason == "error" else None
                outputs.append(
                    GenerationOutput(
                        request.request_id, number, ids, [-1.0] * len(ids), reason, 0, error
                    )
                )
        return outputs

    engine = SimpleNamespace(answer_requests=generate)
    source = make_source(tmp_path, engine, score, **options)
    return source, source.collect(7)


def well(text, number):
    return "ok", "stop"


def test_a_full_batch_in_one_round(tmp_path):
    _, rollout = collect(tmp_path, well, lambda text, number: float(number % 2))
    assert [group.name for group in rollout.groups] == ["7-0", "7-1", "7-2", "7-3"]
    assert [item.traj_id for item in rollout.groups[1].trajectories] == [
        f"7-1/{i}" for i in range(4)
    ]
    assert len(rollout.trajectories) == 16 and not rollout.dropped
    found = rollout.metrics
    assert found["rollout/rounds"] == 1 and found["rollout/missing_prompts"] == 0
    assert found["rollout/no_signal_group_frac"] == 0
    assert found["scheduler/math/score/mean"] == 0.5


def test_a_filter_samples_again_until_the_batch_is_full(tmp_path):
    def score(text, number):  # only prompts with an even number have samples that differ
        return float(number % 2) if int(text[1:]) % 2 == 0 else 1.0

    rule = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    rewards = {"math": {"reward_fn": "r.py:score", "query_filter_config": rule}}
    source, rollout = collect(tmp_path, well, score, rewards=rewards)
    assert len(rollout.groups) == 4
    assert all(int(group.prompt.text[1:]) % 2 == 0 for group in rollout.groups)
    found = rollout.metrics
    drawn, filtered = (
        found["scheduler/collect_query_count"],
        found["scheduler/query_filter_count"],
    )
    assert found["rollout/rounds"] > 1 and drawn == 4 + filtered
    assert source.sampler.epoch == pytest.approx(drawn / 20)
    assert found["rollout/dropped/std_filter"] == 4 * filtered == len(rollout.dropped)
    assert rollout.dropped[0].sample(TOKENIZER).score == 1.0
    assert len({group.name for group in rollout.groups}) == 4


def test_the_bound_ends_a_hopeless_search(tmp_path):
    rule = {"type": "mean_filter", "filter_args": {"threshold_up": 1.0}}
    rewards = {"math": {"reward_fn": "r.py:score", "query_filter_config": rule}}
    _, rollout = collect(tmp_path, well, lambda *_: 1.0, rewards=rewards, max_num_gen_batches=3)
    found = rollout.metrics
    assert not rollout.groups and found["scheduler/collect_query_count"] == 12
    assert found["rollout/rounds"] == 3 and found["rollout/missing_prompts"] == 4


def test_samples_without_a_score_leave_their_group_and_are_never_zero(tmp_path):
    failures = {0: "exception: ValueError at r.py:3", 1: "timeout"}
    _, rollout = collect(tmp_path, well, lambda text, number: failures.get(number, 1.0))
    assert [group.scores for group in rollout.groups] == [[1.0, 1.0]] * 4
    found = rollout.metrics
    assert found["rollout/dropped/exception"] == found["rollout/dropped/timeout"] == 4
    assert {item.reason for item in rollout.dropped} == set(failures.values())
    assert found["rollout/rounds"] == 1
    sample = rollout.dropped[0].sample(TOKENIZER)
    assert (sample.response, sample.domain, sample.score) == ("ok", "math", None)


def test_what_the_engine_could_not_answer_is_dropped_with_its_reason(tmp_path):
    replies = {2: ("", "error"), 3: ("longer", "length")}
    _, rollout = collect(
        tmp_path, lambda text, number: replies.get(number, ("ok", "stop")), lambda *_: 1.0
    )
    found = rollout.metrics
    assert found["rollout/dropped/generation"] == 4
    assert rollout.dropped[0].reason == "generation: engine: it broke"
    assert found["rollout/truncated_frac"] == 0.25 and found["rollout/samples"] == 16


def test_domains_have_their_own_filters(tmp_path):
    rule = {"type": "mean_filter", "filter_args": {"threshold_down": 0.5}}
    rewards = {
        "math": {"reward_fn": "r.py:score"},
        "code": {"reward_fn": "r.py:score", "query_filter_config": rule},
    }
    _, rollout = collect(tmp_path, well, lambda *_: 0.0, rewards=rewards, max_num_gen_batches=2)
    assert [group.prompt.domain for group in rollout.groups] == ["math", "math"]
    assert rollout.metrics["scheduler/query_filter_count"] == 4


@pytest.mark.parametrize(
    ("kind", "options", "scores", "kept"),
    [
        ("no_filter", {}, [1, 1], True),
        ("mean_filter", {}, [1, 0], True),
        ("mean_filter", {"threshold_up": 1}, [1, 1], False),  # a bound is dropped
        ("mean_filter", {"threshold_down": 0}, [0, 0], False),
        ("mean_filter", {"threshold_down": 0, "threshold_up": 1}, [0, 1], True),
        ("std_filter", {"std_threshold": 0.5}, [0, 1], False),
        ("std_filter", {"std_threshold": 0.4}, [0, 1], True),
        ("std_filter", {}, [1], True),
        ("std_filter", {"std_threshold": 0}, [1], False),
    ],
)
def test_rules(kind, options, scores, kept):
    assert is_kept(scores, RewardFilterConfig(type=kind, filter_args=options)) is kept


# -- validation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n, c):
    for k in range(1, n + 1):
        choices = list(combinations([1] * c + [0] * (n - c), k))
        share = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(n, c, k) == pytest.approx(share)
    with pytest.raises(ValueError, match=f"pass@{n + 1} needs at least {n + 1} samples, there are"):
        pass_at_k(n, c, n + 1)


def test_validation_by_tag():
    def group(tag, scores):
        prompt = SimpleNamespace(tag=tag)
        turns = [Turn([1], [2], None, reward=score) for score in scores]
        return Group("g", [Trajectory("t", "g", tag, 0, 0, [t], prompt=prompt) for t in turns])

    groups = [group("add", [1.0, 0.0]), group("add", [0.5, 0.0]), group("sort", [1.0, 1.0])]
    dropped = Dropped(groups[0].trajectories[0], "none")
    metrics = val_metrics(groups, Tally([dropped], num_samples=7, num_truncated=1))
    expected = {
        "val/samples": 6, "val/dropped_samples": 1, "val/truncated_frac": 1 / 7,
        "val_correct/all/mean": 0.5, "val_correct/add/mean": 0.25, "val_correct/sort/mean": 1,
        "val/score/all/mean": 3.5 / 6, "val/score/add/mean": 0.375, "val/score/sort/mean": 1,
        "val/pass_at_2/all": 2 / 3, "val/pass_at_2/add": 0.5, "val/pass_at_2/sort": 1,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_sampling_of_the_validation_is_its_own(tmp_path):
    generating = {"temperature": 0.6, "top_p": 0.9}
    validation = {"data_args": {"file_name": "x.jsonl"}, "generating_args": generating}
    config = make_config(tmp_path, validation=validation, val_n_sample=4)
    params, num_samples = val_sampling(config)
    assert (params.temperature, params.top_p, num_samples) == (0.6, 0.9, 4)
    assert params.max_new_tokens == 5
    greedy = make_config(tmp_path, validation=validation, val_greedy=True, val_n_sample=4)
    params, num_samples = val_sampling(greedy)
    assert params.is_greedy and num_samples == 1, "the same response four times says no more"


# -- beside training -------------------------------------------------------------------------------

LENGTH = 6  # tokens of every response: 10, 11, 12 ... by position
GROUPS, SAMPLES = 4, 2
LONG = 120.0  # seconds, of waits that end at once unless something is broken


class Engine:
    """Answers at once. Its first call stops after `hold_after` tokens, if that is given, until it
    is aborted. Weights are a version number."""

    backend_name = "ray"
    rpc_timeout = LONG

    def __init__(self, hold_after: int | None = None) -> None:
        self.hold_after, self.version = hold_after, 0
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
            new = list(range(10 + len(request.prefix_ids), 10 + end))
            for i in range(request.num_samples):
                outputs.append(
                    GenerationOutput(
                        request.request_id, i, new, [-1.0] * len(new), reason, self.version
                    )
                )
        return outputs

    answer_requests = generate_requests

    def abort_requests(self):
        self._aborted.set()


@pytest.fixture
def ahead(tmp_path):
    """Makes sources that work ahead; they are closed at the end."""
    made = []

    def make(engine, score=lambda text, number: 1.0, ratio=1.0, **overrides) -> PromptSource:
        training = {"training_args": {"per_device_train_batch_size": GROUPS * SAMPLES}}
        source = make_source(
            tmp_path,
            engine,
            score,
            num_rows=500,
            rollout_batch_size=GROUPS,
            num_return_sequences_in_group=SAMPLES,
            async_generation_ratio=ratio,
            actor_train=training,
            **overrides,
        )
        made.append(source)
        return source

    yield make
    for source in made:
        source.close()
        assert not source.buffer.thread.is_alive()


def steps(source, engine, num, first=0, frequency=1) -> Iterator:
    """The loop of the pipeline: pause, new weights, resume, collect, and train until the next batch
    is there."""
    for step in range(first, first + num):
        with source.buffer.paused(step):
            engine.version = step - step % frequency
        yield step, source.collect(step)
        wait_until(source, lambda: num_ready(source) >= GROUPS)


def num_ready(source) -> int:
    return sum(map(len, source.buffer.ready.values()))


def wait_until(source, condition: Callable[[], bool]) -> None:
    """For another thread to get there."""
    with source.buffer.changed:
        assert source.buffer.changed.wait_for(condition, LONG)


def test_training_overlaps_generation_and_staleness_is_bounded(ahead):
    engine = Engine()
    for step, rollout in steps(ahead(engine), engine, 6):
        assert [len(group.trajectories) for group in rollout.groups] == [SAMPLES] * GROUPS
        assert rollout.metrics["rollout/staleness/max"] <= 1
        for item in rollout.trajectories:
            (turn,) = item.turns
            assert turn.response_ids == list(range(10, 10 + LENGTH))
            assert len(turn.token_versions) == len(turn.log_probs) == LENGTH
            assert step - 1 <= min(turn.token_versions) <= max(turn.token_versions) <= step
        numbers = [int(group.name) for group in rollout.groups]
        assert numbers == sorted(numbers), "the oldest first"
    assert rollout.metrics["rollout/staleness/max"] == 1, "answered while the step before trained"


def test_a_weight_update_interrupts_samples_that_go_on_with_the_new_weights(ahead):
    engine = Engine(hold_after=2)
    source = ahead(engine)
    with source.buffer.paused(0):
        pass
    assert engine.holds.wait(LONG)  # two tokens of version 0
    with source.buffer.paused(1):
        assert not source.buffer.gate.is_busy
        engine.version = 1
    rollout = source.collect(1)
    for item in rollout.trajectories:
        assert item.turns[0].token_versions == [0, 0, 1, 1, 1, 1], "tokens of both policies"
        assert item.turns[0].policy_version == 0
    assert rollout.metrics["rollout/mixed_version_samples"] == GROUPS * SAMPLES
    assert rollout.metrics["rollout/continued_samples"] >= GROUPS * SAMPLES
    # While nothing is generated a prompt is one request; samples that go on are their own.
    assert engine.calls[0][0] == "0" and "0/0" in engine.calls[1]


def test_no_more_prompts_are_started_than_the_ratio_allows(ahead):
    source = ahead(Engine(), ratio=2)

    def num_started() -> int:
        """With those that the thread would start now; it may not have got to it yet."""
        with source.buffer.changed:
            source.has_work()
            return source._next_number

    with source.buffer.paused(0):
        pass
    wait_until(source, lambda: num_ready(source) == GROUPS * 3)
    assert num_started() == GROUPS * 3, "the batch of this step, and two ahead"
    source.collect(0)
    assert num_started() == GROUPS * 3, "until the next step begins"
    with source.buffer.paused(1):
        pass
    source.collect(1)
    assert num_started() == GROUPS * 4


def test_samples_that_got_too_old_are_dropped_and_replaced(ahead):
    engine = Engine()
    source = ahead(engine)
    with source.buffer.paused(0):
        pass
    wait_until(source, lambda: num_ready(source) == 2 * GROUPS)  # of version 0
    with source.buffer.paused(5):  # a run that jumps: weights are five steps further
        engine.version = 5
    rollout = source.collect(5)
    assert rollout.metrics["rollout/staleness/max"] <= 1
    assert rollout.metrics["rollout/dropped/stale"] == 2 * GROUPS * SAMPLES
    assert [item.reason for item in rollout.dropped] == ["stale"] * 2 * GROUPS * SAMPLES


def test_what_is_dropped_is_replaced_at_once(ahead, monkeypatch):
    engine, looked = Engine(), threading.Event()
    source = ahead(engine)
    has_work = source.has_work

    def watched():
        looked.set()
        return has_work()

    monkeypatch.setattr(source, "has_work", watched)
    with source.buffer.paused(0):
        pass
    wait_until(source, lambda: num_ready(source) == 2 * GROUPS)  # as many as may be
    with source.buffer.changed:
        looked.clear()
        source.buffer.changed.notify_all()
    assert looked.wait(LONG)  # from here on the thread waits to hear of something to do
    engine.version = 5
    assert source.collect(5).metrics["rollout/dropped/stale"] == 2 * GROUPS * SAMPLES


def test_weights_that_are_copied_rarely_do_not_make_samples_too_old(ahead, tmp_path):
    engine, infer = Engine(), make_values(tmp_path)["actor_infer"]
    source = ahead(engine, actor_infer={**infer, "model_update_frequency": 3})
    found = [rollout.metrics for _, rollout in steps(source, engine, 7, frequency=3)]
    assert [line["rollout/dropped/stale"] for line in found] == [0] * 7
    oldest = max(line["rollout/staleness/max"] for line in found)
    assert oldest == 3, "one step ahead, of weights two steps behind"


def test_a_reward_that_fails_or_drops_everything_ends_the_wait(ahead):
    def broken(text, number):
        raise RuntimeError("the judge is gone")

    engine = Engine()
    with pytest.raises(RuntimeError, match="the judge is gone"):
        next(steps(ahead(engine, broken), engine, 1))
    source = ahead(engine, lambda *_: "none", max_num_gen_batches=2)
    message = r"samples were dropped and the batch is not full .* none: "
    with pytest.raises(DataError, match=message):
        next(steps(source, engine, 1))


def test_prompts_that_were_started_are_answered_after_a_resume(ahead):
    engine = Engine()
    source, seen = ahead(engine), []
    for _, rollout in steps(source, engine, 2):
        seen += [group.prompt.index for group in rollout.groups]
    with source.buffer.paused(2):
        state = source.state_dict()
    source.close()
    assert len(state["jobs"]) >= GROUPS
    resumed = ahead(engine)
    resumed.load_state_dict(state)
    for _, rollout in steps(resumed, engine, 3, first=2):
        seen += [group.prompt.index for group in rollout.groups]
    expected = ahead(engine).sampler.take("all", len(seen))
    assert sorted(seen) == sorted(prompt.index for prompt in expected), "none skipped, none twice"
