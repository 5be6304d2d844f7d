r"""Multiple choice: letters in the last `\boxed{...}`, or, where ROLL is less strict, the first capital letter."""

from __future__ import annotations

import re
from typing import Any

from roll.utils.scoring.answers import after_thinking, last_boxed


def score(prompt: str, response: str, ground_truth: Any, **row: Any) -> float | None:
    """1.0 if the boxed choices are those of the ground truth, in any order; 0.0 otherwise.

    None if the ground truth names no choice.
    """
    right = _choices(str(ground_truth or ""))
    if not right:
        return None
    boxed = last_boxed(after_thinking(response))
    return float(boxed is not None and _choices(boxed) == right)


def _choices(text: str) -> frozenset[str]:
    r"""The single letters of an answer: `B`, `(b)`, `B. Paris`, `\text{B}`, `A, C` and `AC` (two choices)."""
    text = re.sub(r"\\[a-zA-Z]+", "", boxed) if (boxed := last_boxed(text) or text) else ""
    text = text.strip(" {}()[].:$\n")
    if re.fullmatch(r"[A-Z]{1,10}", text):
        return frozenset(text)
    letters = re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z'])", text)
    # Of "B. a cat" only the label counts; of "A, C" or "A and C" both do.
    labelled = re.match(r"[A-Za-z]\s*[.:)]\s*\S", text)
    return frozenset(letter.upper() for letter in (letters[:1] if labelled else letters))


# What an answer is worth by ROLL's `reward_type`: (right and boxed, right, boxed, neither).
CROSSTHINK_REWARDS = {
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
_NGRAM, _MOST_REPEATED = 3, -0.5
GENERAL_VAL_TAGS = ("ceval", "race_high", "mmlu_pro", "commonsense_qa")


def crossthink_score(
    prompt: str, response: str, ground_truth: Any, *, reward_type: str = "soft", **row: Any
) -> dict[str, float] | None:
    """`score` 1.0 or 0.0 as by `first_letter`, and what makes the reward: `answer`, from the table of `reward_type`,
    and `repetition`, up to -0.5 for a response whose runs of three words are all the same.

    None without a ground truth.
    """
    if not str(ground_truth or ""):
        return None
    letter, is_boxed = first_letter(response)
    is_right = letter == str(ground_truth)[0]
    answer = CROSSTHINK_REWARDS[reward_type][2 * (not is_right) + (not is_boxed)]
    words = response.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(_NGRAM)), strict=False))
    repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
    return {"score": float(answer > 0), "answer": answer, "repetition": _MOST_REPEATED * repeated}


def general_val_score(
    prompt: str, response: str, ground_truth: Any, *, tag: str = "", **row: Any
) -> float | None:
    """1.0 if the first letter of the answer is that of the ground truth, 0.0 otherwise.

    None for tags that are not of a benchmark with one choice. (ROLL gives such a row the score of the row before.)
    """
    if tag not in GENERAL_VAL_TAGS or not str(ground_truth or ""):
        return None
    return float(first_letter(response)[0] == str(ground_truth)[0])


def first_letter(response: str) -> tuple[str | None, bool]:
    r"""The first capital letter of the last box, else of what follows the last "answer is", else of the whole answer;
    and whether there was a box."""
    answer = after_thinking(response)
    boxed = last_boxed(answer)
    start = answer.lower().rfind("answer is")
    text = boxed or (answer if start < 0 else answer[start + len("answer is") :])
    return next((char for char in text if char.isupper()), None), bool(boxed)
