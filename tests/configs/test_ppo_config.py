"""PPOConfig: ROLL's defaults and what is derived from them."""

import pytest

from roll.configs.base_config import (
    PPOConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
    TrainInferISWeightConfig,
    TransferBackendArguments,
)
from roll.exceptions import ConfigError


def ppo(**values) -> PPOConfig:
    return PPOConfig(**{"sequence_length": 64, **values})


def test_defaults_are_rolls():
    config = ppo()
    expected = {
        "pretrain": None,
        "reward_pretrain": None,
        "async_generation_ratio": 0,
        "ppo_epochs": 1,
        "max_grad_norm": 1.0,
        "l2": 0.0,
        "lambd": 0.95,
        "gamma": 1,
        "pg_clip": 0.2,
        "use_pg_clip_range": False,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.2,
        "value_clip": None,
        "kl_penalty": "kl",
        "target_kl": None,
        "init_kl_coef": 0.2,
        "kl_horizon": 10000,
        "use_reward_scaling": False,
        "add_len_reward": False,
        "use_reward_norm": False,
        "reward_clip": None,
        "whiten_rewards": False,
        "whiten_advantages": False,
        "advantage_clip": None,
        "adv_estimator": "gae",
        "norm_mean_type": None,
        "norm_std_type": None,
        "add_token_level_kl": False,
        "critic_warmup": 0,
        "use_kl_loss": False,
        "kl_loss_coef": 0,
        "entropy_loss_coef": 0,
        "loss_agg_mode": "seq-mean-token-mean",
        "dual_clip_loss": False,
        "force_disable_old_logprobs_recompute": False,
        "dual_clip_c": None,
        "loss_norm_factor": None,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.train_infer_correction == TrainInferCorrectionConfig(is_weight={}, filters=[])
    assert not config.async_pipeline
    assert config.reference_configs == {"default": config.reference}


def test_defaults_of_the_train_infer_correction_are_rolls():
    assert TrainInferISWeightConfig().model_dump() == {
        "enabled": False,
        "weight_type": "token",
        "upper_bound": 1.2,
        "detach": True,
    }
    assert TrainInferFilterConfig().model_dump() == {
        "enabled": False,
        "agg_type": "token",
        "ratio_enabled": True,
        "ratio_low": 0.8,
        "ratio_high": 1.2,
        "diff_enabled": False,
        "diff_low": -0.2,
        "diff_high": 0.2,
    }
    assert TransferBackendArguments().model_dump() == {"backend_name": None, "backend_config": {}}
    with pytest.raises(
        ConfigError,
        match=r"ratio_low: found 2.0 .* at most ratio_high = 1.2; no token would be kept",
    ):
        TrainInferFilterConfig(ratio_low=2)


def test_a_reference_is_there_when_kl_needs_it():
    assert ppo().enable_reference  # init_kl_coef is 0.2
    assert not ppo(init_kl_coef=0).enable_reference
    assert ppo(init_kl_coef=0, use_kl_loss=True).enable_reference
    assert ppo(init_kl_coef=0, enable_reference=True).enable_reference


def test_roles_that_name_no_model_take_pretrain_and_the_others_keep_theirs():
    # ROLL gives all of actor_train, actor_infer and reference the path of pretrain as soon as one of them has none.
    config = ppo(pretrain="base", reference={"model_args": {"model_name_or_path": "other"}})
    paths = {
        name: getattr(config, name).model_args.model_name_or_path
        for name in config.default_worker_cls
    }
    assert paths == {
        "actor_train": "base",
        "actor_infer": "base",
        "reference": "other",
        "critic": "base",
    }
    assert ppo(pretrain="base", reward_pretrain="rm").critic.model_args.model_name_or_path == "rm"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),  # init_kl_coef is above 0
        ({"init_kl_coef": 0, "rollout_batch_size": 8}, False),  # one optimizer step: the ratio is 1
        ({"init_kl_coef": 0, "rollout_batch_size": 16}, True),  # two
        ({"init_kl_coef": 0, "rollout_batch_size": 8, "enable_old_logprobs_recompute": True}, True),
        ({"init_kl_coef": 0, "rollout_batch_size": 8, "adv_estimator": "gigpo"}, True),
        ({"init_kl_coef": 0, "rollout_batch_size": 8, "adv_estimator": "step_reinforce"}, True),
        ({"force_disable_old_logprobs_recompute": True, "adv_estimator": "gigpo"}, False),
        # The sampler's own, so that stale samples do not count as on-policy; nothing is computed.
        ({"force_disable_old_logprobs_recompute": True, "async_generation_ratio": 1}, True),
    ],
)
def test_when_old_log_probs_are_computed(values, expected):
    assert ppo(**values).enable_old_logprobs_recompute is expected


@pytest.mark.parametrize(
    ("ratio", "frequency", "expected"), [(0, 1, 0), (1, 1, 1), (1.5, 1, 2), (1, 3, 3), (0, 3, 2)]
)
def test_how_old_samples_may_be(ratio, frequency, expected):
    infer = {"model_update_frequency": frequency}
    assert ppo(async_generation_ratio=ratio, actor_infer=infer).max_staleness == expected


def test_a_replay_starts_what_is_trained_or_scores():
    config = ppo(rollout_mock={"enable": True, "mode": "mock"}, use_kl_loss=True)
    assert config.is_replay and not config.is_dump
    assert list(config.active_roles()) == ["actor_train", "reference", "critic"]
    assert (
        not ppo(rollout_mock={"mode": "mock"}).is_replay
        and ppo(rollout_mock={"enable": True}).is_dump
    )


def test_generation_gets_sampling_arguments_and_concurrency():
    config = ppo(max_running_requests=2000)
    assert config.actor_infer.generating_args.num_return_sequences == 1
    assert config.actor_infer.max_concurrency == 2001
    assert ppo().actor_infer.max_concurrency == 1000


def test_default_worker_classes_give_way_to_named_ones():
    config = ppo(actor_train={"worker_cls": "my.Worker"})
    assert config.actor_train.worker_cls == "my.Worker"
    assert config.actor_infer.worker_cls == "roll.pipeline.base_worker.InferWorker"
    assert config.critic.worker_cls == "roll.pipeline.base_worker.CriticWorker"


def test_schedules_are_as_long_as_there_are_optimizer_steps():
    role = {
        "strategy_args": {"strategy_name": "hf_train"},
        "training_args": {"per_device_train_batch_size": 4, "max_steps": 3},
    }
    config = ppo(
        max_steps=10,
        rollout_batch_size=32,
        ppo_epochs=2,
        critic_warmup=4,
        actor_train=role,
        critic=role,
    )
    assert config.actor_train.training_args.max_steps == (10 - 4) * (32 // 4) * 2
    assert config.critic.training_args.max_steps == 10 * (32 // 4)
    # On 4 ranks there are a quarter as many; ROLL divides by the ranks a second time.
    role = {**role, "device_mapping": [0, 1, 2, 3]}
    assert (
        ppo(
            max_steps=10, rollout_batch_size=32, actor_train=role
        ).actor_train.training_args.max_steps
        == 10 * 2
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gamma": 1.1}, "gamma: found 1.1 .* at most 1"),
        ({"lambd": -0.1}, "lambd: found -0.1 .* at least 0"),
        ({"pg_clip": 1}, "pg_clip: found 1 .* below 1"),
        ({"pg_clip_low": 1.0}, "pg_clip_low: found 1.0 .* below 1"),
        ({"pg_clip_high": -0.1}, "pg_clip_high: found -0.1 .* at least 0"),
        (
            {"pg_clip": None},
            "pg_clip: found null, expected a number, because use_pg_clip_range is off",
        ),
        ({"dual_clip_c": 1}, "dual_clip_c: found 1 .* greater than 1"),
        ({"target_kl": 0}, "target_kl: found 0 .* greater than 0"),
        ({"reward_clip": -1}, "reward_clip: found -1 .* at least 0"),
        ({"advantage_clip": 0}, "advantage_clip: found 0 .* greater than 0"),
        ({"ppo_epochs": 0}, "ppo_epochs: found 0 .* at least 1"),
        (
            {"kl_penalty": "k4"},
            "kl_penalty: found .* expected one of kl, k1, abs, mse, k2, k3, low_var_kl;",
        ),
        (
            {"kl_penalty": "full"},
            'kl_penalty: found "full" .*whole vocabulary.*only those.*; k3 comes nearest',
        ),
        (
            {"kl_loss_type": "full"},
            'kl_loss_type: found "full" .*whole vocabulary.*; k3 comes nearest',
        ),
        (
            {"kl_loss_type": "k1"},
            'kl_loss_type: found "k1" .*does not depend on the reference.*k2 and k3',
        ),
        (
            {"kl_loss_type": "k4"},
            "kl_loss_type: found .* expected one of k3, low_var_kl, k2, mse, abs, k3",
        ),
        ({"adv_estimator": "gro"}, 'reinforce_plus_plus_baseline; did you mean "grpo"'),
        ({"adv_estimator": "no_such.module"}, "baseline; No module named 'no_such'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode: found .* expected one of token-mean"),
        (
            {"norm_mean_type": "all"},
            "norm_mean_type: found .* expected one of batch, group, running",
        ),
        ({"critic_warmup": 500}, "critic_warmup: found 500 .* less than max_steps = 500"),
        (
            {"loss_norm_factor": 10},
            "loss_norm_factor: found 10.* expected null, because loss_agg_mode seq-mean-token-mean",
        ),
        (
            {"async_generation_ratio": 1, "generate_opt_level": 0},
            "generate_opt_level: found 0 .* expected 1, because async",
        ),
    ],
)
def test_values_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        ppo(**values)


def test_generation_shares_gpus_or_not():
    train, infer = {"device_mapping": [0, 1]}, {"device_mapping": [1]}
    assert ppo(actor_train=train, actor_infer=infer).is_actor_infer_colocated
    assert not ppo(actor_train=train, actor_infer={"device_mapping": [2]}).is_actor_infer_colocated


def test_missing_for_training_names_strategy_and_model():
    problems = [
        str(problem) for problem in ppo(init_kl_coef=0, adv_estimator="grpo").missing_for_training()
    ]
    assert problems == [
        "actor_train.strategy_args: missing; actor_train needs a strategy: strategy_name: hf_train runs anywhere",
        "actor_infer.strategy_args: missing; actor_infer needs a strategy: strategy_name: hf_infer runs anywhere",
    ]
    train, infer = ({"strategy_args": {"strategy_name": name}} for name in ("hf_train", "hf_infer"))
    config = ppo(actor_train=train, actor_infer=infer, init_kl_coef=0, adv_estimator="grpo")
    (problem,) = config.missing_for_training()
    assert (
        str(problem)
        == "pretrain: missing; a folder or a Hugging Face name of the model for actor_train, actor_infer"
    )
    assert ppo(**{**dict(config), "pretrain": "some/model"}).missing_for_training() == []


@pytest.mark.parametrize(
    ("estimator", "mean", "std", "sentences"),
    [
        ("reinforce", "batch", "running", []),
        ("gae", "group", "group", []),
        ("grpo", None, None, []),
        ("grpo", "group", "group", []),
        (
            "grpo",
            "batch",
            "group",
            [
                "without effect: norm_mean_type: batch; adv_estimator: grpo normalises rewards by its own rule "
                "(mean: group, std: group)"
            ],
        ),
        (
            "dr_grpo",
            "group",
            "group",
            [
                "without effect: norm_std_type: group; adv_estimator: dr_grpo normalises rewards by its own rule "
                "(mean: group, std: none)"
            ],
        ),
        (
            "rloo",
            "group",
            "batch",
            [
                "without effect: norm_mean_type: group, norm_std_type: batch; adv_estimator: rloo normalises rewards "
                "by its own rule (mean: leave_one_out, std: none)"
            ],
        ),
    ],
)
def test_norms_that_the_estimator_overrides_are_named(estimator, mean, std, sentences):
    assert (
        ppo(adv_estimator=estimator, norm_mean_type=mean, norm_std_type=std).cautions() == sentences
    )
