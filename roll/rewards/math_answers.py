"""Mathematical answers, compared by value with math-verify: 1/2, 0.5 and \\frac{1}{2} are the same.

To be called in a `ScorePool`, whose limit ends what sympy does not: the library's own limits work
by signals, only in a main thread, and turn a timeout into a wrong answer.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from roll.exceptions import MissingDependencyError, install_hint
from roll.rewards.functions import after_thinking

try:
    from math_verify import parse, verify
except ImportError as error:
    raise MissingDependencyError(
        "scoring mathematical answers needs math-verify, which is not installed: "
        + install_hint("rewards")
    ) from error

# It warns, at every call, that its own limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(
    prompt: str, response: str, ground_truth: Any, *, format_pattern: str | None = None, **row: Any
) -> float | None:
    """1.0 for the right answer, in the format where one is asked for; 0.0 for another, or for none.

    None if the ground truth itself cannot be read: no answer to such a row would be right.
    """
    gold = _gold(str(ground_truth))
    if ground_truth is None or not gold:
        return None
    if format_pattern is not None and not re.search(format_pattern, response, re.DOTALL):
        return 0.0
    found = _parse(after_thinking(response))
    if not found:
        return 0.0
    return float(verify(list(gold), found, timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    # None is off, which its annotation does not know.
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyrefly: ignore


@lru_cache(maxsize=4096)  # the samples of a group share it
def _gold(text: str) -> tuple[Any, ...]:
    is_marked = "$" in text or r"\boxed" in text
    return tuple(_parse(text if is_marked else f"${text}$"))
