"""Small real models and a small real tokenizer, made on the spot from a seed: what tests use
instead of downloads.

The models have 2 layers, hidden size 64 and 2 heads of 32, which is the smallest head size that
vLLM accepts. The tokenizer has one token per printable ASCII character, in the byte-level form that
GPT-2 and Qwen use, and a ChatML chat template, so text goes in and comes out unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from roll.models.tiny import CHAT_TEMPLATE, PAD, character_tokenizer

__all__ = ["CHAT_TEMPLATE", "PAD"]

Family = Literal["qwen2", "qwen3", "llama", "gemma2", "cohere", "granite"]

VOCAB_SIZE = 100


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer of 99 tokens: 3 special ones (pad is 0, end of turn is 2), newline,
    printable ASCII."""
    return character_tokenizer()


def tiny_config(
    family: Family = "qwen2", *, tied: bool = True, **overrides: Any
) -> PreTrainedConfig:
    """A 2-layer config of the family. `initializer_range` is large enough that log-probs are far
    from uniform."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "attention_dropout": 0.0,
    }
    classes: dict[Family, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {}),
        "llama": (LlamaConfig, {}),
        # Each of these does something to the logits after the head.
        "gemma2": (Gemma2Config, {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}),
        "cohere": (CohereConfig, {"logit_scale": 0.0625}),
        "granite": (GraniteConfig, {"logits_scaling": 8.0}),
    }
    config_class, own = classes[family]
    return config_class(**{**values, **own, **overrides})


def tiny_model(
    family: Family = "qwen2",
    *,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """A causal language model with weights drawn from `seed`; the caller's random state is left as
    it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            tiny_config(family, tied=tied, **overrides), dtype=dtype
        )


def make_model_folder(
    folder: Path,
    family: Family = "qwen2",
    *,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weights: bool = True,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes config, weights and tokenizer as `transformers` would, and returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        tiny_model(family, tied=tied, seed=seed, dtype=dtype, **overrides).save_pretrained(folder)
    else:
        tiny_config(family, tied=tied, **overrides).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_batch(
    lengths: list[int], *, pad_to: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Left-padded rows of random tokens: `input_ids`, `attention_mask` and `position_ids`, each
    (len(lengths), S)."""
    width = pad_to or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB_SIZE - 1, (len(lengths), width), generator=generator)
    attention_mask = (torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)).long()
    return {
        "input_ids": torch.where(attention_mask.bool(), input_ids, 0),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }
