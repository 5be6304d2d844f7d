import math
from typing import Any

import float64_losses as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE
from torch import Tensor

from roll.algorithms.preference_loss import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    completion_mask,
    preference_loss,
    sequence_log_probs,
    split_pairs,
)

# Pair 1: chosen up by 1, rejected down by 1. Pair 2: the wrong way round. Lengths 5, 8 and 6, 9.
POLICY = ([-10.0, -20.0], [-12.0, -18.0])
REFERENCE = ([-11.0, -19.5], [-11.0, -19.0])
LENS = ([5, 8], [6, 9])


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def call(
    policy: Any = POLICY, reference_: Any = REFERENCE, lens: Any = LENS, **options: Any
) -> tuple[PreferenceLoss, list[Tensor]]:
    policy_tensors = [
        torch.as_tensor(x, dtype=torch.float32).clone().requires_grad_() for x in policy
    ]
    result = preference_loss(
        policy_chosen_P=policy_tensors[0],
        policy_rejected_P=policy_tensors[1],
        reference_chosen_P=torch.as_tensor(reference_[0], dtype=torch.float32),
        reference_rejected_P=torch.as_tensor(reference_[1], dtype=torch.float32),
        chosen_lens_P=torch.tensor(lens[0]),
        rejected_lens_P=torch.tensor(lens[1]),
        **options,
    )
    return result, policy_tensors


@pytest.mark.parametrize(
    ("loss_type", "options", "expected"),
    [
        # c = 1, -0.5; r = -1, 1; margin 2, -1.5; beta 0.5: z = 1, -0.75
        ("sigmoid", {}, [-log_sigmoid(1.0), -log_sigmoid(-0.75)]),
        ("sigmoid", {"label_smoothing": 0.2}, [0.5132616875, 0.9868710061]),
        (
            "sigmoid_norm",
            {},
            [-log_sigmoid(0.5 * (1 / 5 + 1 / 6)), -log_sigmoid(0.5 * (-0.5 / 8 - 1 / 9))],
        ),
        ("ipo_sum", {}, [(2 - 1) ** 2, (-1.5 - 1) ** 2]),
        ("ipo", {}, [(1 / 5 + 1 / 6 - 1) ** 2, (-0.5 / 8 - 1 / 9 - 1) ** 2]),
        ("hinge", {}, [0.0, 1.75]),
        (
            "robust",
            {"label_smoothing": 0.1},
            [(-0.9 * log_sigmoid(1) + 0.1 * log_sigmoid(-1)) / 0.8, 1.23062101],
        ),
        ("exo_pair", {"label_smoothing": 0.1}, [0.11408211, 0.97018166]),
        ("nca_pair", {}, [1.19815397, 1.60094762]),
        ("bco_pair", {}, [-2 * log_sigmoid(0.5), -log_sigmoid(-0.25) - log_sigmoid(-0.5)]),
        ("sppo_hard", {}, [0.0, 1.5**2 + 2**2]),
        (
            "apo_zero",
            {},
            [2 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.25)) + 1 / (1 + math.exp(-0.5))],
        ),
        (
            "apo_down",
            {},
            [
                1 / (1 + math.exp(-0.5)) + 1 / (1 + math.e),
                1 / (1 + math.exp(0.25)) + 1 / (1 + math.exp(-0.75)),
            ],
        ),
        # policy margins 2, -2; reference margins 0, -0.5; sorted differences -1.5, 2
        ("aot", {}, [-log_sigmoid(-0.75), -log_sigmoid(1.0)]),
        # c sorted -0.5, 1; r sorted -1, 1
        ("aot_unpaired", {}, [-log_sigmoid(0.25), -log_sigmoid(0.0)]),
        ("discopop", {"discopop_tau": 0.05}, [math.exp(-1.0), -log_sigmoid(-0.75)]),
    ],
)
def test_every_variant_by_hand(
    loss_type: str, options: dict[str, float], expected: list[float]
) -> None:
    result, _ = call(loss_type=loss_type, beta=0.5, **options)
    assert result.losses_P.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert result.loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSSES)
@given(
    seed=st.integers(0, 10_000), beta=st.sampled_from([0.05, 0.5]), ls=st.sampled_from([0.05, 0.3])
)
@settings(max_examples=15, deadline=None)
def test_values_and_gradients_match_plain_loops(
    loss_type: str, seed: int, beta: float, ls: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (
        -20 + 5 * torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    lens = torch.randint(1, 9, (2, 4), generator=generator)
    options = {"beta": beta, "label_smoothing": ls}
    result, leaves = call(policy, ref, lens.tolist(), loss_type=loss_type, **options)
    result.loss.backward()

    def expected(x: Tensor) -> list[float]:
        pairs = (x[0].tolist(), x[1].tolist()), (ref[0].tolist(), ref[1].tolist())
        return reference.preference_losses(
            loss_type, *pairs, tuple(lens.tolist()), beta=beta, ls=ls
        )

    assert result.losses_P.tolist() == pytest.approx(expected(policy), rel=2e-4, abs=2e-5)
    for side in range(2):
        for pair in range(4):
            step = torch.zeros(2, 4, dtype=torch.float64)
            step[side, pair] = 1e-6
            slope = (sum(expected(policy + step)) - sum(expected(policy - step))) / 2e-6 / 4
            assert leaves[side].grad[pair].item() == pytest.approx(slope, rel=2e-3, abs=2e-4)


def test_rewards_are_beta_times_the_log_ratio_and_carry_no_gradient() -> None:
    result, _ = call(beta=0.5)
    assert result.chosen_rewards_P.tolist() == [
        0.5,
        -0.25,
    ] and result.rejected_rewards_P.tolist() == [-0.5, 0.5]
    assert not result.chosen_rewards_P.requires_grad and result.loss.requires_grad


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_identities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (torch.randn(2, 5, generator=generator) for _ in range(2))
    lens = torch.randint(1, 9, (2, 5), generator=generator).tolist()
    same, _ = call(ref, ref, lens)
    assert torch.equal(same.losses_P, torch.full((5,), math.log(2)))
    straight, _ = call(policy, ref, lens)
    swapped, _ = call(policy.flip(0), ref.flip(0), lens)
    assert torch.equal(straight.chosen_rewards_P, swapped.rejected_rewards_P)
    margin = straight.chosen_rewards_P - straight.rejected_rewards_P
    assert torch.equal(margin, -(swapped.chosen_rewards_P - swapped.rejected_rewards_P))
    # -log s(z) + log s(-z) = -z
    torch.testing.assert_close(straight.losses_P - swapped.losses_P, -margin, rtol=1e-4, atol=1e-5)
    # Label smoothing 1/2 would not distinguish the two.
    almost, _ = call(policy, ref, lens, label_smoothing=0.4999)
    almost_swapped, _ = call(policy.flip(0), ref.flip(0), lens, label_smoothing=0.4999)
    torch.testing.assert_close(almost.losses_P, almost_swapped.losses_P, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss_type", sorted(PREFERENCE_LOSSES.keys() - {"aot", "aot_unpaired"}))
def test_micro_batches_of_pairs_add_up(loss_type: str) -> None:
    policy, ref, lens = torch.randn(2, 5), torch.randn(2, 5), torch.randint(1, 9, (2, 5))
    options = {"loss_type": loss_type, "label_smoothing": 0.1}
    whole, leaves = call(policy, ref, lens.tolist(), **options)
    whole.loss.backward()
    parts, gradients = [], []
    for piece in (slice(0, 1), slice(1, 4), slice(4, 5)):
        part, piece_leaves = call(
            policy[:, piece], ref[:, piece], lens[:, piece].tolist(), num_pairs=5, **options
        )
        part.loss.backward()
        parts.append(part.loss)
        gradients.append(torch.stack([leaf.grad for leaf in piece_leaves]))
    torch.testing.assert_close(sum(parts), whole.loss)
    torch.testing.assert_close(torch.cat(gradients, 1), torch.stack([leaf.grad for leaf in leaves]))


def test_reference_free_is_a_reference_of_zero() -> None:
    free = preference_loss(
        policy_chosen_P=torch.tensor([-1.0]),
        policy_rejected_P=torch.tensor([-3.0]),
        reference_chosen_P=None,
        reference_rejected_P=None,
    )
    assert free.loss.item() == pytest.approx(-log_sigmoid(0.1 * 2))


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSSES)
def test_extreme_margins_are_finite(loss_type: str) -> None:
    for sign in (1, -1):
        policy = (torch.tensor([sign * 3000.0]), torch.tensor([-sign * 3000.0]))
        result, leaves = call(
            policy, ([0.0], [0.0]), ([3], [3]), loss_type=loss_type, label_smoothing=0.1
        )
        result.loss.backward()
        assert result.loss.isfinite() and all(leaf.grad.isfinite().all() for leaf in leaves)


def test_half_precision_becomes_float32() -> None:
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    result = preference_loss(
        policy_chosen_P=half,
        policy_rejected_P=half,
        reference_chosen_P=half,
        reference_rejected_P=half,
    )
    assert result.loss.dtype == torch.float32 and result.loss.item() == pytest.approx(math.log(2))


# Log-probabilities of sequences


def test_completion_mask_by_hand() -> None:
    attention = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    expected = [[False, False, False, True], [False, True, True, False], [True, True, True, True]]
    assert completion_mask(attention, torch.tensor([2, 2, 1])).tolist() == expected
    # A prompt of length 0 still has no prediction for its first token.
    assert completion_mask(torch.ones(1, 3), torch.tensor([0])).tolist() == [[True, True]]


def test_sequence_log_probs_by_hand() -> None:
    log_probs = torch.tensor([[9.0, -1.0, -2.0, 9.0], [-1.0, -1.0, -1.0, -1.0]])
    attention = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    sums, lengths = sequence_log_probs(log_probs, attention, torch.tensor([2, 4]))
    assert sums.tolist() == [-3.0, -1.0] and lengths.tolist() == [2, 1]
    sums, lengths = sequence_log_probs(log_probs, attention, torch.tensor([4, 5]))
    assert sums.tolist() == [0.0, 0.0] and lengths.tolist() == [0, 0], "empty completions"


@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 4),
    right=st.integers(0, 4),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=30, deadline=None)
def test_d3_padding_on_either_side_changes_nothing(
    seed: int, left: int, right: int, garbage: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(1, 6, generator=generator)
    prompt_len = torch.randint(1, 6, (1,), generator=generator)
    expected = sequence_log_probs(log_probs, torch.ones(1, 7), prompt_len)
    attention = torch.nn.functional.pad(torch.ones(1, 7), (left, right))
    wide = torch.nn.functional.pad(log_probs, (left, right), value=garbage)
    sums, lengths = sequence_log_probs(wide, attention, prompt_len)
    assert torch.equal(lengths, expected[1])
    torch.testing.assert_close(sums, expected[0])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_d4_garbage_in_the_prompt_changes_no_bit(garbage: float) -> None:
    clean = torch.tensor([[-5.0, -1.0, -2.0, -7.0]], requires_grad=True)
    dirty = torch.tensor([[garbage, -1.0, -2.0, garbage]], requires_grad=True)
    attention = torch.tensor([[1, 1, 1, 1, 0]])
    sums = [sequence_log_probs(x, attention, torch.tensor([2]))[0] for x in (clean, dirty)]
    for total in sums:
        total.sum().backward()
    assert torch.equal(*sums) and torch.equal(clean.grad, dirty.grad)


def test_d2_an_odd_number_of_rows_is_refused() -> None:
    chosen, rejected = split_pairs(torch.arange(4))
    assert chosen.tolist() == [0, 2] and rejected.tolist() == [1, 3]
    with pytest.raises(ValueError, match="has 3 rows, but chosen and rejected rows alternate"):
        split_pairs(torch.arange(3))


def test_d5_length_averaged_ipo_does_not_grow_with_length() -> None:
    # 20 nats over 40 tokens, or 2 nats over 4: the same per token.
    long, _ = call(([20.0], [0.0]), ([0.0], [0.0]), ([40], [40]), loss_type="ipo")
    short, _ = call(([2.0], [0.0]), ([0.0], [0.0]), ([4], [4]), loss_type="ipo")
    assert long.loss.item() == pytest.approx(short.loss.item())
    summed, _ = call(([20.0], [0.0]), ([0.0], [0.0]), ([40], [40]), loss_type="ipo_sum")
    assert summed.loss.item() == pytest.approx(225.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"beta": float("nan")}, "beta must be positive"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 0.5\), got 1.5"),
        ({"label_smoothing": -0.1}, "label_smoothing must be in"),
        ({"label_smoothing": 0.5}, "label_smoothing must be in"),
        ({"loss_type": "dpo"}, "unknown preference loss 'dpo'; known: sigmoid"),
        ({"loss_type": "exo_pair"}, "needs label_smoothing > 0"),
        ({"discopop_tau": 0.0}, "discopop_tau must be positive"),
    ],
)
def test_d6_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_malformed_inputs_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"one log-probability per pair: \[\(2,\), \(2,\), \(1,\), \(2,\)\]"
    ):
        call(reference_=([0.0], [0.0, 0.0]))
    with pytest.raises(ValueError, match="it needs the lengths of the completions"):
        preference_loss(
            **dict.fromkeys(
                (
                    "policy_chosen_P",
                    "policy_rejected_P",
                    "reference_chosen_P",
                    "reference_rejected_P",
                ),
                torch.zeros(1),
            ),
            loss_type="ipo",
        )
    with pytest.raises(
        ValueError, match=r"one column fewer than the attention mask\) has shape \(1, 3\)"
    ):
        sequence_log_probs(torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1))
    with pytest.raises(
        ValueError, match=r"prompt_id_lens must have one entry per row, \(2,\), got \(1,\)"
    ):
        completion_mask(torch.ones(2, 3), torch.ones(1))
