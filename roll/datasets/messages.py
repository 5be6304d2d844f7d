"""Conversations in the forms that data files hold them in, brought to one: a list of {"role": ..., "content": ...}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# "role" and "content", and what some templates read besides (tool_calls, name, reasoning_content ...), so Any.
Message = dict[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def parse_messages(value: object) -> list[Message] | None:
    """The conversation that a cell holds, or None if it holds plain text or nothing.

    Taken as a conversation: a list of messages, such a list written as JSON text (the only way to put one into a CSV
    file), and a single message. A message is {"role", "content"} or ShareGPT's {"from", "value"}; content may be a list
    of text parts. Keys that hold None are left out: columnar files give every message the keys of all the others.

    Raises ValueError, without a place, for a list or an object that is not a conversation.

    >>> parse_messages([{"from": "human", "value": "hi"}])
    [{'role': 'user', 'content': 'hi'}]
    >>> parse_messages("hi") is None
    True
    """
    if isinstance(value, str):
        value = _conversation_in_json(value)
    if value is None:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"expected text or a list of messages, found {_shown(value)}")
    if not value:
        raise ValueError("the list of messages is empty")
    return [_parse_message(message, index) for index, message in enumerate(value)]


def roles_of(conversation: Sequence[Message]) -> str:
    """`user, assistant`: for error messages."""
    return ", ".join(str(message["role"]) for message in conversation)


def _conversation_in_json(text: str) -> list[Any] | None:
    """The list that JSON text holds, if it has the looks of a conversation; None for all other text."""
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith("]")):
        return None
    try:
        messages = json.loads(stripped)
    except ValueError:
        return None  # an answer that begins with a bracket
    looks_right = messages and all(
        isinstance(message, dict)
        and ({"role", "content"} <= message.keys() or {"from", "value"} <= message.keys())
        for message in messages
    )
    return messages if looks_right else None


def _parse_message(message: object, index: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(
            f"message {index + 1} is not an object with role and content but {_shown(message)}"
        )
    given = {key: value for key, value in message.items() if value is not None}
    if "from" in given and "role" not in given:
        role = given.pop("from")
        given = {
            "role": _SHAREGPT_ROLES.get(role, role),
            "content": given.pop("value", None),
            **given,
        }
    if not isinstance(given.get("role"), str):
        raise ValueError(
            f"message {index + 1} has no role; its keys are: {', '.join(map(str, message)) or 'none'}"
        )
    content = given.get("content")
    if isinstance(content, list):
        content = _join_text_parts(content, index)
    # An assistant that only calls a tool says nothing.
    if content is None and "tool_calls" in given:
        content = ""
    if not isinstance(content, str):
        raise ValueError(
            f"message {index + 1} (role {given['role']}) has {_shown(content)} as content, expected text"
        )
    return {**given, "content": content}


def _join_text_parts(parts: list[Any], index: int) -> str:
    for part in parts:
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            raise ValueError(
                f"message {index + 1} has a content part that is not text: {_shown(part)}"
            )
    return "".join(part["text"] for part in parts)


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"a {type(value).__name__}: {text[:60]}{'...' if len(text) > 60 else ''}"
