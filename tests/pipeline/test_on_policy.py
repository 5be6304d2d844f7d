"""The first update against sampling: what is reported, and when a run stops."""

import pytest
import torch
from rlvr_setup import make_config, make_values

from roll.pipeline.base_worker import first_update_metrics
from roll.pipeline.loss_io import first_update_report, sampling_metrics
from roll.pipeline.on_policy import OffPolicyError, check_first_update


def test_gap_and_ratio_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True)
    sampled = torch.tensor([[-1.0, -2.5, 0.0]])
    metrics = sampling_metrics(log_probs, sampled, torch.tensor([[True, True, False]]), 4.0)
    assert float(metrics["actor/sampling_gap@sum"]) == pytest.approx(0.125), (
        "over the tokens of the whole step"
    )
    assert float(metrics["actor/sampling_gap_max@max"]) == 0.5
    assert float(metrics["actor/sampling_ratio_error_max@max"]) == pytest.approx(
        0.6487, abs=1e-4
    )  # e^0.5 - 1
    assert not any(value.requires_grad for value in metrics.values())


def test_the_first_update_has_its_own_names():
    found = first_update_metrics(
        {"actor/sampling_gap@sum": [0.1, 0.2], "actor/sampling_gap_max@max": [1, 3], "x": 1}
    )
    assert found == {"actor/first_gap@sum": pytest.approx(0.3), "actor/first_gap_max@max": [1, 3]}
    report = first_update_report({**found, "actor/first_gap@sum": [0.1, 0.3]})  # of two ranks
    assert report == {"rollout/logprob_gap/mean": pytest.approx(0.4), "rollout/logprob_gap/max": 3}
    assert first_update_report({"actor/lr": 1}) == {}


def check(error, tmp_path, **overrides):
    check_first_update(
        {"actor/first_ratio_error@sum": [error / 2, error / 2]}, make_config(tmp_path, **overrides)
    )


def test_the_tolerance_follows_the_precision(tmp_path):
    check(0.9e-3, tmp_path)
    with pytest.raises(OffPolicyError, match=r"mean of \|ratio - 1\| is 0.0011, more than 0.001"):
        check(1.1e-3, tmp_path)
    values = make_values(tmp_path)
    half = {"actor_infer": {**values["actor_infer"], "model_args": {"dtype": "bf16"}}}
    check(0.04, tmp_path, **half)
    with pytest.raises(
        OffPolicyError, match="precision bf16 and fp32: engine and trainer round differently"
    ):
        check(0.06, tmp_path, **half)
    check(0.5, tmp_path, first_ratio_tolerance=0)
    check(0.5, tmp_path, first_ratio_tolerance=0.6)
    check(0.5, tmp_path, async_generation_ratio=1)
    check(0.5, tmp_path, train_infer_correction={"filters": [{"enabled": True}]})


@pytest.mark.parametrize(
    ("sampling", "cause"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 5}, "top_k=5"),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.2},
            "repetition_penalty=1.2",
        ),
        (
            {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
            "tokens are not sampled but the most likely ones",
        ),
    ],
)
def test_likely_causes_are_named(tmp_path, sampling, cause):
    values = make_values(tmp_path)
    with pytest.raises(OffPolicyError, match=cause):
        check(0.5, tmp_path, actor_infer={**values["actor_infer"], "generating_args": sampling})
