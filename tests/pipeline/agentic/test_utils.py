"""Rewards, masks and advantages of trajectories."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import float64_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.utils import (
    agentic_compute_advantage,
    agentic_reward_norm,
    build_state_group,
    compute_agentic_reinforce_return,
    compute_discounted_returns,
    compute_response_level_rewards,
    get_agentic_response_level_mask,
)
from roll.utils.functionals import compute_advantage

STEPS = {
    "traj_group_id": ["g0", "g0", "g0", "g0", "g1", "g1"],
    "traj_id": ["a", "a", "b", "b", "c", "d"],
    "step": [1, 0, 0, 1, 0, 0],
    "state_hash": ["s1", "s0", "s0", "s1", "s0", "s0"],
    "step_scores": [0.0, 1.0, 0.0, 0.0, 1.0, 3.0],
    "episode_scores": [1.0, 1.0, 0.0, 0.0, 1.0, 1.0],
}


def step_batch(**columns: Any) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(6)}, non_tensors=STEPS | columns)


def norm(grouping="traj_group_id", mean="group", std=None) -> SimpleNamespace:
    return SimpleNamespace(grouping=grouping, norm_mean_type=mean, norm_std_type=std)


def config(adv_estimator: str, normalization: Any = None, **options: Any) -> SimpleNamespace:
    fields = {"reward_clip": None, "episode_reward_weight": 1.0, "step_reward_weight": 0.5}
    fields |= {"adv_estimator": adv_estimator, "reward_normalization": normalization or norm()}
    return SimpleNamespace(**fields | options)


def scored(scores: list[float], **non_tensors: Any) -> DataProto:
    return DataProto.from_dict({"scores": torch.tensor(scores)}, non_tensors=non_tensors)


def test_step_returns_by_hand():
    batch = step_batch(step_scores=[2.0, 1.0, 0.0, 4.0, 1.0, 3.0])
    out = compute_discounted_returns(batch, "gigpo", gamma=0.5)
    assert out.batch["step_rewards"].tolist() == [2, 2, 2, 4, 1, 3]
    # Only estimators of steps have them.
    assert compute_discounted_returns(batch, "grpo") is batch
    assert "step_rewards" in compute_discounted_returns(batch, "step_reinforce")
    assert "step_rewards" not in batch
    with pytest.raises(ValueError, match="trajectory 'a' has step 1 twice"):
        compute_discounted_returns(step_batch(step=[1, 1, 0, 1, 0, 0]), "gigpo")


@given(seed=st.integers(0, 1000), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(max_examples=25, deadline=None)
def test_step_returns_match_the_reference_in_any_order(seed, gamma):
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (f"t{i}", step)
        for i in range(4)
        for step in range(int(torch.randint(1, 5, (1,), generator=generator)))
    ]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    traj, steps = [pairs[i][0] for i in order], [pairs[i][1] for i in order]
    scores = torch.randn(len(pairs), generator=generator).tolist()
    batch = DataProto.from_dict(
        {"row": torch.arange(len(pairs))},
        non_tensors={"traj_id": traj, "step": steps, "step_scores": scores},
    )
    out = compute_discounted_returns(batch, "gigpo", gamma)
    expected = torch.tensor(reference.step_returns(scores, traj, steps, gamma))
    torch.testing.assert_close(out.batch["step_rewards"], expected)
    assert out.batch["row"].tolist() == list(range(len(pairs)))


ROOT = 2**0.5 + 1e-6  # the standard deviation of two values that are 2 apart
NORMS = [
    (("tags", "group"), [-1, 0, 1, 0]),
    (("batch", "batch"), [-2.5, 1.5, -0.5, 1.5]),
    (("batch", "group"), [-2.5, 1.5, -0.5, 1.5]),
    (("batch", None), [1, 5, 3, 5]),
    (("tags", "group", "group"), [-1 / ROOT, 0, 1 / ROOT, 0]),
    (("tags", "batch", "group"), [-2.5 / ROOT, 1.5, -0.5 / ROOT, 1.5]),
]


@pytest.mark.parametrize(("how", "expected"), NORMS)
def test_reward_norm_by_group_and_by_batch(how, expected):
    batch = scored([1.0, 5.0, 3.0, 5.0], tags=["x", "y", "x", "y"])
    torch.testing.assert_close(agentic_reward_norm(batch, norm(*how)), torch.tensor(expected) * 1.0)


def test_rp11_rp12_groups_of_one_and_integer_scores():
    batch = scored([1.0, 3.0], tags=["x", "y"])
    out = agentic_reward_norm(batch, norm("tags", "batch", "batch"))
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0]) / ROOT)
    constant = scored([2.0, 2.0], tags=["x", "x"])
    assert agentic_reward_norm(constant, norm("tags", None, "group")).tolist() == [2, 2]
    out = agentic_reward_norm(scored([1, 0, 3]), norm("batch", "batch"))
    torch.testing.assert_close(out, torch.tensor([-1 / 3, -4 / 3, 5 / 3]))


def test_scores_that_are_not_finite_name_their_rows():
    with pytest.raises(ValueError, match=r"scores is not finite .* rows \[1\]"):
        agentic_reward_norm(scored([1.0, math.nan]), norm("batch", "batch"))
    with pytest.raises(ValueError, match=r"step_scores is not finite .* rows \[0\]"):
        compute_discounted_returns(step_batch(step_scores=[math.inf, 0, 0, 0, 0, 0]), "gigpo")
    with pytest.raises(KeyError, match="'tags'"):
        agentic_reward_norm(scored([1.0]), norm("tags"))


def test_ad11_equal_states_of_different_groups_stay_apart():
    batch = step_batch()
    out = build_state_group(batch)
    ids = out.non_tensor_batch["state_group_id"].tolist()
    assert ids[0] == ids[3] and ids[1] == ids[2] and ids[4] == ids[5] and len(set(ids)) == 3
    sizes = {f"system/state_batch_size/{name}": 2 for name in ("max", "mean", "min")}
    assert out.meta_info["metrics"] == sizes
    assert "state_group_id" not in batch and batch.meta_info == {}
    # ids that only look alike when they are joined
    tricky = step_batch(traj_group_id=["a|b", "a"] * 3, state_hash=["c", "b|c"] * 3)
    tricky = build_state_group(tricky)
    assert len(set(tricky.non_tensor_batch["state_group_id"])) == 2


def gigpo(*how: str | None) -> DataProto:
    batch = compute_discounted_returns(step_batch(), "gigpo", gamma=0.5)
    return compute_response_level_rewards(batch, config("gigpo", norm(*how)))[0]


def test_gigpo_by_hand():
    batch = compute_discounted_returns(step_batch(), "gigpo", gamma=0.5)
    settings = config("gigpo")
    before = copy.deepcopy((batch.meta_info, settings))
    columns = {*batch.batch.keys(), *batch.non_tensor_batch}
    out, metrics = compute_response_level_rewards(batch, settings)
    assert out.batch["episode_rewards_norm"].tolist() == [0.5, 0.5, -0.5, -0.5, 0, 0]
    assert out.batch["step_rewards_norm"].tolist() == [0, 0.5, -0.5, 0, -1, 1]
    assert out.batch["response_level_rewards"].tolist() == [0.5, 0.75, -0.75, -0.5, -0.5, 0.5]
    assert metrics == {"critic/reward_clip_frac": 0.0, "critic/zero_std_group_frac": 0.5}
    assert out.meta_info["metrics"]["system/state_batch_size/mean"] == 2
    # What was given is as it was.
    assert {*batch.batch.keys(), *batch.non_tensor_batch} == columns
    assert (batch.meta_info, settings) == before


def test_ad12_both_parts_of_gigpo_follow_the_configured_types():
    raw = gigpo("traj_group_id", None)
    assert raw.batch["step_rewards_norm"].tolist() == [0, 1, 0, 0, 1, 3]
    half = 0.5 / (0.5**0.5 + 1e-6)
    expected = torch.tensor([0, half, -half, 0, -1 / ROOT])
    scaled = gigpo("traj_group_id", "group", "group")
    torch.testing.assert_close(scaled.batch["step_rewards_norm"][:5], expected)
    # The step's part is always relative to its state.
    out = gigpo("batch", "batch")
    assert out.batch["step_rewards_norm"].tolist() == [0, 0.5, -0.5, 0, -1, 1]
    expected = torch.tensor([1, 1, -2, -2, 1, 1]) / 3
    torch.testing.assert_close(out.batch["episode_rewards_norm"], expected)


def test_step_reinforce_normalises_step_returns():
    batch = compute_discounted_returns(step_batch(), "step_reinforce", gamma=1.0)
    out, _ = compute_response_level_rewards(batch, config("step_reinforce", norm("batch", "batch")))
    expected = torch.tensor([-5, 1, -5, -5, 1, 13]) / 6
    torch.testing.assert_close(out.batch["response_level_rewards"], expected)


def trajectories(estimator: str, **options: Any) -> tuple[DataProto, dict[str, float]]:
    scores = torch.tensor([[0.0, 1.0], [0.5, 2.5], [0.0, 5.0]])
    batch = DataProto.from_dict({"scores": scores}, non_tensors={"traj_group_id": ["g", "g", "h"]})
    return compute_response_level_rewards(batch, config(estimator, **options))


@pytest.mark.parametrize(
    ("estimator", "how", "expected"),
    [
        ("reinforce", ("traj_group_id", "group"), [-1, 1, 0]),
        ("grpo", ("batch", None), [1, 3, 5]),  # as ROLL: the configured normalisation
        ("rloo", ("batch", None), [-2, 2, 0]),  # these, which ROLL lacks, bring their own
        ("dr_grpo", ("batch", None), [-1, 1, 0]),
    ],
)
def test_other_estimators_normalise_the_sum_of_token_scores(estimator, how, expected):
    out, metrics = trajectories(estimator, normalization=norm(*how))
    assert out.batch["response_level_rewards"].tolist() == expected
    if estimator == "reinforce":
        assert metrics["critic/zero_std_group_frac"] == 0.5


def test_response_rewards_are_clipped():
    out, metrics = trajectories("reinforce", reward_clip=0.5)
    assert out.batch["response_level_rewards"].tolist() == [-0.5, 0.5, 0]
    assert metrics["critic/reward_clip_frac"] == pytest.approx(2 / 3)
    _, metrics = trajectories("reinforce", reward_clip=0.0)
    assert metrics["critic/reward_clip_frac"] == 0
    with pytest.raises(ValueError, match="reward_clip=-1"):
        trajectories("reinforce", reward_clip=-1)
    with pytest.raises(ValueError, match="unknown adv_estimator"):
        trajectories("ppo")


def test_response_level_mask_keeps_every_trajectory():
    mask = torch.tensor([[0, 1, 0, 1]])
    out, metrics = get_agentic_response_level_mask(
        DataProto.from_dict({"response_mask": mask}), SimpleNamespace()
    )
    assert out.batch["final_response_mask"].tolist() == [[1, 0, 1]]
    assert out.batch["origin_response_mask"].tolist() == mask.tolist()
    names = ("max_len_mask_ratio", "final_mask_ratio", "samples_used", "samples_total")
    assert metrics == {f"actor/{name}": 1.0 for name in names}


def test_agentic_reinforce_by_hand():
    rewards = torch.tensor([[-0.25, 1.0, math.nan, -0.5, 2.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    advantages, returns = compute_agentic_reinforce_return(rewards, 0.5, 1.0, mask)
    assert advantages.tolist() == returns.tolist() == [[1.5, 1.5, 0, 1.5, 1.5]]
    assert compute_agentic_reinforce_return(torch.tensor([[1.0, 2.0]]), 0.5)[0].tolist() == [[3, 3]]
    batch = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": torch.nn.functional.pad(mask, (1, 0))}
    )
    out = agentic_compute_advantage(batch, 0.5, 1.0, "agentic_reinforce", advantage_clip=1.0)
    assert out.batch["advantages"].tolist() == [[1, 1, 0, 1, 1]]
    assert out.meta_info["metrics"] == {"critic/advantage_clip_frac": 1.0}


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "grpo", "gigpo", "step_reinforce"])
def test_other_agentic_advantages_are_the_common_ones(estimator):
    batch = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[0.1, 9.0, 1.0]]),
            "values": torch.tensor([[0.4, 9.0, 0.2]]),
            "response_mask": torch.tensor([[0, 1, 0, 1]]),
        }
    )
    mine = agentic_compute_advantage(batch, 0.9, 0.8, estimator, whiten_advantages=True)
    common = compute_advantage(batch, 0.9, 0.8, estimator, whiten_advantages=True)
    for key in ("advantages", "returns", "raw_advantages"):
        assert torch.equal(mine.batch[key], common.batch[key])
