"""DPO here and in TRL on one GPU, side by side: a 1.5B Qwen2-shaped model, pairs of 2,048 tokens,
half of them prompt.

    python benchmarks/dpo_gpu.py [--steps 10] [--only roll] [--eager] [--row-by-row] [--profile]

Three settings: 4 pairs a step, 4 pairs with gradient checkpointing, 16 pairs with it. Both train
the same random weights in bf16 with a live reference model and fused AdamW; ours with
`strategy_config: {compile: true}`, TRL's as it comes. Printed are tokens per second, milliseconds
per step (median) and peak memory of both, and which share of the arithmetic floor we reach: 8 x
parameters x tokens (two forward passes and one backward pass) at the rate of the GPU's matrix
units. `--profile` adds where the time of one of our steps goes. Needs `trl` and `datasets` unless
`--only roll`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import string
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ROLL_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from roll.models.tiny import character_tokenizer
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import DPOPipeline

SETTINGS = [(4, False), (4, True), (16, True)]  # pairs of a step, gradient checkpointing
TOKENS = 2048
PEAK_FLOPS = 790e12  # what dense bf16 matrix products reach on an H200
GIB = 2**30


def make_inputs(folder: Path) -> tuple[Path, list[dict[str, str]]]:
    """A folder with random weights and a tokenizer of characters, and pairs that fill 2,048 tokens
    exactly."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            folder / "model"
        )
    character_tokenizer(model_max_length=TOKENS).save_pretrained(folder / "model")
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices(string.ascii_letters, k=length))

    half = TOKENS // 2
    pairs = [
        {"prompt": text(half), "chosen": text(half - 1), "rejected": text(half - 1)}
        for _ in range(64)
    ]
    return folder / "model", pairs


class Record:
    """When steps ended, and the most memory that training took."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.peak = 0

    def end_step(self) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        ends = self.ends[2:]  # the first steps find kernels and memory
        return statistics.median(after - before for before, after in itertools.pairwise(ends))


def train_roll(
    model: Path,
    pairs: list[dict[str, str]],
    folder: Path,
    size: int,
    checkpointing: bool,
    *,
    steps: int,
    strategy_config: dict[str, bool],
    profile: bool,
) -> Record:
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    role: dict[str, Any] = {
        "model_args": {"dtype": "bf16", "attn_implementation": "sdpa"},
        "device_mapping": [0],
        "infer_batch_size": size,
    }
    training = {"per_device_train_batch_size": size, "learning_rate": 1e-6}
    config = DPOConfig(
        pretrain=str(model),
        actor_train={
            **role,
            "model_args": {
                **role["model_args"],
                "disable_gradient_checkpointing": not checkpointing,
            },
            "training_args": training,
            "strategy_args": {"strategy_name": "hf_train", "strategy_config": strategy_config},
            "data_args": {"file_name": str(data), "template": "base"},
        },
        reference={
            **role,
            "strategy_args": {"strategy_name": "hf_infer", "strategy_config": strategy_config},
        },
        sequence_length=TOKENS,
        num_gpus_per_node=1,
        max_steps=steps,
        save_steps=10**6,
        output_dir=str(folder / "runs"),
        exp_name="roll",
        track_with="none",
    )
    record = Record()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    class Measured(DPOPipeline):
        def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            super().end_step(step, metrics)
            record.end_step()
            record.losses.append(self.logged["actor/loss@sum"])
            if profile and step == steps - 2:
                profiler.start()
            if profile and step == steps - 1:
                profiler.stop()

        def save_checkpoint(self, *, keep: bool = False) -> Path:
            return self.run_dir  # TRL saves nothing either

    with Measured(config, progress=False) as pipeline:
        torch.cuda.reset_peak_memory_stats()
        pipeline.run()
        record.peak = torch.cuda.max_memory_allocated()
    if profile:
        record.ends.pop()  # the step that was watched
        print_profile(profiler)
    return record


def print_profile(profiler: torch.profiler.profile) -> None:
    """The kernels of a step by their time, and when the GPU waited for the program."""
    events = [
        event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event.name[:90], []).append(event.time_range.elapsed_us() / 1e3)
    print(f"  busy {sum(map(sum, totals.values())):.0f} ms:")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"    {sum(times):7.1f} ms  {len(times):5d} x  {name}")
    gaps, end = [], None
    for event in sorted(events, key=lambda event: event.time_range.start):
        if end is not None and event.time_range.start > end[0]:
            gaps.append(((event.time_range.start - end[0]) / 1e3, end[1][:50], event.name[:50]))
        if end is None or event.time_range.end > end[0]:
            end = (event.time_range.end, event.name)
    print(f"  idle {sum(gap for gap, *_ in gaps):.1f} ms, of which the longest:")
    for gap, before, after in sorted(gaps, reverse=True)[:8]:
        print(f"    {gap:7.2f} ms  between {before} and {after}")


def train_trl(
    model: Path,
    pairs: list[dict[str, str]],
    folder: Path,
    size: int,
    checkpointing: bool,
    steps: int,
) -> Record:
    import trl
    from datasets import Dataset

    record = Record()

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            record.end_step()

    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=size,
        max_steps=steps,
        max_length=TOKENS,
        learning_rate=1e-6,
        logging_steps=100,
        report_to=[],
        save_strategy="no",
        bf16=True,
        gradient_checkpointing=checkpointing,
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )

    def load() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        return loaded.to("cuda")

    trainer = trl.DPOTrainer(
        model=load(),
        ref_model=load(),
        args=settings,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Watch()],
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    record.peak = torch.cuda.max_memory_allocated()
    return record


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=["roll", "trl"], help="run one of the two")
    parser.add_argument(
        "--profile", action="store_true", help="show the kernels of one of our steps"
    )
    parser.add_argument(
        "--row-by-row", action="store_true", help="without strategy_config.share_prefixes"
    )
    parser.add_argument("--eager", action="store_true", help="without strategy_config.compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs an NVIDIA GPU; benchmarks/dpo_vs_trl.py runs on a CPU"
        )
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, pairs = make_inputs(folder)
        free()
        parameters = sum(
            p.numel()
            for p in AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).parameters()
        )
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {parameters / 1e9:.2f}B parameters",
            flush=True,
        )
        for size, checkpointing in SETTINGS:
            tokens = 2 * size * TOKENS
            records: dict[str, Record] = {}
            if options.only != "trl":
                records["roll"] = train_roll(
                    model,
                    pairs,
                    folder,
                    size,
                    checkpointing,
                    steps=options.steps,
                    strategy_config={
                        "compile": not options.eager,
                        "share_prefixes": not options.row_by_row,
                    },
                    profile=options.profile,
                )
                free()
            if options.only != "roll":
                records["TRL"] = train_trl(model, pairs, folder, size, checkpointing, options.steps)
                free()
            print(f"{size} pairs{', gradient checkpointing' if checkpointing else ''}")
            for name, record in records.items():
                speed, step, peak = tokens / record.seconds, record.seconds * 1e3, record.peak / GIB
                print(
                    f"  {name:5} {speed:9,.0f} tokens/s  {step:7.0f} ms/step  {peak:6.1f} GiB peak",
                    flush=True,
                )
            if "roll" in records:
                floor = 8 * parameters * tokens / PEAK_FLOPS
                share = floor / records["roll"].seconds
                print(f"  arithmetic floor {floor * 1e3:.0f} ms: we reach {share:.0%} of it")
            if len(records) == 2:
                faster = records["TRL"].seconds / records["roll"].seconds
                saved = records["TRL"].peak / records["roll"].peak
                print(
                    f"  {faster:.2f} times TRL's tokens/s (target 1.3), TRL's peak is {saved:.2f} times ours",
                    flush=True,
                )


if __name__ == "__main__":
    main()
