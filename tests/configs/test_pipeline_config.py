"""BaseConfig, PPOConfig and the batch plan: ROLL's defaults and what is derived from them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.batch_plan import BatchPlan, division_problems
from roll.configs.pipeline_config import BaseConfig
from roll.configs.ppo_config import (
    PPOConfig,
    RolloutMockConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
    TrainInferISWeightConfig,
)
from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError


def ppo(**values) -> PPOConfig:
    return PPOConfig(**{"sequence_length": 64, **values})


def test_defaults_are_rolls():
    config = ppo()
    nothing = "response_length rollout_dump_dir rollout_mock pretrain reward_pretrain value_clip"
    nothing += " target_kl reward_clip advantage_clip norm_mean_type norm_std_type dual_clip_c"
    nothing += " loss_norm_factor"
    off = "resume_from_checkpoint is_offload_states use_pg_clip_range whiten_rewards use_kl_loss"
    off += " whiten_advantages add_token_level_kl dual_clip_loss async_pipeline"
    off += " force_disable_old_logprobs_recompute"
    expected = {
        **dict.fromkeys(nothing.split()),
        **dict.fromkeys(off.split(), False),
        **{"seed": 42, "rpc_timeout": 3600, "output_dir": "./output", "max_steps": 500},
        **{"track_with": "tensorboard", "tracker_kwargs": {}, "system_envs": {}},
        **{"save_steps": 50, "max_ckpt_to_keep": 0, "eval_steps": 10, "rollout_batch_size": 128},
        **{"prompt_length": 1024, "model_update_buffer_size_mb": 1024, "num_nodes": 1},
        **{"num_gpus_per_node": 8, "backend": "auto", "async_generation_ratio": 0},
        **{"ppo_epochs": 1, "max_grad_norm": 1.0, "lambd": 0.95, "gamma": 1, "pg_clip": 0.2},
        **{"pg_clip_low": 0.2, "pg_clip_high": 0.2, "kl_penalty": "kl", "init_kl_coef": 0.2},
        **{"kl_horizon": 10000, "adv_estimator": "gae", "critic_warmup": 0, "kl_loss_coef": 0},
        **{"entropy_loss_coef": 0, "loss_agg_mode": "seq-mean-token-mean"},
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.train_infer_correction == TrainInferCorrectionConfig(is_weight={}, filters=[])
    mock = {"enable": False, "mode": "dump", "dump_dir": "./rollout_mock_dumps"}
    assert RolloutMockConfig().model_dump() == mock


def test_what_the_user_wrote_stays():
    # ROLL appends exp_name and timestamps to folders and overwrites num_gpus_per_node.
    written = {"output_dir": "o", "num_gpus_per_node": 3, "tracker_kwargs": {"log_dir": "t"}}
    config = BaseConfig(sequence_length=64, exp_name="e", **written)
    assert {key: getattr(config, key) for key in written} == written


def test_lengths():
    config = BaseConfig(prompt_length=100, response_length=28)
    assert config.sequence_length == 128
    assert (config.val_prompt_length, config.val_sequence_length) == (100, 128)
    assert BaseConfig(sequence_length=128, prompt_length=100, response_length=28) == config
    config = BaseConfig(sequence_length=64, val_prompt_length=10, val_sequence_length=20)
    assert (config.val_prompt_length, config.val_sequence_length) == (10, 20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "sequence_length: missing; set it, or response_length"),
        (
            {"sequence_length": 64, "response_length": 5, "prompt_length": 60},
            "response_length: found 5 .* = 4; remove one",
        ),
        (
            {"sequence_length": 64, "val_prompt_length": 5},
            "val_sequence_length: missing; the two lengths",
        ),
        (
            {"sequence_length": 64, "val_sequence_length": 5},
            "val_prompt_length: missing; the two lengths",
        ),
        ({"sequence_length": 64, "max_steps": 0}, "max_steps: found 0 .* or equal to 1"),
        ({"sequence_length": 64, "save_steps": 0}, "save_steps: found 0 .* or equal to 1"),
        (
            {"sequence_length": 64, "backend": "slurm"},
            'backend: found "slurm" .* expected one of auto, local, ray',
        ),
    ],
)
def test_lengths_and_steps_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        BaseConfig(**values)


def test_roles_inherit_from_the_pipeline():
    config = PPOConfig(
        sequence_length=64,
        seed=7,
        output_dir="out",
        system_envs={"A": "1", "B": 2},
        actor_train={"system_envs": {"A": "mine"}},
    )
    for name in ("actor_train", "actor_infer", "reference", "critic"):
        role = getattr(config, name)
        assert role.name == name
        assert role.training_args.seed == 7 and role.training_args.output_dir == "out"
    assert config.actor_train.system_envs == {"A": "mine", "B": "2"}
    assert config.reference.system_envs == {"A": "1", "B": "2"}


def test_the_number_of_machines_follows_from_the_devices():
    roles = {
        "actor_train": {"device_mapping": "list(range(0,8))"},
        "actor_infer": {"device_mapping": "[15]"},
    }
    assert ppo(num_gpus_per_node=8, **roles).num_nodes == 2
    assert ppo(num_gpus_per_node=16, **roles).num_nodes == 1
    assert ppo(num_gpus_per_node=16, num_nodes=3, **roles).num_nodes == 3


def model_role(strategy: str, workers: int = 1) -> WorkerConfig:
    return WorkerConfig(strategy_args={"strategy_name": strategy}, world_size=workers)


def test_workers_run_in_process_unless_a_role_with_a_model_has_several():
    assert ppo(actor_train=model_role("hf_train")).execution_backend == "local"
    assert ppo(actor_train=WorkerConfig(world_size=8)).execution_backend == "local"
    assert ppo(backend="ray").execution_backend == "ray"
    assert ppo(actor_infer=model_role("vllm", 2)).execution_backend == "ray"


def test_roles_that_are_not_started_do_not_call_for_ray():
    values = {"sequence_length": 64, "critic": model_role("hf_train", 2)}
    assert PPOConfig(adv_estimator="gae", **values).execution_backend == "ray"
    assert PPOConfig(adv_estimator="grpo", **values).execution_backend == "local"


def test_in_process_with_several_workers_is_an_error_with_the_fix():
    message = 'backend: found "local" .* expected "ray" or "auto".*actor_infer has 2.*; or give each of them one worker'
    with pytest.raises(ConfigError, match=message):
        ppo(backend="local", actor_infer=model_role("hf_infer", 2))


@pytest.mark.parametrize(
    ("role", "strategy", "expected"),
    [
        ("actor_train", "hf_infer", "hf_train, fsdp2_train, deepspeed_train"),
        ("actor_infer", "fsdp2_infer", "hf_infer, vllm"),
        ("reference", "hf_train", "hf_infer, fsdp2_infer, deepspeed_infer"),
        ("critic", "vllm", "hf_train, fsdp2_train, deepspeed_train"),
    ],
)
def test_each_role_has_its_strategies(role, strategy, expected):
    with pytest.raises(
        ConfigError,
        match=f"{role}.strategy_args.strategy_name: found .* expected one of {expected}",
    ):
        ppo(**{role: model_role(strategy)})


def test_a_token_budget_holds_at_least_one_row():
    role = WorkerConfig(
        strategy_args={"strategy_name": "hf_train"},
        use_dynamic_batching_in_train=True,
        max_tokens_per_microbatch_in_train=63,
    )
    with pytest.raises(
        ConfigError,
        match=r"actor_train.max_tokens_per_microbatch_in_train: found 63 .* sequence_length = 64",
    ):
        ppo(actor_train=role)


def test_another_number_of_steps_is_another_config():
    config = ppo(actor_train=model_role("hf_train"))
    assert config.actor_train.training_args.max_steps == 500 * 128 // 8
    longer = config.with_max_steps(1000)
    assert longer.actor_train.training_args.max_steps == 1000 * 128 // 8
    assert config.max_steps == 500


# learning from rewards


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
    # ROLL gives all of actor_train, actor_infer and reference the path of pretrain as soon as one
    # of them has none.
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
    assert ppo().actor_infer.generating_args.num_return_sequences == 1
    assert ppo().actor_infer.max_concurrency == 1000
    assert ppo(actor_infer={"max_concurrency": 2001}).actor_infer.max_concurrency == 2001


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
        ({"gamma": 1.1}, "gamma: found 1.1 .* or equal to 1"),
        ({"lambd": -0.1}, "lambd: found -0.1 .* or equal to 0"),
        ({"pg_clip": 1}, "pg_clip: found 1 .* less than 1"),
        ({"pg_clip_low": 1.0}, "pg_clip_low: found 1.0 .* less than 1"),
        ({"pg_clip_high": -0.1}, "pg_clip_high: found -0.1 .* or equal to 0"),
        (
            {"pg_clip": None},
            "pg_clip: found null, expected a number, because use_pg_clip_range is off",
        ),
        ({"dual_clip_c": 1}, "dual_clip_c: found 1 .* greater than 1"),
        ({"target_kl": 0}, "target_kl: found 0 .* greater than 0"),
        ({"reward_clip": -1}, "reward_clip: found -1 .* or equal to 0"),
        ({"advantage_clip": 0}, "advantage_clip: found 0 .* greater than 0"),
        ({"ppo_epochs": 0}, "ppo_epochs: found 0 .* or equal to 1"),
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
            {"async_generation_ratio": 1, "backend": "local"},
            "backend: found .* because roles in one process take turns",
        ),
    ],
)
def test_values_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        ppo(**values)


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


# the batch plan, by hand


def role(
    ranks: int = 1, per_device: int = 8, accumulation: int = 1, **training_args
) -> WorkerConfig:
    sizes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    strategy = {"strategy_name": "hf_train"}
    return WorkerConfig(
        name="actor_train",
        world_size=ranks,
        strategy_args=strategy,
        training_args={**sizes, **training_args},
    )


def plan(config: WorkerConfig, **values) -> BatchPlan:
    return BatchPlan(
        role=config,
        **{"prompts": 64, "samples_per_prompt": 8, "sequence_length": 1024, "steps": 500, **values},
    )


def test_the_example_of_the_docstring():
    result = plan(role(ranks=4, per_device=2, accumulation=16))
    assert (result.samples, result.rows, result.ranks, result.rows_per_rank) == (512, 512, 4, 128)
    assert (result.rows_per_micro_batch, result.micro_batches_per_optimizer_step) == (2, 16)
    assert (result.optimizer_steps_per_batch, result.total_optimizer_steps) == (4, 2000)
    assert result.tokens_per_step == 512 * 1024
    assert division_problems([result], "rollout_batch_size") == []


def test_epochs_multiply_optimizer_steps():
    assert plan(role(per_device=512), epochs=3).optimizer_steps_per_batch == 3


def test_pairs_are_two_rows_of_one_sample():
    result = plan(
        role(per_device=4, accumulation=2), prompts=8, samples_per_prompt=1, rows_per_sample=2
    )
    assert (result.rows, result.rows_per_micro_batch, result.optimizer_steps_per_batch) == (
        16,
        8,
        1,
    )


def test_turns_round_up():
    assert (
        plan(
            role(per_device=100), prompts=20, samples_per_prompt=1, rows_are_turns=True
        ).optimizer_steps_per_batch
        == 1
    )


def test_learning_rates_at_first_middle_and_last_step():
    config = role(per_device=512, learning_rate=1.0, lr_scheduler_type="linear")
    assert plan(config, steps=4).learning_rates() == (1.0, 0.5, 0.25)
    assert plan(config, steps=1).learning_rates() == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("prompts", "samples", "ranks", "per_device", "accumulation", "low", "high"),
    [
        (100, 8, 4, 8, 4, 96, 112),  # steps of 128 samples are 16 prompts
        (100, 1, 1, 8, 1, 96, 104),
        (3, 4, 1, 8, 1, 2, 4),
        (1, 1, 1, 8, 1, 8, 16),  # less than one optimizer step
        (50, 8, 1, 8, 16, 48, 64),
    ],
)
def test_what_does_not_divide_names_the_two_nearest_values(
    prompts, samples, ranks, per_device, accumulation, low, high
):
    result = plan(
        role(ranks, per_device, accumulation), prompts=prompts, samples_per_prompt=samples
    )
    (problem,) = division_problems([result], "rollout_batch_size")
    assert problem.key == "rollout_batch_size"
    assert problem.message.startswith(f"found {prompts} (int), expected a multiple of ")
    assert problem.message.endswith(f"; use {low} or {high}")
    for value in (low, high):
        config = role(ranks, per_device, accumulation)
        fits = plan(config, prompts=value, samples_per_prompt=samples)
        assert division_problems([fits], "x") == []


def test_a_polynomial_schedule_needs_steps_after_its_warmup():
    config = role(lr_scheduler_type="polynomial", warmup_steps=4)
    assert ppo(rollout_batch_size=8, max_steps=5, actor_train=config)
    message = (
        "warmup_steps: found 4 .* fewer than the 4 optimizer steps of the run for a polynomial"
    )
    with pytest.raises(ConfigError, match=f"actor_train.training_args.{message}"):
        ppo(rollout_batch_size=8, max_steps=4, actor_train=config)


def test_the_message_shows_the_arithmetic():
    (problem,) = division_problems([plan(role(4, 8, 4), prompts=100)], "rollout_batch_size")
    assert str(problem) == (
        "rollout_batch_size: found 100 (int), expected a multiple of 16, so that 100 x 8 samples "
        "fill the optimizer steps of actor_train (128 = 4 ranks x per_device_train_batch_size 8 x "
        "gradient_accumulation_steps 4); use 96 or 112"
    )


def test_a_second_condition_is_met_by_the_values_too():
    plans = [plan(role(per_device=8), prompts=100, samples_per_prompt=1)]
    (problem,) = division_problems(plans, "rollout_batch_size", multiple_of=12)
    assert problem.message.endswith("; use 96 or 120")


def test_values_that_suit_all_roles_are_proposed():
    actor, critic = (
        plan(role(per_device=12), prompts=100, samples_per_prompt=1),
        plan(role(per_device=50), prompts=100),
    )
    (problem,) = division_problems([critic, actor], "rollout_batch_size")
    assert problem.message.startswith("found 100 (int), expected a multiple of 300,")
    assert problem.message.endswith("; use 300 or 600")
    assert division_problems([critic], "rollout_batch_size") == []
    assert division_problems([], "rollout_batch_size") == []


@settings(max_examples=50, deadline=None)
@given(*[st.integers(1, size) for size in (64, 8, 8, 8, 8)])
def test_plans_without_problems_use_every_row_exactly_once(
    prompts, samples, ranks, per_device, accumulation
):
    result = plan(
        role(ranks, per_device, accumulation), prompts=prompts, samples_per_prompt=samples
    )
    divides = prompts * samples % (ranks * per_device * accumulation) == 0
    assert (division_problems([result], "x") == []) == divides
    if divides:
        per_step = (
            result.ranks * result.rows_per_micro_batch * result.micro_batches_per_optimizer_step
        )
        assert result.optimizer_steps_per_batch * per_step == result.rows
