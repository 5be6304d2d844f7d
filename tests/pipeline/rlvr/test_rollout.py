"""Collecting a batch: filters sample again, failures leave their group, and everything is counted."""

from types import SimpleNamespace

import pytest
from rlvr_setup import make_values
from tiny_models import tiny_tokenizer

from roll.datasets.encoding import encode_prompts
from roll.datasets.sampler import PromptSampler
from roll.datasets.tables import Table
from roll.engines.request import GenerationOutput
from roll.pipeline.rlvr.rlvr_config import RewardFilterConfig, RLVRConfig
from roll.pipeline.rlvr.rollout import RolloutCollector, is_kept
from roll.pipeline.rlvr.samples import ScoredSample

TOKENIZER = tiny_tokenizer()


def collector(
    tmp_path, answer, score, *, num_rows=20, rewards=None, **overrides
) -> RolloutCollector:
    """`answer(prompt_text, number)` gives a response and its finish reason, `score(prompt_text, number)` a verdict."""
    rewards = rewards or {"math": {"reward_fn": "r.py:score"}}
    config = RLVRConfig(**make_values(tmp_path, rewards=rewards, **overrides))
    rows = [{"prompt": f"q{i}", "domain": list(rewards)[i % len(rewards)]} for i in range(num_rows)]
    dataset = encode_prompts(
        Table("data", rows),
        TOKENIZER,
        max_length=8,
        template="base",
        domain_of=lambda row: row["domain"],
    )
    shares = {domain: 1 / len(rewards) for domain in rewards}

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

    def judge(samples):
        found = [score(sample.prompt.text, sample.number) for sample in samples]
        return [
            value if isinstance(value, str) else ScoredSample(sample, value, value)
            for sample, value in zip(samples, found, strict=True)
        ]

    engine = SimpleNamespace(answer_requests=generate)
    return RolloutCollector(
        config, PromptSampler(dataset, seed=0, shares=shares), engine, judge, TOKENIZER
    )


def well(text, number):
    return "ok", "stop"


def test_a_full_batch_in_one_round(tmp_path):
    rollout = collector(tmp_path, well, lambda text, number: float(number % 2)).collect(7)
    assert [group.name for group in rollout.groups] == ["7-0", "7-1", "7-2", "7-3"]
    assert sum(len(group.samples) for group in rollout.groups) == 16 and not rollout.dropped
    assert (
        rollout.metrics["rollout/rounds"] == 1 and rollout.metrics["rollout/missing_prompts"] == 0
    )
    assert rollout.metrics["rollout/no_signal_group_frac"] == 0
    assert rollout.metrics["scheduler/math/score/mean"] == 0.5


def test_a_filter_samples_again_until_the_batch_is_full(tmp_path):
    def score(text, number):  # only prompts with an even number have samples that differ
        return float(number % 2) if int(text[1:]) % 2 == 0 else 1.0

    rule = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    rewards = {"math": {"reward_fn": "r.py:score", "query_filter_config": rule}}
    made = collector(tmp_path, well, score, rewards=rewards)
    rollout = made.collect(0)
    assert len(rollout.groups) == 4 and all(
        int(group.prompt.text[1:]) % 2 == 0 for group in rollout.groups
    )
    assert rollout.metrics["rollout/rounds"] > 1
    drawn, filtered = (
        rollout.metrics["scheduler/collect_query_count"],
        rollout.metrics["scheduler/query_filter_count"],
    )
    assert drawn == 4 + filtered and made.sampler.epoch == pytest.approx(drawn / 20)
    assert rollout.metrics["rollout/dropped/std_filter"] == 4 * filtered == len(rollout.dropped)
    assert len({group.name for group in rollout.groups}) == 4


def test_the_bound_ends_a_hopeless_search(tmp_path):
    rule = {"type": "mean_filter", "filter_args": {"threshold_up": 1.0}}
    rewards = {"math": {"reward_fn": "r.py:score", "query_filter_config": rule}}
    made = collector(tmp_path, well, lambda *_: 1.0, rewards=rewards, max_num_gen_batches=3)
    rollout = made.collect(0)
    assert not rollout.groups
    assert (
        rollout.metrics["rollout/rounds"] == 3 and rollout.metrics["rollout/missing_prompts"] == 4
    )
    assert rollout.metrics["scheduler/collect_query_count"] == 12


def test_samples_without_a_score_leave_their_group_and_are_never_zero(tmp_path):
    def score(text, number):
        return (
            "exception: ValueError at r.py:3" if number == 0 else "timeout" if number == 1 else 1.0
        )

    rollout = collector(tmp_path, well, score).collect(0)
    assert [len(group.samples) for group in rollout.groups] == [2, 2, 2, 2]
    assert all(value == 1.0 for group in rollout.groups for value in group.scores)
    assert (
        rollout.metrics["rollout/dropped/exception"]
        == rollout.metrics["rollout/dropped/timeout"]
        == 4
    )
    assert {sample.reason for sample in rollout.dropped} == {
        "exception: ValueError at r.py:3",
        "timeout",
    }
    assert rollout.metrics["rollout/rounds"] == 1


def test_what_the_engine_could_not_answer_is_dropped_with_its_reason(tmp_path):
    def answer(text, number):
        return (
            ("", "error")
            if number == 2
            else ("longer", "length")
            if number == 3
            else ("ok", "stop")
        )

    rollout = collector(tmp_path, answer, lambda *_: 1.0).collect(0)
    assert rollout.metrics["rollout/dropped/generation"] == 4
    assert rollout.dropped[0].reason == "generation: engine: it broke"
    assert (
        rollout.metrics["rollout/truncated_frac"] == 0.25
        and rollout.metrics["rollout/samples"] == 16
    )


def test_domains_have_their_own_filters(tmp_path):
    rule = {"type": "mean_filter", "filter_args": {"threshold_down": 0.5}}
    rewards = {
        "math": {"reward_fn": "r.py:score"},
        "code": {"reward_fn": "r.py:score", "query_filter_config": rule},
    }
    made = collector(tmp_path, well, lambda *_: 0.0, rewards=rewards, max_num_gen_batches=2)
    rollout = made.collect(0)
    assert [group.prompt.domain for group in rollout.groups] == ["math", "math"], (
        "code's own filter rejects all"
    )
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
