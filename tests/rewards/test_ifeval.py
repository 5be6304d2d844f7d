"""Checks of instructions: one text that follows and one that does not, in both forms of data."""

import json

import pytest

from roll.rewards.ifeval import _BY_FUNCTION, score

NTH = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}
SECTIONS = {"section_spliter": "Section", "num_sections": 2}
# Instruction, its arguments, a text that follows it, one that does not.
CASES = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A cat and a dogma."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2}, "cat, Cat", "cat"),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 2, "let_relation": "less than"},
        "Ab",
        "aA",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at most"},
        "don't do it",
        "one two three four",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 2, "relation": "around"},
        "1 2 3",
        "1 2 3 4",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2}, "One. Two!", "One, two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n"),
    (
        "length_constraints:nth_paragraph_first_word",
        NTH,
        "It is.\n\n(So) be it.",
        "So.\n\nIt is.",
    ),
    ("length_constraints:nth_paragraph_first_word", NTH, "It.\n\nSo", "It.\n\nSo\n\nSo"),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] of [town]",
        "[name]",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Yes.\nP.S. No.",
        "Yes.\nP.S.",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and * b",
    ),
    ("detectable_format:title", {}, "<<On cats>>\nThey", "<< >> They"),
    (
        "detectable_format:multiple_sections",
        SECTIONS,
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "yes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "Say hi\nhi", "hi"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("startend:end_checker", {"end_phrase": "the end."}, "This is The End.", "The end. Or not"),
    ("startend:quotation", {}, '"Yes."', '"'),
    ("change_case:english_capital", {}, "YES 1", "Yes"),
    ("change_case:english_lowercase", {}, "yes 1", "12"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2}, "I AM", "I am"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


def test_every_check_has_a_case():
    checks = {value.split()[0] for value in _BY_FUNCTION.values()}
    assert {name for name, *_ in CASES} == checks


@pytest.mark.parametrize(("name", "arguments", "follows", "does_not"), CASES)
def test_checks(name, arguments, follows, does_not):
    row = {"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None}]}
    assert score("", follows, None, **row) == {name: 1.0, "score": 1.0}
    assert score("", does_not, None, **row) == {name: 0.0, "score": 0.0}


def test_several_instructions():
    names = ["punctuation:no_comma", "change_case:english_lowercase", "punctuation:no_comma"]
    row = {"instruction_id_list": names, "kwargs": "[{}, {}, {}]"}
    parts = {names[0]: 1.0, names[1]: 0.0, f"{names[0]}#2": 1.0}
    assert score("", "<think>a,</think>Yes", None, **row) == {**parts, "score": 0.0}
    assert score("", "Yes", None, reward_type="fraction", **row)["score"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("function", "arguments", "follows", "does_not"),
    [
        ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a b", "a"),
        ("verify_keyword_frequency", {"word": "a", "N": 2}, "a b a", "a a a"),
        ("validate_paragraphs", {"N": 2, "first_word": "b", "i": 2}, "a\n\nb", "a\n\nc"),
        ("validate_sections", {"N": 1, "section_splitter": "Part"}, "Part one", "One"),
        ("validate_sections", {"N": 1, "section_spliter": "Part"}, "Part one", "One"),
        ("validate_choice", {"options": ["left", "right"]}, "left", "up"),
        ("validate_lowercase", {"N": None, "keyword_list": None}, "a", "A"),
    ],
)
def test_the_other_form_of_data(function, arguments, follows, does_not):
    constraint = {"func_name": function, **arguments}
    for truth in (constraint, json.dumps(constraint), [constraint]):
        assert score("", follows, truth)["score"] == 1.0
        assert score("", does_not, truth)["score"] == 0.0


def test_what_cannot_be_judged():
    assert score("", "a", None) is None
    with pytest.raises(ValueError, match="'validate_response_language' is not known"):
        score("", "a", {"func_name": "validate_response_language", "language": "de"})
    row = {"instruction_id_list": ["language:response_language"], "kwargs": [{}]}
    with pytest.raises(ValueError, match="'language:response_language' is not known; known are"):
        score("", "a", None, **row)
    with pytest.raises(ValueError, match="relation 'some'; expected one of at least"):
        score("", "a", {"func_name": "validate_word_constraint", "N": 2, "quantifier": "some"})
    # An empty answer follows nothing.
    assert score("", " ", {"func_name": "validate_no_commas"})["score"] == 0.0
