"""A tiny model made from nothing that knows how an answer looks, and nothing else.

    python examples/agentic/warm_start.py examples/agentic/frozen_lake_gigpo.yaml [KEY=VALUE ...] [--steps 25]

Writes the model that the config names as `pretrain`: random weights and a tokenizer of single
characters. Then it plays the config's environments with random valid actions and takes a few
supervised steps on them, so that the model answers with some valid action. Which one is for
reinforcement to find out. The seed is the config's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.models.tiny import ASCII, make_tiny_model
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env_source import EnvSource
from roll.pipeline.registry import load_config
from roll.rollout.collate import collate

# A message is <|im_start|>text, an answer >text<|im_end|>: short, because every character is a
# token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}>{{ message['content'] }}<|im_end|>"
    "{% else %}<|im_start|>{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TOKENS_PER_STEP = 8192


def make_model(folder: Path, seed: int, max_length: int) -> None:
    """Random weights with a wide spread: with the usual 0.02 so small a model sits on a plateau for
    long."""
    make_tiny_model(folder, ASCII, seed=seed, initializer_range=0.15, max_length=max_length)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def random_play(config: AgenticConfig, rounds: int) -> Iterator[DataProto]:
    """Rows of episodes in which every answer is a valid action drawn at random, new ones in each
    round."""
    tokenizer = AutoTokenizer.from_pretrained(config.pretrain)
    manager = config.train_env_manager
    with Cluster(
        "train_env", manager.worker_cls, ResourceManager(backend="local"), manager
    ) as cluster:
        source = EnvSource(config, "train", cluster, tokenizer)
        for number in range(rounds):
            played = source.rollout(number, config.rollout_batch_size).trajectories
            yield collate(played, tokenizer.pad_token_id, per_turn=config.rows_are_turns)
        source.close()


def imitate(folder: Path, batches: Iterator[DataProto]) -> float:
    """One supervised step on the answers of each batch; returns the last loss."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    loss = torch.zeros(())
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 5)
        rows = batch.slice(0, TOKENS_PER_STEP // batch["input_ids"].shape[1])
        logits = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        log_probs, _ = next_token_log_probs(logits, rows["input_ids"], rows["response_mask"])
        loss = -log_probs.sum() / rows["response_mask"][:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    return loss.item()


def warm_start(config_file: str, overrides: list[str], steps: int) -> Path:
    """Make the model; returns its folder."""
    overrides = [*overrides, "train_env_manager.llm_proxy.proxy_type=random"]
    config = load_config(config_file, overrides).config
    assert isinstance(config, AgenticConfig) and config.pretrain is not None
    folder = Path(config.pretrain)
    torch.manual_seed(config.seed)
    make_model(folder, config.seed, config.sequence_length)
    loss = imitate(folder, random_play(config, steps))
    print(f"{folder}: {steps} supervised steps on random play, last loss {loss:.3f}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    warm_start(args.config, args.overrides, args.steps)


if __name__ == "__main__":
    main()
