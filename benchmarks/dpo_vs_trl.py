"""DPO here and in TRL, side by side on this machine's CPU: the same numbers, and how many steps a
second.

    python benchmarks/dpo_vs_trl.py [--steps 100] [--repeats 3] [--pairs 8]

Both start from the same weights and see the same pairs in the same order, with a live reference
model, AdamW and a linear schedule. Printed are the largest difference of the losses of the first
ten steps, the relative difference of the first gradient, and the steps per second of both, measured
in turns. Ours is measured twice: as it comes, and with `strategy_config: {compile: true}`, whose
compilation (a quarter of a minute, with a C++ compiler) is not counted; TRL runs as it comes. Needs
`trl` and `datasets`.

The tokenizer has one token per character: TRL cuts a text after the number of tokens that its
prompt has alone, and where a token spans that place the two would train on different tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ROLL_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import trl
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from roll.models.tiny import make_tiny_model
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import DPOPipeline

BETA, LEARNING_RATE = 0.1, 1e-3
COMPARED_STEPS = 10
WARM_UP = 10


class Record:
    """Losses, times of the ends of steps, and the first gradient of one training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[float] = []
        self.gradient: dict[str, Tensor] = {}

    @property
    def seconds_per_step(self) -> float:
        ends = self.ends[WARM_UP:]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def make_pairs() -> list[dict[str, str]]:
    """Sums with a right and a wrong result, of different lengths."""
    sums = [(a, b) for a in range(20) for b in range(10)]
    return [
        {"prompt": f"add {a} plus {b} equals ", "chosen": str(a + b), "rejected": str(a + b + 7)}
        for a, b in sums
    ]


def train_roll(
    model: Path, data: Path, folder: Path, steps: int, pairs: int, *, compiled: bool
) -> tuple[Record, list[int]]:
    """Our pipeline as `roll train` runs it. Returns also the order in which it took the pairs."""
    role: dict[str, Any] = {
        "model_args": {
            "model_name_or_path": str(model),
            "dtype": "fp32",
            "disable_gradient_checkpointing": True,
        },
        "training_args": {"per_device_train_batch_size": pairs, "learning_rate": LEARNING_RATE},
        "data_args": {"file_name": str(data), "template": "base"},
        "infer_batch_size": pairs,
    }
    options = {"strategy_config": {"compile": compiled}}
    config = DPOConfig(
        actor_train={**role, "strategy_args": {"strategy_name": "hf_train", **options}},
        reference={
            **role,
            "data_args": None,
            "strategy_args": {"strategy_name": "hf_infer", **options},
        },
        sequence_length=64,
        beta=BETA,
        max_steps=steps,
        save_steps=10**6,
        max_grad_norm=1e9,
        output_dir=str(folder),
        exp_name="roll",
        track_with="none",
    )
    record = Record()

    class Measured(DPOPipeline):
        def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            super().end_step(step, metrics)
            record.losses.append(self.logged["actor/loss@sum"])
            record.ends.append(time.perf_counter())

        def save_checkpoint(self, *, keep: bool = False) -> Path:
            return self.run_dir  # TRL saves nothing either

    with Measured(config, progress=False) as pipeline:
        order = pipeline.sampler.order().tolist()
        strategy = pipeline.actor_train.workers[0].strategy

        def keep_first_gradient(*_: Any) -> None:
            record.gradient = record.gradient or strategy.full_gradients()

        strategy.optimizer.register_step_pre_hook(keep_first_gradient)
        pipeline.run()
    return record, order


def train_trl(
    model: Path, rows: list[dict[str, str]], folder: Path, steps: int, pairs: int
) -> Record:
    """TRL's trainer on `rows` in their order."""
    record = Record()

    class Trainer(trl.DPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            record.losses.append(float(loss))
            return loss

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            if not record.gradient:
                named = model.named_parameters()
                record.gradient = {
                    name: p.grad.detach().clone() for name, p in named if p.grad is not None
                }

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            record.ends.append(time.perf_counter())

    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=pairs,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1e9,
        beta=BETA,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Watch()],
    )
    trainer.remove_callback(
        PrinterCallback
    )  # its lines would fill the screen; the numbers are logged all the same
    trainer.train()
    return record


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    return (
        difference / sum(float(value.double().square().sum()) for value in theirs.values())
    ) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a step")
    options = parser.parse_args()
    disable_progress_bar()
    disable_progress_bars()
    rows = make_pairs()
    ours, compiled, theirs = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny_model(folder / "model", seed=0)
        data = folder / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train_roll(
            model, data, folder, options.steps, options.pairs, compiled=True
        )  # compiles, once for all repeats
        for _ in range(options.repeats):
            record, order = train_roll(
                model, data, folder, options.steps, options.pairs, compiled=False
            )
            ours.append(record)
            compiled.append(
                train_roll(model, data, folder, options.steps, options.pairs, compiled=True)[0]
            )
            theirs.append(
                train_trl(model, [rows[i] for i in order], folder, options.steps, options.pairs)
            )
    versions = f"TRL {trl.__version__}, torch {torch.__version__}"
    print(f"{versions}, {torch.get_num_threads()} threads, {options.pairs} pairs a step")
    print("step   loss here    compiled   loss in TRL")
    losses = list(zip(ours[0].losses, compiled[0].losses, theirs[0].losses, strict=True))[
        :COMPARED_STEPS
    ]
    for step, (one, two, three) in enumerate(losses):
        print(f"{step:4d}   {one:.7f}   {two:.7f}   {three:.7f}")
    difference = max(max(abs(one - three), abs(two - three)) for one, two, three in losses)
    gradient = max(
        relative_difference(records[0].gradient, theirs[0].gradient) for records in (ours, compiled)
    )
    print(f"largest difference of a loss: {difference:.1e} (at most 1e-4)")
    print(f"first gradient, relative difference: {gradient:.1e} (at most 1e-4)")
    speeds = [
        [1 / record.seconds_per_step for record in records] for records in (ours, compiled, theirs)
    ]
    eager, fast, peer = (statistics.median(values) for values in speeds)
    print(
        f"steps per second: {peer:.1f} in TRL; {eager:.1f} here, {eager / peer:.2f} times; ", end=""
    )
    print(f"{fast:.1f} compiled, {fast / peer:.2f} times (at least 1.5)")
    print(
        "  of each repeat: "
        + ", ".join(f"{c:.1f}, {a:.1f}, {b:.1f}" for a, b, c in zip(*speeds, strict=True))
    )


if __name__ == "__main__":
    main()
