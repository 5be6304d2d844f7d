"""A reward in five lines: 1 for the exact answer and nothing after it, else 0."""

from typing import Any


def score(
    prompt: str, response: str, ground_truth: str, finish_reason: str = "stop", **row: Any
) -> float:
    return float(response == ground_truth and finish_reason == "stop")
