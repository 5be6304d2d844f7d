"""What a turn costs besides the model: environments, prompts, tokens, masks and rows.

    python benchmarks/rollout.py [--envs 256] [--turns 10] [--env frozen_lake]

The policy answers instantly with a fixed text, so all the time that is left is overhead: rendering
and tokenising observations, talking to the process of the environments, stepping them, decoding,
and making the batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.engines.request import GenerationOutput
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env_source import EnvSource
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, TurnRequest
from roll.rollout.collate import collate


class InstantProxy(BaseLLMProxy):
    """Says the same thing every time, in no time."""

    needs_messages = False

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        ids = [*self.tokenizer("<answer>Left</answer>")["input_ids"], self.tokenizer.eos_token_id]
        log_probs = [-0.5] * len(ids)
        return [
            GenerationOutput(turn.request.request_id, 0, ids, log_probs, "stop", 0)
            for turn in requests
        ]


def measure(num_envs: int, turns: int, env_type: str) -> tuple[float, dict[str, float]]:
    """(milliseconds per turn and environment, seconds of the parts)."""
    tokenizer = character_tokenizer(model_max_length=8192)
    manager = {"num_env_groups": num_envs // 8, "group_size": 8, "tags": ["Env"]}
    config = AgenticConfig(
        rollout_batch_size=num_envs,
        sequence_length=8192,
        custom_envs={"Env": {"env_type": env_type, "max_steps": turns, "max_tokens_per_step": 64}},
        train_env_manager=manager,
        eval_steps=0,
    )
    role = config.train_env_manager
    with Cluster(
        "train_env", role.worker_cls, ResourceManager(0, 1, backend="local"), role
    ) as cluster:
        proxy = InstantProxy(actor_infer=None, tokenizer=tokenizer, options={})
        source = EnvSource(config, "train", cluster, tokenizer, proxy=proxy)
        source.rollout(0, num_envs)  # the process starts, modules are imported, templates compiled
        started = time.perf_counter()
        rollout = source.rollout(1, num_envs)
        played = time.perf_counter() - started
        batch = collate(rollout.trajectories, 0)
        total = time.perf_counter() - started
        source.close()
    num_turns = sum(len(item.turns) for item in rollout.trajectories)
    parts = {"rows": total - played, "environments": rollout.metrics["time/train/environments"]}
    parts["prompts and answers"] = rollout.metrics["time/train/prompts"]
    print(
        f"{len(batch)} trajectories, {num_turns} turns, {int(batch['attention_mask'].sum()):,} tokens"
    )
    return 1000 * total / num_turns, parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--env", default="frozen_lake")
    args = parser.parse_args()
    milliseconds, parts = measure(args.envs, args.turns, args.env)
    print(
        f"{milliseconds:.3f} ms per turn and environment with {args.envs} environments (target: below 1 ms)"
    )
    for name, seconds in parts.items():
        print(f"  {name:22s} {seconds:.3f} s")


if __name__ == "__main__":
    main()
