"""Fields that no run of test_field_effects reads, and for each the test that shows its effect."""

_HERE = "tests/configs/test_field_effects.py"
_FOLLOWED = f"{_HERE}::test_fields_that_others_follow"
_SAMPLING = f"{_HERE}::test_sampling_arguments_reach_the_engine"
_REWARD = f"{_HERE}::test_options_of_a_reward_reach_its_function"
_REPLACED = "tests/configs/test_load.py::test_values_that_follow_from_others_are_named"

TESTS: dict[str, str] = {
    # Other fields follow from them while the config is made.
    **{f"{cls}.{name}": _FOLLOWED
       for cls in ("dpo.DPOConfig", "sft.SFTConfig", "rlvr.RLVRConfig", "agentic.AgenticConfig")
       for name in ("response_length", "system_envs")},
    **{f"{cls}.prompt_length": _FOLLOWED for cls in ("dpo.DPOConfig", "sft.SFTConfig", "agentic.AgenticConfig")},
    **{f"{cls}.pretrain": _FOLLOWED for cls in ("sft.SFTConfig", "rlvr.RLVRConfig", "agentic.AgenticConfig")},
    **{f"{cls}.{name}": _FOLLOWED
       for cls in ("rlvr.RLVRConfig", "agentic.AgenticConfig")
       for name in ("reward_pretrain", "force_disable_old_logprobs_recompute")},
    "rlvr.RLVRConfig.sequence_length": _FOLLOWED,
    "rlvr.RLVRConfig.val_sequence_length": _FOLLOWED,
    "agentic.RewardNormalizationConfig.method": (
        "tests/pipeline/agentic/test_agentic_config.py::test_normalisation_types_follow_the_method_unless_written_down"
    ),
    # Read all together, by name.
    **{f"configs.GeneratingArguments.{name}": _SAMPLING
       for name in ("top_p", "top_k", "min_p", "repetition_penalty", "stop_strings")},
    "configs.GeneratingArguments.max_length": f"{_HERE}::test_the_longest_sequence_limits_the_sample",
    # Rewards that the runs do not have.
    **{f"rlvr.RewardConfig.{name}": _REWARD
       for name in (
           "judge_prompt", "judge_model_name", "judge_api_url", "judge_api_key", "format_pattern", "reward_type")},
    "rlvr.RewardConfig.judge_model_type": (
        "tests/rewards/test_reward_workers.py::test_rewards_are_checked_before_anything_is_loaded"
    ),
    "configs.WorkerConfig.num_gpus_per_worker": (
        "tests/configs/test_worker_config.py::test_workers_follow_from_devices"
    ),
    # Set from other fields; a file that says otherwise is told so.
    **{f"configs.TrainingArguments.{name}": _REPLACED for name in ("seed", "output_dir", "bf16", "fp16")},
    # Some values are refused, and the others all mean the same.
    "configs.Fsdp2Options.fsdp_size": (
        "tests/configs/test_worker_config.py::test_sharding_over_a_part_of_the_ranks_is_not_built"
    ),
    "agentic.EnvManagerConfig.max_traj_per_env": (
        "tests/pipeline/agentic/test_agentic_config.py::test_values_that_do_not_fit"
    ),
    # Anything but null is refused for environments that are played.
    **{f"agentic.EnvTemplate.{name}": (
           "tests/pipeline/agentic/test_agentic_config.py::test_what_is_not_built_is_refused_where_it_is_played")
       for name in ("agent_runner_cls", "tool_wrapper")},
}  # fmt: skip
