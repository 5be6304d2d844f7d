"""Multiple choice."""

import pytest

from roll.pipeline.rlvr.rewards.choice_answers import score


@pytest.mark.parametrize("answer", ["B", "(b)", "B.", "B. Paris", r"\text{B}", r"\mathbf{(B)}", "B: a cat", "b) a dog"])
def test_one_letter_in_many_spellings(answer):
    assert score("", rf"I think \boxed{{{answer}}}", "B") == 1.0
    assert score("", rf"I think \boxed{{{answer}}}", "C") == 0.0


def test_several_letters_in_any_order():
    assert score("", r"\boxed{C, A}", "AC") == 1.0
    assert score("", r"\boxed{A and C}", "A,C") == 1.0
    assert score("", r"\boxed{A}", "AC") == 0.0


def test_only_the_last_box_after_thinking_counts():
    assert score("", r"<think>\boxed{B}</think> \boxed{A}", "B") == 0.0
    assert score("", r"\boxed{A} or rather \boxed{B}", "B") == 1.0


def test_no_answer_is_wrong_and_no_ground_truth_is_unknown():
    assert score("", "B", "B") == 0.0
    assert score("", r"\boxed{}", "B") == 0.0
    assert score("", r"\boxed{B}", None) is None
    assert score("", r"\boxed{B}", "") is None
