"""Answers that an action pattern accepts, made from the action: the reverse of `parse_action`."""

from __future__ import annotations

import re


def answer_with(pattern: str, action: str) -> str:
    r"""`pattern` with `action` in the place of its last group; the action alone if the pattern says more than texts.

    Example: answer_with(r"<answer>(.*?)</answer>", "Left") == "<answer>Left</answer>".
    """
    plain = pattern.removeprefix("^").removesuffix("$").replace(r"\s*", "").replace(r"\s+", " ")
    texts = re.split(r"\([^()]*\)", plain)
    text = "".join(texts[:-1]) + action + texts[-1] if len(texts) > 1 else action
    match = re.search(pattern, text, re.DOTALL)
    fits = match is not None and ((match.groups() or (match.group(0),))[-1] or "").strip() == action
    return text if fits else action
