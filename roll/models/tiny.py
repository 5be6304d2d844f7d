"""Tiny models from nothing: a character tokenizer, a Qwen2 configuration and random weights.

    make_tiny_model("models/digits", "0123456789<", seed=0)

The folder is what `transformers` writes for any model: `pretrain: models/digits` loads it, here, in
plain transformers and in vLLM. By default it has about 134,000 parameters and learns short tasks on
a CPU in seconds.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from roll.exceptions import ConfigError

# transformers gives <|endoftext|> to every tokenizer of a Qwen2 folder that lacks it.
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ASCII = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def character_tokenizer(
    characters: str = ASCII, *, model_max_length: int = 512
) -> PreTrainedTokenizerFast:
    """One token for each character, after padding (0), start of a turn (1) and end of a turn (2).

    Text goes in and comes out unchanged, in the byte-level form that GPT-2 and Qwen use; other
    characters are left out. The chat template is ChatML, which needs letters and a newline; models
    for bare prompts use the template `base`.
    """
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    unusual = sorted({character for character in characters if not character.isascii()})
    if not characters or repeated or unusual:
        found = f"{repeated} more than once" if repeated else str(unusual or "none")
        raise ConfigError(f"characters: expected different ASCII characters, found {found}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    tokens = [PAD, START, END, *letters]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_model(
    folder: str | Path,
    characters: str = ASCII,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    intermediate: int | None = None,
    max_length: int = 512,
    initializer_range: float = 0.02,
    tied: bool = False,
) -> Path:
    """Write a Qwen2 with weights drawn from `seed` and its tokenizer to `folder`; returns it.

    `intermediate` is the width of the feed-forward layers, 4 * hidden if left out. Heads narrower
    than 32 work everywhere but in vLLM. The caller's random state stays as it was.
    """
    if hidden % heads:
        raise ConfigError(f"hidden={hidden} is not a multiple of heads={heads}")
    folder = Path(folder)
    tokenizer = character_tokenizer(characters, model_max_length=max_length)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
