import copy
import math
from types import SimpleNamespace
from typing import Any

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

from roll.algorithms.masking import segment_masked_mean
from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.base_worker import ActorWorker, compute_segment_masked_mean
from roll.utils.train_infer_corrections import apply_train_infer_correction_to_batch

POLICY_KEYS = {
    "actor/ppo_ratio_high_clipfrac@sum",
    "actor/ppo_ratio_low_clipfrac@sum",
    "actor/ppo_ratio_clipfrac@sum",
    "actor/ratio_mean@sum",
    "actor/ratio_max@max",
    "actor/ratio_min@min",
    "actor/clipfrac@sum",
    "actor/pg_loss@sum",
    "actor/kl_loss@sum",
    "actor/total_loss@sum",
    "actor/approxkl@sum",
    "actor/policykl@sum",
}
GAP_KEYS = {
    f"actor/train_infer_{kind}_{level}_mean@sum"
    for kind in ("ratio", "diff")
    for level in ("token", "geometric", "sequence", "segment")
} | {
    "actor/sampling_gap@sum",
    "actor/sampling_gap_max@max",
    "actor/sampling_ratio_error@sum",
    "actor/sampling_ratio_error_max@max",
}
CORRECTION = {
    "is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.1},
    "filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.7, "ratio_high": 1.4}],
}


def make_worker(
    recompute: bool = False, worker_options: dict[str, Any] | None = None, **options: Any
) -> ActorWorker:
    worker = ActorWorker(WorkerConfig(name="actor_train", **(worker_options or {})))
    worker.pipeline_config = AgenticConfig(
        prompt_length=8,
        sequence_length=16,
        force_disable_old_logprobs_recompute=not recompute,
        enable_old_logprobs_recompute=recompute,
        **options,
    )
    return worker


FULL = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "entropy_loss_coef": 0.01,
    "train_infer_correction": CORRECTION,
}


def test_metrics_are_floats_under_rolls_names() -> None:
    data, logits = policy_batch()
    loss, metrics, _ = loss_and_gradient(make_worker(), data, logits)
    assert set(metrics) == POLICY_KEYS | GAP_KEYS
    assert all(type(value) is float for value in metrics.values())
    assert metrics["actor/total_loss@sum"] == pytest.approx(loss.item())
    _, metrics, _ = loss_and_gradient(make_worker(**FULL), data, logits)
    assert set(metrics) == POLICY_KEYS | GAP_KEYS | {
        "actor/entropy@sum",
        "actor/is_weight_clipfrac@sum",
        "actor/train_infer_token_ratio_mask_mean@sum",
        "actor/train_infer_final_mask_mean@sum",
    }


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
    assert metrics["actor/pg_loss@sum"] == pytest.approx(-(1.2 + 3) / 2)
    assert metrics["actor/kl_loss@sum"] == pytest.approx(k3 / 2)
    assert metrics["actor/entropy@sum"] == pytest.approx(math.log(2))
    assert loss.item() == pytest.approx(-2.1 + 0.1 * k3 / 2 - 0.01 * math.log(2))
    assert metrics["actor/clipfrac@sum"] == metrics["actor/ppo_ratio_high_clipfrac@sum"] == 0.5
    assert metrics["actor/ratio_max@max"] == pytest.approx(2) and metrics[
        "actor/ratio_min@min"
    ] == pytest.approx(1)
    assert metrics["actor/policykl@sum"] == pytest.approx(math.log(2) / 2)
    assert metrics["actor/approxkl@sum"] == pytest.approx(math.log(2) ** 2 / 4)


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
    off = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
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
        train_infer_correction=off,
    )
    loss, _, gradient = loss_and_gradient(worker, data, logits)
    expected_loss, _, expected_gradient = loss_and_gradient(make_worker(), data, logits)
    assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)


RATIO_TYPES = ["token", "segment", "seq", "segment_token", "seq_token"]


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@given(seed=st.integers(0, 10_000), ratio_type=st.sampled_from(RATIO_TYPES))
@settings(max_examples=12, deadline=None)
def test_micro_batches_trimmed_to_their_width_add_up(mode: str, seed: int, ratio_type: str) -> None:
    data, logits = policy_batch(seed, rows=5, empty_row=seed % 2 == 0)
    data = with_counts(data, "response_mask")
    worker = make_worker(ratio_type=ratio_type, loss_agg_mode=mode, **FULL)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    losses, parts, summed = [], [], torch.zeros_like(gradient)
    for rows in cuts(len(data), seed):
        used = window(data["response_mask"][rows])
        used = slice(
            max(used.start - 1, 0), max(used.stop, used.start + 2)
        )  # a prediction needs the token before
        piece_loss, piece_metrics, piece_gradient = loss_and_gradient(
            worker, narrowed(data, rows, used), logits[rows][:, used]
        )
        losses.append(piece_loss)
        parts.append(piece_metrics)
        for row, values in zip(rows, piece_gradient, strict=True):
            summed[row, used] = values
    torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-7)
    assert merged(parts) == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(ratio_type: str, garbage: float) -> None:
    data, logits = policy_batch(3, empty_row=True)
    worker = make_worker(ratio_type=ratio_type, **FULL)
    expected_loss, expected_metrics, expected_gradient = loss_and_gradient(worker, data, logits)
    mask = data["response_mask"][:, 1:].bool()
    dirty = data.clone()
    for key in ("old_log_probs", "ref_log_probs", "infer_logprobs", "advantages"):
        dirty[key] = torch.where(mask, data[key], garbage)
    dirty["input_ids"] = torch.where(data["response_mask"].bool(), data["input_ids"], 10**9)
    predicting = torch.nn.functional.pad(mask, (0, 1))
    logits = torch.where(predicting[..., None], logits, garbage)
    loss, metrics, gradient = loss_and_gradient(worker, dirty, logits)
    assert torch.equal(loss, expected_loss) and metrics == expected_metrics
    assert torch.equal(gradient, expected_gradient)


def test_nothing_that_was_given_is_changed() -> None:
    data, logits = policy_batch()
    data = with_counts(data, "response_mask")
    worker = make_worker(ratio_type="segment", **FULL)
    before, config, meta = (
        data.clone(),
        worker.pipeline_config.model_dump(),
        copy.deepcopy(data.meta_info),
    )
    worker.loss_func(data, logits)
    assert set(data.batch.keys()) == set(before.batch.keys())
    assert all(torch.equal(data[key], before[key]) for key in before.batch.keys())
    assert data.meta_info == meta and worker.pipeline_config.model_dump() == config


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
    assert worker.strategy.asked_for_entropy == [True], "log-probs and entropy come from one pass"
    torch.testing.assert_close(loss, expected)
    worker.pipeline_config = make_worker().pipeline_config
    worker.loss_func(data, logits)
    assert worker.strategy.asked_for_entropy == [True, False], (
        "no entropy unless it has a coefficient"
    )


def test_the_temperature_divides_the_logits() -> None:
    data, logits = policy_batch()
    worker = make_worker()
    worker.log_prob_temperature = 0.5
    loss, _ = worker.loss_func(data, logits)
    expected, _ = make_worker().loss_func(data, logits / 0.5)
    torch.testing.assert_close(loss, expected)


def test_compute_segment_masked_mean_is_importable_from_here() -> None:
    values, mask = torch.tensor([[1.0, 3.0, 9.0, 5.0]]), torch.tensor([[1, 1, 0, 1]])
    assert compute_segment_masked_mean(values, mask).tolist() == [[2.0, 2.0, 0.0, 5.0]]
    assert torch.equal(compute_segment_masked_mean(values, mask), segment_masked_mean(values, mask))


def test_an_all_masked_micro_batch_is_a_connected_zero_without_extremes() -> None:
    data, logits = policy_batch()
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    loss, metrics, gradient = loss_and_gradient(make_worker(**FULL), data, logits)
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros_like(logits))
    assert not any(key.endswith(("@max", "@min")) for key in metrics)
    assert all(value == 0 for value in metrics.values())


# Regressions


def test_l2_the_filter_changes_loss_and_gradient_in_token_mean() -> None:
    data, logits = policy_batch(1)
    filters = {"filters": [{"enabled": True, "ratio_low": 0.9, "ratio_high": 1.1}]}
    plain, _, plain_gradient = loss_and_gradient(
        make_worker(loss_agg_mode="token-mean"), data, logits
    )
    worker = make_worker(loss_agg_mode="token-mean", train_infer_correction=filters)
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    kept = metrics["actor/train_infer_final_mask_mean@sum"]
    assert 0 < kept < 1 and loss != plain
    dropped = (plain_gradient.abs().sum(-1) > 0) & (gradient.abs().sum(-1) == 0)
    assert dropped.any()


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
def test_l3_l12_l13_correction_on_the_driver_and_in_the_worker_are_one_loss(
    ratio_type: str,
) -> None:
    data, logits = policy_batch(1)
    options = {
        "loss_agg_mode": "token-mean",
        "ratio_type": ratio_type,
        "train_infer_correction": CORRECTION,
    }
    in_worker = make_worker(**options)
    loss, metrics, gradient = loss_and_gradient(in_worker, data, logits)
    on_driver = make_worker(recompute=True, **options)
    corrected, driver_metrics = apply_train_infer_correction_to_batch(
        on_driver.pipeline_config, data
    )
    driver_loss, worker_metrics, driver_gradient = loss_and_gradient(on_driver, corrected, logits)
    assert torch.equal(driver_loss, loss) and torch.equal(driver_gradient, gradient)
    assert {**worker_metrics, **driver_metrics} == pytest.approx(metrics)


def test_l6_the_dual_clip_has_its_own_constant() -> None:
    data, logits = policy_batch(2)
    data["advantages"] = -torch.ones_like(data["advantages"])
    data["old_log_probs"] = data["old_log_probs"] - 3  # ratios around e^3
    losses = {}
    for name, options in {
        "default": {},
        "asymmetric": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
        "own": {"dual_clip_c": 3.0},
        "none": {"use_pg_clip_range": True, "pg_clip": None, "pg_clip_high": 0.3},
    }.items():
        worker = make_worker(dual_clip_loss=True, **options)
        losses[name] = worker.loss_func(data, logits)[0].item()
    # All ratios are above every bound, so the loss is the constant.
    assert losses == pytest.approx({"default": 1.4, "asymmetric": 1.4, "own": 3.0, "none": 1.6})


def test_l7_columns_are_needed_only_by_what_is_switched_on() -> None:
    data, logits = policy_batch()
    minimal = data.select(["input_ids", "response_mask", "old_log_probs", "advantages"])
    for worker in (make_worker(), make_worker(recompute=True)):
        loss, metrics, _ = loss_and_gradient(worker, minimal, logits)
        assert loss.isfinite() and metrics["actor/kl_loss@sum"] == 0
        assert set(metrics) == POLICY_KEYS
    needs = {
        "ref_log_probs": make_worker(use_kl_loss=True),
        "infer_logprobs": make_worker(train_infer_correction=CORRECTION),
        "train_infer_is_weight": make_worker(
            recompute=True, train_infer_correction={"is_weight": {"enabled": True}}
        ),
        "train_infer_filter_mask": make_worker(
            recompute=True, train_infer_correction={"filters": [{"enabled": True}]}
        ),
    }
    for column, worker in needs.items():
        with pytest.raises(KeyError, match=f"the batch has no column '{column}'"):
            worker.loss_func(minimal, logits)
    with pytest.raises(KeyError, match="advantages"):
        make_worker().loss_func(
            minimal.select(["input_ids", "response_mask", "old_log_probs"]), logits
        )


def test_wrong_widths_are_named() -> None:
    data, logits = policy_batch()
    data["advantages"] = torch.zeros_like(data["input_ids"], dtype=torch.float32)
    with pytest.raises(
        ValueError,
        match=r"advantages has shape \(4, 10\) but its mask has shape \(4, 9\); token-level",
    ):
        make_worker().loss_func(data, logits)


def test_counts_for_another_mask_are_an_error() -> None:
    data, logits = policy_batch()
    data.meta_info["batch_num_tokens"], data.meta_info["global_valid_samples"] = (
        {"labels": 3},
        {"default": 4},
    )
    with pytest.raises(
        KeyError, match=r"no count for 'response_mask' \(it has \['labels'\]\).*loss_mask_keys"
    ):
        make_worker().loss_func(data, logits)


@pytest.mark.parametrize("variant", ["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"])
def test_pg_variants_by_name(variant: str) -> None:
    data, logits = policy_batch()
    loss, metrics, gradient = loss_and_gradient(
        make_worker(worker_options={"pg_variant": variant}), data, logits
    )
    plain, _, _ = loss_and_gradient(make_worker(), data, logits)
    assert set(metrics) == POLICY_KEYS | GAP_KEYS and gradient.isfinite().all()
    assert (loss == plain) == (variant == "ppo")


def test_an_unknown_pg_variant_lists_the_known_ones() -> None:
    data, logits = policy_batch()
    worker = make_worker()
    worker.worker_config = SimpleNamespace(pg_variant="ppg")
    with pytest.raises(ValueError, match="unknown pg_variant 'ppg'; known: ppo, vanilla, tis"):
        worker.loss_func(data, logits)
