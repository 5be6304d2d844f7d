"""Preference pairs: the layouts that people have, and the answer trained to the last token."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tiny_tokenizer import BOS, EOS, bpe_tokenizer

from roll.datasets.preference import (
    PreferenceRow,
    encode_preferences,
    find_preference_columns,
    parse_preference_row,
    why_unusable,
)
from roll.datasets.tables import JoinedTable, Table, load_table
from roll.exceptions import ConfigError, DataError

TOKENIZER = bpe_tokenizer()
SCRIPT = Path(__file__).parents[2] / "examples" / "dpo" / "make_data.py"


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def row(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


# --- rows to pairs --------------------------------------------------------------------------------


def parse(row, *, bare_texts=False, **keys):
    columns = find_preference_columns(Table("pairs.jsonl", [row]), **keys)
    return parse_preference_row(row, columns, bare_texts=bare_texts)


SIMPLE = PreferenceRow([user("Q")], [answer("A")], [answer("B")])
WHOLE = {"chosen": [user("Q"), answer("A")], "rejected": [user("Q"), answer("B")]}


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Q", "chosen": "A", "rejected": "B"},
        {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
        {"instruction": "Q", "input": None, "chosen": "A", "rejected": "B"},
        row("Q", "A", "B", input="not part of this layout"),
        {"question": "Q", "chosen": "A", "rejected": "B"},
        row([user("Q")], "A", "B"),
        row("Q", [answer("A")], [answer("B")]),
        row("Q", answer("A"), answer("B")),
        row([user("Q")], [answer("A")], [answer("B")]),
        WHOLE,
        {**WHOLE, "prompt": "  q. "},
        {**WHOLE, "prompt": [user("Q")]},
        {**WHOLE, "prompt": None},
        row('[{"role": "user", "content": "Q"}]', "A", "B"),
        row("Q", "A", "B", system=""),
    ],
)
def test_layouts(row):
    assert parse(row) == SIMPLE


def test_parts_of_a_row():
    named = {"text": "Q", "good": "A", "bad": "B", "prompt": "not this", "chosen": "nor this"}
    assert parse(named, chosen_key="good", rejected_key="bad", prompt_key="text") == SIMPLE
    extra = {"instruction": "Translate.", "input": "bonjour", "chosen": "A", "rejected": "B"}
    assert parse(extra).prompt == [user("Translate.\nbonjour")]
    assert parse(row("Q", "A", "B", system="S")).prompt == [system("S"), user("Q")]
    with_system = {side: [system("S"), *WHOLE[side]] for side in WHOLE}
    assert parse({**with_system, "system": "S"}).prompt == [system("S"), user("Q")]


def test_the_shared_messages_are_the_prompt():
    shared = [system("S"), user("Q"), answer("R"), user("S")]
    pair = parse({"chosen": [*shared, answer("A")], "rejected": [*shared, answer("B")]})
    assert pair == PreferenceRow(shared, [answer("A")], [answer("B")])
    # The last message is the answer, even where the two are equal.
    pair = parse({"chosen": WHOLE["chosen"], "rejected": WHOLE["chosen"]})
    assert pair == PreferenceRow([user("Q")], [answer("A")], [answer("A")])
    turns = [answer("A"), user("R"), answer("C")]
    pair = parse({"chosen": [user("Q"), *turns], "rejected": WHOLE["rejected"]})
    assert pair == PreferenceRow([user("Q")], turns, [answer("B")])


def test_bare_texts_share_their_first_words():
    texts = {"chosen": "Q: 2+2? A: It is 4", "rejected": "Q: 2+2? A: It is 45"}
    pair = parse(texts, bare_texts=True)
    assert pair == PreferenceRow([user("Q: 2+2? A: It is")], [answer(" 4")], [answer(" 45")])
    pair = parse({"chosen": "Q\nA", "rejected": "Q\nB"}, bare_texts=True)
    assert pair == PreferenceRow([user("Q\n")], [answer("A")], [answer("B")])
    same = parse({"chosen": "same text", "rejected": "same text"}, bare_texts=True)
    assert why_unusable(same) == "equal_answers"
    with pytest.raises(ValueError, match="there is no prompt; the two texts share no first word"):
        parse({"chosen": "yes", "rejected": "no"}, bare_texts=True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (row("Q", None, "B"), "'chosen' has no value"),
        (row(None, "A", "B"), "'prompt' has no value"),
        (row(3, "A", "B"), "column 'prompt': expected text or a list of messages, found a int: 3"),
        (row("Q", "A", []), "column 'rejected': the list of messages is empty"),
        (row("Q", "A", [answer("B")]), "'chosen' is text but 'rejected' is a list of messages"),
        (row("Q", "A", "B", system=1), "column 'system' holds a int, expected text"),
        (
            {**row(None, "A", "B"), "instruction": "Q", "input": [user("x")]},
            "column 'input' holds messages, expected text",
        ),
        (
            {"chosen": [answer("A")], "rejected": [answer("B")]},
            "there is no prompt; the roles are assistant in chosen and assistant in rejected. Give",
        ),
        (
            row("Q", [answer("A")], WHOLE["rejected"]),
            "there is no prompt; the roles are assistant in chosen and user, assistant in rejected",
        ),
        (
            {"chosen": WHOLE["chosen"], "rejected": [user("P"), answer("B")]},
            "the chosen answer begins with a message of role 'user', not 'assistant' (after 0 ",
        ),
        (
            {"chosen": [*WHOLE["chosen"], user("R")], "rejected": WHOLE["rejected"]},
            "the chosen answer ends with a message of role 'user', not 'assistant' (after 1 "
            "messages of prompt its roles are assistant, user)",
        ),
        (
            {**WHOLE, "prompt": [user("P")]},
            "chosen and rejected do not both begin with the messages of the prompt",
        ),
        (
            {"chosen": "Q: A", "rejected": "Q: B"},
            "'chosen' and 'rejected' are texts and the file has no prompt column (instruction, ",
        ),
        (
            {side: [system("S"), *WHOLE[side]] for side in WHOLE} | {"system": "other"},
            "there is a text in 'system' and another one as system message; keep one",
        ),
    ],
)
def test_rows_that_are_not_pairs(row, reason):
    with pytest.raises(ValueError, match="^is not a pair: " + re.escape(reason)):
        parse(row)


def test_missing_columns_list_those_found():
    table = Table("pairs.jsonl", [{"prompt": "Q", "better": "A", "rejected": "B"}])
    expected = (
        "pairs.jsonl has no column chosen; its columns are: prompt, better, rejected. Set cho"
    )
    with pytest.raises(DataError, match=expected):
        find_preference_columns(table)
    with pytest.raises(DataError, match="has no column ask; "):
        find_preference_columns(table, chosen_key="better", prompt_key="ask")
    # A row may lack a column that others have.
    with pytest.raises(DataError, match=r"jsonl, row 2: is not a pair: 'rejected' has no value"):
        encode(row("Q", "A", "B"), {"prompt": "Q", "chosen": "A"})


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (answer("4 "), answer("4"), "equal_answers"),
        (answer("4"), answer("4."), None),
        (answer(" \n"), answer("4"), "empty_answer"),
        ({**answer(""), "tool_calls": ["f"]}, {**answer(""), "tool_calls": ["g"]}, None),
    ],
)
def test_what_counts_as_empty_and_as_equal(chosen, rejected, reason):
    assert why_unusable(PreferenceRow([user("Q")], [chosen], [rejected])) == reason


# --- what is trained ------------------------------------------------------------------------------


def encode(*rows, tokenizer=TOKENIZER, max_length=512, **options):
    table = Table("pairs.jsonl", rows)
    return encode_preferences(table, tokenizer, max_length=max_length, **options)


def split(dataset, side="chosen", index=0, tokenizer=TOKENIZER):
    """(text of the prompt, text that is trained)"""
    pair = dataset[index]
    ids, prompt_len = pair[f"{side}_ids"], pair[f"{side}_prompt_len"]
    return tokenizer.decode(ids[:prompt_len]), tokenizer.decode(ids[prompt_len:])


def pieces(ids):
    return TOKENIZER.convert_ids_to_tokens(ids.tolist())


@pytest.mark.parametrize("template", ["native", "chatml", "empty", "qwen3"])
def test_answer_and_end_of_turn_are_trained_and_the_header_is_not(template):
    dataset = encode(row("2+2?", "It is 4.", "five"), template=template)
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert split(dataset) == (prompt, "It is 4.<|im_end|>\n")
    assert split(dataset, "reject") == (prompt, "five<|im_end|>\n")


def test_a_token_that_spans_prompt_and_answer_is_trained_on_its_own_side_only():
    dataset = encode(row("add ", "4", "8"), template="base")
    assert pieces(dataset[0]["chosen_ids"]) == ["add", "Ġ4", EOS]
    assert pieces(dataset[0]["reject_ids"]) == ["add", "Ġ", "8", EOS]
    # Counting the prompt's own two tokens on the chosen side would leave only the end to train.
    assert (dataset[0]["chosen_prompt_len"], dataset[0]["reject_prompt_len"]) == (1, 2)
    # A newline may join that of the header.
    pair = encode(row("2+2?", "\nfour", "five"))[0]
    start = pair["chosen_prompt_len"]
    assert pieces(pair["chosen_ids"])[start - 1 : start + 2] == ["t", "ĊĊ", "f"]


def test_a_beginning_of_text_token_comes_once():
    with_bos = "{{ bos_token }}" + str(TOKENIZER.chat_template)
    tokenizer = bpe_tokenizer(adds_bos=True, chat_template=with_bos)
    for template, start in (("native", f"{BOS}<|im_start|>"), ("base", f"{BOS}2+2?")):
        [pair] = encode(row("2+2?", "4", "5"), tokenizer=tokenizer, template=template)
        ids = pair["chosen_ids"].tolist()
        assert ids.count(tokenizer.bos_token_id) == 1 and tokenizer.decode(ids).startswith(start)
    [pair] = encode(row("2+2?", "4", "5"), tokenizer=tokenizer, template="chatml")
    assert tokenizer.bos_token_id not in pair["chosen_ids"].tolist()


# As Qwen's: a default system text, an empty thought before an answer that has none, and in the
# header if asked for.
THINKING = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n"
    "{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_thoughts_are_trained_unless_the_header_has_them():
    head = (
        "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    thought = "<think>\n\n</think>\n\n"
    options = {"tokenizer": bpe_tokenizer(chat_template=THINKING), "template": "qwen3"}
    assert split(encode(row("2+2?", "4", "5"), **options)) == (head, f"{thought}4<|im_end|>\n")
    options["template_options"] = {"enable_thinking": False}
    assert split(encode(row("2+2?", "4", "5"), **options)) == (head + thought, "4<|im_end|>\n")
    # A thought that only the generation prompt opens is no part of the prompt.
    dataset = encode(row("2+2?", "4", "5"), template="longcot_V3")
    assert split(dataset)[1] == "4<|im_end|>\n"
    dataset = encode(row("2+2?", "<think>\neasy</think>4", "5"), template="longcot_V3")
    assert split(dataset)[1] == "easy</think>4<|im_end|>\n"


def test_conversations_system_texts_and_bare_texts():
    turns = [user("a"), answer("b"), user("c")]
    sides = {"chosen": [*turns, answer("X")], "rejected": [*turns, answer("Y")], "system": "S"}
    prompt = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert split(encode(sides)) == (prompt, "X<|im_end|>\n")
    texts = {"chosen": "Q: 2+2? A: four", "rejected": "Q: 2+2? A: five"}
    assert split(encode(texts, template="base")) == ("Q: 2+2? A:", f" four{EOS}")
    with pytest.raises(DataError, match=r"pairs.jsonl, row 1: is not a pair: .* template to base"):
        encode(texts, template="native")


texts = st.text(st.sampled_from("ad1045 =?\nÄ"), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(prompt=texts, chosen=texts, rejected=texts, template=st.sampled_from(["chatml", "base"]))
def test_the_mask_covers_the_answer_exactly(prompt, chosen, rejected, template):
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
    head, end = prompt, EOS
    if template == "chatml":
        head = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        end = "<|im_end|>\n"
    for side, text in (("chosen", chosen), ("reject", rejected)):
        ids, prompt_len = dataset[0][f"{side}_ids"], dataset[0][f"{side}_prompt_len"]
        # The ids are those of the whole text: what the model meets when it answers.
        assert ids.tolist() == TOKENIZER(head + text + end, add_special_tokens=False)["input_ids"]
        untrained, trained = split(dataset, side)
        # Nothing of the answer is left out, and of the prompt only what is cut into other tokens
        # once it is there: "0? " and "1" are "0", "? " alone, and "0", "?", " 1" together.
        assert trained.endswith(text + end)
        alone = TOKENIZER(head, add_special_tokens=False)["input_ids"]
        assert ids[:prompt_len].tolist() == alone[:prompt_len]
        assert prompt_len == len(alone) or ids[prompt_len] != alone[prompt_len]
        if untrained == head:
            assert trained == text + end


# --- what is left out -----------------------------------------------------------------------------


def reasons(dataset):
    return {reason: entry["count"] for reason, entry in dataset.summary.dropped.items()}


def test_rows_are_counted_by_reason():
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
    counts = {"equal_answers": 1, "empty_answer": 2, "empty_prompt": 1, "too_long": 1}
    assert reasons(dataset) == {**counts, "several_turns": 1}
    summary = dataset.summary
    assert (summary.rows_read, summary.kept, summary.num_dropped, len(dataset)) == (8, 2, 6, 2)
    assert summary.dropped["empty_answer"]["first"] == "pairs.jsonl, row 3"
    assert "1 with a side longer than 512 tokens (first: pairs.jsonl, row 6)" in str(summary)
    json.dumps(summary.to_dict())
    with pytest.raises(DataError) as error:
        encode(row("Q", "A", "A"), row("Q", "", "B"))
    assert str(error.value) == (
        "pairs.jsonl: no preference pair is left to train on.\n"
        "2 rows read, 0 kept, 2 dropped\n"
        "  1 whose two answers are equal (first: pairs.jsonl, row 1)\n"
        "  1 with an empty answer (first: pairs.jsonl, row 2)"
    )


def test_a_template_that_rewrites_the_prompt_when_the_answer_follows():
    # As those that remove a thought from every message but the last one.
    rewriting = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = bpe_tokenizer(chat_template=rewriting)
    dataset = encode(row("<think>a</think>b", "A", "B"), row("b", "A", "B"), tokenizer=tokenizer)
    assert reasons(dataset) == {"prompt_rewritten": 1}
    assert split(dataset)[0] == "[user]b[assistant]"
    # One that only opens the answer in another way does not rewrite the prompt.
    other = (
        "{% for m in messages %}{{ '<' if m.role == 'assistant' else '[' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}#{% endif %}"
    )
    dataset = encode(row("b", "A", "B"), tokenizer=bpe_tokenizer(chat_template=other))
    assert reasons(dataset) == {} and split(dataset) == ("[b", "<A")


def test_the_lengths_in_the_summary_are_those_of_the_rows():
    dataset = encode(row("add", "ad", "1010"), row("add add", "a", "xyz"), template="base")
    # add | ad <eos>; add | 10 10 <eos>; add Ġ add | a <eos>; add Ġ add | x y z <eos>
    assert dataset.lengths.tolist() == [3, 4, 5, 7]
    assert dataset.prompt_lens.tolist() == [1, 1, 3, 3]
    assert str(dataset.summary).splitlines() == [
        "2 rows read, 2 kept, 0 dropped",
        "  tokens of prompt: 1 to 3 (mean 2.0)",
        "  tokens of chosen answer: 2 to 2 (mean 2.0)",
        "  tokens of rejected answer: 3 to 4 (mean 3.5)",
        "  tokens of longest side: 4 to 7 (mean 5.5)",
    ]


# --- too long -------------------------------------------------------------------------------------

LONG = row("abcd", "vwxyz", "u")  # base: 4 + 5 + 1 tokens and 4 + 1 + 1


@pytest.mark.parametrize(
    ("overlong", "adds_bos", "max_length", "chosen", "rejected"),
    [
        ("drop", False, 10, ("abcd", f"vwxyz{EOS}"), ("abcd", f"u{EOS}")),
        ("truncate_answer", False, 6, ("abcd", "vw"), ("abcd", f"u{EOS}")),
        ("truncate_prompt", False, 8, ("cd", f"vwxyz{EOS}"), ("cd", f"u{EOS}")),
        ("truncate_prompt", True, 9, (f"{BOS}cd", f"vwxyz{EOS}"), (f"{BOS}cd", f"u{EOS}")),
    ],
)
def test_long_pairs_that_fit_once_shortened(overlong, adds_bos, max_length, chosen, rejected):
    tokenizer = bpe_tokenizer(adds_bos=adds_bos)
    options = {"tokenizer": tokenizer, "template": "base", "overlong": overlong}
    dataset = encode(LONG, max_length=max_length, **options)
    assert (split(dataset), split(dataset, "reject")) == (chosen, rejected)
    assert dataset.summary.truncated == (overlong != "drop")
    assert ("1 truncated" in str(dataset.summary)) == (overlong != "drop")


@pytest.mark.parametrize(
    ("overlong", "adds_bos", "max_length", "reason"),
    [
        ("drop", False, 9, "1 with a side longer than 9 tokens"),
        ("truncate_answer", False, 4, "1 whose prompt alone fills 4 tokens"),
        ("truncate_prompt", False, 6, "1 with an answer that alone fills 6 tokens"),
        # A prompt of which only the BOS token is left is none.
        ("truncate_prompt", True, 7, "1 with an answer that alone fills 7 tokens"),
    ],
)
def test_long_pairs_that_do_not_fit(overlong, adds_bos, max_length, reason):
    tokenizer = bpe_tokenizer(adds_bos=adds_bos)
    options = {"tokenizer": tokenizer, "template": "base", "overlong": overlong}
    with pytest.raises(DataError, match=reason):
        encode(LONG, max_length=max_length, **options)


def test_answers_that_are_equal_once_truncated_are_left_out():
    pair = row("abcd", "xyzA", "xyzB")
    with pytest.raises(DataError, match="1 whose two answers are equal"):
        encode(pair, template="base", max_length=6, overlong="truncate_answer")


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text("ab", min_size=1, max_size=8),
    chosen=st.text("cd", min_size=1, max_size=8),
    rejected=st.text("ef", min_size=1, max_size=8),
    max_length=st.integers(2, 20),
    overlong=st.sampled_from(["drop", "truncate_answer", "truncate_prompt"]),
)
def test_no_row_is_too_long_and_none_is_without_prompt_or_answer(
    prompt, chosen, rejected, max_length, overlong
):
    pair = row(prompt, chosen, rejected)
    try:
        dataset = encode(pair, template="base", max_length=max_length, overlong=overlong)
    except DataError:
        return
    for length, prompt_len in zip(dataset.lengths, dataset.prompt_lens, strict=True):
        assert 0 < prompt_len < length <= max_length


# --- errors and the rest --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overlong": "cut"}, "overlong='cut' is not known; use one of drop, truncate_answer, tru"),
        ({"max_length": 1}, "max_length=1 leaves no room"),
        ({"template": "chatlm"}, "no chat template 'chatlm'; did you mean 'chatml'"),
    ],
)
def test_options_that_are_not_known(options, expected):
    with pytest.raises(ConfigError, match=expected):
        encode(LONG, **options)


def test_a_template_that_cannot_render_names_the_row(tmp_path):
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    path = tmp_path / "pairs.jsonl"
    rows = [row("Q", "A", "B"), row("Q", "A", "B", system="S")]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    expected = r"pairs.jsonl:2: chat template 'native' cannot render .* system, user: No system"
    with pytest.raises(DataError, match=expected):
        encode_preferences(load_table(path), bpe_tokenizer(chat_template=refusing), max_length=64)


def test_each_file_has_its_own_layout():
    instruction = {"instruction": "Q", "input": "R", "chosen": "A", "rejected": "B"}
    parts = [Table("a.jsonl", [instruction]), Table("b.jsonl", [WHOLE])]
    dataset = encode_preferences(JoinedTable(parts), TOKENIZER, max_length=64)
    assert split(dataset)[0].startswith("<|im_start|>user\nQ\nR<|im_end|>")
    assert split(dataset, index=1)[0].startswith("<|im_start|>user\nQ<|im_end|>")
    broken = JoinedTable([*parts, Table("c.jsonl", [{"prompt": "Q"}])])
    with pytest.raises(DataError, match=r"c.jsonl has no columns chosen, rejected; its columns ar"):
        encode_preferences(broken, TOKENIZER, max_length=64)


def test_many_rows_give_the_tokens_of_each(capsys):
    rows = [row(f"{i}+{i}?", str(2 * i), str(2 * i + 1)) for i in range(1100)]
    dataset = encode(*rows)  # more than one block, with a progress bar
    assert capsys.readouterr().out == "", "progress is shown on stderr only"
    assert len(dataset) == 1100
    [single] = encode(rows[-1])
    for index in (1099, -1):
        assert dataset[index]["chosen_ids"].tolist() == single["chosen_ids"].tolist()
    with pytest.raises(IndexError):
        dataset[1100]
    assert dataset.fingerprint() == encode(*rows, show_progress=False).fingerprint()


def test_the_fingerprint_changes_with_tokens_prompt_lengths_and_order():
    rows = [row("a", "b", "c"), row("d", "e", "f")]
    same_tokens = [row("xy", "b", "c")], [row("x", "yb", "yc")]
    variants = [rows, rows[::-1], [row("a", "b", "x"), rows[1]], rows[:1], *same_tokens]
    datasets = [encode(*variant, template="base") for variant in variants]
    assert len({dataset.fingerprint() for dataset in datasets}) == 6
    ids = [[row.tolist() for row in dataset.rows] for dataset in datasets[-2:]]
    assert ids[0] == ids[1]
    # Log-probs that an older version stored are found again.
    assert datasets[0].fingerprint().startswith("85f3c4645e4c7516")


# --- the data of the example ----------------------------------------------------------------------


def make_data(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pairs_of_the_example_are_right_and_separate(tmp_path):
    result = make_data(str(tmp_path))
    assert result.stdout.splitlines() == [
        f"{tmp_path}/train.jsonl: 1200 pairs",
        f"{tmp_path}/validation.jsonl: 200 pairs",
    ]
    train, validation = (
        list(load_table(tmp_path / f"{name}.jsonl")) for name in ("train", "validation")
    )
    questions = [{row["instruction"] for row in part} for part in (train, validation)]
    assert [len(part) for part in questions] == [1200, 200] and not questions[0] & questions[1]
    for row in train + validation:
        match = re.fullmatch(
            r"Which is the (largest|smallest): (\d), (\d) or (\d)\?", row["instruction"]
        )
        assert match is not None
        digits = match.groups()[1:]
        assert row["chosen"] == (max if match[1] == "largest" else min)(digits)
        assert row["rejected"] in digits and row["rejected"] != row["chosen"]
    larger_chosen = sum(row["chosen"] > row["rejected"] for row in validation)
    assert 70 < larger_chosen < 130, "preferring large digits does not help"
    table = load_table(tmp_path / "train.jsonl")
    summary = encode_preferences(table, tiny_tokenizer(), max_length=128).summary
    assert (summary.kept, summary.num_dropped) == (1200, 0)


def test_the_seed_of_the_example_and_its_limits(tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        few = ("--seed", seed, "--train", "50", "--validation", "10")
        assert make_data(str(tmp_path / name), *few).returncode == 0
    texts = [(tmp_path / name / "train.jsonl").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    result = make_data(str(tmp_path), "--train", "1400", "--validation", "100")
    assert result.returncode == 2 and "together at most 1440" in result.stderr
