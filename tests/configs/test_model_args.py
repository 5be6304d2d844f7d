"""ModelArguments: ROLL's defaults, LoRA's derived values."""

import pytest

from roll.configs import ModelArguments
from roll.exceptions import ConfigError


def test_defaults_are_rolls():
    assert ModelArguments().model_dump() == {
        "additional_target": None,
        "autocast_adapter_dtype": True,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_rank": 8,
        "lora_target": None,
        "model_name_or_path": None,
        "random_init": False,
        "trust_remote_code": False,
        "adapter_name_or_path": None,
        "attn_implementation": None,
        "moe_aux_loss_coef": None,
        "disable_gradient_checkpointing": False,
        "gradient_checkpointing_use_reentrant": None,
        "device_map": "balanced",
        "dtype": "bf16",
        "model_type": None,
        "num_labels": 1,
        "model_config_kwargs": {},
        "freeze_module_prefix": None,
        "ulysses_size": 1,
        "model_max_length": None,
    }
    assert not ModelArguments().is_lora


def test_lora_names_are_split_at_commas_and_a_regular_expression_is_not():
    args = ModelArguments(
        lora_target="q_proj, v_proj", additional_target="lm_head", freeze_module_prefix="embed,head"
    )
    assert args.lora_target == ["q_proj", "v_proj"]
    assert args.additional_target == ["lm_head"]
    assert args.freeze_module_prefix == ["embed", "head"]
    assert args.is_lora
    pattern = r".*\.(q_proj|v_proj)$"
    assert ModelArguments(lora_target=pattern).lora_target == pattern
    assert ModelArguments(lora_target=["a", "b"]).lora_target == ["a", "b"]


def test_lora_alpha_is_twice_the_rank_unless_given():
    assert ModelArguments(lora_rank=64).lora_alpha == 128
    assert ModelArguments(lora_rank=64, lora_alpha=32).lora_alpha == 32


def test_names_of_attention_and_precision():
    assert ModelArguments(attn_implementation="fa2").attn_implementation == "flash_attention_2"
    assert ModelArguments(attn_implementation="sdpa").attn_implementation == "sdpa"
    assert [ModelArguments(dtype=dtype).compute_dtype for dtype in ("fp32", "bf16", "fp16")] == [
        "float32",
        "bfloat16",
        "float16",
    ]
    with pytest.raises(
        ConfigError,
        match=r'dtype: found "bfloat16" .* expected one of fp32, bf16, fp16; did you mean',
    ):
        ModelArguments(dtype="bfloat16")
