"""Conversations in all the forms that files hold them in."""

from __future__ import annotations

import json

import pytest

from roll.datasets.messages import parse_messages

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "value",
    [
        [USER],
        USER,
        json.dumps([USER]),
        f"  {json.dumps([USER])}\n",
        [{"from": "human", "value": "hi"}],
        json.dumps([{"from": "human", "value": "hi"}]),
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            }
        ],
        [{"role": "user", "content": "hi", "tool_calls": None, "name": None}],
    ],
)
def test_forms_of_one_message(value: object) -> None:
    assert parse_messages(value) == [USER]


def test_sharegpt_roles() -> None:
    values = [{"from": role, "value": role} for role in ("system", "human", "gpt", "tool")]
    parsed = parse_messages(values)
    assert parsed is not None
    assert [message["role"] for message in parsed] == ["system", "user", "assistant", "tool"]


def test_other_keys_are_kept_and_a_tool_call_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert parse_messages([message]) == [
        {"role": "assistant", "tool_calls": [{"name": "f"}], "content": ""}
    ]


@pytest.mark.parametrize(
    "value",
    [None, "hi", "", "[1, 2]", "[not json]", '["a"]', '{"role": "user", "content": "x"}', "[]"],
)
def test_plain_text_is_not_a_conversation(value: object) -> None:
    assert parse_messages(value) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "expected text or a list of messages, found a int: 5"),
        ([], "the list of messages is empty"),
        (["hi"], "message 1 is not an object with role and content but a str: 'hi'"),
        ([USER, {"content": "x"}], "message 2 has no role; its keys are: content"),
        ([{}], "message 1 has no role; its keys are: none"),
        (
            [USER, {"role": "assistant"}],
            r"message 2 \(role assistant\) has nothing as content, expected text",
        ),
        (
            [{"role": "user", "content": 7}],
            r"message 1 \(role user\) has a int: 7 as content, expected text",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 1 has a content part that is not text: a dict",
        ),
    ],
)
def test_what_is_not_a_conversation(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        parse_messages(value)
