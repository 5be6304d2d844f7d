import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    GARBAGE,
    cuts,
    loss_and_gradient,
    merged,
    narrowed,
    policy_batch,
    window,
    with_counts,
)

from roll.algorithms.policy_loss import policy_loss
from roll.algorithms.surrogates import PPOClip
from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.rlvr.actor_worker import ActorWorker, compute_sample_weights
from roll.pipeline.rlvr.rlvr_config import RLVRConfig

WEIGHTS = {"difficulty_loss_weight": True, "length_loss_weight": True}
CORRECTION = {
    "is_weight": {"enabled": True, "upper_bound": 1.1},
    "filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.7, "ratio_high": 1.4}],
}
FULL = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "entropy_loss_coef": 0.01,
    "rl_loss_coef": 0.7,
    "train_infer_correction": CORRECTION,
}


def make_worker(**options: Any) -> ActorWorker:
    worker = ActorWorker(WorkerConfig(name="actor_train"))
    worker.pipeline_config = RLVRConfig(
        prompt_length=8, sequence_length=16, force_disable_old_logprobs_recompute=True, **options
    )
    return worker


def rlvr_batch(seed: int = 0, rows: int = 5) -> tuple[DataProto, torch.Tensor]:
    """Row 1 was dropped by a sample mask."""
    data, logits = policy_batch(seed, rows=rows)
    final = data["response_mask"][:, 1:].float()
    final[1] = 0
    data["final_response_mask"] = final
    data["difficulty"] = np.array([i / rows for i in range(rows)], dtype=object)
    return data, logits


def test_metrics_have_rolls_names() -> None:
    data, logits = rlvr_batch()
    loss, metrics, _ = loss_and_gradient(make_worker(), data, logits)
    expected = {
        "actor/weighted_pg_loss@sum",
        "actor/valid_samples@sum",
        "actor/total_samples@sum",
        "actor/valid_sample_ratio@sum",
        "actor/sample_weights_mean@mean",
        "actor/sample_weights_min@min",
        "actor/sample_weights_max@max",
        "actor/pg_loss@sum",
        "actor/kl_loss@sum",
        "actor/total_loss@sum",
        "actor/clipfrac@sum",
        "actor/ratio_mean@sum",
        "actor/ratio_max@max",
        "actor/ratio_min@min",
        "actor/ppo_ratio_clipfrac@sum",
        "actor/ppo_ratio_high_clipfrac@sum",
        "actor/ppo_ratio_low_clipfrac@sum",
        "actor/approxkl@sum",
        "actor/policykl@sum",
        "actor/train_infer_ratio_token_mean@sum",
    }
    assert expected <= set(metrics)
    assert metrics["actor/valid_samples@sum"] == 4 and metrics["actor/total_samples@sum"] == 5
    assert metrics["actor/valid_sample_ratio@sum"] == pytest.approx(0.8)
    assert metrics["actor/sample_weights_mean@mean"] == metrics["actor/sample_weights_max@max"] == 1
    assert (
        metrics["actor/pg_loss@sum"]
        == metrics["actor/weighted_pg_loss@sum"]
        == pytest.approx(loss.item())
    )


@pytest.mark.parametrize(
    ("importance_sampling", "ratio_type"),
    [("seq", "sequence"), ("seq_token", "sequence_token"), ("segment_token", "segment_token")],
)
@pytest.mark.parametrize("kl", ["k3", "k2", "abs", "k3+"])
def test_the_loss_is_that_of_the_final_mask_with_weights_and_coefficient(
    importance_sampling: str, ratio_type: str, kl: str
) -> None:
    data, logits = rlvr_batch()
    options = {**FULL, **WEIGHTS, "train_infer_correction": {}, "kl_loss_type": kl}
    worker = make_worker(importance_sampling=importance_sampling, **options)
    logits.requires_grad_()
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    log_probs, entropy = next_token_log_probs(
        logits, data["input_ids"], data["response_mask"], with_entropy=True
    )
    expected = policy_loss(
        log_probs_BT=log_probs,
        old_log_probs_BT=data["old_log_probs"],
        advantages_BT=data["advantages"],
        mask_BT=data["final_response_mask"],
        ref_log_probs_BT=data["ref_log_probs"],
        entropy_BT=entropy,
        surrogate=PPOClip(),
        ratio_type=ratio_type,
        sample_weights_B=compute_sample_weights(data, worker.pipeline_config),
        kl_coef=0.05,
        kl_kind=kl,
        entropy_coef=0.01,
        pg_coef=0.7,
    )
    torch.testing.assert_close(loss, expected.total.detach())
    expected.total.backward()
    torch.testing.assert_close(gradient, logits.grad)
    assert metrics["actor/kl_loss@sum"] == pytest.approx(expected.kl.item())
    assert metrics["actor/weighted_pg_loss@sum"] == pytest.approx(expected.weighted_pg.item())
    assert metrics["actor/pg_loss@sum"] == pytest.approx(expected.pg.item())
    assert metrics["actor/pg_loss@sum"] != pytest.approx(metrics["actor/weighted_pg_loss@sum"])


def test_without_a_final_mask_the_response_mask_is_used() -> None:
    data, logits = policy_batch()
    loss, _, _ = loss_and_gradient(make_worker(), data, logits)
    data["final_response_mask"] = data["response_mask"][:, 1:].float()
    same, _, _ = loss_and_gradient(make_worker(), data, logits)
    assert torch.equal(loss, same)


def test_sample_weights_by_hand() -> None:
    data = DataProto.from_dict(
        {"response_mask": torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]])},
        non_tensors={"difficulty": [0.0, 1, np.float32(1.0)]},
    )
    data["final_response_mask"] = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    # Valid rows 0 and 1: difficulty 0.5 and 2, length 1.5 and 0.5; products 0.75 and 1 with mean 0.875.
    weights = compute_sample_weights(data, make_worker(**WEIGHTS).pipeline_config)
    torch.testing.assert_close(weights, torch.tensor([0.75 / 0.875, 1 / 0.875, 0.0]))
    tensor_column = data.select(["response_mask", "final_response_mask"], [])
    tensor_column["difficulty"] = torch.tensor([0.0, 1.0, 1.0])
    assert torch.equal(
        compute_sample_weights(tensor_column, make_worker(**WEIGHTS).pipeline_config), weights
    )
    assert compute_sample_weights(data, make_worker().pipeline_config).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("importance_sampling", ["token", "seq", "seq_token"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_l23_weighted_micro_batches_add_up(importance_sampling: str, seed: int) -> None:
    data, logits = rlvr_batch(seed)
    worker = make_worker(importance_sampling=importance_sampling, **FULL, **WEIGHTS)
    data["sample_weights"] = compute_sample_weights(data, worker.pipeline_config)
    data = with_counts(data, "response_mask", "final_response_mask")
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    losses, parts, summed = [], [], torch.zeros_like(gradient)
    for rows in cuts(len(data), seed):
        used = window(data["response_mask"][rows])
        used = slice(max(used.start - 1, 0), max(used.stop, used.start + 2))
        piece = loss_and_gradient(worker, narrowed(data, rows, used), logits[rows][:, used])
        losses.append(piece[0])
        parts.append(piece[1])
        for row, values in zip(rows, piece[2], strict=True):
            summed[row, used] = values
    torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-7)
    together = merged(parts)
    for key, value in metrics.items():
        if not key.endswith("@mean"):  # a mean of means
            assert together[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_l23_weights_are_not_made_inside_a_micro_batch() -> None:
    data, logits = rlvr_batch()
    data = with_counts(data, "response_mask", "final_response_mask")
    with pytest.raises(
        KeyError,
        match="no column 'sample_weights', which difficulty_loss_weight or length_loss_weight",
    ):
        make_worker(**WEIGHTS).loss_func(data, logits)


def test_l22_meta_info_is_not_written() -> None:
    data, logits = policy_batch()
    data = with_counts(data, "response_mask")
    meta = copy.deepcopy(data.meta_info)
    make_worker().loss_func(data, logits)
    assert data.meta_info == meta


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(garbage: float) -> None:
    data, logits = rlvr_batch()
    worker = make_worker(importance_sampling="seq", **FULL, **WEIGHTS)
    data["sample_weights"] = compute_sample_weights(data, worker.pipeline_config)
    expected_loss, expected_metrics, expected_gradient = loss_and_gradient(worker, data, logits)
    mask = data["final_response_mask"].bool()
    for key in ("old_log_probs", "ref_log_probs", "infer_logprobs", "advantages"):
        data[key] = torch.where(mask, data[key], garbage)
    data["sample_weights"] = torch.where(mask.any(1), data["sample_weights"], garbage)
    logits = torch.where(torch.nn.functional.pad(mask, (0, 1))[..., None], logits, garbage)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    assert torch.equal(loss, expected_loss) and metrics == expected_metrics
    assert torch.equal(gradient, expected_gradient)


def test_a_micro_batch_of_dropped_rows_is_a_connected_zero() -> None:
    data, logits = rlvr_batch()
    loss, metrics, gradient = loss_and_gradient(make_worker(**FULL), data[1], logits[1:2])
    assert loss.item() == 0 and not gradient.any()
    assert not any(key.endswith(("@max", "@min", "@mean")) for key in metrics)
    assert metrics["actor/valid_samples@sum"] == 0 and metrics["actor/total_samples@sum"] == 1


def test_bad_difficulties_are_named() -> None:
    data, _ = rlvr_batch()
    config = make_worker(**WEIGHTS).pipeline_config
    data["difficulty"] = np.array([0.1, 0.2, "hard", 0.4, 0.5], dtype=object)
    with pytest.raises(
        ValueError, match=r"column 'difficulty', row 2: expected a number in .*, found 'hard'"
    ):
        compute_sample_weights(data, config)
    del data["difficulty"]
    with pytest.raises(
        KeyError, match="no column 'difficulty', which difficulty_loss_weight needs"
    ):
        compute_sample_weights(data, config)
