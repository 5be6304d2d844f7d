"""How an answer is scored. Change this, and the model learns something else."""

from typing import Any


def score(prompt: str, response: str, ground_truth: str, **row: Any) -> dict[str, float]:
    """1 for the right digits. The parts are added up, and the report shows each of them."""
    return {"correct": float(response == ground_truth)}
