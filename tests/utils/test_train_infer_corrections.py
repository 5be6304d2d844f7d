import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_cases import GARBAGE, policy_batch

from roll.configs.ppo_config import TrainInferCorrectionConfig
from roll.utils.train_infer_corrections import (
    apply_train_infer_correction_to_batch,
    compute_train_infer_correction,
    correction_enabled,
)

OLD = torch.tensor([[-1.0, -2.0, 0.0, -0.5], [-0.3, -0.4, -0.5, 0.0]])
INFER = torch.tensor([[-1.1, -1.5, 0.0, -0.9], [-0.3, -3.0, -0.1, 0.0]])
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
ALWAYS = {
    f"actor/train_infer_{kind}_{level}_mean@sum"
    for kind in ("ratio", "diff")
    for level in ("token", "geometric", "sequence", "segment")
}


def config(**options: Any) -> TrainInferCorrectionConfig:
    return TrainInferCorrectionConfig(**options)


def test_switched_off_it_only_measures() -> None:
    weight, keep, metrics = compute_train_infer_correction(config(), MASK, OLD, INFER)
    assert torch.equal(weight, torch.ones(2, 4)) and keep.all()
    assert set(metrics) == ALWAYS and all(type(value) is float for value in metrics.values())
    assert metrics["actor/train_infer_ratio_sequence_mean@sum"] == pytest.approx(
        (1 + math.exp(2.2)) / 2
    )
    _, _, metrics = compute_train_infer_correction(
        config(), MASK, OLD, INFER, global_valid_samples=torch.tensor(8)
    )
    assert metrics["actor/train_infer_ratio_sequence_mean@sum"] == pytest.approx(
        (1 + math.exp(2.2)) / 8
    )


def test_weights_and_filters_by_hand() -> None:
    cfg = config(
        is_weight={"enabled": True, "upper_bound": 1.2},
        filters=[
            {"enabled": True, "agg_type": "token", "ratio_low": 0.8, "ratio_high": 1.5},
            {"enabled": False, "agg_type": "sequence", "ratio_high": 0.9},
        ],
    )
    weight, keep, metrics = compute_train_infer_correction(
        cfg, MASK, OLD, INFER, global_valid_tokens=12
    )
    expected = [[math.exp(0.1), math.exp(-0.5), 1.0, 1.2], [1.0, 1.2, math.exp(-0.4), 1.0]]
    torch.testing.assert_close(weight, torch.tensor(expected))
    assert keep.tolist() == [[True, False, True, True], [True, False, False, True]]
    assert set(metrics) == ALWAYS | {
        "actor/is_weight_clipfrac@sum",
        "actor/train_infer_token_ratio_mask_mean@sum",
        "actor/train_infer_final_mask_mean@sum",
    }
    assert metrics["actor/is_weight_clipfrac@sum"] == pytest.approx(2 / 12)
    assert metrics["actor/train_infer_token_ratio_mask_mean@sum"] == pytest.approx(3 / 12)
    assert metrics["actor/train_infer_final_mask_mean@sum"] == pytest.approx(3 / 12)


def test_difference_filters_have_their_own_metric() -> None:
    filters = [
        {"enabled": True, "agg_type": "segment", "ratio_enabled": False, "diff_enabled": True}
    ]
    _, keep, metrics = compute_train_infer_correction(config(filters=filters), MASK, OLD, INFER)
    # Segment differences: -0.026 on the first run, 0.19996 on the second; 0.107 on row 1.
    assert keep.all() and metrics["actor/train_infer_segment_diff_mask_mean@sum"] == 1
    assert "actor/train_infer_segment_ratio_mask_mean@sum" not in metrics


def test_without_a_bound_nothing_is_clipped() -> None:
    cfg = config(is_weight={"enabled": True, "weight_type": "sequence", "upper_bound": None})
    weight, _, metrics = compute_train_infer_correction(cfg, MASK, OLD, INFER)
    torch.testing.assert_close(weight[1, :3], torch.full((3,), math.exp(2.2)))
    assert "actor/is_weight_clipfrac@sum" not in metrics


def test_detach_decides_about_the_gradient_of_the_weight() -> None:
    old = OLD.clone().requires_grad_()
    for detach in (True, False):
        cfg = config(is_weight={"enabled": True, "upper_bound": None, "detach": detach})
        assert compute_train_infer_correction(cfg, MASK, old, INFER)[0].requires_grad is not detach


def test_correction_enabled() -> None:
    assert not correction_enabled(config(filters=[{"enabled": False}]))
    assert correction_enabled(config(filters=[{"enabled": True}]))
    assert correction_enabled(config(is_weight={"enabled": True}))


def pipeline(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(train_infer_correction=config(**options))


ENABLED = {
    "is_weight": {"enabled": True},
    "filters": [{"enabled": True, "ratio_low": 0.9, "ratio_high": 1.1}],
}


def test_the_batch_gets_two_columns_and_keeps_its_masks() -> None:
    data, _ = policy_batch(1)
    result, metrics = apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)
    mask = data["response_mask"][:, 1:]
    weight, keep, expected = compute_train_infer_correction(
        config(**ENABLED), mask, data["old_log_probs"], data["infer_logprobs"]
    )
    assert torch.equal(result["train_infer_is_weight"], weight)
    assert torch.equal(result["train_infer_filter_mask"], keep) and not keep.all()
    assert metrics == expected
    assert torch.equal(result["response_mask"], data["response_mask"])
    assert "train_infer_is_weight" not in data, "the batch that came in is not changed"


def test_named_masks_are_filtered_at_either_width_without_touching_the_input() -> None:
    data, _ = policy_batch(1)
    data["final_response_mask"] = data["response_mask"][:, 1:].float()
    before = data.clone()
    keys = ["response_mask", "final_response_mask"]
    result, _ = apply_train_infer_correction_to_batch(
        pipeline(**ENABLED), data, update_mask_keys=keys
    )
    keep = result["train_infer_filter_mask"]
    assert torch.equal(result["response_mask"][:, 1:], before["response_mask"][:, 1:] * keep)
    assert torch.equal(result["final_response_mask"], before["final_response_mask"] * keep)
    assert result["final_response_mask"].dtype == torch.float32
    assert all(torch.equal(data[key], before[key]) for key in before.batch.keys())


def test_without_log_probs_of_the_engine_there_is_nothing_to_correct() -> None:
    data, _ = policy_batch()
    del data["infer_logprobs"]
    result, metrics = apply_train_infer_correction_to_batch(pipeline(), data)
    assert metrics == {} and torch.equal(result["train_infer_is_weight"], torch.ones(4, 9))
    assert result["train_infer_filter_mask"].all()
    with pytest.raises(
        KeyError, match="train_infer_correction is enabled but the batch has no infer_logprobs"
    ):
        apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)
    data["old_log_probs"] = torch.zeros(
        4, 9, dtype=torch.long
    )  # a placeholder is no log-probability
    with pytest.raises(KeyError, match="the batch has no old_log_probs and no infer_logprobs"):
        apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)


def test_the_statistics_can_be_taken_over_a_mask_of_either_width() -> None:
    data, _ = policy_batch(1)
    data["final_response_mask"] = data["response_mask"][:, 1:].float()
    full = apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)[1]
    final = apply_train_infer_correction_to_batch(
        pipeline(**ENABLED), data, stat_mask_key="final_response_mask"
    )[1]
    assert full == final


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_nothing(garbage: float) -> None:
    data, _ = policy_batch(2, empty_row=True)
    expected, expected_metrics = apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)
    mask = data["response_mask"][:, 1:].bool()
    for key in ("old_log_probs", "infer_logprobs"):
        data[key] = torch.where(mask, data[key], garbage)
    result, metrics = apply_train_infer_correction_to_batch(pipeline(**ENABLED), data)
    assert metrics == expected_metrics
    for key in ("train_infer_is_weight", "train_infer_filter_mask"):
        assert torch.equal(result[key], expected[key])


def test_l5_an_unbounded_sequence_weight_is_finite() -> None:
    cfg = config(is_weight={"enabled": True, "weight_type": "sequence", "upper_bound": None})
    old, infer, mask = torch.zeros(1, 3), torch.full((1, 3), -60.0), torch.ones(1, 3)
    weight, _, metrics = compute_train_infer_correction(cfg, mask, old, infer)
    torch.testing.assert_close(weight, torch.full((1, 3), math.exp(20)))
    assert all(math.isfinite(value) for value in metrics.values())
