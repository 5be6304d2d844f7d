"""Mathematical answers through the pool, as they are scored in a run."""

import pytest

from roll.utils.scoring.pool import ScorePool

pytest.importorskip("math_verify")


def scores(rows, **options):
    spec = "roll.utils.scoring.math_answers:score"
    with ScorePool(spec, timeout_s=options.pop("timeout_s", 60.0), options=options) as pool:
        return pool.score(
            [
                {"prompt": "", "response": response, "ground_truth": truth}
                for response, truth in rows
            ]
        )


def test_answers_are_compared_by_value():
    right = [
        ("The answer is 42", "42"),
        (r"\boxed{42}", 42),
        ("so 0.5", r"\frac{1}{2}"),
        (r"$1+x$", "x+1"),
        ("<think>It is 3.</think> It is 4.", "4"),
        (r"first 4, but finally \boxed{3}", "3"),
        ("1000", "1,000"),
        (r"$\{1,2\}$", r"$\{2,1\}$"),
    ]
    wrong = [
        ("The answer is 41", "42"),
        ("I do not know", "42"),
        ("", "42"),
        (r"\boxed{}", "42"),
        ("<think>4</think>", "4"),
    ]
    unknown = [("4", ""), ("4", None)]
    values = [score.value for score in scores(right + wrong + unknown)]
    assert values == [1.0] * len(right) + [0.0] * len(wrong) + [None] * len(unknown)


def test_the_format_counts_where_it_is_asked_for():
    rows = [(r"<answer>\boxed{2}</answer>", "2"), (r"\boxed{2}", "2")]
    assert [score.value for score in scores(rows, format_pattern="<answer>.*</answer>")] == [
        1.0,
        0.0,
    ]


def test_a_comparison_that_does_not_end_is_a_timeout_and_not_a_wrong_answer():
    hard, easy = scores([(r"$\binom{10^9}{10^8}$", "1"), ("2", "2")], timeout_s=3.0)
    assert (hard.value, hard.reason) == (None, "timeout")
    assert easy.value == 1.0
