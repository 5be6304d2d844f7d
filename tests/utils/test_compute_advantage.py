"""compute_advantage: columns, metrics, errors, and the three steps together."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loss_cases import GARBAGE
from reward_batches import (
    NAN,
    advantage_batch,
    assert_unchanged,
    reward_config,
    snapshot,
    token_batch,
)
from torch import Tensor

from roll.algorithms.kl import AdaptiveKLController, FixedKLController
from roll.distributed.scheduler.protocol import DataProto
from roll.exceptions import ConfigError
from roll.pipeline.agentic.utils import (
    agentic_compute_advantage,
    compute_response_level_rewards,
    get_agentic_response_level_mask,
)
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.functionals import (
    RunningMoments,
    apply_kl_penalty,
    compute_advantage,
    compute_token_reward,
    difficulty_mask,
    get_sample_level_mask,
    group_reward_norm,
    reduce_metrics,
    reward_postprocess,
    union_two_dict,
)


def test_ad8_columns_are_written_on_a_new_batch_only():
    batch = advantage_batch()
    batch.meta_info["global_step"] = 3
    before = snapshot(batch)
    data = compute_advantage(
        batch, 0.9, 0.8, "gae", advantage_clip=0.1, whiten_advantages=True, whiten_rewards=True
    )
    assert_unchanged(before, batch)
    assert set(data.batch.keys()) - set(batch.batch.keys()) == {
        "advantages",
        "returns",
        "raw_advantages",
    }
    assert torch.equal(data.batch["values"], torch.tensor([[0.2, 0, 0.4, 0], [0, 0.1, 0.3, 0]]))
    assert data.meta_info["global_step"] == 3


@pytest.mark.parametrize(
    "estimator", ["gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"]
)
def test_ad8_a_second_call_gives_the_same_advantages(estimator):
    once = compute_advantage(advantage_batch(), 0.9, 0.8, estimator, advantage_clip=0.7)
    twice = compute_advantage(once, 0.9, 0.8, estimator, advantage_clip=0.7)
    assert_unchanged(snapshot(once), twice)
    # also after rewards were whitened, which the batch then holds
    whitened = compute_advantage(advantage_batch(), 0.9, 0.8, estimator, whiten_rewards=True)
    again = compute_advantage(whitened, 0.9, 0.8, estimator)
    assert torch.equal(whitened.batch["advantages"], again.batch["advantages"])


def test_ad5_metrics_are_merged():
    batch = advantage_batch()
    batch.meta_info["metrics"] = {"time/x": 1.0}
    data = compute_advantage(batch, 1.0, 1.0, "reinforce", advantage_clip=1.2)
    assert data.meta_info["metrics"] == {
        "time/x": 1.0,
        "critic/advantage_clip_frac": pytest.approx(1 / 4),
    }
    assert batch.meta_info["metrics"] == {"time/x": 1.0}
    untouched = compute_advantage(batch, 1.0, 1.0, "reinforce")
    assert untouched.meta_info["metrics"] == {"time/x": 1.0}


def test_ad6_clip_fraction_does_not_depend_on_padding():
    batch = advantage_batch()
    wide = DataProto.from_dict(
        {
            key: torch.nn.functional.pad(batch.batch[key].float(), (0, 7))
            for key in batch.batch.keys()
        }
    )
    narrow, padded = (
        compute_advantage(b, 1.0, 1.0, "reinforce", advantage_clip=1.2) for b in (batch, wide)
    )
    assert narrow.meta_info == padded.meta_info


def test_ad9_whitening_rewards_centres_them():
    rewards = torch.tensor([[0.0, 0.0, 3.0]])
    data = compute_advantage(
        DataProto.from_dict({"token_level_rewards": rewards, "response_mask": torch.ones(1, 4)}),
        1.0, 1.0, "reinforce", whiten_rewards=True,
    )  # fmt: skip
    std = (3 + 1e-8) ** 0.5
    torch.testing.assert_close(
        data.batch["token_level_rewards"], torch.tensor([[-1 / std, -1 / std, 2 / std]])
    )


def test_an_explicit_mask_replaces_the_column():
    final = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    data = compute_advantage(advantage_batch(), 1.0, 1.0, "reinforce", response_mask=final)
    assert data.batch["advantages"].tolist() == [[1.5, 0, 1, 0], [0, 0, 0, 0]]


def test_whitening_of_fewer_than_two_tokens_is_skipped_with_a_warning(caplog):
    batch = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[9.0, 2.0]]),
            "response_mask": torch.tensor([[0, 0, 1]]),
        }
    )
    with caplog.at_level("WARNING"):
        data = compute_advantage(
            batch, 1.0, 1.0, "gigpo", whiten_advantages=True, whiten_rewards=True
        )
    assert data.batch["advantages"].tolist() == [[0, 2]] and "whitening is skipped" in caplog.text


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("estimator", ["gae", "grpo", "agentic_reinforce"])
def test_ad7_garbage_under_the_mask_changes_no_bit(estimator, garbage):
    def fill(tensor: Tensor) -> Tensor:
        return tensor.nan_to_num(nan=garbage) if not math.isnan(garbage) else tensor

    clean = advantage_batch()
    clean.batch["token_level_rewards"] = clean.batch["token_level_rewards"].nan_to_num(0.0)
    clean.batch["values"] = clean.batch["values"].nan_to_num(0.0)
    source = advantage_batch()
    dirty = advantage_batch(
        **{key: fill(source.batch[key]) for key in ("token_level_rewards", "values")}
    )
    options = {"advantage_clip": 0.5, "whiten_advantages": True, "whiten_rewards": True}
    results = [compute_advantage(b, 0.9, 0.8, estimator, **options) for b in (clean, dirty)]
    for key in ("advantages", "returns", "raw_advantages", "token_level_rewards"):
        assert torch.equal(results[0].batch[key], results[1].batch[key])
    assert results[0].meta_info == results[1].meta_info


@pytest.mark.parametrize("key", ["token_level_rewards", "values"])
def test_nan_at_a_valid_token_names_key_and_row(key):
    bad = torch.zeros(2, 4)
    bad[1, 1] = math.inf
    with pytest.raises(
        ValueError, match=rf"{key} is not finite .* rows \[1\]: {key}\[1, 1\] is inf"
    ):
        compute_advantage(advantage_batch(**{key: bad}), 1.0, 1.0, "gae")
    if key == "values":  # not read, not checked
        compute_advantage(advantage_batch(**{key: bad}), 1.0, 1.0, "reinforce")


def test_errors_of_compute_advantage():
    with pytest.raises(KeyError, match=r"'values'.*'gae'"):
        compute_advantage(advantage_batch(values=None), 1.0, 1.0, "gae")
    with pytest.raises(KeyError, match="token_level_rewards"):
        compute_advantage(advantage_batch(token_level_rewards=None), 1.0, 1.0, "reinforce")
    with pytest.raises(ValueError, match="unknown adv_estimator 'ppo'; known: gae"):
        compute_advantage(advantage_batch(), 1.0, 1.0, "ppo")
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        compute_advantage(advantage_batch(), 1.5, 1.0, "reinforce")
    with pytest.raises(ValueError, match=r"lambd=-0\.1"):
        compute_advantage(advantage_batch(), 1.0, -0.1, "gae")
    with pytest.raises(ValueError, match="advantage_clip=-1"):
        compute_advantage(advantage_batch(), 1.0, 1.0, "reinforce", advantage_clip=-1)
    with pytest.raises(
        ValueError, match=r"token_level_rewards has shape \(2, 4\).*response_mask\[:, 1:\]"
    ):
        batch = advantage_batch()
        compute_advantage(batch, 1.0, 1.0, "reinforce", response_mask=batch.batch["response_mask"])


def test_seed_usage_from_rewards_to_advantages():
    """The three steps in the order and with the arguments of the documentation."""
    torch.manual_seed(0)
    mask = torch.cat([torch.zeros(4, 2), torch.ones(4, 4)], dim=1).long()
    data = DataProto.from_dict(
        {
            "response_mask": mask,
            "response_level_rewards": torch.tensor([1.0, 0.0, 0.0, 0.0]),
            "old_log_probs": torch.randn(4, 5),
            "ref_log_probs": torch.randn(4, 5),
        }
    )
    config = reward_config(adv_estimator="grpo", add_token_level_kl=False)
    data, reward_metrics = reward_postprocess(data, config, {})
    data, kl_metrics = compute_token_reward(data, config, FixedKLController(0.1))
    data = compute_advantage(
        data=data,
        gamma=1.0,
        lambd=1.0,
        adv_estimator="grpo",
        advantage_clip=5.0,
        whiten_advantages=True,
    )
    assert data.batch["advantages"].shape == data.batch["returns"].shape == (4, 5)
    # Group 0 differs by one: +-0.7071 on all of its tokens; whitened over 8 tokens of that and 8
    # zeros.
    raw = torch.tensor([0.7071058, -0.7071058, 0.0, 0.0])
    expected = raw / (raw.repeat_interleave(4).std() ** 2 + 1e-8) ** 0.5
    torch.testing.assert_close(data.batch["advantages"][:, 1:], expected[:, None].expand(4, 4))
    assert not data.batch["advantages"][:, 0].any()
    assert set(reward_metrics) | set(kl_metrics) >= {
        "critic/kl",
        "critic/kl_coef",
        "critic/reward_clip_frac",
    }


def test_inputs_and_configs_are_never_changed():
    config = reward_config(adv_estimator="grpo", reward_clip=0.3)
    batch = token_batch(
        token_level_rewards=torch.ones(2, 4), values=torch.ones(2, 4), scores=torch.tensor([1.0, 0.0]),
        responses=torch.ones(2, 3),
    )  # fmt: skip
    batch.meta_info["metrics"] = {"a": 1.0}
    before = snapshot(batch, config)
    reward_postprocess(batch, config, RunningMoments())
    compute_token_reward(batch, config, AdaptiveKLController(0.2, 0.1, 10))
    compute_advantage(
        batch, 0.9, 0.9, "gae", advantage_clip=0.1, whiten_advantages=True, whiten_rewards=True
    )
    group_reward_norm(batch, n_sample=2)
    difficulty_mask(batch, n_sample=2)
    flags = SimpleNamespace(
        max_len_mask=True, difficulty_mask=True, error_max_len_clip=True, error_max_len_threshold=2,
        difficulty_low_threshold=0.1, difficulty_high_threshold=0.9, actor_infer=config.actor_infer,
    )  # fmt: skip
    get_sample_level_mask(batch, flags)
    assert_unchanged(before, batch, config)


@pytest.mark.parametrize("compute", [compute_advantage, agentic_compute_advantage])
def test_rolls_call_with_the_whole_config(compute):
    options = {
        "gamma": 0.9,
        "lambd": 0.8,
        "adv_estimator": "gae",
        "whiten_advantages": True,
        "advantage_clip": 0.7,
    }
    expected = compute(advantage_batch(), **options)
    config = RLVRConfig(prompt_length=8, sequence_length=16)
    for given in (
        None,
        config,
        SimpleNamespace(),
        SimpleNamespace(use_opd=False, is_pure_opd=False),
    ):
        data = compute(data=advantage_batch(), response_mask=None, pipeline_config=given, **options)
        assert_unchanged(snapshot(expected), data)
    for key in ("use_opd", "is_pure_opd"):
        with pytest.raises(
            ConfigError, match=f"{key}: found true, .*on-policy distillation is not supported"
        ):
            compute(advantage_batch(), **options, pipeline_config=SimpleNamespace(**{key: True}))


def differences_page() -> str:
    return " ".join(
        (Path(__file__).parents[2] / "docs" / "differences-from-roll.md").read_text("utf-8").split()
    )


def test_steps_that_roll_does_in_place_return_a_new_batch():
    """The ones that docs/differences-from-roll.md lists, and no others of these two modules."""
    config = reward_config(
        max_len_mask=True, difficulty_mask=True, difficulty_low_threshold=0.1, difficulty_high_threshold=0.9,
        error_max_len_clip=False, episode_reward_weight=1.0, step_reward_weight=1.0, adv_estimator="grpo",
        reward_normalization=SimpleNamespace(grouping="batch", norm_mean_type="batch", norm_std_type=None),
    )  # fmt: skip
    control = FixedKLController(0.1)
    steps = {
        "reward_postprocess": lambda batch: reward_postprocess(batch, config, None)[0],
        "group_reward_norm": lambda batch: group_reward_norm(batch, n_sample=2),
        "get_sample_level_mask": lambda batch: get_sample_level_mask(batch, config)[0],
        "difficulty_mask": lambda batch: difficulty_mask(batch, n_sample=2),
        "compute_token_reward": lambda batch: compute_token_reward(batch, config, control)[0],
        "apply_kl_penalty": lambda batch: apply_kl_penalty(batch, control)[0],
        "compute_advantage": lambda batch: compute_advantage(batch, 1.0, 1.0, "gae"),
        "agentic_compute_advantage": lambda batch: agentic_compute_advantage(
            batch, 1.0, 1.0, "gae"
        ),
        "compute_response_level_rewards": lambda batch: compute_response_level_rewards(
            batch, config
        )[0],
        "get_agentic_response_level_mask": lambda batch: get_agentic_response_level_mask(
            batch, config
        )[0],
    }
    listed = differences_page().split("return a new batch: ")[1].split(". ")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == steps.keys()
    for name, step in steps.items():
        batch = token_batch(
            scores=torch.tensor([1.0, 0.0]), responses=torch.zeros(2, 3), values=torch.zeros(2, 4),
            token_level_rewards=torch.tensor([[0.5, NAN, 1.0, NAN], [NAN, 0.0, 2.0, 0.0]]),
        )  # fmt: skip
        before = snapshot(batch)
        changed = step(batch)
        assert_unchanged(before, batch)
        with pytest.raises(AssertionError):
            assert_unchanged(snapshot(changed), batch)
        assert changed is not batch, name


def test_helpers_that_roll_does_in_place_return_a_new_dict():
    metrics, other = {"a": [1.0, 3.0]}, {"b": 2}
    assert reduce_metrics(metrics) == {"a": 2.0} and union_two_dict(metrics, other) == {
        **metrics,
        "b": 2,
    }
    assert metrics == {"a": [1.0, 3.0]} and other == {"b": 2}
    assert "`reduce_metrics` and `union_two_dict` return a new dict" in differences_page()
