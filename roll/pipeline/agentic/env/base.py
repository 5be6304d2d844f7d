"""The protocol of an environment, and how a model's text becomes one of its actions.

    observation, info = env.reset(seed)                                   # text, and what else there is to say
    observation, reward, terminated, truncated, info = env.step(action)   # action: the model's answer, as text

ROLL and GEM use the same protocol, so their environments work here. Keys of `info` that are read:

    env_instruction    at reset: the rules; stands in front of the first observation, or where a template puts it
    suffix             text for the placeholder {suffix} of the template
    metrics            numbers of this step: `success`, `action_is_valid` ... (bools count as 0 and 1)
    metrics_agg_mode   how a metric becomes one of the episode: mean (default), sum, max, min, first, last
    state              what identifies the state for GiGPO; the observation if left out

Nothing here imports torch: environments run in processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from roll.exceptions import ConfigError

Info = dict[str, Any]
Reset = tuple[str, Info]
Step = tuple[str, float, bool, bool, Info]


@runtime_checkable
class Env(Protocol):
    """An environment that takes and gives text. A subclass needs `reset` and `step`."""

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode; the same seed gives the same episode for the same actions."""
        ...

    def step(self, action: str) -> Step:
        """Answer one action. Whatever the text is, malformed included, this is the environment's to judge."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        return None


@dataclass(frozen=True)
class ParsedAction:
    """What was found in an answer: `name` is None where there is no valid action."""

    name: str | None
    content: str
    think: str = ""


def parse_action(
    text: str, pattern: str, known: Iterable[str], special_tokens: Iterable[str] = ()
) -> ParsedAction:
    """The action in `text`: the last group of `pattern`, which may have a first one for a thought before it.

    `known` are the names of the actions; upper and lower case are the same.
    Example: parse_action("<answer>left</answer>", "<answer>(.*?)</answer>", ["Left", "Right"]).name == "Left".
    """
    for token in special_tokens:
        text = text.replace(token, "")
    groups = find_groups(pattern, text)
    if groups is None:
        return ParsedAction(None, text)
    content = groups[-1].strip()
    think = groups[0].strip() if len(groups) > 1 else ""
    names = {name.lower(): name for name in known}
    return ParsedAction(names.get(content.lower()), content, think)


def find_groups(pattern: str, text: str) -> list[str] | None:
    """What the groups of a pattern found in a text, or all that it found if it has none; None if it found nothing."""
    match = re.search(pattern, text, re.DOTALL)
    return None if match is None else [group or "" for group in match.groups() or (match.group(0),)]


def default_parser_action_func(
    text: str,
    action_pattern: str,
    action_lookup: Mapping[Any, str] | None,
    special_token_list: Iterable[str] | None,
) -> dict[str, Any]:
    """`parse_action` with ROLL's arguments and result: `action` is the key of `action_lookup`, None if invalid."""
    lookup = {name.lower(): key for key, name in (action_lookup or {}).items()}
    parsed = parse_action(
        text, action_pattern, (action_lookup or {}).values(), special_token_list or ()
    )
    action = lookup.get(parsed.content.lower()) if action_lookup else parsed.content
    return {"action": action, "action_content": parsed.content, "think_content": parsed.think}


def symbols_in_effect(
    env_id: str, standard: str, grid_lookup: Mapping[int, str] | None
) -> list[str]:
    """The symbols of a board, each `standard` one or what ROLL's `grid_lookup` has under its number."""
    unknown = [number for number in grid_lookup or {} if number not in range(len(standard))]
    if unknown:
        raise ConfigError(
            f"{env_id}: grid_lookup: found {unknown}, expected numbers from 0 to {len(standard) - 1}"
        )
    return [(grid_lookup or {}).get(number, symbol) for number, symbol in enumerate(standard)]


def meanings(grid_vocab: Mapping[str, str] | None) -> str:
    """A sentence that explains symbols, behind a space; nothing for None."""
    if grid_vocab is None:
        return ""
    return (
        " The symbols are "
        + ", ".join(f"{symbol}: {meaning}" for symbol, meaning in grid_vocab.items())
        + "."
    )
