"""pass@k and means by tag."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from rlvr_setup import make_config

from roll.datasets.encoding import Prompt
from roll.pipeline.rlvr.samples import Group, Sample, ScoredSample
from roll.pipeline.rlvr.validation import ValSampling, pass_at_k, val_metrics


def group_of(tag: str, scores: list[float]) -> Group:
    prompt = Prompt(0, (1,), "q", "q", None, tag, "math", {})
    sample = Sample(prompt, "g", 0, (2,), (-1.0,), "stop", (0,))
    return Group(prompt, "g", [ScoredSample(sample, score, score) for score in scores])


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n, c):
    for k in range(1, n + 1):
        choices = list(combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(
            sum(any(choice) for choice in choices) / len(choices)
        )


def test_pass_at_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples, there are 2"):
        pass_at_k(2, 1, 3)


def test_metrics_by_tag():
    groups = [
        group_of("add", [1.0, 0.0]),
        group_of("add", [0.5, 0.0]),
        group_of("sort", [1.0, 1.0]),
    ]
    metrics = val_metrics(groups, SimpleNamespace(dropped=[None], num_truncated=1, num_samples=7))
    assert metrics["val_correct/all/mean"] == 0.5 and metrics["val_correct/add/mean"] == 0.25
    assert metrics["val/score/add/mean"] == 0.375 and metrics["val/score/sort/mean"] == 1.0
    assert (
        metrics["val/pass_at_2/all"] == pytest.approx(2 / 3) and metrics["val/pass_at_2/add"] == 0.5
    )
    assert metrics["val/dropped_samples"] == 1 and metrics["val/truncated_frac"] == pytest.approx(
        1 / 7
    )


def test_sampling_of_the_validation_is_its_own(tmp_path):
    validation = {
        "data_args": {"file_name": "x.jsonl"},
        "generating_args": {"temperature": 0.6, "top_p": 0.9},
    }
    sampling = ValSampling.of(make_config(tmp_path, validation=validation, val_n_sample=4))
    assert (sampling.params.temperature, sampling.params.top_p, sampling.num_samples) == (
        0.6,
        0.9,
        4,
    )
    assert sampling.params.max_new_tokens == 5
    greedy = ValSampling.of(
        make_config(tmp_path, validation=validation, val_greedy=True, val_n_sample=4)
    )
    assert greedy.params.is_greedy and greedy.num_samples == 1, (
        "the same answer four times says no more"
    )
