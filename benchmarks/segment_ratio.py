"""What one probability ratio for each turn costs in a training step, against one for each token.

    python benchmarks/segment_ratio.py [--rows 16] [--length 2048] [--turns 16] [--repeats 5]

One optimizer step of a tiny model on trajectories of many turns, through the worker and its
strategy, so everything is in it: forward, loss, backward, optimizer. The two kinds of ratio
alternate in one process; the medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.models.tiny import make_tiny_model
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.base_worker import ActorWorker


def make_batch(rows: int, length: int, turns: int) -> DataProto:
    """Trajectories whose turns are half observation and half answer."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(length) % (length // turns)
    mask = (place >= length // turns // 2).long().expand(rows, -1).clone()
    old = -3 * torch.rand(rows, length - 1, generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, 90, (rows, length), generator=generator),
            "attention_mask": torch.ones(rows, length, dtype=torch.int64),
            "response_mask": mask,
            "old_log_probs": old,
            "infer_logprobs": old + 0.01 * torch.randn(old.shape, generator=generator),
            "advantages": torch.randn(rows, 1, generator=generator).expand_as(old).contiguous(),
        },
        meta_info={"loss_mask_keys": ["response_mask"]},
    )


def make_worker(folder: Path, ratio_type: str, rows: int, length: int) -> ActorWorker:
    role: dict[str, Any] = {
        "strategy_args": {"strategy_name": "hf_train"},
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": rows // 4,
        },
    }
    config = AgenticConfig(
        pretrain=str(folder),
        actor_train=role,
        ratio_type=ratio_type,
        adv_estimator="reinforce",
        sequence_length=length,
        rollout_batch_size=rows,
        train_env_manager={"num_env_groups": rows},
        init_kl_coef=0,
        enable_old_logprobs_recompute=True,
        eval_steps=0,
    )
    worker = ActorWorker(config.actor_train)
    worker.initialize(config)
    return worker


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batch = make_batch(args.rows, args.length, args.turns)
    seconds: dict[str, list[float]] = {"token": [], "segment": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", max_length=args.length)
        workers = {kind: make_worker(model, kind, args.rows, args.length) for kind in seconds}
        for repeat in range(args.repeats + 1):
            for kind, worker in workers.items():
                started = time.perf_counter()
                worker.train_step(batch)
                if repeat:  # the first one warms up
                    seconds[kind].append(time.perf_counter() - started)
    print(
        f"{args.rows} trajectories x {args.length} tokens x {args.turns} turns, one optimizer step"
    )
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for kind, median in medians.items():
        print(
            f"  {kind:8s} {median:.3f} s (of {', '.join(f'{value:.3f}' for value in sorted(seconds[kind]))})"
        )
    print(f"segment / token: {medians['segment'] / medians['token']:.3f} (target: at most 1.1)")


if __name__ == "__main__":
    main()
