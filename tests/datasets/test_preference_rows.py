"""Rows to pairs: the layouts that people have, and those that are not pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.datasets.preference_rows import (
    PreferenceRow,
    find_preference_columns,
    is_same_answer,
    parse_preference_row,
    says_nothing,
)
from roll.datasets.table import RowsTable
from roll.exceptions import DataError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def parse(row: dict[str, Any], *, allow_bare_texts: bool = False, **keys: str) -> PreferenceRow:
    table = RowsTable("pairs.jsonl", [row])
    columns = find_preference_columns(table, **keys)
    return parse_preference_row(row, columns, "pairs.jsonl:7", allow_bare_texts=allow_bare_texts)


SIMPLE = PreferenceRow([user("Q")], [answer("A")], [answer("B")])


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Q", "chosen": "A", "rejected": "B"},
        {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
        {"instruction": "Q", "input": None, "chosen": "A", "rejected": "B"},
        {"prompt": "Q", "chosen": "A", "rejected": "B", "input": "not part of this layout"},
        {"question": "Q", "chosen": "A", "rejected": "B"},
        {"prompt": [user("Q")], "chosen": "A", "rejected": "B"},
        {"prompt": "Q", "chosen": [answer("A")], "rejected": [answer("B")]},
        {"prompt": "Q", "chosen": answer("A"), "rejected": answer("B")},
        {"prompt": [user("Q")], "chosen": [answer("A")], "rejected": [answer("B")]},
        {"chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]},
        {
            "prompt": "  q. ",
            "chosen": [user("Q"), answer("A")],
            "rejected": [user("Q"), answer("B")],
        },
        {
            "prompt": [user("Q")],
            "chosen": [user("Q"), answer("A")],
            "rejected": [user("Q"), answer("B")],
        },
        {"prompt": None, "chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]},
        {"prompt": '[{"role": "user", "content": "Q"}]', "chosen": "A", "rejected": "B"},
        {"prompt": "Q", "system": "", "chosen": "A", "rejected": "B"},
    ],
)
def test_layouts(row: dict[str, Any]) -> None:
    assert parse(row) == SIMPLE


def test_names_of_columns_can_be_given() -> None:
    row = {"text": "Q", "good": "A", "bad": "B", "prompt": "not this", "chosen": "nor this"}
    assert parse(row, chosen_key="good", rejected_key="bad", prompt_key="text") == SIMPLE


def test_input_is_appended_to_the_instruction() -> None:
    row = {"instruction": "Translate.", "input": "bonjour", "chosen": "A", "rejected": "B"}
    assert parse(row).prompt == [user("Translate.\nbonjour")]


def test_system_column() -> None:
    row = {"prompt": "Q", "system": "S", "chosen": "A", "rejected": "B"}
    assert parse(row).prompt == [system("S"), user("Q")]
    conversations = {
        "chosen": [system("S"), user("Q"), answer("A")],
        "rejected": [system("S"), user("Q"), answer("B")],
    }
    assert parse({**conversations, "system": "S"}).prompt == [system("S"), user("Q")]
    with pytest.raises(
        DataError, match="a text in 'system' and another one as system message; keep one"
    ):
        parse({**conversations, "system": "other"})


def test_the_shared_messages_are_the_prompt() -> None:
    shared = [system("S"), user("Q"), answer("R"), user("S")]
    pair = parse({"chosen": [*shared, answer("A")], "rejected": [*shared, answer("B")]})
    assert pair == PreferenceRow(shared, [answer("A")], [answer("B")])


def test_the_last_message_is_the_answer_even_where_both_are_equal() -> None:
    pair = parse({"chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("A")]})
    assert pair == PreferenceRow([user("Q")], [answer("A")], [answer("A")])


def test_answers_over_several_turns_are_kept_together() -> None:
    pair = parse(
        {
            "chosen": [user("Q"), answer("A"), user("R"), answer("C")],
            "rejected": [user("Q"), answer("B")],
        }
    )
    assert pair == PreferenceRow([user("Q")], [answer("A"), user("R"), answer("C")], [answer("B")])


def test_bare_texts_share_their_first_words() -> None:
    row = {
        "chosen": "Human: 2+2? Assistant: It is 4",
        "rejected": "Human: 2+2? Assistant: It is 45",
    }
    pair = parse(row, allow_bare_texts=True)
    assert pair.prompt == [user("Human: 2+2? Assistant: It is")]
    assert (pair.chosen, pair.rejected) == ([answer(" 4")], [answer(" 45")])
    pair = parse({"chosen": "Q\nA", "rejected": "Q\nB"}, allow_bare_texts=True)
    assert pair == PreferenceRow([user("Q\n")], [answer("A")], [answer("B")])
    pair = parse({"chosen": "same text", "rejected": "same text"}, allow_bare_texts=True)
    assert is_same_answer(pair.chosen, pair.rejected)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Q", "chosen": None, "rejected": "B"}, "'chosen' has no value"),
        ({"prompt": None, "chosen": "A", "rejected": "B"}, "'prompt' has no value"),
        (
            {"prompt": 3, "chosen": "A", "rejected": "B"},
            "column 'prompt': expected text or a list of messages, found a int: 3",
        ),
        (
            {"prompt": "Q", "chosen": "A", "rejected": []},
            "column 'rejected': the list of messages is empty",
        ),
        (
            {"prompt": "Q", "chosen": "A", "rejected": [answer("B")]},
            "'chosen' is text but 'rejected' is a list of messages",
        ),
        (
            {"prompt": "Q", "system": 1, "chosen": "A", "rejected": "B"},
            "column 'system' holds a int, expected text",
        ),
        (
            {"instruction": "Q", "input": [user("x")], "chosen": "A", "rejected": "B"},
            "column 'input' holds messages",
        ),
        (
            {"chosen": [answer("A")], "rejected": [answer("B")]},
            "there is no prompt; the roles are assistant in chosen and assistant in rejected. Give a prompt column",
        ),
        (
            {"prompt": "Q", "chosen": [answer("A")], "rejected": [user("Q"), answer("B")]},
            "there is no prompt; the roles are assistant in chosen and user, assistant in rejected",
        ),
        (
            {"chosen": [user("Q"), answer("A")], "rejected": [user("P"), answer("B")]},
            r"the chosen answer begins with a message of role 'user', not 'assistant' \(after 0 messages of prompt",
        ),
        (
            {"chosen": [user("Q"), answer("A"), user("R")], "rejected": [user("Q"), answer("B")]},
            r"the chosen answer ends with a message of role 'user', .* its roles are assistant, user\)",
        ),
        (
            {
                "prompt": [user("P")],
                "chosen": [user("Q"), answer("A")],
                "rejected": [user("Q"), answer("B")],
            },
            "chosen and rejected do not both begin with the messages of the prompt",
        ),
        (
            {"chosen": "Q: A", "rejected": "Q: B"},
            "are texts and the file has no prompt column .instruction, prompt, question",
        ),
    ],
)
def test_rows_that_are_not_pairs(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"^pairs.jsonl:7: is not a pair: .*{reason}"):
        parse(row)


def test_bare_texts_without_a_shared_word() -> None:
    with pytest.raises(DataError, match="there is no prompt; the two texts share no first word"):
        parse({"chosen": "yes", "rejected": "no"}, allow_bare_texts=True)


def test_a_row_may_lack_a_column_that_others_have(tmp_path: Path) -> None:
    table = RowsTable(
        "pairs.jsonl",
        [{"prompt": "Q", "chosen": "A", "rejected": "B"}, {"prompt": "Q", "chosen": "A"}],
    )
    with pytest.raises(DataError, match=r"pairs.jsonl:2: is not a pair: 'rejected' has no value"):
        parse_preference_row(table[1], find_preference_columns(table), "pairs.jsonl:2")


def test_missing_columns_list_those_found() -> None:
    table = RowsTable("pairs.jsonl", [{"prompt": "Q", "better": "A", "rejected": "B"}])
    expected = "pairs.jsonl has no column chosen; its columns are: prompt, better, rejected. Set chosen_key"
    with pytest.raises(DataError, match=expected):
        find_preference_columns(table)
    with pytest.raises(DataError, match="has no column ask; "):
        find_preference_columns(table, chosen_key="better", prompt_key="ask")


def test_what_counts_as_empty_and_as_equal() -> None:
    assert says_nothing([answer(" \n")])
    assert not says_nothing([{**answer(""), "tool_calls": [{"name": "f"}]}])
    assert is_same_answer([answer("4 ")], [answer("4")])
    assert not is_same_answer([answer("4")], [answer("4.")])
    assert not is_same_answer(
        [{**answer(""), "tool_calls": ["f"]}], [{**answer(""), "tool_calls": ["g"]}]
    )
