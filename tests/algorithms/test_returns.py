"""Returns over masks with gaps: hand-computed values, the float64 reference, invariances, size."""

import float64_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, padded, poisoned, random_mask
from torch import Tensor

from roll.algorithms.advantages import discounted_returns, gae, turn_discounted_returns
from roll.ops import scans

R = torch.tensor([[1.0, 2.0, 9.0, 4.0]])
V = torch.tensor([[0.5, 1.0, 7.0, 2.0]])
MASK = torch.tensor([[1, 1, 0, 1]])
DISCOUNTS = [0.0, 1e-30, 0.01, 0.5, 0.9, 0.99, 1.0]

FUNCTIONS = {
    "discounted": lambda r, v, m, gamma, lam: (discounted_returns(r, m, gamma),),
    "turns": lambda r, v, m, gamma, lam: (turn_discounted_returns(r, m, gamma),),
    "gae": lambda r, v, m, gamma, lam: gae(r, v, m, gamma, lam),
}


def case(seed: int, rows: int = 4, width: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return rewards, values, random_mask(seed, rows, width)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_by_hand():
    assert discounted_returns(R, MASK, 0.5).tolist() == [[3, 4, 0, 4]]
    assert turn_discounted_returns(R, MASK, 0.5).tolist() == [[5, 5, 0, 4]]
    # 4 - 2 = 2; 2 + 0.5 * 2 - 1 + 0.25 * 2 = 2.5; 1 + 0.5 * 1 - 0.5 + 0.25 * 2.5 = 1.625
    advantages, returns = gae(R, V, MASK, 0.5, 0.5)
    assert advantages.tolist() == [[1.625, 2.5, 0, 2]]
    assert returns.tolist() == [[2.125, 3.5, 0, 4]]


def test_ad1_the_last_response_token_does_not_bootstrap_from_padding():
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1, 1, 0]])
    for padding in (0.0, 7.0):
        advantages, _ = gae(rewards, torch.tensor([[0.4, 0.5, padding]]), mask, 1.0, 1.0)
        torch.testing.assert_close(advantages, torch.tensor([[0.6, 0.5, 0.0]]))


def test_ad2_observation_tokens_neither_decay_nor_contribute():
    dense = gae(torch.tensor([[0.1, 1.0]]), torch.tensor([[0.4, 0.6]]), torch.ones(1, 2), 0.9, 0.8)
    rewards, mask = torch.tensor([[0.1, 0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 0, 1]])
    for observed in (0.0, 3.0):
        values = torch.tensor([[0.4, observed, observed, 0.6]])
        gapped = gae(rewards, values, mask, 0.9, 0.8)
        assert equal(tuple(x[:, [0, 3]] for x in gapped), dense)


def test_ad3_discount_counts_response_tokens_only():
    rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]]), torch.tensor([[1, 0, 0, 1, 0]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[0.5, 0, 0, 1, 0]]


def test_ad10_penalties_inside_a_turn_count():
    rewards = torch.tensor([[-0.25, 1.0, 0.0, -0.5, 2.0]])
    out = turn_discounted_returns(rewards, torch.tensor([[1, 1, 0, 1, 1]]), 0.5)
    assert out.tolist() == [[1.5, 1.5, 0, 1.5, 1.5]]


@pytest.mark.parametrize("gamma", DISCOUNTS)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    width=st.integers(1, 20),
    lam=st.sampled_from(DISCOUNTS),
)
@settings(max_examples=15, deadline=None)
def test_all_match_the_reference(gamma, seed, rows, width, lam):
    rewards, values, mask = case(seed, rows, width)
    r, v, m = rewards.tolist(), values.tolist(), mask.tolist()
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(
        discounted_returns(rewards, mask, gamma),
        torch.tensor(reference.discounted_returns(r, m, gamma)),
        **close,
    )
    torch.testing.assert_close(
        turn_discounted_returns(rewards, mask, gamma),
        torch.tensor(reference.turn_discounted_returns(r, m, gamma)),
        **close,
    )
    for actual, expected in zip(
        gae(rewards, values, mask, gamma, lam), reference.gae(r, v, m, gamma, lam), strict=True
    ):
        torch.testing.assert_close(actual, torch.tensor(expected), **close)


@pytest.mark.parametrize("gamma", [1e-70, 1e-3, 0.5, 0.97, 0.9999])
def test_long_rows_match_a_loop(gamma):
    """Longer than a block of the scan, for decays that need one, a few and thousands of blocks."""
    width = 3000
    rewards, values, mask = case(1, 2, width)
    r, v = rewards.double(), values.double()
    following, advantage, next_value = (torch.zeros(2, dtype=torch.float64) for _ in range(3))
    returns, advantages = torch.zeros_like(r), torch.zeros_like(r)
    for t in reversed(range(width)):
        valid = mask[:, t].bool()
        following = torch.where(valid, r[:, t] + gamma * following, following)
        advantage = torch.where(
            valid, r[:, t] + gamma * next_value - v[:, t] + gamma * 0.9 * advantage, advantage
        )
        next_value = torch.where(valid, v[:, t], next_value)
        returns[:, t], advantages[:, t] = following * valid, advantage * valid
    torch.testing.assert_close(discounted_returns(r, mask, gamma), returns, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gae(r, v, mask, gamma, 0.9)[0], advantages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_ad7_garbage_under_the_mask_changes_no_bit(name, garbage):
    rewards, values, mask = case(11)
    mask[-1] = 0
    clean = FUNCTIONS[name](
        poisoned(rewards, mask, 0.0), poisoned(values, mask, 0.0), mask, 0.9, 0.8
    )
    for r_fill, v_fill in ((garbage, 0.0), (0.0, garbage), (garbage, garbage)):
        dirty = FUNCTIONS[name](
            poisoned(rewards, mask, r_fill), poisoned(values, mask, v_fill), mask, 0.9, 0.8
        )
        assert equal(clean, dirty)
    assert all(torch.equal(x, x * mask) for x in clean)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 40),
    right=st.integers(0, 40),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=25, deadline=None)
def test_padding_on_either_side_changes_no_bit(name, seed, left, right, garbage):
    rewards, values, mask = case(seed)
    out = FUNCTIONS[name](rewards, values, mask, 0.9, 0.8)
    wide = FUNCTIONS[name](
        padded(rewards, left, right, garbage),
        padded(values, left, right, garbage),
        padded(mask, left, right, 0),
        0.9,
        0.8,
    )
    assert equal(out, tuple(x[:, left : left + rewards.shape[1]] for x in wide))


@pytest.mark.parametrize("name", ["discounted", "gae"])
@given(
    seed=st.integers(0, 10_000),
    at=st.integers(0, 9),
    length=st.integers(1, 40),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=25, deadline=None)
def test_a_gap_anywhere_changes_no_bit(name, seed, at, length, garbage):
    rewards, values, mask = case(seed)
    out = FUNCTIONS[name](rewards, values, mask, 0.9, 0.8)

    def insert(x: Tensor, fill: float) -> Tensor:
        return torch.cat(
            [x[:, :at], torch.full((len(x), length), fill).to(x.dtype), x[:, at:]], dim=1
        )

    gapped = FUNCTIONS[name](
        insert(rewards, garbage), insert(values, garbage), insert(mask, 0), 0.9, 0.8
    )
    kept = [t for t in range(rewards.shape[1] + length) if not at <= t < at + length]
    assert equal(out, tuple(x[:, kept] for x in gapped))


@pytest.mark.parametrize("name", FUNCTIONS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_permuting_rows_permutes_results(name, seed):
    rewards, values, mask = case(seed)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    out = FUNCTIONS[name](rewards, values, mask, 0.9, 0.8)
    permuted = FUNCTIONS[name](rewards[order], values[order], mask[order], 0.9, 0.8)
    assert equal(tuple(x[order] for x in out), permuted)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_gae_telescopes_without_discount(seed):
    """gamma = lam = 1: the advantage is the sum of the rewards to come, less the value."""
    rewards, values, mask = case(seed)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    to_come = discounted_returns(rewards, mask, 1.0)
    torch.testing.assert_close(advantages, (to_come - values) * mask, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, to_come, rtol=1e-5, atol=1e-5)


def test_extreme_discounts_are_exact():
    rewards, values, mask = case(3)
    masked = torch.where(mask.bool(), rewards, 0.0)
    assert torch.equal(discounted_returns(rewards, mask, 0.0), masked)
    terminal = torch.zeros(1, 5000)
    terminal[0, -1] = 0.7
    assert torch.equal(
        discounted_returns(terminal, torch.ones(1, 5000), 1.0), torch.full((1, 5000), 0.7)
    )
    # lam = 0 is the one-step error, which needs the next value itself
    expected = torch.tensor(
        reference.gae(rewards.tolist(), values.tolist(), mask.tolist(), 0.9, 0.0)[0]
    )
    torch.testing.assert_close(gae(rewards, values, mask, 0.9, 0.0)[0], expected)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_empty_batches_and_empty_masks(shape):
    empty = torch.zeros(shape)
    for fn in FUNCTIONS.values():
        for out in fn(empty + 1, empty, empty, 0.9, 0.9):
            assert out.shape == shape and not out.any()


def test_dtypes():
    rewards, values, mask = case(0)
    assert discounted_returns(rewards.half(), mask, 0.9).dtype == torch.float32
    assert discounted_returns(rewards.long(), mask, 0.9).dtype == torch.float32
    assert gae(rewards.bfloat16(), values.bfloat16(), mask, 0.9, 0.9)[0].dtype == torch.float32
    assert discounted_returns(rewards.double(), mask, 0.9).dtype == torch.float64
    assert equal(gae(rewards, values, mask, 0.9, 0.8), gae(rewards, values, mask.bool(), 0.9, 0.8))


def test_inputs_are_not_changed_and_results_carry_no_gradient():
    rewards, values, mask = case(0)
    copies = [x.clone() for x in (rewards, values, mask)]
    values.requires_grad_()
    for fn in FUNCTIONS.values():
        assert not any(x.requires_grad for x in fn(rewards, values, mask, 0.9, 0.8))
    assert equal(tuple(copies), (rewards, values.detach(), mask))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_inputs(name):
    rewards, values, mask = case(4)
    out = FUNCTIONS[name](rewards, values, mask, 0.9, 0.8)
    columns = (torch.nn.functional.pad(x, (1, 0))[:, 1:] for x in (rewards, values, mask.bool()))
    assert equal(out, FUNCTIONS[name](*columns, 0.9, 0.8))
    assert equal(
        out,
        FUNCTIONS[name](
            *(x.t().contiguous().t() for x in (rewards, values, mask.bool())), 0.9, 0.8
        ),
    )


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_discounts_outside_the_unit_interval_are_errors(bad):
    with pytest.raises(ValueError, match=r"gamma=.* must lie in \[0, 1\]"):
        discounted_returns(R, MASK, bad)
    with pytest.raises(ValueError, match="gamma"):
        turn_discounted_returns(R, MASK, bad)
    with pytest.raises(ValueError, match="lambd="):
        gae(R, V, MASK, 1.0, bad)


def test_shape_mismatch_names_the_tensor():
    with pytest.raises(ValueError, match=r"rewards has shape.*response_mask\[:, 1:\]"):
        discounted_returns(R, torch.ones(1, 5), 1.0)
    with pytest.raises(ValueError, match="values has shape"):
        gae(R, V[:, :3], MASK, 1.0, 1.0)


def test_many_rows_are_split_into_chunks_without_a_seam(monkeypatch):
    rewards, values, mask = case(9, rows=7, width=11)
    whole = [fn(rewards, values, mask, 0.9, 0.8) for fn in FUNCTIONS.values()]
    monkeypatch.setattr(scans, "CPU_CHUNK", 22)  # two rows at a time
    assert all(
        equal(a, fn(rewards, values, mask, 0.9, 0.8))
        for a, fn in zip(whole, FUNCTIONS.values(), strict=True)
    )
