"""`strategy_config`: every key of every strategy works, is refused by name, or is named as one without effect."""

import pytest

from roll.configs.loader import load_yaml
from roll.configs.strategy_options import OPTIONS, Fsdp2TrainOptions, options_of
from roll.configs.worker_config import STRATEGIES, StrategyArguments, WorkerConfig
from roll.exceptions import ConfigError
from roll.pipeline.registry import load_config

OURS = [name for name in STRATEGIES if name.startswith(("hf_", "fsdp2_"))]


def strategy(name, **options):
    return StrategyArguments(strategy_name=name, strategy_config=options)


def test_every_strategy_but_vllm_has_options_of_ours():
    assert OPTIONS.keys() == set(STRATEGIES) - {"vllm"}


@pytest.mark.parametrize("name", OURS)
def test_a_key_that_a_strategy_does_not_have_is_refused(name):
    cls = OPTIONS[name].__name__
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
            r"compile: found .*, expected true or false; the default is False",
        ),
        ("hf_train", {"keep_logits_gib": -1}, "keep_logits_gib: found -1 .* at least 0"),
        ("hf_infer", {"max_batch_size": 0}, "max_batch_size: found 0 .* at least 1"),
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


def test_sequence_parallelism_is_not_built():
    message = r"model_args.ulysses_size: found 2 \(int\); not built yet: sequence parallelism; remove it or set it to 1"
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(model_args={"ulysses_size": 2}, world_size=4)


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
    assert (
        load_yaml(path)["actor_train"]["strategy_args"]["strategy_config"][
            "tensor_model_parallel_size"
        ]
        == 2
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
    assert config == {
        "fsdp_size": 4,
        "wrap_policy": {"wrap_embeddings": True},
        "param_dtype": "bf16",
    }
