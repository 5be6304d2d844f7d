"""The batch-level steps: columns in, columns out, metrics, errors, and nothing changed that is not
theirs."""

import math
from types import SimpleNamespace
from typing import Any

import float64_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, random_mask
from reward_batches import NAN, assert_unchanged, reward_config, scored, snapshot, token_batch

from roll.algorithms.kl import AdaptiveKLController, FixedKLController
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.functionals import (
    RunningMoments,
    agg_loss,
    apply_kl_penalty,
    compute_advantage,
    compute_approx_kl,
    compute_clip_fraction,
    compute_gae_advantage_return,
    compute_reinforce_return,
    compute_token_reward,
    difficulty_mask,
    expand_to_token_level,
    get_sample_level_mask,
    group_reward_norm,
    reward_norm,
    reward_postprocess,
)

# reward_postprocess


def test_rp1_grpo_normalises_by_group_and_leaves_the_config_alone():
    config = reward_config(adv_estimator="grpo", norm_mean_type="batch")
    batch = scored([1.0, 0.0, 3.0, 1.0, 2.0, 2.0])
    before = snapshot(batch, config)
    data, metrics = reward_postprocess(batch, config, {})
    half, wide = 0.5**0.5 + 1e-6, 2**0.5 + 1e-6
    expected = torch.tensor([0.5 / half, -0.5 / half, 1 / wide, -1 / wide, 0, 0])
    torch.testing.assert_close(data.batch["response_level_rewards"], expected)
    assert metrics == {
        "critic/reward_clip_frac": 0.0,
        "critic/zero_std_group_frac": pytest.approx(1 / 3),
    }
    assert_unchanged(before, batch, config)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", [0.5, -0.5, 1, -1]),
        ("rloo", [1, -1, 2, -2]),
        ("reinforce_plus_plus_baseline", [0.5, -0.5, 1, -1]),
        ("reinforce_plus_plus", [1, 0, 3, 1]),
        ("gae", [1, 0, 3, 1]),
    ],
)
def test_presets_normalise_as_they_say(estimator, expected):
    data, _ = reward_postprocess(
        scored([1.0, 0.0, 3.0, 1.0]), reward_config(adv_estimator=estimator), None
    )
    assert data.batch["response_level_rewards"].tolist() == expected


def test_rp4_running_moments_are_found_by_the_domain_of_the_rows():
    config = reward_config(norm_mean_type="running", norm_std_type="running")
    running = {"math": RunningMoments(), "code": RunningMoments()}
    batch = scored([1.0, 3.0], domain=["math", "math"])
    data, metrics = reward_postprocess(batch, config, running)
    expected = torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-6)
    torch.testing.assert_close(data.batch["response_level_rewards"], expected)
    assert running["math"].count == 2 and running["code"].count == 0
    assert "critic/zero_std_group_frac" not in metrics


def test_rp4_running_moments_alone_or_as_the_only_entry():
    config = reward_config(norm_mean_type="running")
    for running in (
        RunningMoments(),
        {"any": RunningMoments()},
        {"domain": RunningMoments(), "x": RunningMoments()},
    ):
        data, _ = reward_postprocess(scored([1.0, 3.0]), config, running)
        assert data.batch["response_level_rewards"].tolist() == [-1, 1]


def test_running_moments_that_are_missing_or_ambiguous():
    config = reward_config(norm_mean_type="running")
    with pytest.raises(KeyError, match=r"no moments of domain 'code'; it has 'math'"):
        reward_postprocess(scored([1.0], domain=["code"]), config, {"math": RunningMoments()})
    with pytest.raises(ValueError, match="one domain at a time; this batch has code, math"):
        reward_postprocess(
            scored([1.0, 2.0], domain=["math", "code"]), config, {"math": RunningMoments()}
        )
    with pytest.raises(ValueError, match="needs running_ctrl"):
        reward_postprocess(scored([1.0]), config, None)
    with pytest.raises(KeyError, match="domain"):
        reward_postprocess(scored([1.0]), config, {"a": RunningMoments(), "b": RunningMoments()})


def test_running_moments_are_not_updated_when_they_are_not_used():
    running = RunningMoments()
    reward_postprocess(scored([1.0, 2.0]), reward_config(norm_mean_type="batch"), {"math": running})
    assert running.count == 0


@pytest.mark.parametrize("key", ["group_id", "group_ids"])
def test_rp7_group_ids_win_over_positions(key):
    config = reward_config(adv_estimator="dr_grpo")
    batch = scored([1.0, 10.0, 3.0], **{key: ["a", "b", "a"]})
    data, _ = reward_postprocess(batch, config, None)
    assert data.batch["response_level_rewards"].tolist() == [-1, 0, 1]
    tensor_ids = scored([1.0, 10.0, 3.0])
    tensor_ids.batch[key] = torch.tensor([4, 2, 4])
    data, _ = reward_postprocess(tensor_ids, config, None)
    assert data.batch["response_level_rewards"].tolist() == [-1, 0, 1]


def test_rp6_groups_that_do_not_fit():
    with pytest.raises(ValueError, match="group size 2 does not divide the 3 rows"):
        reward_postprocess(scored([1.0, 2.0, 3.0]), reward_config(adv_estimator="grpo"), None)


def test_rp8_clip_none_and_zero_are_off_and_negative_is_an_error():
    batch = scored([-3.0, 0.5, 2.0, 1.0])
    for off in (None, 0.0, 0):
        data, metrics = reward_postprocess(batch, reward_config(reward_clip=off), None)
        assert data.batch["response_level_rewards"].tolist() == [-3, 0.5, 2, 1]
        assert metrics["critic/reward_clip_frac"] == 0
    data, metrics = reward_postprocess(batch, reward_config(reward_clip=1.0), None)
    assert data.batch["response_level_rewards"].tolist() == [-1, 0.5, 1, 1]
    assert metrics["critic/reward_clip_frac"] == 0.5
    with pytest.raises(ValueError, match="reward_clip=-1"):
        reward_postprocess(batch, reward_config(reward_clip=-1.0), None)


def test_rp9_rewards_that_are_not_finite_name_key_and_rows():
    with pytest.raises(ValueError, match=r"response_level_rewards is not finite .* rows \[0, 2\]"):
        reward_postprocess(scored([NAN, 1.0, math.inf, 2.0]), reward_config(), None)


def test_missing_rewards_name_the_key():
    with pytest.raises(KeyError, match="response_level_rewards"):
        reward_postprocess(DataProto.from_dict({"x": torch.ones(1)}), reward_config(), None)


def test_unknown_names_are_listed():
    with pytest.raises(ValueError, match=r"unknown adv_estimator 'x'; known: gae"):
        reward_postprocess(scored([1.0]), reward_config(adv_estimator="x"), None)
    with pytest.raises(ValueError, match=r"unknown norm_mean_type 'foo'"):
        reward_postprocess(scored([1.0]), reward_config(norm_mean_type="foo"), None)


def test_reward_norm_and_group_reward_norm():
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    assert reward_norm(rewards, n_sample=2, norm_mean_type="group").tolist() == [
        0.5,
        -0.5,
        -1.5,
        1.5,
    ]
    assert reward_norm(rewards).tolist() == rewards.tolist()
    running = RunningMoments()
    assert reward_norm(
        rewards, running_ctrl={"domain": running}, norm_mean_type="running"
    ).tolist() == [-1, -2, 0, 3]
    for n_sample in (-1, 0, 3):
        with pytest.raises(ValueError, match=f"group size {n_sample}"):
            reward_norm(rewards, n_sample=n_sample, norm_mean_type="group")
    batch = scored(rewards.tolist())
    centred = group_reward_norm(batch, n_sample=2, div_std=False).batch["response_level_rewards"]
    assert centred.tolist() == [0.5, -0.5, -1.5, 1.5]
    together = group_reward_norm(batch, n_sample=2, div_std_global=True).batch[
        "response_level_rewards"
    ]
    torch.testing.assert_close(together, centred / (centred.std() + 1e-6))
    apart = group_reward_norm(batch, n_sample=2).batch["response_level_rewards"]
    torch.testing.assert_close(apart, reward_norm(rewards, 2, None, "group", "group"))


# compute_token_reward


def test_token_reward_by_hand():
    data, metrics = compute_token_reward(token_batch(), reward_config(), FixedKLController(0.1))
    expected = torch.tensor([[-0.05, 0, 1.02, 0], [0, 0, -0.03, -0.5 + 0.06]])
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics == pytest.approx(
        {
            "critic/kl": ((0.5 - 0.2) / 2 + (0 + 0.3 - 0.6) / 3) / 2,
            "critic/kl_coef": 0.1,
            "critic/token_reward_clip_frac": 0.0,
            "critic/empty_response_frac": 0.0,
        }
    )


def test_tr1_a_row_that_ends_with_an_observation_keeps_its_reward():
    config = reward_config(add_token_level_kl=False)
    data, _ = compute_token_reward(token_batch(), config, FixedKLController(0.1))
    assert data.batch["token_level_rewards"].tolist() == [[0, 0, 1, 0], [0, 0, 0, -0.5]]
    data = compute_advantage(data, 1.0, 1.0, "reinforce")
    assert data.batch["advantages"].tolist() == [[1, 0, 1, 0], [0, -0.5, -0.5, -0.5]]


def test_tr2_one_response_token_or_none():
    mask = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    config = reward_config(add_token_level_kl=False)
    data, metrics = compute_token_reward(
        token_batch(response_mask=mask), config, FixedKLController(0.1)
    )
    assert data.batch["token_level_rewards"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert metrics["critic/empty_response_frac"] == 0.5


def test_tr3_position_ids_are_not_needed():
    batch = token_batch(position_ids=torch.zeros(2, 3, 5, dtype=torch.long), attention_mask=None)
    assert expand_to_token_level(batch).tolist() == [[0, 0, 1, 0], [0, 0, 0, -0.5]]


def test_tr4_no_reference_is_no_divergence():
    config = reward_config(add_token_level_kl=False)
    data, metrics = compute_token_reward(
        token_batch(ref_log_probs=None), config, FixedKLController(0.1)
    )
    assert data.batch["token_level_rewards"].tolist() == [[0, 0, 1, 0], [0, 0, 0, -0.5]]
    assert metrics["critic/kl"] == 0 and metrics["critic/kl_coef"] == 0
    compute_token_reward(token_batch(old_log_probs=None), config, FixedKLController(0.1))


@pytest.mark.parametrize("key", ["old_log_probs", "ref_log_probs"])
def test_tr4_the_penalty_needs_both_log_probs(key):
    with pytest.raises(KeyError, match=f"'{key}'.*add_token_level_kl"):
        compute_token_reward(token_batch(**{key: None}), reward_config(), FixedKLController(0.1))


def test_tr5_integer_placeholders_are_not_log_probs():
    placeholder = torch.zeros(2, 4, dtype=torch.long)
    _, metrics = compute_token_reward(
        token_batch(old_log_probs=placeholder),
        reward_config(add_token_level_kl=False),
        FixedKLController(0.1),
    )
    assert metrics["critic/kl"] == 0
    with pytest.raises(ValueError, match=r"old_log_probs holds torch\.int64: a placeholder"):
        compute_token_reward(
            token_batch(old_log_probs=placeholder), reward_config(), FixedKLController(0.1)
        )


def test_tr6_the_controller_hears_only_a_divergence_that_was_penalised():
    controller = AdaptiveKLController(0.2, target=10.0, horizon=100)
    _, metrics = compute_token_reward(
        token_batch(), reward_config(add_token_level_kl=False), controller
    )
    assert controller.value == 0.2 and metrics["critic/kl_coef"] == 0 and metrics["critic/kl"] != 0
    _, metrics = compute_token_reward(token_batch(), reward_config(), controller)
    assert metrics["critic/kl_coef"] == 0.2  # the value before the update
    assert controller.value == pytest.approx(0.2 * (1 - 0.2 * 2 / 100))


def test_tr7_clip_fraction_counts_response_tokens():
    data, metrics = compute_token_reward(
        token_batch(), reward_config(reward_clip=0.4), FixedKLController(0.0)
    )
    assert data.batch["token_level_rewards"][0, 2].item() == pytest.approx(0.4)
    assert metrics["critic/token_reward_clip_frac"] == pytest.approx(2 / 5)


def test_tr8_empty_rows_do_not_dilute_the_divergence():
    batch = token_batch()
    _, alone = compute_token_reward(batch[:1], reward_config(), FixedKLController(0.1))
    mask = batch.batch["response_mask"].clone()
    mask[1] = 0
    _, with_empty = compute_token_reward(
        token_batch(response_mask=mask), reward_config(), FixedKLController(0.1)
    )
    assert with_empty["critic/kl"] == alone["critic/kl"] == pytest.approx(0.15)


def test_tr9_integer_rewards_give_float_token_rewards():
    batch = token_batch(response_level_rewards=torch.tensor([1, 0]))
    data, _ = compute_token_reward(batch, reward_config(), FixedKLController(0.1))
    assert data.batch["token_level_rewards"].dtype == torch.float32


def test_older_token_rewards_become_scores():
    scores = torch.full((2, 3), 7.0)
    data, _ = compute_token_reward(
        token_batch(token_level_rewards=scores), reward_config(), FixedKLController(0.1)
    )
    assert torch.equal(data.batch["token_level_scores"], scores) and data.batch[
        "token_level_rewards"
    ].shape == (2, 4)


@pytest.mark.parametrize("key", ["old_log_probs", "ref_log_probs"])
def test_nan_log_probs_at_a_response_token_name_key_and_row(key):
    bad = torch.zeros(2, 4)
    bad[1, 2] = NAN
    with pytest.raises(
        ValueError, match=rf"{key} is not finite .* rows \[1\]: {key}\[1, 2\] is nan"
    ):
        compute_token_reward(token_batch(**{key: bad}), reward_config(), FixedKLController(0.1))


def test_log_probs_of_the_wrong_width_name_the_key():
    with pytest.raises(
        ValueError, match=r"old_log_probs has shape \(2, 5\).*response_mask\[:, 1:\]"
    ):
        compute_token_reward(
            token_batch(old_log_probs=torch.zeros(2, 5)), reward_config(), FixedKLController(0.1)
        )


def test_kl5_full_divergence_of_sampled_tokens_is_an_error():
    with pytest.raises(ValueError, match="whole vocabulary"):
        compute_token_reward(
            token_batch(), reward_config(kl_penalty="full"), FixedKLController(0.1)
        )


def test_apply_kl_penalty_is_the_same_without_a_config():
    expected, _ = compute_token_reward(token_batch(), reward_config(), FixedKLController(0.1))
    data, metrics = apply_kl_penalty(token_batch(), FixedKLController(0.1))
    assert torch.equal(data.batch["token_level_rewards"], expected.batch["token_level_rewards"])
    assert metrics["critic/kl_coef"] == 0.1
    _, metrics = apply_kl_penalty(token_batch(ref_log_probs=None), FixedKLController(0.1))
    assert metrics["critic/kl_coef"] == 0


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "k3"])
@given(seed=st.integers(0, 10_000), clip=st.sampled_from([None, 0.3]))
@settings(max_examples=15, deadline=None)
def test_token_reward_matches_the_reference(kind, seed, clip):
    mask = random_mask(seed, empty_row=True)
    generator = torch.Generator().manual_seed(seed)
    old, ref = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    rewards = torch.randn(len(mask), generator=generator)
    batch = DataProto.from_dict(
        {
            "response_mask": torch.cat([torch.ones(len(mask), 1).long(), mask], dim=1),
            "response_level_rewards": rewards,
            "old_log_probs": old,
            "ref_log_probs": ref,
        }
    )
    config = reward_config(kl_penalty=kind, reward_clip=clip)
    data, metrics = compute_token_reward(batch, config, FixedKLController(0.3))
    kl = reference.approx_kl(old.tolist(), ref.tolist(), mask.tolist(), kind)
    expected, mean_kl, clip_frac = reference.token_rewards(
        rewards.tolist(), mask.tolist(), kl, 0.3, clip
    )
    torch.testing.assert_close(
        data.batch["token_level_rewards"], torch.tensor(expected), rtol=1e-5, atol=1e-5
    )
    assert metrics["critic/kl"] == pytest.approx(mean_kl, rel=1e-4, abs=1e-6)
    assert metrics["critic/token_reward_clip_frac"] == pytest.approx(clip_frac, abs=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_of_log_probs_changes_no_bit(garbage):
    runs = []
    for fill in (0.0, garbage):
        columns = {}
        for key in ("old_log_probs", "ref_log_probs"):
            column = token_batch().batch[key]
            columns[key] = torch.where(column.isnan(), torch.tensor(fill), column)
        runs.append(
            compute_token_reward(token_batch(**columns), reward_config(), FixedKLController(0.1))
        )
    assert torch.equal(
        runs[0][0].batch["token_level_rewards"], runs[1][0].batch["token_level_rewards"]
    )
    assert runs[0][1] == runs[1][1]


# masks of samples


def mask_config(**options: Any) -> SimpleNamespace:
    fields = {"max_len_mask": False, "difficulty_mask": False, "error_max_len_clip": False}
    infer = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=2))
    return SimpleNamespace(**fields | {"actor_infer": infer} | options)


def sample_batch() -> DataProto:
    return DataProto.from_dict(
        {
            "response_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]),
            "responses": torch.zeros(4, 3),
            "scores": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        }
    )


def test_sample_masks_off_keep_everything():
    data, metrics = get_sample_level_mask(sample_batch(), mask_config())
    assert torch.equal(
        data.batch["final_response_mask"], sample_batch().batch["response_mask"][:, 1:].float()
    )
    assert torch.equal(data.batch["origin_response_mask"], sample_batch().batch["response_mask"])
    assert metrics == {
        "actor/max_len_mask_ratio": 1.0,
        "actor/difficulty_mask_ratio": 1.0,
        "actor/error_len_mask_ratio": 1.0,
        "actor/final_mask_ratio": 1.0,
        "actor/samples_used": 4.0,
        "actor/samples_total": 4.0,
    }


def test_sample_masks_by_hand():
    config = mask_config(
        max_len_mask=True, difficulty_mask=True, difficulty_low_threshold=0.0, difficulty_high_threshold=1.0,
        error_max_len_clip=True, error_max_len_threshold=2,
    )  # fmt: skip
    data, metrics = get_sample_level_mask(sample_batch(), config)
    # rows 0 and 3 are as long as `responses`; rows 0 and 1 are too easy; row 2 is wrong and not
    # shorter than 2
    assert not data.batch["final_response_mask"].any()
    assert data.batch["difficulty_mask"].tolist() == [False, False, True, True]
    assert metrics["actor/max_len_mask_ratio"] == metrics["actor/difficulty_mask_ratio"] == 0.5
    assert metrics["actor/error_len_mask_ratio"] == 0.75 and metrics["actor/samples_used"] == 0
    data, metrics = get_sample_level_mask(sample_batch(), mask_config(max_len_mask=True))
    assert data.batch["final_response_mask"].sum(1).tolist() == [0, 1, 2, 0]
    assert metrics["actor/final_mask_ratio"] == 0.5 and metrics["actor/samples_used"] == 2


def test_difficulty_mask_of_single_samples_keeps_all():
    assert difficulty_mask(sample_batch(), n_sample=-1).batch["difficulty_mask"].all()
    assert difficulty_mask(sample_batch(), n_sample=2).batch["difficulty_mask"].tolist() == [
        False,
        False,
        True,
        True,
    ]


# ROLL's names


def test_wrappers_are_the_algorithms():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 1.0, 2.0]])
    advantages, returns = compute_reinforce_return(rewards, gamma=0.5, lambd=1.0)
    assert advantages.tolist() == returns.tolist() == [[3, 4, 4]]
    assert compute_reinforce_return(rewards, 0.5, 1.0, torch.tensor([[1, 0, 1]]))[0].tolist() == [
        [3, 0, 4]
    ]
    advantages, returns = compute_gae_advantage_return(rewards, values, 0.5, 0.5)
    assert advantages.tolist() == [[1.625, 2.5, 2]] and returns.tolist() == [[2.125, 3.5, 4]]
    assert compute_clip_fraction(rewards, 3.0, 1.5) == pytest.approx(2 / 3)
    assert compute_clip_fraction(rewards, 3.0, 1.5, mask=torch.tensor([[1, 0, 0]])) == 1
    assert compute_clip_fraction(torch.zeros(0), 1.0, -1.0) == 0
    assert compute_approx_kl(rewards, values, torch.tensor([[1, 1, 0]]), "abs").tolist() == [
        [0.5, 1, 0]
    ]
    loss = agg_loss(rewards, torch.tensor([[1, 1, 0]]), "token-mean", batch_num_tokens=6)
    assert loss.item() == pytest.approx(0.5)


def test_non_tensor_columns_survive():
    batch = scored([1.0, 2.0], tag=["a", "b"])
    data, _ = reward_postprocess(batch, reward_config(), None)
    assert isinstance(data.non_tensor_batch["tag"], np.ndarray) and data.non_tensor_batch[
        "tag"
    ].tolist() == ["a", "b"]
