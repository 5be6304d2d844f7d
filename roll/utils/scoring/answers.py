"""Where an answer stands in a response."""

from __future__ import annotations


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; everything if there is none."""
    return text.rpartition("</think>")[2].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, inner braces included.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}".
    """
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : position]
        end = start
    return None
