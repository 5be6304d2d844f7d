"""The policy losses of the agentic and the RLVR actor: numbers by hand, names, splits and
poison."""

import copy
import math
from types import SimpleNamespace
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
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.base_worker import ActorWorker, compute_segment_masked_mean
from roll.pipeline.rlvr.actor_worker import ActorWorker as RLVRActorWorker
from roll.pipeline.rlvr.actor_worker import compute_sample_weights
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

SUMS = (
    "ppo_ratio_high_clipfrac ppo_ratio_low_clipfrac ppo_ratio_clipfrac ratio_mean clipfrac pg_loss "
    "kl_loss total_loss approxkl policykl"
)
POLICY_KEYS = {f"actor/{name}@sum" for name in SUMS.split()}
POLICY_KEYS |= {"actor/ratio_max@max", "actor/ratio_min@min"}
GAP_KEYS = {
    f"actor/train_infer_{kind}_{level}_mean@sum"
    for kind in ("ratio", "diff")
    for level in ("token", "geometric", "sequence", "segment")
}
GAP_KEYS |= {"actor/sampling_gap@sum", "actor/sampling_gap_max@max"}
GAP_KEYS |= {"actor/sampling_ratio_error@sum", "actor/sampling_ratio_error_max@max"}
CORRECTION = {
    "is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.1},
    "filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.7, "ratio_high": 1.4}],
}
FULL = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "entropy_loss_coef": 0.01,
    "train_infer_correction": CORRECTION,
}
WEIGHTS = {"difficulty_loss_weight": True, "length_loss_weight": True}
RATIO_TYPES = ["token", "segment", "seq", "segment_token", "seq_token"]


def make_worker(
    recompute: bool = False, pg_variant: str | None = None, **options: Any
) -> ActorWorker:
    worker = ActorWorker(WorkerConfig(name="actor_train", pg_variant=pg_variant))
    worker.pipeline_config = AgenticConfig(
        prompt_length=8,
        sequence_length=16,
        force_disable_old_logprobs_recompute=not recompute,
        enable_old_logprobs_recompute=recompute,
        **options,
    )
    return worker


def rlvr_worker(**options: Any) -> RLVRActorWorker:
    worker = RLVRActorWorker(WorkerConfig(name="actor_train"))
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


def weighted_case(importance_sampling: str, seed: int = 0) -> tuple[Any, DataProto, torch.Tensor]:
    """An RLVR worker with everything on, and its batch with the weights that the pipeline makes."""
    data, logits = rlvr_batch(seed)
    options = {**FULL, **WEIGHTS, "rl_loss_coef": 0.7}
    worker = rlvr_worker(importance_sampling=importance_sampling, **options)
    data["sample_weights"] = compute_sample_weights(data, worker.pipeline_config)
    return worker, data, logits


def test_metrics_are_floats_under_rolls_names() -> None:
    data, logits = policy_batch()
    loss, metrics, _ = loss_and_gradient(make_worker(), data, logits)
    assert set(metrics) == POLICY_KEYS | GAP_KEYS
    assert all(type(value) is float for value in metrics.values())
    assert metrics["actor/total_loss@sum"] == pytest.approx(loss.item())
    _, metrics, _ = loss_and_gradient(make_worker(**FULL), data, logits)
    more = (
        "entropy is_weight_clipfrac train_infer_token_ratio_mask_mean train_infer_final_mask_mean"
    )
    assert set(metrics) == POLICY_KEYS | GAP_KEYS | {f"actor/{name}@sum" for name in more.split()}


def test_rlvr_adds_metrics_of_weights_and_dropped_rows() -> None:
    data, logits = rlvr_batch()
    loss, metrics, _ = loss_and_gradient(rlvr_worker(), data, logits)
    assert set(metrics) >= POLICY_KEYS and "actor/train_infer_ratio_token_mean@sum" in metrics
    assert metrics["actor/valid_samples@sum"] == 4 and metrics["actor/total_samples@sum"] == 5
    assert metrics["actor/valid_sample_ratio@sum"] == pytest.approx(0.8)
    for key in ("mean@mean", "min@min", "max@max"):
        assert metrics[f"actor/sample_weights_{key}"] == 1
    assert metrics["actor/pg_loss@sum"] == metrics["actor/weighted_pg_loss@sum"]
    assert metrics["actor/pg_loss@sum"] == pytest.approx(loss.item())


def test_the_loss_by_hand() -> None:
    # Two response tokens with probability 1/2 now; before, 0.25 (ratio 2) and 0.5 (ratio 1).
    data = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 1, 0, 1]]),
            "response_mask": torch.tensor([[0, 0, 1, 1]]),
            "old_log_probs": torch.tensor([[0.0, math.log(0.25), math.log(0.5)]]),
            "ref_log_probs": torch.tensor([[0.0, math.log(0.5), math.log(0.25)]]),
            "advantages": torch.tensor([[0.0, 1.0, 3.0]]),
        }
    )
    worker = make_worker(use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.01)
    loss, metrics, _ = loss_and_gradient(worker, data, torch.zeros(1, 4, 2))
    k3 = math.exp(-math.log(2)) + math.log(2) - 1  # ref - lp = -log 2
    assert loss.item() == pytest.approx(-2.1 + 0.1 * k3 / 2 - 0.01 * math.log(2))
    expected = {
        "actor/pg_loss@sum": -(1.2 + 3) / 2,
        "actor/kl_loss@sum": k3 / 2,
        "actor/entropy@sum": math.log(2),
        "actor/clipfrac@sum": 0.5,
        "actor/ppo_ratio_high_clipfrac@sum": 0.5,
        "actor/ratio_max@max": 2,
        "actor/ratio_min@min": 1,
        "actor/policykl@sum": math.log(2) / 2,
        "actor/approxkl@sum": math.log(2) ** 2 / 4,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("importance_sampling", "ratio_type"),
    [("seq", "sequence"), ("seq_token", "sequence_token"), ("segment_token", "segment_token")],
)
@pytest.mark.parametrize("kl", ["k3", "k2", "abs", "k3+"])
def test_the_rlvr_loss_is_that_of_the_final_mask_with_weights_and_coefficient(
    importance_sampling: str, ratio_type: str, kl: str
) -> None:
    data, logits = rlvr_batch()
    options = {**FULL, **WEIGHTS, "train_infer_correction": {}, "kl_loss_type": kl}
    worker = rlvr_worker(importance_sampling=importance_sampling, rl_loss_coef=0.7, **options)
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
    loss, _, _ = loss_and_gradient(rlvr_worker(), data, logits)
    data["final_response_mask"] = data["response_mask"][:, 1:].float()
    assert torch.equal(loss, loss_and_gradient(rlvr_worker(), data, logits)[0])


def test_sample_weights_by_hand() -> None:
    data = DataProto.from_dict(
        {"response_mask": torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]])},
        non_tensors={"difficulty": [0.0, 1, np.float32(1.0)]},
    )
    data["final_response_mask"] = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    config = rlvr_worker(**WEIGHTS).pipeline_config
    # Rows 0 and 1: difficulty 0.5 and 2, length 1.5 and 0.5; products 0.75 and 1 with mean 0.875.
    weights = compute_sample_weights(data, config)
    torch.testing.assert_close(weights, torch.tensor([0.75 / 0.875, 1 / 0.875, 0.0]))
    tensor_column = data.select(["response_mask", "final_response_mask"], [])
    tensor_column["difficulty"] = torch.tensor([0.0, 1.0, 1.0])
    assert torch.equal(compute_sample_weights(tensor_column, config), weights)
    assert compute_sample_weights(data, rlvr_worker().pipeline_config).tolist() == [1.0, 1.0, 0.0]
    data["difficulty"] = np.array([0.1, 0.2, "hard"], dtype=object)
    message = r"column 'difficulty', row 2: expected a number in .*, found 'hard'"
    with pytest.raises(ValueError, match=message):
        compute_sample_weights(data, config)
    del data["difficulty"]
    message = "no column 'difficulty', which difficulty_loss_weight needs"
    with pytest.raises(KeyError, match=message):
        compute_sample_weights(data, config)


def test_l23_weights_are_not_made_inside_a_micro_batch() -> None:
    data, logits = rlvr_batch()
    data = with_counts(data, "response_mask", "final_response_mask")
    message = "no column 'sample_weights', which difficulty_loss_weight or length_loss_weight"
    with pytest.raises(KeyError, match=message):
        rlvr_worker(**WEIGHTS).loss_func(data, logits)


def test_the_kl_coefficient_counts_only_when_the_kl_loss_is_on() -> None:
    data, logits = policy_batch()
    plain, _, plain_gradient = loss_and_gradient(make_worker(), data, logits)
    off, metrics, off_gradient = loss_and_gradient(make_worker(kl_loss_coef=0.5), data, logits)
    assert torch.equal(off, plain) and torch.equal(off_gradient, plain_gradient)
    assert metrics["actor/kl_loss@sum"] > 0, "reported all the same"
    on, _, _ = loss_and_gradient(make_worker(use_kl_loss=True, kl_loss_coef=0.5), data, logits)
    assert on.item() == pytest.approx(plain.item() + 0.5 * metrics["actor/kl_loss@sum"])


def test_any_object_with_the_fields_of_roll_serves_as_configuration() -> None:
    data, logits = policy_batch()
    worker = ActorWorker(SimpleNamespace())
    worker.pipeline_config = SimpleNamespace(
        pg_clip=0.2,
        use_pg_clip_range=False,
        dual_clip_loss=False,
        loss_agg_mode="seq-mean-token-mean",
        ratio_type="token",
        use_kl_loss=False,
        kl_loss_coef=0.0,
        entropy_loss_coef=0.0,
        enable_old_logprobs_recompute=False,
        train_infer_correction=SimpleNamespace(
            is_weight=SimpleNamespace(enabled=False), filters=[]
        ),
    )
    loss, _, gradient = loss_and_gradient(worker, data, logits)
    expected_loss, _, expected_gradient = loss_and_gradient(make_worker(), data, logits)
    assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)


def check_splits(worker: Any, data: DataProto, logits: torch.Tensor, seed: int) -> None:
    """Micro-batches, trimmed to the columns that they use, add up to the whole batch."""
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    losses, parts, summed = [], [], torch.zeros_like(gradient)
    for rows in cuts(len(data), seed):
        used = window(data["response_mask"][rows])
        # A prediction needs the token before.
        used = slice(max(used.start - 1, 0), max(used.stop, used.start + 2))
        piece = loss_and_gradient(worker, narrowed(data, rows, used), logits[rows][:, used])
        losses.append(piece[0])
        parts.append(piece[1])
        for row, values in zip(rows, piece[2], strict=True):
            summed[row, used] = values
    torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-7)
    together = merged(parts)
    assert set(together) == set(metrics)
    for key, value in metrics.items():
        if not key.endswith("@mean"):  # a mean of means
            assert together[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@given(seed=st.integers(0, 10_000), ratio_type=st.sampled_from(RATIO_TYPES))
@settings(max_examples=12, deadline=None)
def test_micro_batches_add_up(mode: str, seed: int, ratio_type: str) -> None:
    data, logits = policy_batch(seed, rows=5, empty_row=seed % 2 == 0)
    worker = make_worker(ratio_type=ratio_type, loss_agg_mode=mode, **FULL)
    check_splits(worker, with_counts(data, "response_mask"), logits, seed)


@pytest.mark.parametrize("importance_sampling", ["token", "seq", "seq_token"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_l23_weighted_micro_batches_add_up(importance_sampling: str, seed: int) -> None:
    worker, data, logits = weighted_case(importance_sampling, seed)
    data = with_counts(data, "response_mask", "final_response_mask")
    check_splits(worker, data, logits, seed)


@pytest.mark.parametrize("kind", [*RATIO_TYPES, "rlvr"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(kind: str, garbage: float) -> None:
    if kind == "rlvr":
        worker, data, logits = weighted_case("seq")
        mask = data["final_response_mask"].bool()
    else:
        worker = make_worker(ratio_type=kind, **FULL)
        data, logits = policy_batch(3, empty_row=True)
        mask = data["response_mask"][:, 1:].bool()
    expected_loss, expected_metrics, expected_gradient = loss_and_gradient(worker, data, logits)
    for key in ("old_log_probs", "ref_log_probs", "infer_logprobs", "advantages"):
        data[key] = torch.where(mask, data[key], garbage)
    if kind == "rlvr":
        data["sample_weights"] = torch.where(mask.any(1), data["sample_weights"], garbage)
    else:
        data["input_ids"] = torch.where(data["response_mask"].bool(), data["input_ids"], 10**9)
    logits = torch.where(torch.nn.functional.pad(mask, (0, 1))[..., None], logits, garbage)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    assert torch.equal(loss, expected_loss) and metrics == expected_metrics
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("make", [make_worker, rlvr_worker])
def test_nothing_that_was_given_is_changed(make: Any) -> None:
    data, logits = policy_batch()
    data = with_counts(data, "response_mask")
    worker = make(**FULL)
    before, config = data.clone(), worker.pipeline_config.model_dump()
    meta = copy.deepcopy(data.meta_info)
    worker.loss_func(data, logits)
    assert set(data.batch.keys()) == set(before.batch.keys())
    assert all(torch.equal(data[key], before[key]) for key in before.batch.keys())
    assert data.meta_info == meta and worker.pipeline_config.model_dump() == config


def test_a_micro_batch_without_tokens_is_a_connected_zero_without_extremes() -> None:
    data, logits = policy_batch()
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    loss, metrics, gradient = loss_and_gradient(make_worker(**FULL), data, logits)
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros_like(logits))
    assert not any(key.endswith(("@max", "@min")) for key in metrics)
    assert all(value == 0 for value in metrics.values())
    data, logits = rlvr_batch()
    loss, metrics, gradient = loss_and_gradient(rlvr_worker(**FULL), data[1], logits[1:2])
    assert loss.item() == 0 and not gradient.any()
    assert not any(key.endswith(("@max", "@min", "@mean")) for key in metrics)
    assert metrics["actor/valid_samples@sum"] == 0 and metrics["actor/total_samples@sum"] == 1


def test_hidden_states_with_the_head_give_the_same_loss() -> None:
    data, _ = policy_batch()
    hidden, weight = torch.randn(4, 10, 6), torch.randn(11, 6)
    worker = make_worker(**FULL)
    loss, metrics = worker.loss_func(data, hidden @ weight.T)
    fused, fused_metrics = worker.loss_func(data, LinearLogits(hidden, weight))
    torch.testing.assert_close(fused, loss, rtol=1e-5, atol=1e-6)
    assert fused_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


class Strategy:
    """Scores as the operator does, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked_for_entropy: list[bool] = []

    def score(self, output, input_ids, mask, *, temperature, with_entropy):
        self.asked_for_entropy.append(with_entropy)
        return next_token_log_probs(
            output, input_ids, mask, temperature=temperature, with_entropy=with_entropy
        )


def test_a_strategy_does_the_scoring_when_there_is_one() -> None:
    data, logits = policy_batch()
    worker = make_worker(**FULL)
    expected, _ = worker.loss_func(data, logits)
    worker.strategy = Strategy()
    loss, _ = worker.loss_func(data, logits)
    torch.testing.assert_close(loss, expected)
    worker.pipeline_config = make_worker().pipeline_config
    worker.loss_func(data, logits)
    # Log-probs and entropy come from one pass; no entropy unless it has a coefficient.
    assert worker.strategy.asked_for_entropy == [True, False]


def test_the_temperature_divides_the_logits() -> None:
    data, logits = policy_batch()
    worker = make_worker()
    worker.log_prob_temperature = 0.5
    loss, _ = worker.loss_func(data, logits)
    torch.testing.assert_close(loss, make_worker().loss_func(data, logits / 0.5)[0])


def test_rolls_segment_mean_is_importable_from_here() -> None:
    values, mask = torch.tensor([[1.0, 3.0, 9.0, 5.0]]), torch.tensor([[1, 1, 0, 1]])
    assert compute_segment_masked_mean(values, mask).tolist() == [[2.0, 2.0, 0.0, 5.0]]


def test_l2_the_filter_changes_loss_and_gradient_in_token_mean() -> None:
    data, logits = policy_batch(1)
    filters = {"filters": [{"enabled": True, "ratio_low": 0.9, "ratio_high": 1.1}]}
    worker = make_worker(loss_agg_mode="token-mean")
    plain, _, plain_gradient = loss_and_gradient(worker, data, logits)
    worker = make_worker(loss_agg_mode="token-mean", train_infer_correction=filters)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    assert 0 < metrics["actor/train_infer_final_mask_mean@sum"] < 1 and loss != plain
    assert ((plain_gradient.abs().sum(-1) > 0) & (gradient.abs().sum(-1) == 0)).any()


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
def test_l3_l12_l13_correction_on_the_driver_and_in_the_worker_are_one_loss(ratio_type) -> None:
    data, logits = policy_batch(1)
    options = {"loss_agg_mode": "token-mean", "train_infer_correction": CORRECTION}
    worker = make_worker(ratio_type=ratio_type, **options)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    driver = make_worker(recompute=True, ratio_type=ratio_type, **options)
    corrected, driver_metrics = apply_train_infer_correction_to_batch(driver.pipeline_config, data)
    driver_loss, worker_metrics, driver_gradient = loss_and_gradient(driver, corrected, logits)
    assert torch.equal(driver_loss, loss) and torch.equal(driver_gradient, gradient)
    assert {**worker_metrics, **driver_metrics} == pytest.approx(metrics)


@pytest.mark.parametrize(
    ("options", "constant"),
    [
        ({}, 1.4),
        ({"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3}, 1.4),
        ({"dual_clip_c": 3.0}, 3.0),
        ({"use_pg_clip_range": True, "pg_clip": None, "pg_clip_high": 0.3}, 1.6),
    ],
)
def test_l6_the_dual_clip_has_its_own_constant(options: Any, constant: float) -> None:
    data, logits = policy_batch(2)
    data["advantages"] = -torch.ones_like(data["advantages"])
    # Ratios around e^3 are above every bound, so the loss is the constant.
    data["old_log_probs"] = data["old_log_probs"] - 3
    loss, _ = make_worker(dual_clip_loss=True, **options).loss_func(data, logits)
    assert loss.item() == pytest.approx(constant)


def test_l7_columns_are_needed_only_by_what_is_switched_on() -> None:
    data, logits = policy_batch()
    minimal = data.select(["input_ids", "response_mask", "old_log_probs", "advantages"])
    for worker in (make_worker(), make_worker(recompute=True)):
        loss, metrics, _ = loss_and_gradient(worker, minimal, logits)
        assert loss.isfinite() and metrics["actor/kl_loss@sum"] == 0
        assert set(metrics) == POLICY_KEYS
    weight, filters = {"is_weight": {"enabled": True}}, {"filters": [{"enabled": True}]}
    needs = {
        "ref_log_probs": make_worker(use_kl_loss=True),
        "infer_logprobs": make_worker(train_infer_correction=CORRECTION),
        "train_infer_is_weight": make_worker(recompute=True, train_infer_correction=weight),
        "train_infer_filter_mask": make_worker(recompute=True, train_infer_correction=filters),
    }
    for column, worker in needs.items():
        with pytest.raises(KeyError, match=f"the batch has no column '{column}'"):
            worker.loss_func(minimal, logits)
    without = minimal.select(["input_ids", "response_mask", "old_log_probs"])
    with pytest.raises(KeyError, match="advantages"):
        make_worker().loss_func(without, logits)


def test_wrong_widths_and_counts_for_another_mask_are_named() -> None:
    data, logits = policy_batch()
    data.meta_info["batch_num_tokens"] = {"labels": 3}
    data.meta_info["global_valid_samples"] = {"default": 4}
    message = r"no count for 'response_mask' \(it has \['labels'\]\).*loss_mask_keys"
    with pytest.raises(KeyError, match=message):
        make_worker().loss_func(data, logits)
    data, logits = policy_batch()
    data["advantages"] = torch.zeros_like(data["input_ids"], dtype=torch.float32)
    message = r"advantages has shape \(4, 10\) but its mask has shape \(4, 9\); token-level"
    with pytest.raises(ValueError, match=message):
        make_worker().loss_func(data, logits)


@pytest.mark.parametrize("variant", ["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"])
def test_pg_variants_by_name(variant: str) -> None:
    data, logits = policy_batch()
    worker = make_worker(pg_variant=variant)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    plain, _, _ = loss_and_gradient(make_worker(), data, logits)
    assert set(metrics) == POLICY_KEYS | GAP_KEYS and gradient.isfinite().all()
    assert (loss == plain) == (variant == "ppo")
    worker.worker_config = SimpleNamespace(pg_variant="ppg")
    with pytest.raises(ValueError, match="unknown pg_variant 'ppg'; known: ppo, vanilla, tis"):
        worker.loss_func(data, logits)
