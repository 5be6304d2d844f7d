"""Prompts from tables: columns, templates, lengths, domains, and an order that resumes exactly."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from roll.datasets.prompts import EVERYTHING, PromptSampler, domain_sizes, encode_prompts
from roll.datasets.table import RowsTable
from roll.exceptions import DataError

TOKENIZER = tiny_tokenizer()


def encode(rows, **options):
    return encode_prompts(
        RowsTable("data.jsonl", rows),
        TOKENIZER,
        **{"max_length": 40, "template": "base", **options},
    )


def two_domains(num: int = 10):
    rows = [{"prompt": f"q{i}", "domain": "math" if i % 2 else "code"} for i in range(num)]
    return encode(rows, domain_of=lambda row: row["domain"])


def test_a_prompt_has_its_tokens_and_its_row():
    prompt = encode([{"prompt": "1+1=", "ground_truth": "2", "tag": "sum", "level": 3}])[0]
    assert TOKENIZER.decode(list(prompt.ids)) == prompt.text == prompt.question == "1+1="
    assert (prompt.ground_truth, prompt.tag, prompt.row["level"]) == ("2", "sum", 3)


def test_messages_are_rendered_with_the_template_of_their_tag():
    rows = [{"messages": [{"role": "user", "content": "hi"}], "tag": tag} for tag in ("a", "b")]
    prompts = encode(rows, template="chatml", tag_to_template={"b": "base"})
    assert [prompt.text for prompt in prompts] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "hi",
    ]
    assert [prompt.question for prompt in prompts] == ["hi", "hi"]


def test_the_column_can_be_named_and_a_missing_one_lists_those_there_are():
    assert encode([{"question": "x"}], prompt_key="question")[0].text == "x"
    with pytest.raises(
        DataError, match=r"data.jsonl has no column prompt; its columns are: question, ground_truth"
    ):
        encode([{"question": "x", "ground_truth": "y"}])
    with pytest.raises(
        DataError, match=r"no column chat; its columns are: question. .* data_args.messages"
    ):
        encode([{"question": "x"}], messages_key="chat")


def test_long_prompts_are_dropped_and_counted_and_none_left_is_an_error():
    prompts = encode([{"prompt": "short"}, {"prompt": "x" * 41}, {"prompt": "x" * 40}])
    assert [prompt.text for prompt in prompts] == ["short", "x" * 40]
    assert prompts.summary.dropped["too_long"].count == 1
    with pytest.raises(
        DataError,
        match=r"no prompt is left. The longest of them has 50 tokens and prompt_length is 40",
    ):
        encode([{"prompt": "x" * 50}, {"prompt": "y" * 45}])


def test_a_row_without_a_prompt_is_named():
    with pytest.raises(DataError, match=r"data.jsonl, row 2: column 'prompt' has no prompt in it"):
        encode([{"prompt": "x"}, {"prompt": None}])


@pytest.mark.parametrize(
    ("num", "shares", "sizes"),
    [
        (64, {"a": 0.7, "b": 0.3}, {"a": 44, "b": 20}),
        (100, {"a": 0.29, "b": 0.71}, {"a": 29, "b": 71}),  # int(0.29 * 100) is 28
        (10, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 3, "b": 3, "c": 4}),
        (7, {"a": 1.0}, {"a": 7}),
    ],
)
def test_shares_become_whole_prompts(num, shares, sizes):
    assert domain_sizes(num, shares) == sizes


@given(num=st.integers(1, 500), parts=st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_all_prompts_are_dealt(num, parts):
    shares = {str(i): part / sum(parts) for i, part in enumerate(parts)}
    sizes = domain_sizes(num, shares)
    assert sum(sizes.values()) == num
    assert all(abs(sizes[name] - num * share) < len(parts) for name, share in shares.items())


def test_domains_come_by_their_shares_and_each_in_its_own_order():
    draw = PromptSampler(two_domains(), seed=0, shares={"math": 0.75, "code": 0.25})
    batch = draw.batch(4)
    assert [prompt.domain for prompt in batch] == ["math"] * 3 + ["code"]
    other = PromptSampler(two_domains(), seed=0, shares={"math": 0.75, "code": 0.25})
    other.take("code", 3)
    assert [p.index for p in other.take("math", 3)] == [p.index for p in batch[:3]], (
        "one domain does not move another"
    )


def test_every_prompt_comes_once_an_epoch():
    draw = PromptSampler(two_domains(10), seed=1)
    seen = [prompt.index for _ in range(5) for prompt in draw.batch(4)]
    assert Counter(seen) == dict.fromkeys(range(10), 2)
    assert draw.epoch == 2
    assert draw.pool_of(draw.dataset[0]) == EVERYTHING


def test_a_saved_position_goes_on_exactly():
    shares = {"math": 0.5, "code": 0.5}
    draw = PromptSampler(two_domains(), seed=5, shares=shares)
    draw.batch(6)
    draw.take("math", 1)
    state = draw.state_dict()
    following = [prompt.index for _ in range(4) for prompt in draw.batch(4)]
    resumed = PromptSampler(two_domains(), seed=5, shares=shares)
    resumed.load_state_dict(state)
    assert [prompt.index for _ in range(4) for prompt in resumed.batch(4)] == following
    with pytest.raises(DataError, match="made with seed=5, this run has 6"):
        PromptSampler(two_domains(), seed=6, shares=shares).load_state_dict(state)
    with pytest.raises(DataError, match="of the domains math, code, this run has all"):
        PromptSampler(two_domains(), seed=5).load_state_dict(state)


def test_a_domain_without_prompts_is_named(tmp_path: Path):
    with pytest.raises(
        DataError,
        match=r"domain 'law' of domain_interleave_probs has no prompt; the prompts are of code",
    ):
        PromptSampler(two_domains(), seed=0, shares={"law": 0.5, "math": 0.5})
