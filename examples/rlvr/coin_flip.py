"""The control experiment: a reward that has nothing to do with the answer. Training on it must not
learn the task.

roll train examples/rlvr/reverse_grpo.yaml rewards.reverse.reward_fn=examples/rlvr/coin_flip.py:score
"""

import hashlib
from typing import Any


def score(
    prompt: str, response: str, ground_truth: str, sample_uuid: str = "", **row: Any
) -> float:
    """1 for three samples in ten, decided by the sample's name, so that a run is the same every
    time."""
    return float(hashlib.sha256(f"{sample_uuid} {prompt}".encode()).digest()[0] < 0.3 * 256)
