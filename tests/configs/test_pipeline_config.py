"""BaseConfig: ROLL's defaults, lengths, what roles inherit, where workers run."""

import pytest

from roll.configs.base_config import BaseConfig, PPOConfig, RolloutMockConfig, RouterArguments
from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError


def test_defaults_are_rolls():
    config = BaseConfig(sequence_length=64)
    expected = {
        "generate_opt_level": 1,
        "is_num_return_sequences_expand": False,
        "max_running_requests": 128,
        "is_use_additional_prompts": False,
        "max_additional_running_prompts": 16,
        "user_defined_rollout_loop_cls": "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",
        "router_args": None,
        "seed": 42,
        "rpc_timeout": 3600,
        "output_dir": "./output",
        "base_dir": "./output",
        "logging_dir": "./output/logs",
        "rollout_dump_dir": None,
        "track_with": "tensorboard",
        "tracker_kwargs": {},
        "max_steps": 500,
        "save_steps": 50,
        "max_ckpt_to_keep": 0,
        "logging_steps": 1,
        "eval_steps": 10,
        "rollout_batch_size": 128,
        "val_batch_size": 128,
        "local_rank": -1,
        "resume_from_checkpoint": False,
        "checkpoint_config": {},
        "prompt_length": 1024,
        "response_length": None,
        "profiler_timeline": False,
        "profiler_memory": False,
        "report_length_and_rewards": False,
        "is_offload_states": False,
        "is_offload_optimizer_states_in_train_step": False,
        "length_profiler_dir": "./output/profiler",
        "profiler_output_dir": "./output/profiler",
        "otlp_output_dir": "./output/otlp",
        "system_envs": {},
        "model_update_buffer_size_mb": 1024,
        "num_nodes": 1,
        "num_gpus_per_node": 8,
        "model_download_type": None,
        "rollout_mock": None,
        "transfer_backend": None,
        "backend": "auto",
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert RolloutMockConfig().model_dump() == {
        "enable": False,
        "mode": "dump",
        "dump_dir": "./rollout_mock_dumps",
    }
    assert RouterArguments().model_dump() == {
        "router_name": None,
        "router_config": {},
        "max_running_requests": 128,
    }


def test_what_the_user_wrote_stays():
    # ROLL appends exp_name and timestamps to folders and overwrites num_gpus_per_node with what it finds.
    config = BaseConfig(
        sequence_length=64,
        output_dir="o",
        logging_dir="l",
        num_gpus_per_node=3,
        tracker_kwargs={"log_dir": "t"},
        checkpoint_config={"type": "file_system", "output_dir": "c"},
        exp_name="e",
    )
    assert (config.output_dir, config.logging_dir, config.num_gpus_per_node) == ("o", "l", 3)
    assert (config.tracker_kwargs, config.checkpoint_config["output_dir"]) == (
        {"log_dir": "t"},
        "c",
    )


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
        ({"sequence_length": 64, "max_steps": 0}, "max_steps: found 0 .* at least 1"),
        ({"sequence_length": 64, "save_steps": 0}, "save_steps: found 0 .* at least 1"),
        (
            {"sequence_length": 64, "generate_opt_level": 2},
            "generate_opt_level: found 2 .* at most 1",
        ),
        (
            {"sequence_length": 64, "backend": "slurm"},
            'backend: found "slurm" .* expected one of auto, local, ray',
        ),
    ],
)
def test_values_that_do_not_fit(values, message):
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
    assert PPOConfig(sequence_length=64, num_gpus_per_node=8, **roles).num_nodes == 2
    assert PPOConfig(sequence_length=64, num_gpus_per_node=16, **roles).num_nodes == 1
    assert PPOConfig(sequence_length=64, num_gpus_per_node=16, num_nodes=3, **roles).num_nodes == 3


def model_role(strategy: str, workers: int = 1) -> WorkerConfig:
    return WorkerConfig(strategy_args={"strategy_name": strategy}, world_size=workers)


def test_workers_run_in_process_unless_a_role_with_a_model_has_several():
    alone = PPOConfig(
        sequence_length=64, actor_train=model_role("hf_train"), reward=WorkerConfig(world_size=8)
    )
    assert alone.execution_backend == "local"
    assert PPOConfig(sequence_length=64, backend="ray").execution_backend == "ray"
    assert (
        PPOConfig(sequence_length=64, actor_infer=model_role("vllm", 2)).execution_backend == "ray"
    )


def test_roles_that_are_not_started_do_not_call_for_ray():
    values = {"sequence_length": 64, "critic": model_role("hf_train", 2)}
    assert PPOConfig(adv_estimator="gae", **values).execution_backend == "ray"
    assert PPOConfig(adv_estimator="grpo", **values).execution_backend == "local"


def test_in_process_with_several_workers_is_an_error_with_the_fix():
    message = 'backend: found "local" .* expected "ray" or "auto".*actor_infer has 2.*; or give each of them one worker'
    with pytest.raises(ConfigError, match=message):
        PPOConfig(sequence_length=64, backend="local", actor_infer=model_role("hf_infer", 2))


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
        PPOConfig(sequence_length=64, **{role: model_role(strategy)})


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
        PPOConfig(sequence_length=64, actor_train=role)


def test_another_number_of_steps_is_another_config():
    config = PPOConfig(sequence_length=64, actor_train=model_role("hf_train"))
    assert config.actor_train.training_args.max_steps == 500 * 128 // 8
    longer = config.with_max_steps(1000)
    assert longer.actor_train.training_args.max_steps == 1000 * 128 // 8
    assert config.max_steps == 500
