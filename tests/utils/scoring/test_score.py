"""What score functions may return, and what becomes of the rest."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.utils.scoring.answers import after_thinking, last_boxed
from roll.utils.scoring.score import Score, reason_kind, to_score


@pytest.mark.parametrize(
    "returned",
    [
        1,
        1.0,
        True,
        np.float32(1),
        np.int64(1),
        np.array(1.0),
        torch.tensor(1.0),
        torch.tensor([[1]]),
    ],
)
def test_numbers(returned):
    assert to_score(returned) == Score(1.0)


def test_parts_add_up_unless_one_is_the_score():
    assert to_score({"a": 0.5, "b": np.float64(0.25)}) == Score(0.75, {"a": 0.5, "b": 0.25})
    assert to_score({"a": 0.5, "score": 2}) == Score(2.0, {"a": 0.5, "score": 2.0})


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "none"),
        ({}, "none"),
        (float("nan"), "nan"),
        (float("inf"), "nan"),
        ({"a": 1.0, "b": float("nan")}, "nan"),
        ("1", "type"),
        ([1.0], "type"),
        (np.array([1.0, 2.0]), "type"),
        (torch.ones(2), "type"),
        ({"a": "x"}, "type"),
        (1j, "type"),
    ],
)
def test_what_is_no_score(returned, kind):
    score = to_score(returned)
    assert score.value is None and score.parts == {} and reason_kind(score.reason) == kind


LEAVES = st.none() | st.floats() | st.text() | st.booleans()


@settings(max_examples=50, deadline=None)
@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_a_score_has_a_value_or_a_reason(returned):
    score = to_score(returned)
    assert (score.value is None) == (score.reason is not None)
    assert score.value is None or np.isfinite(score.value)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{cut off", "1"),
        ("none", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


def test_after_thinking():
    assert after_thinking("<think>4?</think> no </think>\n5 ") == "5"
    assert after_thinking("5") == "5"
