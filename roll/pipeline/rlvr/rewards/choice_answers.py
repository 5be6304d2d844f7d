r"""Multiple choice: the letter in the last `\boxed{...}`."""

from __future__ import annotations

import re
from typing import Any

from roll.utils.scoring.answers import after_thinking, last_boxed


def score(prompt: str, response: str, ground_truth: Any, **row: Any) -> float | None:
    """1.0 if the boxed choices are those of the ground truth, in any order; 0.0 otherwise.

    None if the ground truth names no choice.
    """
    right = _choices(str(ground_truth or ""))
    if not right:
        return None
    boxed = last_boxed(after_thinking(response))
    return float(boxed is not None and _choices(boxed) == right)


def _choices(text: str) -> frozenset[str]:
    r"""The single letters of an answer: `B`, `(b)`, `B. Paris`, `\text{B}`, `A, C` and `AC` (two choices)."""
    text = re.sub(r"\\[a-zA-Z]+", "", boxed) if (boxed := last_boxed(text) or text) else ""
    text = text.strip(" {}()[].:$\n")
    if re.fullmatch(r"[A-Z]{1,10}", text):
        return frozenset(text)
    letters = re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z'])", text)
    # Of "B. a cat" only the label counts; of "A, C" or "A and C" both do.
    labelled = re.match(r"[A-Za-z]\s*[.:)]\s*\S", text)
    return frozenset(letter.upper() for letter in (letters[:1] if labelled else letters))
