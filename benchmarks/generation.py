"""New tokens a second: the engine of `hf_infer` against `generate` of transformers, which return
the same things.

    python benchmarks/generation.py
    python benchmarks/generation.py --device cuda --dtype bf16 --layers 28 --hidden 1536 --heads 12 --vocab 151936

Both sample at temperature 1 and return token ids with the log-probability of each; the model is
random and never ends. All ways run in turns, so that a busy machine hurts them alike. Groups: 8
samples of each prompt, as GRPO asks for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.engines import hf_engine
from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams

GROUP = 8


def make_model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 6, 1),
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    return Qwen2ForCausalLM(config).to(args.device, dtype).eval()


def ways(model: Qwen2ForCausalLM, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Each way to answer, by name: all get the same prompts of different lengths."""
    num_prompts = args.rows // GROUP
    lengths = [args.prompt - index % 4 for index in range(num_prompts)]
    prompts = [torch.randint(0, args.vocab, (length,)).tolist() for length in lengths]
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=(), max_batch_size=args.rows)
    sampling = SamplingParams(max_new_tokens=args.new)
    requests = [
        GenerationRequest(str(i), tuple(ids), sampling, GROUP) for i, ids in enumerate(prompts)
    ]
    padded = torch.tensor(
        [[0] * (args.prompt - len(ids)) + ids for ids in prompts], device=args.device
    )
    mask = torch.tensor([[0] * (args.prompt - n) + [1] * n for n in lengths], device=args.device)

    @torch.no_grad()
    def plain() -> object:
        out = model.generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=GROUP,
            max_new_tokens=args.new,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[:, -args.new :].T
        scores = [
            step.float().log_softmax(-1).gather(-1, ids[:, None])
            for step, ids in zip(out.logits, tokens, strict=True)
        ]
        return out.sequences.tolist(), torch.cat(scores, dim=1).tolist()

    def unrecorded() -> object:
        with mock.patch.object(hf_engine, "can_record", lambda *_: False):
            return engine.generate(requests)

    found: dict[str, Callable[[], object]] = {"roll hf_infer": lambda: engine.generate(requests)}
    if args.device == "cuda":
        found["roll without a graph"] = unrecorded
    return {**found, "transformers generate": plain}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, and torch sees none")
    candidates = ways(make_model(args), args)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(args.turns + 1):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()  # ends with a copy to the host, so there is nothing to wait for
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - started)
    print(
        f"{args.rows} rows of {args.new} new tokens on {args.device}, {args.layers} layers of {args.hidden}"
    )
    ours = statistics.median(seconds["roll hf_infer"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"  {name:24s} {args.rows * args.new / median:10,.0f} tok/s   {median / ours:5.2f} x our time"
        )


if __name__ == "__main__":
    main()
