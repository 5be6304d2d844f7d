"""The metrics of a batch, by hand."""

import pytest
import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.metrics.metrics_manager import DurationTracker, MetricsManager, batch_metrics


def batch(**extra) -> DataProto:
    """Two groups of two rows: scores 1 0 | 0 0, response lengths 2 1 | 3 3."""
    response = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]])
    prompt = torch.tensor([[1, 0, 0, 0]] * 4).bool()
    advantages = torch.tensor(
        [[1.0, 1.0, 99.0], [-1.0, 99.0, 99.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    )
    tensors = {
        "response_mask": response,
        "prompt_mask": prompt,
        "attention_mask": response + prompt.long(),
        "responses": torch.zeros(4, 3, dtype=torch.long),
        "scores": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "response_level_rewards": torch.tensor([0.7, -0.7, 0.0, 0.0]),
        "advantages": advantages,
        "group_id": torch.tensor([0, 0, 1, 1]),
    }
    return DataProto.from_dict({**tensors, **extra}, non_tensors={"domain": ["a", "a", "b", "b"]})


def test_tokens_scores_and_advantages():
    metrics = batch_metrics(batch())
    assert (
        metrics["token/response_length/mean"] == 2.25 and metrics["token/response_length/diff"] == 2
    )
    assert metrics["token/total_response_length/clip"] == 0.5, (
        "two rows fill the width of the responses"
    )
    assert (
        metrics["token/right_response_length/mean"] == 2
        and metrics["token/error_response_length/max"] == 3
    )
    assert metrics["critic/correct/mean"] == 0.25
    assert metrics["critic/score_distribution/incorrect_samples_ratio"] == 0.75
    assert metrics["critic/rewards/max"] == pytest.approx(0.7)
    # 99 stands where there is no response token.
    assert metrics["critic/advantages/max"] == 1 and metrics[
        "critic/advantages/mean"
    ] == pytest.approx(1 / 9)
    assert metrics["critic/right_response/advantages/mean"] == 1
    assert metrics["critic/error_response/advantages/min"] == -1


def test_groups():
    metrics = batch_metrics(batch())
    assert (
        metrics["group/correct_ratio/mean"] == 0.25 and metrics["group/mixed_groups_ratio"] == 0.5
    )
    assert (
        metrics["group/all_incorrect_groups_ratio"] == 0.5
        and metrics["group/all_correct_groups_ratio"] == 0
    )
    assert (
        metrics["group/response_length_diff/max"] == 1 and metrics["group/advantage_diff/max"] == 2
    )
    assert metrics["group/correct_vs_incorrect_advantage_diff/mean"] == 2
    alone = batch()
    alone["group_id"] = torch.arange(4)
    assert not [name for name in batch_metrics(alone) if name.startswith("group/")], (
        "groups of one say nothing"
    )


def test_what_was_cut_off_is_what_the_engine_says():
    data = batch()
    data.non_tensor_batch["finish_reason"] = DataProto(
        non_tensor_batch={"x": ["length", "stop", "stop", "stop"]}
    )["x"]
    metrics = batch_metrics(data)
    assert (
        metrics["token/total_response_length/clip"] == 0.25
        and metrics["token/right_response_length/clip"] == 1
    )


def test_a_step_has_its_metrics_its_domains_and_its_speeds():
    manager = MetricsManager()
    with manager.timer("time/step_train"):
        pass
    manager.add_all_metrics(7, batch())
    manager.add_domain_all_metrics(batch())
    manager.metrics |= {"time/step_train": 2.0, "time/step_generate": 1.0}
    manager.add_speeds(batch(), {"actor_infer": (0, 2), "actor_train": (4, 4)})
    metrics = manager.pop()
    assert metrics["system/global_step"] == 7 and metrics["a/critic/correct/mean"] == 0.5
    assert "b/token/response_length/mean" in metrics
    # 13 tokens in 3 seconds, 9 of them generated in 1.
    assert metrics["system/tps/tps"] == pytest.approx(13 / 3) and metrics[
        "system/tps_gpu"
    ] == pytest.approx(13 / 12)
    assert metrics["system/actor_infer/response/tps_dp"] == pytest.approx(4.5)
    assert metrics["system/actor_train/tps_gpu"] == pytest.approx(13 / 8)
    assert manager.metrics == {}


def test_one_domain_is_not_said_twice():
    data = batch()
    data.non_tensor_batch["domain"][:] = "a"
    manager = MetricsManager()
    manager.add_domain_all_metrics(data)
    assert manager.metrics == {}


def test_speeds_are_those_of_the_last_steps():
    timer = DurationTracker(window=2)
    for seconds, tokens in ((1, 1000), (1, 10), (3, 30)):
        timer.add(seconds, tokens)
    assert timer.tokens_per_second == 10 and timer.mean_seconds == 2
