import math
from types import SimpleNamespace
from typing import Any

import float64_losses as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, cuts, lists, padded, poisoned, policy_columns, random_mask, window
from torch import Tensor

from roll.algorithms.aggregation import AGGREGATION_MODES, count_sequences, count_tokens
from roll.algorithms.policy_loss import RATIO_TYPES, PolicyLoss, importance_ratio, policy_loss
from roll.algorithms.surrogates import (
    CISPO,
    TOPR,
    KimiK15,
    PPOClip,
    Reinforce,
    Surrogate,
    TruncatedIS,
    get_policy_loss,
    surrogate_of,
)

SURROGATES: dict[str, tuple[Surrogate, dict[str, Any]]] = {
    "ppo": (PPOClip(), {}),
    "ppo_asymmetric_dual": (
        PPOClip(clip_low=0.1, clip_high=0.28, dual_clip=1.4),
        {"low": 0.1, "high": 0.28, "dual": 1.4},
    ),
    "vanilla": (Reinforce(), {"low": math.inf, "high": math.inf}),
    "tis": (TruncatedIS(low=0.5, high=1.1), {"low": 0.5, "high": 1.1}),
    "cispo": (CISPO(clip_low=0.1, clip_high=0.2), {"low": 0.1, "high": 0.2}),
    "topr": (TOPR(), {"low": math.inf, "high": 0.0}),
    "kimi15": (KimiK15(tau=0.3), {"tau": 0.3, "low": math.inf, "high": math.inf}),
}


def one_token(surrogate: Surrogate, ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, gradient) of a single token with log p = -1."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    loss = policy_loss(
        log_probs_BT=log_probs,
        old_log_probs_BT=torch.tensor([[-1.0 - math.log(ratio)]]),
        advantages_BT=torch.tensor([[advantage]]),
        mask_BT=torch.ones(1, 1),
        surrogate=surrogate,
    ).total
    loss.backward()
    return loss.item(), log_probs.grad.item()


def run(
    mask: Tensor, columns: dict[str, Tensor], surrogate: Surrogate, **options: Any
) -> tuple[PolicyLoss, Tensor]:
    """The loss and its gradient with respect to log_probs."""
    log_probs = columns["log_probs_BT"].detach().clone().requires_grad_()
    loss = policy_loss(
        **{**columns, "log_probs_BT": log_probs}, mask_BT=mask, surrogate=surrogate, **options
    )
    loss.total.backward()
    return loss, log_probs.grad


def columns_of(
    log_probs: list[float], old: list[float], advantages: list[float]
) -> dict[str, Tensor]:
    values = {"log_probs_BT": log_probs, "old_log_probs_BT": old, "advantages_BT": advantages}
    return {name: torch.tensor([row]) for name, row in values.items()}


FULL = {"kl_coef": 0.05, "entropy_coef": 0.01, "pg_coef": 0.7}


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "gradient"),
    [
        (PPOClip(), 1.1, 2.0, -2.2, -2.2),
        (PPOClip(), 1.5, 2.0, -2.4, 0.0),  # clipped from above
        (PPOClip(), 0.5, 2.0, -1.0, -1.0),  # below the range, but the free branch is the lower
        (PPOClip(), 0.5, -2.0, 1.6, 0.0),  # clipped from below
        (PPOClip(), 1.5, -2.0, 3.0, 3.0),  # no upper bound for bad actions ...
        (PPOClip(dual_clip=1.4), 1.5, -2.0, 2.8, 0.0),  # ... unless the dual clip gives one
        (PPOClip(dual_clip=1.4), 1.3, -2.0, 2.6, 2.6),
        (PPOClip(dual_clip=1.4), 1.5, 2.0, -2.4, 0.0),  # it concerns A < 0 only
        (PPOClip(clip_low=0.1, clip_high=0.28), 1.25, 1.0, -1.25, -1.25),
        (PPOClip(clip_low=0.1, clip_high=0.28), 0.85, -1.0, 0.9, 0.0),
        (Reinforce(), 3.0, 2.0, 2.0, -2.0),  # log p = -1
        (TruncatedIS(), 0.5, 2.0, 1.0, -1.0),
        (TruncatedIS(), 3.0, 2.0, 2.0, -2.0),
        (TruncatedIS(low=0.8, high=2.0), 0.5, -1.0, -0.8, 0.8),
        (CISPO(clip_low=0.2, clip_high=0.2), 1.5, 2.0, 2.4, -2.4),  # unlike PPO: still a gradient
        (CISPO(clip_low=0.2, clip_high=0.2, drop_clipped=True), 1.5, 2.0, 0.0, 0.0),
        (CISPO(clip_low=0.2, clip_high=0.2, drop_clipped=True), 1.5, -2.0, -2.4, 2.4),
        (CISPO(clip_low=0.2, clip_high=0.2, drop_clipped=True), 0.5, -2.0, 0.0, 0.0),
        (CISPO(clip_low=1.0, clip_high=3.0), 0.01, 1.0, 0.01, -0.01),  # no lower bound
        (TOPR(), 3.0, 2.0, 2.0, -2.0),
        (TOPR(), 0.5, -2.0, -1.0, 1.0),
        (TOPR(), 3.0, -2.0, -2.0, 2.0),
        (TOPR(positive_weight=2.0, negative_weight=0.5), 3.0, 1.0, 2.0, -2.0),
        (TOPR(positive_weight=2.0, negative_weight=0.5), 3.0, -1.0, -0.5, 0.5),
        (KimiK15(tau=0.2), math.e, 2.0, 2.0 + 0.1, -2.0 + 0.2),
    ],
)
def test_one_token_by_hand(
    surrogate: Surrogate, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert one_token(surrogate, ratio, advantage) == pytest.approx(
        (loss, gradient), rel=1e-5, abs=1e-6
    )


def test_ratio_types_by_hand() -> None:
    log_ratio = torch.tensor([[0.1, 0.3, 9.0, 0.5, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    expected = {"token": [0.1, 0.3, 0.0, 0.5, 0.0], "segment": [0.2, 0.2, 0.0, 0.5, 0.0]}
    expected["sequence"] = [0.3, 0.3, 0.0, 0.3, 0.0]
    expected |= {"segment_token": expected["segment"], "sequence_token": expected["sequence"]}
    assert expected.keys() == set(RATIO_TYPES)
    for ratio_type, values in expected.items():
        log_rho, rho = importance_ratio(log_ratio, mask, ratio_type=ratio_type)
        torch.testing.assert_close(log_rho, torch.tensor([values]))
        torch.testing.assert_close(rho, torch.tensor([values]).exp())


def test_filtered_tokens_leave_the_means_but_do_not_split_a_turn() -> None:
    log_ratio = torch.tensor([[0.1, 9.0, 0.5, 7.0, 0.7]])
    mask, keep = torch.tensor([[1, 1, 1, 0, 1]]), torch.tensor([[1, 0, 1, 1, 1]])
    log_rho, _ = importance_ratio(log_ratio, mask, ratio_type="segment", keep_BT=keep)
    torch.testing.assert_close(log_rho, torch.tensor([[0.3, 0.0, 0.3, 0.0, 0.7]]))
    log_rho, _ = importance_ratio(log_ratio, mask, ratio_type="sequence", keep_BT=keep)
    torch.testing.assert_close(log_rho, torch.tensor([[1.3 / 3, 0.0, 1.3 / 3, 0.0, 1.3 / 3]]))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("name", SURROGATES)
def test_matches_plain_loops_in_float64(name: str, ratio_type: str, mode: str) -> None:
    surrogate, settings_ = SURROGATES[name]
    for seed in range(3):
        mask = random_mask(seed, empty_row=seed == 2)
        columns = policy_columns(seed, mask)
        keep = (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.8).long()
        weights = torch.tensor([0.5, 2.0, 1.0, 3.0])
        counts = {"num_tokens": 31, "num_sequences": 6, "norm_factor": 13}
        options: dict[str, Any] = {"ratio_type": ratio_type, **counts, **FULL}
        loss, gradient = run(
            mask,
            columns,
            surrogate,
            agg_mode=mode,
            keep_BT=keep,
            sample_weights_B=weights,
            **options,
        )
        arguments = lists(
            **{key.removesuffix("_BT"): value.double() for key, value in columns.items()},
            mask=mask,
            keep=keep,
            sample_weights=weights,
            mode=mode,
            variant=name.split("_")[0],
            **settings_,
            **options,
        )
        expected = reference.policy_loss(**arguments)
        for part in ("total", "pg", "weighted_pg", "kl", "entropy"):
            assert getattr(loss, part).item() == pytest.approx(
                expected[part], rel=2e-5, abs=1e-6
            ), part
        statistics = loss.statistics
        if name == "tis":  # its range is not written as 1 - low, 1 + high
            expected.pop("ppo_ratio_high_clipfrac"), expected.pop("ppo_ratio_low_clipfrac")
        for key in expected.keys() & statistics.keys():
            assert statistics[key].item() == pytest.approx(expected[key], rel=2e-5, abs=1e-6), key
        expected_gradient = torch.tensor(reference.policy_gradient(**arguments))
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 3),
    right=st.integers(0, 3),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=30, deadline=None)
def test_padding_on_either_side_changes_nothing(
    seed: int, left: int, right: int, garbage: float
) -> None:
    mask = random_mask(seed)
    columns = policy_columns(seed, mask)
    for ratio_type in RATIO_TYPES:
        options = {"ratio_type": ratio_type, "agg_mode": "seq-mean-token-mean", **FULL}
        loss, gradient = run(mask, columns, PPOClip(), **options)
        wide = {key: padded(value, left, right, garbage) for key, value in columns.items()}
        wide_loss, wide_gradient = run(
            padded(mask, left, right, garbage), wide, PPOClip(), **options
        )
        torch.testing.assert_close(wide_loss.total, loss.total, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            wide_gradient, padded(gradient, left, right, 0.0), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(
    seed=st.integers(0, 10_000),
    ratio_type=st.sampled_from(RATIO_TYPES),
    name=st.sampled_from(sorted(SURROGATES)),
)
@settings(max_examples=25, deadline=None)
def test_any_split_into_trimmed_micro_batches_adds_up(
    mode: str, seed: int, ratio_type: str, name: str
) -> None:
    mask = random_mask(seed, rows=6, empty_row=seed % 2 == 0)
    columns, surrogate = policy_columns(seed, mask), SURROGATES[name][0]
    counts = {
        "num_tokens": count_tokens(mask),
        "num_sequences": count_sequences(mask),
        "norm_factor": mask.shape[1],
    }
    options = {"ratio_type": ratio_type, "agg_mode": mode, **FULL, **counts}
    whole, whole_gradient = run(mask, columns, surrogate, **options)
    total, gradient, statistics = 0.0, torch.zeros(mask.shape), []
    for rows in cuts(len(mask), seed):
        columns_used = window(mask[rows])
        piece = {key: value[rows][:, columns_used] for key, value in columns.items()}
        loss, piece_gradient = run(mask[rows][:, columns_used], piece, surrogate, **options)
        total = total + loss.total
        for row, values in zip(rows, piece_gradient, strict=True):
            gradient[row, columns_used] = values
        statistics.append(loss.statistics)
    torch.testing.assert_close(total, whole.total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-7)
    for key, value in whole.statistics.items():
        pieces = torch.stack([item[key] for item in statistics])
        merged = {"ratio_max": pieces.max, "ratio_min": pieces.min}.get(key, pieces.sum)()
        torch.testing.assert_close(merged, value, rtol=1e-5, atol=1e-6, msg=key)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    mask = random_mask(seed)
    columns, order = policy_columns(seed, mask), torch.randperm(len(mask))
    loss, gradient = run(mask, columns, PPOClip(), ratio_type="segment", **FULL)
    moved = {key: value[order] for key, value in columns.items()}
    moved_loss, moved_gradient = run(mask[order], moved, PPOClip(), ratio_type="segment", **FULL)
    torch.testing.assert_close(moved_loss.total, loss.total, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(
    ratio_type: str, seed: int
) -> None:
    mask = random_mask(seed)
    columns = policy_columns(seed, mask)
    log_probs, advantages = columns["log_probs_BT"], columns["advantages_BT"]
    if ratio_type in ("segment", "sequence"):  # they spread the mean; a constant is its own mean
        advantages = torch.where(mask.bool(), torch.randn(len(mask), 1), torch.zeros(()))
    on_policy = {
        "log_probs_BT": log_probs,
        "old_log_probs_BT": log_probs,
        "advantages_BT": advantages,
    }
    loss, gradient = run(
        mask, on_policy, PPOClip(dual_clip=3.0), ratio_type=ratio_type, agg_mode="token-mean"
    )
    statistics = loss.statistics
    assert torch.equal(loss.ratio_BT, torch.ones(mask.shape))
    assert statistics["clipfrac"] == statistics["ppo_ratio_clipfrac"] == statistics["approxkl"] == 0
    torch.testing.assert_close(gradient, -advantages / mask.sum(), rtol=1e-5, atol=1e-7)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_segments_of_one_token_are_tokens(seed: int) -> None:
    mask = torch.zeros(4, 9, dtype=torch.long)
    mask[:, ::2] = 1
    columns = policy_columns(seed, mask)
    token, token_gradient = run(mask, columns, PPOClip(), ratio_type="token", **FULL)
    segment, segment_gradient = run(mask, columns, PPOClip(), ratio_type="segment", **FULL)
    assert torch.equal(token.total, segment.total)
    assert torch.equal(token_gradient, segment_gradient)


def test_a_shared_ratio_spreads_its_gradient_evenly_and_gspo_token_keeps_each_tokens_own() -> None:
    mask = torch.tensor([[1, 1, 0, 1]])
    old = [-1.1, -1.2, 0.0, -0.7]
    columns = columns_of([-1.0, -1.2, 0.0, -0.7], old, [1.0, 3.0, 0.0, -2.0])
    shared = {"segment": [2.0, 2.0, 0.0, -2.0], "sequence": [2 / 3, 2 / 3, 0.0, 2 / 3]}
    ratios = {"segment": [math.exp(0.05)] * 3 + [1.0], "sequence": [math.exp(0.1 / 3)] * 4}
    for scope, mean in shared.items():
        ratio = torch.tensor([ratios[scope]])
        loss, gradient = run(mask, columns, PPOClip(), ratio_type=scope, agg_mode="token-mean")
        torch.testing.assert_close(gradient, -torch.tensor([mean]) * ratio / 3)
        options = {"ratio_type": f"{scope}_token", "agg_mode": "token-mean"}
        own, own_gradient = run(mask, columns, PPOClip(), **options)
        torch.testing.assert_close(own_gradient, -ratio * columns["advantages_BT"] / 3)
        assert torch.equal(own.total, loss.total) and torch.equal(own.ratio_BT, loss.ratio_BT)


def test_gspo_token_clips_whole_rows() -> None:
    """By the ratio of the row and the sign of each token's advantage, however little it has
    moved."""
    columns = columns_of([-1.0, -1.0], [-2.0, -1.0], [-1.0, 1.0])
    options = {"ratio_type": "sequence_token", "agg_mode": "token-mean"}
    _, gradient = run(torch.ones(1, 2), columns, PPOClip(), **options)
    torch.testing.assert_close(gradient, torch.tensor([[math.exp(0.5) / 2, 0.0]]))


@pytest.mark.parametrize("scope", ["segment", "sequence"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_gspo_token_is_gspo_where_the_tokens_of_a_row_have_one_advantage(
    name: str, mode: str, scope: str, seed: int
) -> None:
    mask = random_mask(seed)
    columns = policy_columns(seed, mask) | {"is_weight_BT": None}
    advantages = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(seed))
    columns["advantages_BT"] = torch.where(mask.bool(), advantages, torch.zeros(()))
    loss, gradient = run(
        mask, columns, SURROGATES[name][0], ratio_type=scope, agg_mode=mode, **FULL
    )
    token, token_gradient = run(
        mask, columns, SURROGATES[name][0], ratio_type=f"{scope}_token", agg_mode=mode, **FULL
    )
    assert torch.equal(token.total, loss.total)
    torch.testing.assert_close(token_gradient, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
def test_kimi15_moves_that_cancel_in_the_mean_cost_what_they_cost(ratio_type: str) -> None:
    """Two tokens of one row move by +1 and -1: tau/2 each, with tau times the move as gradient."""
    columns = columns_of([-1.0, -3.0], [-2.0, -2.0], [0.0, 0.0])
    options = {"ratio_type": ratio_type, "agg_mode": "token-mean"}
    loss, gradient = run(torch.ones(1, 2), columns, KimiK15(tau=0.4), **options)
    assert loss.total.item() == pytest.approx(0.2)
    torch.testing.assert_close(gradient, torch.tensor([[0.2, -0.2]]))


@pytest.mark.parametrize("kl_kind", ["k3", "low_var_kl", "k2", "mse", "abs", "k3+"])
def test_the_kl_loss_matches_plain_loops_in_float64(kl_kind: str) -> None:
    for seed in range(3):
        mask = random_mask(seed, empty_row=seed == 2)
        columns = policy_columns(seed, mask)
        loss, gradient = run(
            mask, columns, PPOClip(), agg_mode="token-mean", kl_coef=0.5, kl_kind=kl_kind
        )
        arguments = lists(
            **{key.removesuffix("_BT"): value.double() for key, value in columns.items()},
            mask=mask,
            kl_coef=0.5,
            kl_kind={"low_var_kl": "k3", "k2": "mse"}.get(kl_kind, kl_kind),
        )
        assert loss.kl.item() == pytest.approx(
            reference.policy_loss(**arguments)["kl"], rel=2e-5, abs=1e-6
        )
        expected = torch.tensor(reference.policy_gradient(**arguments))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(name: str, ratio_type: str, garbage: float) -> None:
    mask = random_mask(7, empty_row=True)
    keep = (torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.8).long()
    columns = policy_columns(7, mask)
    kept, weights = mask * keep, torch.tensor([1.0, 2.0, 0.5, 1.0])
    options = {"ratio_type": ratio_type, "keep_BT": keep, **FULL}
    clean, clean_gradient = run(
        mask, columns, SURROGATES[name][0], sample_weights_B=weights, **options
    )
    # Dropped tokens too: a filter often drops them because they are not finite.
    dirty = {key: poisoned(value, kept, garbage) for key, value in columns.items()}
    weights = poisoned(weights, kept.any(1), garbage)
    loss, gradient = run(mask, dirty, SURROGATES[name][0], sample_weights_B=weights, **options)
    for key, value in clean.statistics.items():
        assert torch.equal(loss.statistics[key], value), key
    for part in ("total", "pg", "weighted_pg", "kl", "entropy"):
        assert torch.equal(getattr(loss, part), getattr(clean, part)), part
    assert torch.equal(gradient, clean_gradient)


def test_an_all_masked_batch_is_a_connected_zero() -> None:
    nan = torch.full((2, 3), float("nan"))
    columns = dict.fromkeys(
        ("log_probs_BT", "old_log_probs_BT", "advantages_BT", "ref_log_probs_BT", "entropy_BT"), nan
    )
    for ratio_type in RATIO_TYPES:
        loss, gradient = run(torch.zeros(2, 3), columns, PPOClip(), ratio_type=ratio_type, **FULL)
        assert loss.total.item() == 0
        assert torch.equal(gradient, torch.zeros(2, 3))
    extremes = loss.statistics["ratio_max"].item(), loss.statistics["ratio_min"].item()
    assert extremes == (-math.inf, math.inf)
    empty = policy_columns(0, torch.zeros(0, 3))
    assert run(torch.zeros(0, 3), empty, PPOClip(), **FULL)[0].total.item() == 0


def test_inputs_are_not_changed() -> None:
    mask = random_mask(5)
    columns = policy_columns(5, mask)
    before = {key: value.clone() for key, value in columns.items()}
    run(mask, columns, PPOClip(), ratio_type="segment", keep_BT=mask, **FULL)
    assert all(torch.equal(columns[key], value) for key, value in before.items())


def test_the_kl_is_reported_without_a_gradient_when_it_has_no_coefficient() -> None:
    mask = random_mask(2)
    columns = policy_columns(2, mask)
    without = {key: value for key, value in columns.items() if key != "ref_log_probs_BT"}
    loss, gradient = run(mask, columns, PPOClip())
    no_reference, same_gradient = run(mask, without, PPOClip())
    assert loss.kl.item() > 0 and no_reference.kl is None
    assert torch.equal(loss.total, no_reference.total) and torch.equal(gradient, same_gradient)


def test_a_filter_drops_tokens_from_loss_and_statistics_but_not_from_counts_and_turns() -> None:
    mask, keep = torch.ones(1, 4), torch.tensor([[1, 1, 0, 1]])
    columns = columns_of([-1.0] * 4, [-1.0, -1.0, -30.0, -1.0], [1.0] * 4)
    loss, gradient = run(mask, columns, PPOClip(), agg_mode="token-mean", keep_BT=keep)
    assert loss.total.item() == pytest.approx(-3 / 4)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, -0.25, 0.0, -0.25]]))
    assert loss.statistics["ppo_ratio_clipfrac"] == loss.statistics["clipfrac"] == 0
    assert loss.statistics["ratio_max"] == loss.statistics["ratio_min"] == 1
    assert loss.statistics["policykl"] == 0
    turn = columns_of([-1.0] * 4, [-1.1, -1.3, -5.0, -1.2], [1.0] * 4)
    loss, _ = run(mask, turn, PPOClip(), ratio_type="segment", keep_BT=keep)
    torch.testing.assert_close(loss.ratio_BT, torch.tensor([[0.2, 0.2, 0.0, 0.2]]).exp())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, math.inf])
def test_l4_extreme_ratios_keep_loss_and_gradient_finite(
    advantage: float, log_ratio: float
) -> None:
    columns = columns_of([-1.0, -1.0], [-1.0 - log_ratio, -1.0], [advantage, advantage])
    for name, (surrogate, _) in SURROGATES.items():
        for ratio_type in RATIO_TYPES:
            loss, gradient = run(torch.ones(1, 2), columns, surrogate, ratio_type=ratio_type)
            assert loss.total.isfinite() and gradient.isfinite().all(), (name, ratio_type)
    loss, gradient = run(torch.ones(1, 2), columns, PPOClip())
    assert gradient[0, 0] == 0, "a saturated log-ratio has no gradient"
    limit = math.exp(math.copysign(20, log_ratio))
    assert loss.ratio_BT[0, 0].item() == pytest.approx(limit, rel=1e-6)


def test_statistics_ignore_masked_tokens() -> None:
    mask = torch.tensor([[1, 1, 0]])
    columns = columns_of([-1.0] * 3, [-1.0 - math.log(0.9), -3.0, -500.0], [1.0] * 3)
    statistics = run(mask, columns, PPOClip())[0].statistics
    assert statistics["ratio_max"].item() == pytest.approx(math.exp(2))
    assert statistics["ratio_min"].item() == pytest.approx(0.9)
    for surrogate in (TruncatedIS(), CISPO()):
        statistics = run(mask, columns, surrogate)[0].statistics
        assert statistics["clipfrac"].item() == statistics["ppo_ratio_high_clipfrac"].item() == 0.5


def test_kl1_the_kl_loss_has_a_finite_gradient_far_from_the_reference() -> None:
    columns = {
        key: torch.full((1, 1), -1.0)
        for key in ("log_probs_BT", "old_log_probs_BT", "advantages_BT")
    }
    for distance in (99.0, -99.0, math.inf):
        far = {**columns, "ref_log_probs_BT": torch.full((1, 1), -1.0 + distance)}
        loss, gradient = run(torch.ones(1, 1), far, PPOClip(), kl_coef=1.0)
        assert loss.total.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(clip_low=-0.1), "must not be negative, got low=-0.1"),
        (lambda: PPOClip(clip_high=-0.1), "must not be negative"),
        (lambda: PPOClip(clip_low=1.0), "must be below 1"),
        (lambda: PPOClip(clip_low=float("nan")), "must not be negative"),
        (lambda: PPOClip(dual_clip=1.0), "greater than 1, got 1.0"),
        (lambda: CISPO(clip_low=1.5), "must be below 1"),
        (lambda: TruncatedIS(low=2.0, high=1.0), "0 <= low <= high"),
    ],
)
def test_impossible_bounds_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_malformed_inputs_are_named() -> None:
    mask = torch.ones(2, 4)
    columns = policy_columns(0, mask)
    for key in columns:
        wrong = {**columns, key: torch.zeros(2, 5)}
        name = {"is_weight_BT": "train_infer_is_weight"}.get(key, key.removesuffix("_BT"))
        with pytest.raises(
            ValueError,
            match=rf"{name} has shape \(2, 5\) but its mask has shape \(2, 4\); token-level",
        ):
            policy_loss(**wrong, mask_BT=mask, surrogate=PPOClip())
    with pytest.raises(
        ValueError, match="unknown ratio type 'turn'; known: token, segment, sequence"
    ):
        policy_loss(**columns, mask_BT=mask, surrogate=PPOClip(), ratio_type="turn")
    with pytest.raises(ValueError, match="unknown KL estimator"):
        policy_loss(**columns, mask_BT=mask, surrogate=PPOClip(), kl_kind="k9")


def test_a_surrogate_of_ones_own_is_named_by_its_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from dataclasses import dataclass\n"
        "from roll.algorithms.surrogates import PPOClip\n"
        "narrow, number = PPOClip(clip_low=0.01), 3\n"
        "@dataclass\nclass Flat:\n"
        "    slope: float = 1.0\n    config_keys, low, high = {'slope': 'kimi15_tau'}, None, None\n"
        "    def __call__(self, terms):\n"
        "        return -self.slope * terms.log_probs_BT, None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker_config = SimpleNamespace(pg_variant="my_losses.Flat", kimi15_tau=3.0)
    assert one_token(surrogate_of(None, worker_config), 1.0, 1.0) == (3.0, -3.0)
    worker_config.pg_variant = "my_losses.narrow"
    assert one_token(surrogate_of(None, worker_config), 0.5, -1.0) == pytest.approx((0.99, 0.0))
    for name, message in (
        ("ppg", "unknown pg_variant 'ppg'; known: ppo, vanilla, tis, topr, cispo, kimi15$"),
        ("no_such.loss", "kimi15, and it cannot be imported: No module named 'no_such'"),
        ("my_losses.number", "and it is a int, not a surrogate"),
    ):
        with pytest.raises(ValueError, match=message):
            get_policy_loss(name)
