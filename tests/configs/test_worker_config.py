"""WorkerConfig: ROLL's defaults, devices and workers, strategies."""

import pytest

from roll.configs.worker_config import (
    SequencePackingConfig,
    StrategyArguments,
    WorkerConfig,
    is_actor_infer_overlapping_with_any_cluster,
)
from roll.exceptions import ConfigError


def worker(name: str = "hf_train", **values) -> WorkerConfig:
    return WorkerConfig(
        strategy_args={"strategy_name": name, "strategy_config": values.pop("options", {})},
        **values,
    )


def test_defaults_are_rolls():
    config = WorkerConfig()
    expected = {
        "name": None,
        "worker_cls": None,
        "pg_variant": None,
        "data_args": None,
        "generating_args": None,
        "strategy_args": None,
        "device_mapping": None,
        "model_update_frequency": 1,
        "infer_batch_size": 16,
        "backend_timeout": 30,
        "system_envs": {},
        "topr_positive_weight": 1.0,
        "topr_negative_weight": 1.0,
        "max_concurrency": 1,
        "use_dynamic_batching_in_train": False,
        "max_tokens_per_microbatch_in_train": 0,
        "sequence_length_round_in_train": 4,
        "use_dynamic_batching_in_infer": False,
        "max_tokens_per_microbatch_in_infer": None,
        "sequence_length_round_in_infer": 4,
        "offload_nccl": False,
        "use_sequence_packing": False,
        "logits_in_fp32": False,
        "apply_loss_scale": True,
        "mtp_training_mode": "disabled",
        "tag_included": [],
        "checkpoint_config": None,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.router_replay.mode == "disable"
    assert config.sequence_packing_args == SequencePackingConfig()
    assert not config.holds_model and config.strategy_name is None


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
    with pytest.raises(ConfigError, match=r"system_envs.A: found True .*, expected text"):
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
