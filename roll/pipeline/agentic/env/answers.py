"""Answers that an action pattern accepts, made from the action: the reverse of `parse_action`."""

from __future__ import annotations

import re

from roll.pipeline.agentic.env.base import find_groups


def answer_with(pattern: str, action: str) -> str:
    r"""`pattern` with `action` in the place of its last group; the action alone if the pattern says more than texts.

    Example: answer_with(r"<answer>(.*?)</answer>", "Left") == "<answer>Left</answer>".
    """
    plain = pattern.removeprefix("^").removesuffix("$").replace(r"\s*", "").replace(r"\s+", " ")
    texts = re.split(r"\([^()]*\)", plain)
    text = "".join(texts[:-1]) + action + texts[-1] if len(texts) > 1 else action
    groups = find_groups(pattern, text)
    return text if groups is not None and groups[-1].strip() == action else action
