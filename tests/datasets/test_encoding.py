"""Prompts, and rows to imitate: columns, templates, lengths, and what is left out."""

import pytest
from tiny_models import tiny_tokenizer

from roll.datasets.encoding import LABEL_PAD, encode_answers, encode_prompts
from roll.datasets.tables import Table
from roll.exceptions import DataError

TOKENIZER = tiny_tokenizer()


def encode(rows, function=encode_prompts, **options):
    options = {"max_length": 40, "template": "base", **options}
    return function(Table("data.jsonl", rows), TOKENIZER, **options)


def test_a_prompt_has_its_tokens_and_its_row():
    prompt = encode([{"prompt": "1+1=", "ground_truth": "2", "tag": "sum", "level": 3}])[0]
    assert TOKENIZER.decode(list(prompt.ids)) == prompt.text == prompt.question == "1+1="
    assert (prompt.ground_truth, prompt.tag, prompt.row["level"]) == ("2", "sum", 3)


def test_messages_are_rendered_with_the_template_of_their_tag():
    rows = [{"messages": [{"role": "user", "content": "hi"}], "tag": tag} for tag in ("a", "b")]
    prompts = encode(rows, template="chatml", tag_to_template={"b": "base"})
    chatml = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [prompt.text for prompt in prompts] == [chatml, "hi"]
    assert [prompt.question for prompt in prompts] == ["hi", "hi"]


def test_the_column_can_be_named_and_a_missing_one_lists_those_there_are():
    assert encode([{"question": "x"}], prompt_key="question")[0].text == "x"
    with pytest.raises(
        DataError, match=r"data.jsonl has no column prompt; its columns are: question, truth"
    ):
        encode([{"question": "x", "truth": "y"}])
    with pytest.raises(
        DataError, match=r"no column chat; its columns are: question. .* data_args.messages"
    ):
        encode([{"question": "x"}], messages_key="chat")
    with pytest.raises(DataError, match=r"data.jsonl, row 2: column 'prompt' has no prompt in it"):
        encode([{"prompt": "x"}, {"prompt": None}])


def test_long_and_empty_prompts_are_counted_and_none_left_is_an_error():
    rows = [{"prompt": text} for text in ("short", "x" * 41, "x" * 40, " ")]
    prompts = encode(rows)
    assert [prompt.text for prompt in prompts] == ["short", "x" * 40]
    assert [prompt.row for prompt in prompts] == [rows[0], rows[2]]
    assert prompts.summary.to_dict() == {
        "rows_read": 4,
        "kept": 2,
        "truncated": 0,
        "dropped": {
            "too_long": {"count": 1, "first": "data.jsonl, row 2"},
            "empty_prompt": {"count": 1, "first": "data.jsonl, row 4"},
        },
        "lengths": {"prompt": {"min": 5, "mean": 22.5, "max": 40}},
    }
    with pytest.raises(
        DataError,
        match=r"no prompt is left. The longest of them has 50 tokens and prompt_length is 40",
    ):
        encode([{"prompt": "x" * 50}, {"prompt": "y" * 45}])


def trained(row) -> str:
    return TOKENIZER.decode([int(label) for label in row["labels"] if label != LABEL_PAD])


def test_the_answer_and_the_end_token_are_trained():
    rows = encode([{"prompt": "12<", "response": "21"}], encode_answers)
    assert TOKENIZER.decode(rows[0]["input_ids"].tolist()) == "12<21<|im_end|>"
    assert trained(rows[0]) == "21<|im_end|>" and (rows[0]["labels"] == LABEL_PAD).sum() == 3
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = encode([{"messages": chat}], encode_answers, template="chatml")
    assert trained(rows[0]) == "b<|im_end|>\n", "a conversation may hold the answer itself"


def test_answers_that_are_left_out_or_missing():
    rows = [{"prompt": "a", "solution": "b"}, {"prompt": "a", "solution": ""}]
    kept = encode(rows, encode_answers, answer_key="solution")
    assert len(kept) == 1 and kept.summary.dropped["empty_answer"]["count"] == 1
    with pytest.raises(
        DataError, match=r"no row is left to train on.\n1 rows read, 0 kept, 1 dropped"
    ):
        encode([{"prompt": "a", "response": "b" * 60}], encode_answers)
    with pytest.raises(DataError, match=r"no column response; its columns are: prompt, answer"):
        encode([{"prompt": "a", "answer": "b"}], encode_answers)
    with pytest.raises(
        DataError, match=r"data.jsonl, row 1: column 'response' holds a int: 3, expected text"
    ):
        encode([{"prompt": "a", "response": 3}], encode_answers)
