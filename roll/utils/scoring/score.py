"""The outcome of scoring one sample: a number with its parts, or the reason why there is none.

A sample that could not be judged is dropped from the batch and counted by the kind of its reason. It never counts as
a score of 0: that would teach the model that the answer was wrong.

    exception: ValueError: ... (my_file.py:12)   the function raised
    none                                         it returned None: it cannot judge this sample
    nan                                          it returned NaN or an infinity
    type: ...                                    it returned something else than a number, a dict of numbers or None
    timeout                                      it took too long
    memory                                       it took too much memory
    killed: ...                                  its process ended: a crash, os._exit, the machine out of memory
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Score:
    """`value` is None if and only if the sample is dropped, for `reason`."""

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


def dropped(reason: str) -> Score:
    return Score(None, {}, reason)


def reason_kind(reason: str) -> str:
    """What reasons are counted by: the text before the first colon."""
    return reason.partition(":")[0]


def to_score(returned: Any) -> Score:
    """What a score function returned, as a Score.

    A dict names the parts; their sum is the score, unless one of them is called `score`.
    """
    if returned is None:
        return dropped("none")
    if not isinstance(returned, Mapping):
        value = _number(returned)
        if value is None:
            return dropped(
                f"type: returned {_describe(returned)}; expected a number, a dict of numbers or None"
            )
        return Score(value) if math.isfinite(value) else dropped("nan")
    parts: dict[str, float] = {}
    for name, part in returned.items():
        value = _number(part)
        if value is None:
            return dropped(f"type: part {name!r} is {_describe(part)}; expected a number")
        if not math.isfinite(value):
            return dropped("nan")
        parts[str(name)] = value
    if not parts:
        return dropped("none")
    return Score(parts["score"] if "score" in parts else math.fsum(parts.values()), parts)


def _number(value: Any) -> float | None:
    """Python and numpy numbers, bools, tensors and arrays of one number; None for anything else."""
    if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (ValueError, RuntimeError):  # more than one number
            return None
    return float(value) if isinstance(value, int | float) else None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
