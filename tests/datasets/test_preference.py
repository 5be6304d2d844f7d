"""Preference pairs as tokens: the answer is trained, all of it and nothing else, wherever tokens are joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tiny_tokenizer import BOS, EOS, bpe_tokenizer
from transformers import PreTrainedTokenizerBase

from roll.datasets.files import load_table
from roll.datasets.preference import PreferenceDataset, encode_preferences
from roll.datasets.table import JoinedTable, RowsTable
from roll.exceptions import ConfigError, DataError

TOKENIZER = bpe_tokenizer()


def row(prompt: Any, chosen: Any, rejected: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def encode(
    *rows: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    max_length: int = 512,
    **options: Any,
) -> PreferenceDataset:
    return encode_preferences(
        RowsTable("pairs.jsonl", rows), tokenizer, max_length=max_length, **options
    )


def trained(
    dataset: PreferenceDataset,
    index: int,
    side: str,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
) -> str:
    pair: Any = dataset[index]
    return tokenizer.decode(pair[f"{side}_ids"][pair[f"{side}_prompt_len"] :])


def untrained(
    dataset: PreferenceDataset,
    index: int,
    side: str,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
) -> str:
    pair: Any = dataset[index]
    return tokenizer.decode(pair[f"{side}_ids"][: pair[f"{side}_prompt_len"]])


def pieces(ids: np.ndarray) -> list[str]:
    return TOKENIZER.convert_ids_to_tokens(ids.tolist())


# --- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["native", "chatml", "empty", "qwen3"])
def test_answer_and_end_of_turn_are_trained_and_the_header_is_not(template: str) -> None:
    dataset = encode(row("2+2?", "It is 4.", "five"), template=template)
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    for side, text in (("chosen", "It is 4."), ("reject", "five")):
        assert trained(dataset, 0, side) == text + "<|im_end|>\n"
        assert untrained(dataset, 0, side) == prompt


def test_base_trains_the_answer_and_the_end_token() -> None:
    dataset = encode(row("add ", "seven", "8"), template="base")
    assert pieces(dataset[0]["chosen_ids"]) == ["add", "Ġ", "s", "e", "v", "e", "n", EOS]
    assert pieces(dataset[0]["reject_ids"]) == ["add", "Ġ", "8", EOS]
    assert (dataset[0]["chosen_prompt_len"], dataset[0]["reject_prompt_len"]) == (2, 2)


def test_a_token_that_spans_prompt_and_answer_is_trained_on_its_own_side_only() -> None:
    dataset = encode(row("add ", "4", "8"), template="base")
    assert pieces(dataset[0]["chosen_ids"]) == ["add", "Ġ4", EOS]
    assert pieces(dataset[0]["reject_ids"]) == ["add", "Ġ", "8", EOS]
    # Counting the prompt's own two tokens on the chosen side would leave only the end token to train.
    assert (dataset[0]["chosen_prompt_len"], dataset[0]["reject_prompt_len"]) == (1, 2)
    assert trained(dataset, 0, "chosen") == f" 4{EOS}"


def test_a_newline_that_joins_the_header_is_trained() -> None:
    dataset = encode(row("2+2?", "\nfour", "five"))
    chosen = pieces(dataset[0]["chosen_ids"])
    start = dataset[0]["chosen_prompt_len"]
    assert chosen[start - 1 : start + 2] == ["t", "ĊĊ", "f"]
    assert trained(dataset, 0, "reject") == "five<|im_end|>\n"


def test_a_beginning_of_text_token_comes_once() -> None:
    with_bos = "{{ bos_token }}" + str(TOKENIZER.chat_template)
    tokenizer = bpe_tokenizer(adds_bos=True, chat_template=with_bos)
    for template in ("native", "base"):
        ids = encode(row("2+2?", "4", "5"), tokenizer=tokenizer, template=template)[0][
            "chosen_ids"
        ].tolist()
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids).startswith(
            BOS + ("2+2?" if template == "base" else "<|im_start|>")
        )
    ids = encode(row("2+2?", "4", "5"), tokenizer=tokenizer, template="chatml")[0][
        "chosen_ids"
    ].tolist()
    assert tokenizer.bos_token_id not in ids


def test_a_thought_that_only_the_generation_prompt_opens_is_not_part_of_the_prompt() -> None:
    dataset = encode(row("2+2?", "4", "5"), template="longcot_V3")
    assert trained(dataset, 0, "chosen") == "4<|im_end|>\n"
    dataset = encode(row("2+2?", "<think>\neasy</think>4", "5"), template="longcot_V3")
    assert trained(dataset, 0, "chosen") == "easy</think>4<|im_end|>\n"


# As Qwen's: a default system text, an empty thought before an answer that has none, and in the header if asked for.
THINKING = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_an_empty_thought_is_trained_unless_the_header_has_it() -> None:
    tokenizer = bpe_tokenizer(chat_template=THINKING)
    head = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\n\n</think>\n\n"
    dataset = encode(row("2+2?", "4", "5"), tokenizer=tokenizer, template="qwen3")
    assert untrained(dataset, 0, "chosen") == head
    assert trained(dataset, 0, "chosen") == f"{thought}4<|im_end|>\n"
    dataset = encode(
        row("2+2?", "4", "5"),
        tokenizer=tokenizer,
        template="qwen3",
        template_options={"enable_thinking": False},
    )
    assert untrained(dataset, 0, "chosen") == head + thought
    assert trained(dataset, 0, "chosen") == "4<|im_end|>\n"


def test_conversations_and_system_texts() -> None:
    turns = [user("a"), answer("b"), user("c")]
    dataset = encode(
        {"chosen": [*turns, answer("X")], "rejected": [*turns, answer("Y")], "system": "S"}
    )
    assert untrained(dataset, 0, "chosen") == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(dataset, 0, "chosen") == "X<|im_end|>\n"


def test_bare_texts_with_base() -> None:
    rows = {"chosen": "Q: 2+2? A: four", "rejected": "Q: 2+2? A: five"}
    dataset = encode(rows, template="base")
    assert untrained(dataset, 0, "chosen") == "Q: 2+2? A:"
    assert trained(dataset, 0, "chosen") == f" four{EOS}"
    with pytest.raises(
        DataError, match=r"pairs.jsonl, row 1: is not a pair: .* set the template to base"
    ):
        encode(rows, template="native")


texts = st.text(st.sampled_from("ad1045 =?\nÄ"), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(prompt=texts, chosen=texts, rejected=texts, template=st.sampled_from(["chatml", "base"]))
def test_the_mask_covers_the_answer_exactly(
    prompt: str, chosen: str, rejected: str, template: str
) -> None:
    try:
        dataset = encode(row(prompt, chosen, rejected), template=template)
    except DataError as error:
        if "no preference pair is left" not in str(error):
            raise
        assert (
            chosen.strip() == rejected.strip()
            or not (prompt.strip() and chosen.strip() and rejected.strip())
            or (template == "base" and "empty prompt" in str(error))
        )
        return
    head = (
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        if template == "chatml"
        else prompt
    )
    end = "<|im_end|>\n" if template == "chatml" else EOS
    for side, text in (("chosen", chosen), ("reject", rejected)):
        pair: Any = dataset[0]
        ids, prompt_len = pair[f"{side}_ids"], pair[f"{side}_prompt_len"]
        # The ids are those of the whole text: what the model meets when it answers.
        assert ids.tolist() == TOKENIZER(head + text + end, add_special_tokens=False)["input_ids"]
        masked = TOKENIZER.decode(ids[prompt_len:])
        # Nothing of the answer is left out, and of the prompt only what is cut into other tokens once it is there: for
        # "0? " and "1" these are "0", "? " alone, and "0", "?", " 1" together.
        assert masked.endswith(text + end)
        alone = TOKENIZER(head, add_special_tokens=False)["input_ids"]
        assert ids[:prompt_len].tolist() == alone[:prompt_len]
        assert prompt_len == len(alone) or ids[prompt_len] != alone[prompt_len]
        if TOKENIZER.decode(ids[:prompt_len]) == head:
            assert masked == text + end


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.text("abc 12?", min_size=1).filter(str.strip),
    answers=st.sets(st.text("abc 12\n", min_size=1), min_size=2, max_size=2),
)
def test_without_merges_the_mask_is_the_answer_to_the_letter(
    prompt: str, answers: set[str]
) -> None:
    tokenizer = tiny_tokenizer()
    chosen, rejected = sorted(answers)
    if not chosen.strip() or not rejected.strip() or chosen.strip() == rejected.strip():
        return
    dataset = encode(row(prompt, chosen, rejected), tokenizer=tokenizer)
    for side, text in (("chosen", chosen), ("reject", rejected)):
        assert trained(dataset, 0, side, tokenizer) == text + "<|im_end|>\n"
        assert untrained(dataset, 0, side, tokenizer).endswith(
            f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )


# --- what is left out ------------------------------------------------------------------------------------------------


def reasons(dataset: PreferenceDataset) -> dict[str, int]:
    return {reason: entry.count for reason, entry in dataset.summary.dropped.items()}


def test_rows_are_counted_by_reason() -> None:
    dataset = encode(
        row("Q", "A", "B"),
        row("Q", "A", " A"),
        row("Q", "", "B"),
        row("Q", "A", " \n"),
        row(" ", "A", "B"),
        row("Q", "A" * 600, "B"),
        row("Q", [answer("A"), user("R"), answer("C")], [answer("B")]),
        row("Q", "C", "D"),
    )
    assert reasons(dataset) == {
        "equal_answers": 1,
        "empty_answer": 2,
        "empty_prompt": 1,
        "too_long": 1,
        "several_turns": 1,
    }
    assert (dataset.summary.rows_read, dataset.summary.kept, dataset.summary.num_dropped) == (
        8,
        2,
        6,
    )
    assert len(dataset) == 2
    assert dataset.origins.tolist() == [0, 7]
    assert dataset.summary.dropped["empty_answer"].first == "pairs.jsonl, row 3"
    assert "1 with a side longer than 512 tokens (first: pairs.jsonl, row 6)" in str(
        dataset.summary
    )
    assert "2 with an empty answer" in str(dataset.summary)
    json.dumps(dataset.summary.to_dict())


def test_nothing_left_is_an_error_with_the_reasons() -> None:
    with pytest.raises(DataError) as error:
        encode(row("Q", "A", "A"), row("Q", "", "B"))
    assert str(error.value) == (
        "pairs.jsonl: no preference pair is left to train on.\n"
        "2 rows read, 0 kept, 2 dropped\n"
        "  1 whose two answers are equal (first: pairs.jsonl, row 1)\n"
        "  1 with an empty answer (first: pairs.jsonl, row 2)"
    )


def test_a_template_that_rewrites_the_prompt_when_the_answer_follows() -> None:
    # As those that remove a thought from every message but the last one.
    rewriting = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = bpe_tokenizer(chat_template=rewriting)
    dataset = encode(row("<think>a</think>b", "A", "B"), row("b", "A", "B"), tokenizer=tokenizer)
    assert reasons(dataset) == {"prompt_rewritten": 1}
    assert untrained(dataset, 0, "chosen") == "[user]b[assistant]"


def test_the_lengths_in_the_summary_are_those_of_the_rows() -> None:
    dataset = encode(row("add", "ad", "1010"), row("add add", "a", "xyz"), template="base")
    # add | ad <eos>; add | 10 10 <eos>; add Ġ add | a <eos>; add Ġ add | x y z <eos>
    assert dataset.lengths.tolist() == [3, 4, 5, 7]
    assert dataset.prompt_lens.tolist() == [1, 1, 3, 3]
    lengths = {name: (s.min, s.mean, s.max) for name, s in dataset.summary.lengths.items()}
    assert lengths == {
        "prompt": (1, 2.0, 3),
        "chosen answer": (2, 2.0, 2),
        "rejected answer": (3, 3.5, 4),
        "longest side": (4, 5.5, 7),
    }
    assert str(dataset.summary).splitlines() == [
        "2 rows read, 2 kept, 0 dropped",
        "  tokens of prompt: 1 to 3 (mean 2.0)",
        "  tokens of chosen answer: 2 to 2 (mean 2.0)",
        "  tokens of rejected answer: 3 to 4 (mean 3.5)",
        "  tokens of longest side: 4 to 7 (mean 5.5)",
    ]


# --- too long --------------------------------------------------------------------------------------------------------

LONG = row("abcd", "vwxyz", "u")  # base: 4 + 5 + 1 tokens and 4 + 1 + 1


def ids_as_text(dataset: PreferenceDataset, side: str) -> str:
    pair: Any = dataset[0]
    return TOKENIZER.decode(pair[f"{side}_ids"])


def test_a_side_of_exactly_the_length_fits() -> None:
    assert reasons(encode(LONG, template="base", max_length=10)) == {}
    with pytest.raises(DataError, match="1 with a side longer than 9 tokens"):
        encode(LONG, template="base", max_length=9)


def test_truncating_the_answer() -> None:
    dataset = encode(LONG, template="base", max_length=6, overlong="truncate_answer")
    assert ids_as_text(dataset, "chosen") == "abcdvw"
    assert ids_as_text(dataset, "reject") == f"abcdu{EOS}"
    assert dataset.prompt_lens.tolist() == [4, 4]
    assert dataset.summary.truncated == 1
    assert "1 truncated" in str(dataset.summary)
    with pytest.raises(DataError, match="1 whose prompt alone fills 4 tokens"):
        encode(LONG, template="base", max_length=4, overlong="truncate_answer")


def test_answers_that_are_equal_once_truncated_are_left_out() -> None:
    with pytest.raises(DataError, match="1 whose two answers are equal"):
        encode(
            row("abcd", "xyzA", "xyzB"), template="base", max_length=6, overlong="truncate_answer"
        )


def test_truncating_the_prompt_cuts_both_sides_alike() -> None:
    dataset = encode(LONG, template="base", max_length=8, overlong="truncate_prompt")
    assert ids_as_text(dataset, "chosen") == f"cdvwxyz{EOS}"
    assert ids_as_text(dataset, "reject") == f"cdu{EOS}"
    assert dataset.prompt_lens.tolist() == [2, 2]
    assert trained(dataset, 0, "chosen") == f"vwxyz{EOS}"
    with pytest.raises(DataError, match="1 with an answer that alone fills 6 tokens"):
        encode(LONG, template="base", max_length=6, overlong="truncate_prompt")


def test_truncating_the_prompt_keeps_the_beginning_of_text_token() -> None:
    tokenizer = bpe_tokenizer(adds_bos=True)
    dataset = encode(
        LONG, tokenizer=tokenizer, template="base", max_length=9, overlong="truncate_prompt"
    )
    assert ids_as_text(dataset, "chosen") == f"{BOS}cdvwxyz{EOS}"
    assert dataset.prompt_lens.tolist() == [3, 3]
    # A prompt of which only that token is left is none.
    with pytest.raises(DataError, match="1 with an answer that alone fills 7 tokens"):
        encode(LONG, tokenizer=tokenizer, template="base", max_length=7, overlong="truncate_prompt")


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text("ab", min_size=1, max_size=8),
    chosen=st.text("cd", min_size=1, max_size=8),
    rejected=st.text("ef", min_size=1, max_size=8),
    max_length=st.integers(2, 20),
    overlong=st.sampled_from(["drop", "truncate_answer", "truncate_prompt"]),
)
def test_no_row_is_too_long_and_none_is_without_prompt_or_answer(
    prompt: str, chosen: str, rejected: str, max_length: int, overlong: str
) -> None:
    try:
        dataset = encode(
            row(prompt, chosen, rejected), template="base", max_length=max_length, overlong=overlong
        )
    except DataError:
        return
    for ids, prompt_len in (
        (dataset[0]["chosen_ids"], dataset[0]["chosen_prompt_len"]),
        (dataset[0]["reject_ids"], dataset[0]["reject_prompt_len"]),
    ):
        assert 0 < prompt_len < len(ids) <= max_length


# --- errors and the rest ---------------------------------------------------------------------------------------------


def test_options_that_are_not_known() -> None:
    with pytest.raises(
        ConfigError,
        match="overlong='cut' is not known; use one of drop, truncate_answer, truncate_prompt",
    ):
        encode(LONG, overlong="cut")
    with pytest.raises(ConfigError, match="max_length=1 leaves no room"):
        encode(LONG, max_length=1)
    with pytest.raises(ConfigError, match="no chat template 'chatlm'; did you mean 'chatml'"):
        encode(LONG, template="chatlm")


def test_a_template_that_cannot_render_names_the_row(tmp_path: Path) -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    path = tmp_path / "pairs.jsonl"
    rows = [row("Q", "A", "B"), row("Q", "A", "B", system="S")]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    with pytest.raises(
        DataError,
        match=r"pairs.jsonl:2: chat template 'native' cannot render .* roles system, user: No system",
    ):
        encode_preferences(load_table(path), bpe_tokenizer(chat_template=refusing), max_length=64)


def test_each_file_has_its_own_layout() -> None:
    table = JoinedTable(
        [
            RowsTable(
                "a.jsonl", [{"instruction": "Q", "input": "R", "chosen": "A", "rejected": "B"}]
            ),
            RowsTable(
                "b.jsonl",
                [{"chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]}],
            ),
        ]
    )
    dataset = encode_preferences(table, TOKENIZER, max_length=64)
    assert untrained(dataset, 0, "chosen").startswith("<|im_start|>user\nQ\nR<|im_end|>")
    assert untrained(dataset, 1, "chosen").startswith("<|im_start|>user\nQ<|im_end|>")
    assert dataset.origins.tolist() == [0, 1]
    broken = JoinedTable([*table.parts, RowsTable("c.jsonl", [{"prompt": "Q"}])])
    with pytest.raises(
        DataError, match=r"c.jsonl has no columns chosen, rejected; its columns are: prompt"
    ):
        encode_preferences(broken, TOKENIZER, max_length=64)


def test_the_same_rows_give_the_same_tokens_in_any_number() -> None:
    rows = [row(f"{i}+{i}?", str(2 * i), str(2 * i + 1)) for i in range(600)]  # more than one block
    dataset = encode(*rows)
    again = encode(*rows, show_progress=False)
    assert len(dataset) == 600
    assert dataset.fingerprint() == again.fingerprint()
    single = encode(rows[599])
    assert (
        dataset[599]["chosen_ids"].tolist()
        == single[0]["chosen_ids"].tolist()
        == dataset[-1]["chosen_ids"].tolist()
    )
    with pytest.raises(IndexError):
        dataset[600]


def test_the_fingerprint_changes_with_tokens_prompt_lengths_and_order() -> None:
    rows = [row("a", "b", "c"), row("d", "e", "f")]
    same_tokens = [row("xy", "b", "c")], [row("x", "yb", "yc")]
    variants = [rows, rows[::-1], [row("a", "b", "x"), rows[1]], rows[:1], *same_tokens]
    datasets = [encode(*variant, template="base") for variant in variants]
    assert len({dataset.fingerprint() for dataset in datasets}) == 6
    assert datasets[-1].tokens.tolist() == datasets[-2].tokens.tolist()


def test_a_long_run_shows_progress_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(f"{i}", "a", "b") for i in range(1100)]
    assert len(encode(*rows, template="base")) == 1100
    assert capsys.readouterr().out == ""
