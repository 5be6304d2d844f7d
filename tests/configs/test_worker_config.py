"""WorkerConfig: ROLL's defaults, devices and workers, strategies and their options."""

import pytest

from roll.configs.strategy_info import STRATEGIES, Fsdp2TrainOptions, options_of
from roll.configs.worker_config import (
    StrategyArguments,
    WorkerConfig,
    is_actor_infer_overlapping_with_any_cluster,
)
from roll.exceptions import ConfigError
from roll.pipeline.registry import load_config

OURS = [name for name in STRATEGIES if name.startswith(("hf_", "fsdp2_"))]


def worker(name: str = "hf_train", **values) -> WorkerConfig:
    return WorkerConfig(
        strategy_args={"strategy_name": name, "strategy_config": values.pop("options", {})},
        **values,
    )


def test_defaults_are_rolls():
    config = WorkerConfig()
    nothing = "name worker_cls pg_variant data_args generating_args strategy_args device_mapping"
    nothing += " max_tokens_per_microbatch_in_infer strategy_name"
    expected = {
        **dict.fromkeys(nothing.split()),
        **{"model_update_frequency": 1, "infer_batch_size": 16, "backend_timeout": 30},
        **{"system_envs": {}, "topr_positive_weight": 1.0, "topr_negative_weight": 1.0},
        **{"max_concurrency": 1, "use_dynamic_batching_in_train": False, "holds_model": False},
        **{"max_tokens_per_microbatch_in_train": 0, "sequence_length_round_in_train": 4},
        **{"use_dynamic_batching_in_infer": False, "sequence_length_round_in_infer": 4},
    }
    assert {key: getattr(config, key) for key in expected} == expected


def test_without_devices_a_role_has_one_worker_or_as_many_as_it_says():
    assert (WorkerConfig().world_size, WorkerConfig().num_gpus_per_worker) == (1, 0)
    assert WorkerConfig(world_size=8).world_size == 8
    assert WorkerConfig(world_size=None).world_size == 1


@pytest.mark.parametrize(
    ("config", "world_size", "gpus_per_worker"),
    [
        (worker(device_mapping="list(range(0,8))"), 8, 1),
        (
            worker("fsdp2_train", device_mapping=[0, 1, 2, 3], num_gpus_per_worker=2),
            4,
            1,
        ),  # training: always one
        (worker("vllm", device_mapping=[0, 1, 2, 3], options={"tensor_parallel_size": 2}), 2, 2),
        (
            worker(
                "vllm",
                device_mapping=[0, 1, 2, 3],
                options={"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            ),
            1,
            4,
        ),
        (worker("hf_infer", device_mapping=[0, 1, 2, 3], num_gpus_per_worker=2), 2, 2),
        (worker(device_mapping=[0, 1], world_size=7), 2, 1),  # devices decide
        (worker("vllm"), 1, 0),
    ],
)
def test_workers_follow_from_devices(config, world_size, gpus_per_worker):
    assert (config.world_size, config.num_gpus_per_worker) == (world_size, gpus_per_worker)


def test_devices_that_do_not_divide_name_the_two_nearest_numbers():
    with pytest.raises(
        ConfigError, match=r"expected a multiple of the 2 GPUs of one worker; name 4 or 6 GPUs"
    ):
        worker("vllm", device_mapping="list(range(0,5))", options={"tensor_parallel_size": 2})


@pytest.mark.parametrize("size", [0, -1, 0.5, "two", True])
def test_parallel_sizes_are_counts(size):
    with pytest.raises(
        ConfigError,
        match=r"strategy_config.tensor_parallel_size: found .* a whole number of at least 1",
    ):
        worker("vllm", device_mapping=[0, 1], options={"tensor_parallel_size": size})


def test_a_bad_device_mapping_is_told_by_its_key():
    with pytest.raises(
        ConfigError,
        match=r'WorkerConfig: device_mapping: found "all" .*, expected a list of GPU numbers',
    ):
        WorkerConfig(device_mapping="all")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("megatron_train", "fsdp2_train"), ("megatron_infer", "fsdp2_infer"), ("sglang", "vllm")],
)
def test_unsupported_strategies_name_the_nearest_one(name, nearest):
    message = (
        f'strategy_name: the strategy "{name}" is not supported; the nearest one is "{nearest}"'
    )
    with pytest.raises(ConfigError, match=message):
        StrategyArguments(strategy_name=name)


def test_unknown_strategies_list_the_known_ones():
    with pytest.raises(
        ConfigError, match=r'expected one of hf_train, .*, vllm; did you mean "fsdp2_train"\?'
    ):
        StrategyArguments(strategy_name="fsdp_train")
    assert StrategyArguments() == StrategyArguments(
        strategy_name="fsdp2_train", strategy_config=None
    )


def test_precision_flags_follow_the_dtype():
    flags = {}
    for dtype in ("fp32", "bf16", "fp16"):
        args = WorkerConfig(model_args={"dtype": dtype}, training_args={"bf16": True}).training_args
        flags[dtype] = (args.bf16, args.fp16)
    assert flags == {"fp32": (False, False), "bf16": (True, False), "fp16": (False, True)}


def test_worker_cls_is_a_class_or_a_dotted_path():
    class Local:
        pass

    assert WorkerConfig(worker_cls=Local).worker_cls is Local
    assert WorkerConfig(worker_cls="a.b.C").worker_cls == "a.b.C"
    assert (
        WorkerConfig(worker_cls=WorkerConfig).to_dict()["worker_cls"]
        == "roll.configs.worker_config.WorkerConfig"
    )
    for bad in ("C", "a..C", "a.b C", 3):
        with pytest.raises(
            ConfigError, match=r"worker_cls: found .* expected a class or its dotted path"
        ):
            WorkerConfig(worker_cls=bad)


def test_environment_variables_are_text():
    assert WorkerConfig(system_envs={"OMP_NUM_THREADS": 2}).system_envs == {"OMP_NUM_THREADS": "2"}
    assert WorkerConfig(system_envs=None).system_envs == {}
    with pytest.raises(ConfigError, match=r"system_envs.A: found True .*, expected a valid string"):
        WorkerConfig(system_envs={"A": True})


def test_dynamic_batching_needs_a_budget():
    for phase in ("train", "infer"):
        with pytest.raises(
            ConfigError,
            match=f"max_tokens_per_microbatch_in_{phase}: found .* expected a number of tokens",
        ):
            WorkerConfig(**{f"use_dynamic_batching_in_{phase}": True})


def test_overlap_of_generation_with_other_roles():
    infer = WorkerConfig(device_mapping=[2, 3])
    assert is_actor_infer_overlapping_with_any_cluster(
        infer, actor_train=WorkerConfig(device_mapping=[3, 4])
    )
    assert not is_actor_infer_overlapping_with_any_cluster(
        infer, reference=WorkerConfig(device_mapping=[0, 1])
    )
    assert not is_actor_infer_overlapping_with_any_cluster(
        WorkerConfig(), critic=WorkerConfig(device_mapping=[0])
    )


# options of strategies


def strategy(name, **options):
    return StrategyArguments(strategy_name=name, strategy_config=options)


@pytest.mark.parametrize("name", OURS)
def test_a_key_that_a_strategy_does_not_have_is_refused(name):
    cls = STRATEGIES[name].options.__name__
    with pytest.raises(
        ConfigError, match=rf"strategy_config.no_such_thing: unknown key; {cls} has no key like it"
    ):
        strategy(name, no_such_thing=8)
    with pytest.raises(
        ConfigError, match=r'share_prefix: unknown key; did you mean "share_prefixes"\?'
    ):
        strategy(name, share_prefix=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "hf_infer",
            {"keep_logits_gib": 1},
            "keep_logits_gib: unknown key",
        ),  # nothing is kept without a backward
        ("hf_train", {"max_batch_size": 4}, "max_batch_size: unknown key"),  # it does not generate
        ("hf_train", {"fsdp_size": 1}, "fsdp_size: unknown key"),
        (
            "hf_train",
            {"compile": "maybe"},
            r"compile: found .*, expected true or false.*; the default is False",
        ),
        ("hf_train", {"keep_logits_gib": -1}, "keep_logits_gib: found -1 .* or equal to 0"),
        ("hf_infer", {"max_batch_size": 0}, "max_batch_size: found 0 .* or equal to 1"),
        (
            "hf_train",
            {"share_prefixes": "maybe"},
            "share_prefixes: found .* expected true or false",
        ),
        (
            "fsdp2_train",
            {"reduce_dtype": "fp23"},
            r'reduce_dtype: found "fp23" .* did you mean "fp32"',
        ),
        (
            "fsdp2_train",
            {"compile": True},
            "compile: found True .* not built yet: compiled layers .* set it to false",
        ),
        (
            "fsdp2_train",
            {"ep_size": 2},
            "ep_size: found 2 .* not built yet: expert parallelism; .* set it to 1",
        ),
        (
            "fsdp2_infer",
            {"apply_tiled_mlp": True},
            "not built yet: a tiled MLP; remove it or set it to false",
        ),
        (
            "fsdp2_train",
            {"moe_experts": 1},
            "moe_experts: unknown key",
        ),  # no key of Megatron, though it begins so
        (
            "fsdp2_train",
            {"max_grad_norm": 1.0},
            "max_grad_norm: unknown key",
        ),  # of Megatron, but no matter of speed
        ("deepspeed_train", {"keep_logits_gib": "much"}, "keep_logits_gib: found"),
        (
            "vllm",
            {"dtype": "half"},
            "strategy_config.dtype: it follows from model_args.dtype; remove it",
        ),
    ],
)
def test_wrong_options_are_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        strategy(name, **options)


def test_values_that_switch_something_off_are_accepted():
    off = {"ep_size": 1, "efsdp_size": 1, "apply_tiled_mlp": False, "compile": False}
    strategy("fsdp2_train", **off)
    for size in (None, -1, 0, 1, 4, 8):
        options = {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": size}}
        assert WorkerConfig(strategy_args=options, world_size=4).dp_size == 4
    assert WorkerConfig(model_args={"ulysses_size": 1}, world_size=4).dp_size == 4


def test_sharding_over_a_part_of_the_ranks_is_not_built():
    options = {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 2}}
    with pytest.raises(
        ConfigError, match=r"fsdp_size: found 2 .* expected 4, the number of ranks: not built yet"
    ):
        WorkerConfig(strategy_args=options, world_size=4)


def test_dtypes_may_have_the_names_of_torch():
    options = options_of("fsdp2_train", {"reduce_dtype": "float32", "param_dtype": "bfloat16"})
    assert isinstance(options, Fsdp2TrainOptions)
    assert (options.reduce_dtype, options.param_dtype) == ("fp32", "bf16")


def test_the_other_libraries_check_their_own_keys():
    zero = {"zero_optimization": {"stage": 3}, "any_other": 1}
    assert (
        strategy("deepspeed_train", **zero, linear_logits=False).strategy_config["any_other"] == 1
    )
    assert strategy("vllm", no_such_thing=8).strategy_config == {"no_such_thing": 8}
    assert options_of("deepspeed_train", {**zero, "keep_logits_gib": 2}).keep_logits_gib == 2


def test_keys_without_effect_are_named_in_the_one_warning(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        """
pipeline: rlvr
sequence_length: 64
prompt_length: 32
rollout_batch_size: 8
actor_train:
  world_size: 4
  training_args: {per_device_train_batch_size: 2}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      {fsdp_size: 4, wrap_policy: {wrap_embeddings: true}, tensor_model_parallel_size: 2, param_dtype: bf16}
reference:
  strategy_args: {strategy_name: fsdp2_infer, strategy_config: {reduce_dtype: float32}}
critic:
  strategy_args: {strategy_name: deepspeed_train, strategy_config: {bf16: {enabled: auto}}}
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {sleep_level: 2, max_model_len: 64}}
""",
        encoding="utf-8",
    )
    loaded = load_config(path, warn=False)
    prefix = "strategy_args.strategy_config"
    assert loaded.ignored == (
        f"actor_train.{prefix}.wrap_policy",
        f"actor_train.{prefix}.tensor_model_parallel_size",
        f"reference.{prefix}.reduce_dtype",
        f"actor_infer.{prefix}.sleep_level",
    )
    assert loaded.config.critic.strategy_config == {"bf16": {"enabled": "auto"}}
    config = loaded.config.actor_train.strategy_config
    assert config == {"fsdp_size": 4, "param_dtype": "bf16"}
