"""A small real BPE tokenizer whose merges cross the places where prompts and answers meet.

Bytes are the alphabet, and no regular expression cuts the text first: between special tokens, any
neighbours that the list below names are joined. `tiny_models.tiny_tokenizer` has no merges at all.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, START, END = "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"

# In the byte-level alphabet a space is written Ġ and a newline Ċ.
MERGES = [
    ("Ċ", "Ċ"),
    ("Ġ", "4"),
    ("Ġ", "1"),
    ("Ġ1", "0"),
    ("1", "0"),
    ("a", "d"),
    ("ad", "d"),
    ("=", "4"),
    ("?", "Ġ"),
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bpe_tokenizer(
    *, chat_template: str | None = CHATML, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """The tokenizer, with this chat template; with `adds_bos` it puts a BOS token before plain
    text, as Llama does."""
    specials = [PAD, BOS, EOS, START, END]
    tokens = [
        *specials,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(merge) for merge in MERGES),
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, special=True) for special in specials])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    tokenizer.chat_template = chat_template
    return tokenizer
