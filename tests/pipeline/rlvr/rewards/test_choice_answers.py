"""Multiple choice."""

import pytest

from roll.pipeline.rlvr.rewards.choice_answers import crossthink_score, general_val_score, score


@pytest.mark.parametrize(
    "answer", ["B", "(b)", "B.", "B. Paris", r"\text{B}", r"\mathbf{(B)}", "B: a cat", "b) a dog"]
)
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


@pytest.mark.parametrize(
    ("response", "truth", "rewards"),  # loose, soft, strict: what ROLL's function gives
    [
        (r"<think>A</think>so \boxed{B}", "B", (1.0, 1.0, 1.0)),
        ("The answer is C.", "C", (1.0, 0.5, -1.0)),
        ("the answer is b, or B", "B", (1.0, 0.5, -1.0)),
        ("A or B", "B", (-1.0, -1.0, -1.0)),
        (r"\boxed{A}", "B", (-1.0, -0.5, -1.0)),
        ("nothing", "B", (-1.0, -1.0, -1.0)),
        (r"\boxed{\text{D}}", "D. four", (1.0, 1.0, 1.0)),
        ("I think the Answer Is: C", "C", (1.0, 0.5, -1.0)),
        (r"\boxed{} B", "B", (1.0, 0.5, -1.0)),
    ],
)
def test_crossthink_gives_part_of_the_credit_for_the_form(response, truth, rewards):
    for reward_type, reward in zip(("loose", "soft", "strict"), rewards, strict=True):
        found = crossthink_score("", response, truth, reward_type=reward_type)
        assert found == {"score": float(reward > 0), "answer": reward, "repetition": 0.0}


def test_crossthink_takes_off_what_is_repeated():
    # Of seven runs of three words three are repetitions: 0.5 * 3 / 7.
    found = crossthink_score("", "no no no no no no answer is A", "A")
    assert found is not None and found["repetition"] == pytest.approx(-0.5 * 3 / 7)
    assert crossthink_score("", "A", None) is None


def test_general_val_knows_its_benchmarks_and_drops_the_others():
    assert general_val_score("", "the answer is B", "B", tag="mmlu_pro") == 1.0
    assert general_val_score("", "the answer is C", "B", tag="ceval") == 0.0
    assert general_val_score("", "the answer is B", "B", tag="math") is None
