"""Advantage estimators as presets: what each name stands for, whitening, clipping."""

import float64_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, padded, poisoned, random_mask

from roll.algorithms.advantages import (
    compute_advantages,
    discounted_returns,
    gae,
    turn_discounted_returns,
)
from roll.algorithms.estimators import ESTIMATORS, Estimator, RewardNorm, get_estimator
from roll.algorithms.masking import masked_whiten

R = torch.tensor([[0.0, 1.0, 9.0, 2.0], [0.0, -1.0, 0.0, 0.0]])
V = torch.tensor([[0.5, 0.25, 9.0, 1.0], [0.0, 0.5, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
EVERYTHING = {
    "gamma": 0.9,
    "lam": 0.8,
    "whiten_rewards": True,
    "whiten_advantages": True,
    "clip": 1.0,
}


def run(estimator: str, **options):
    kwargs = {
        "rewards": R,
        "mask": MASK,
        "values": V,
        "gamma": 0.5,
        "lam": 0.5,
        "estimator": estimator,
    }
    return compute_advantages(**kwargs | options)


def test_the_names():
    assert set(ESTIMATORS) == {
        "gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce",
        "rloo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("grpo", RewardNorm("group", "group")),
        ("dr_grpo", RewardNorm("group", None)),
        ("rloo", RewardNorm("leave_one_out", None)),
        ("reinforce_plus_plus_baseline", RewardNorm("group", None)),
        ("reinforce_plus_plus", None),
        ("reinforce", None),
        ("gae", None),
    ],
)
def test_reward_normalisation_of_the_presets(name, norm):
    assert get_estimator(name).reward_norm == norm


@pytest.mark.parametrize(
    "name", ["reinforce", "grpo", "gigpo", "step_reinforce", "rloo", "dr_grpo"]
)
def test_reinforce_like_estimators(name):
    out = run(name)
    assert out.advantages.tolist() == [[1, 2, 0, 2], [-0.5, -1, 0, 0]]
    assert torch.equal(out.returns, out.advantages) and torch.equal(
        out.raw_advantages, out.advantages
    )


def test_agentic_reinforce_discounts_per_turn():
    assert run("agentic_reinforce").advantages.tolist() == [[2, 2, 0, 2], [-1, -1, 0, 0]]


def test_gae_uses_values():
    out, expected = run("gae"), gae(R, V, MASK, 0.5, 0.5)
    assert torch.equal(out.advantages, expected[0]) and torch.equal(out.returns, expected[1])
    with pytest.raises(ValueError, match="'gae' needs values"):
        run("gae", values=None)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_whitens_over_the_batch(name):
    out, returns = run(name), discounted_returns(R, MASK, 0.5)
    assert torch.equal(out.advantages, masked_whiten(returns, MASK)) and torch.equal(
        out.raw_advantages, returns
    )
    assert torch.equal(run(name, whiten_advantages=True).advantages, out.advantages)


def test_unknown_estimators_list_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown adv_estimator 'ppo'; known: gae, reinforce, grpo"
    ):
        run("ppo")


def test_an_estimator_of_one_s_own_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text(
        "from roll.algorithms.estimators import Estimator\n"
        "def halved(rewards, mask, values, gamma, lam):\n"
        "    return rewards / 2, rewards.clone()\n"
        "half = Estimator(advantages=halved, whiten_advantages=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(get_estimator("my_estimators.half"), Estimator)
    out = run("my_estimators.half")
    assert out.advantages.tolist() == [[0, 0.5, 0, 1], [0, -0.5, 0, 0]]
    assert out.returns.tolist() == [[0, 1, 0, 2], [0, -1, 0, 0]]
    with pytest.raises(ValueError, match=r"known: gae.*cannot be imported: No module named"):
        get_estimator("no_such_module.half")
    with pytest.raises(ValueError, match=r"cannot be imported: .* has no attribute 'third'"):
        get_estimator("my_estimators.third")
    with pytest.raises(ValueError, match="it is a function, not an Estimator"):
        get_estimator("my_estimators.halved")
    (tmp_path / "broken_estimators.py").write_text("half = \n")
    with pytest.raises(ValueError, match="cannot be imported: invalid syntax"):
        get_estimator("broken_estimators.half")
    scopes = {("group", None): True, ("batch", "batch"): False, ("running", "group"): True}
    for scope, compares in scopes.items():
        assert Estimator(reward_norm=RewardNorm(*scope)).compares_group == compares


def test_whitening_rewards_comes_before_the_recurrence():
    out = run("reinforce", whiten_rewards=True)
    whitened = masked_whiten(R, MASK)
    assert torch.equal(out.rewards, whitened)
    assert torch.equal(out.advantages, discounted_returns(whitened, MASK, 0.5))


def test_clip_and_its_fraction_count_valid_tokens():
    out = run("reinforce", clip=1.5)
    assert out.advantages.tolist() == [[1, 1.5, 0, 1.5], [-0.5, -1, 0, 0]]
    assert out.clip_frac == pytest.approx(2 / 5) and out.raw_advantages[0, 1] == 2
    with pytest.raises(ValueError, match="advantage_clip=-1"):
        run("reinforce", clip=-1)


def test_one_token_is_not_whitened():
    out = compute_advantages(
        rewards=torch.tensor([[9.0, 2.0]]), mask=torch.tensor([[0, 1]]), estimator="gigpo", gamma=1.0, lam=1.0,
        whiten_rewards=True, whiten_advantages=True,
    )  # fmt: skip
    assert out.advantages.tolist() == [[0, 2]] and out.rewards.tolist() == [[0, 2]]


def test_results_do_not_share_memory():
    out = run("grpo")
    pointers = {
        x.data_ptr() for x in (out.advantages, out.returns, out.raw_advantages, out.rewards)
    }
    assert len(pointers) == 4


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit(name, garbage):
    mask = random_mask(2, empty_row=True)
    generator = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    runs = [
        compute_advantages(
            rewards=poisoned(rewards, mask, r),
            values=poisoned(values, mask, v),
            mask=mask,
            estimator=name,
            **EVERYTHING,
        )
        for r, v in ((0.0, 0.0), (garbage, 0.0), (0.0, garbage))
    ]
    for field in ("advantages", "returns", "raw_advantages", "rewards"):
        first = getattr(runs[0], field)
        assert torch.equal(first, first * mask)
        assert all(torch.equal(first, getattr(other, field)) for other in runs[1:])
    assert all(other.clip_frac == runs[0].clip_frac for other in runs)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 30),
    right=st.integers(0, 30),
    garbage=st.sampled_from(GARBAGE),
)
@settings(max_examples=8, deadline=None)
def test_padding_changes_no_bit(name, seed, left, right, garbage):
    mask = random_mask(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    out = compute_advantages(
        rewards=rewards, values=values, mask=mask, estimator=name, **EVERYTHING
    )
    wide = [padded(x, left, right, garbage) for x in (rewards, values, mask)]
    padded_out = compute_advantages(
        rewards=wide[0], values=wide[1], mask=wide[2], estimator=name, **EVERYTHING
    )
    for field in ("advantages", "returns", "raw_advantages", "rewards"):
        assert torch.equal(
            getattr(out, field), getattr(padded_out, field)[:, left : left + mask.shape[1]]
        )
    assert padded_out.clip_frac == out.clip_frac


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_whole_chain_matches_the_reference(seed):
    mask = random_mask(seed, empty_row=True)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    m = mask.tolist()
    r = reference.whiten(rewards.tolist(), m)
    out = compute_advantages(
        rewards=rewards, values=values, mask=mask, estimator="gae", gamma=0.9, lam=0.8,
        whiten_rewards=True, whiten_advantages=True,
    )  # fmt: skip
    raw, returns = reference.gae(r, values.tolist(), m, 0.9, 0.8)
    for actual, expected in (
        (out.rewards, r),
        (out.raw_advantages, raw),
        (out.returns, returns),
        (out.advantages, reference.whiten(raw, m)),
    ):
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_turns_with_one_token_each_are_tokens():
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    rewards = torch.tensor([[1.0, 5.0, 2.0, 5.0, 4.0]])
    assert torch.equal(
        turn_discounted_returns(rewards, mask, 0.5), discounted_returns(rewards, mask, 0.5)
    )
