"""Rows to imitate: which tokens are trained, and what is left out."""

import pytest
from tiny_models import tiny_tokenizer

from roll.datasets.prompt_answers import LABEL_PAD, encode_answers
from roll.datasets.table import RowsTable
from roll.exceptions import DataError

TOKENIZER = tiny_tokenizer()


def encode(rows, **options):
    table = RowsTable("data.jsonl", rows)
    return encode_answers(table, TOKENIZER, **{"max_length": 40, "template": "base", **options})


def trained(row) -> str:
    return TOKENIZER.decode([int(label) for label in row["labels"] if label != LABEL_PAD])


def test_the_answer_and_the_end_token_are_trained():
    rows = encode([{"prompt": "12<", "response": "21"}])
    assert TOKENIZER.decode(rows[0]["input_ids"].tolist()) == "12<21<|im_end|>"
    assert trained(rows[0]) == "21<|im_end|>"
    assert (rows[0]["labels"] == LABEL_PAD).sum() == 3


def test_a_conversation_may_hold_the_answer_itself():
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert trained(encode(rows, template="chatml")[0]) == "b<|im_end|>\n"


def test_what_is_left_out_is_counted_and_nothing_left_is_an_error():
    rows = encode(
        [{"prompt": "a", "solution": "b"}, {"prompt": "a", "solution": ""}], answer_key="solution"
    )
    assert len(rows) == 1 and rows.summary.dropped["empty_answer"].count == 1
    with pytest.raises(
        DataError, match=r"no row is left to train on.\n1 rows read, 0 kept, 1 dropped"
    ):
        encode([{"prompt": "a", "response": "b" * 60}])


def test_a_missing_answer_column_lists_those_there_are():
    with pytest.raises(DataError, match=r"has no column response; its columns are: prompt, answer"):
        encode([{"prompt": "a", "answer": "b"}])
    with pytest.raises(
        DataError, match=r"data.jsonl, row 1: column 'response' holds a int: 3, expected text"
    ):
        encode([{"prompt": "a", "response": 3}])
