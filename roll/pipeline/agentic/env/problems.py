"""Questions with answers that can be checked: from a file, or sums made from a seed."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.datasets.files import load_table
from roll.exceptions import ConfigError

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_QUESTION, _ANSWER = ("prompt", "question", "problem"), ("ground_truth", "answer")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str


class Problems:
    """A source of problems: `file` if there is one, otherwise sums of `num_operands` numbers of up to `digits` digits.

    A file has the columns `prompt` (or `question`, `problem`) and `ground_truth` (or `answer`).
    """

    def __init__(
        self, *, file: str | None = None, digits: int = 2, num_operands: int = 2, operators: Sequence[str] = ("+",)
    ) -> None:
        unknown = [name for name in operators if name not in OPERATORS]
        if unknown or not operators:
            raise ConfigError(f"operators: found {list(operators)}, expected some of {', '.join(OPERATORS)}")
        if digits < 1 or num_operands < 2:
            raise ConfigError(f"found digits {digits} and num_operands {num_operands}, expected at least 1 and 2")
        self.digits, self.num_operands, self.operators = digits, num_operands, tuple(operators)
        self.rows = None if file is None else _rows_of(file)

    def draw(self, seed: int | None) -> Problem:
        """The problem of a seed."""
        rng = random.Random(seed)
        if self.rows is not None:
            return self.rows[rng.randrange(len(self.rows))]
        names = [rng.choice(self.operators) for _ in range(self.num_operands - 1)]
        numbers = [rng.randrange(10**self.digits) for _ in range(self.num_operands)]
        text = str(numbers[0]) + "".join(f"{name}{number}" for name, number in zip(names, numbers[1:], strict=True))
        return Problem(text, str(_value(numbers, names)))


def _value(numbers: list[int], names: list[str]) -> int:
    """With the usual precedence: products first."""
    terms, signs = [numbers[0]], []
    for name, number in zip(names, numbers[1:], strict=True):
        if name == "*":
            terms[-1] *= number
        else:
            signs.append(name)
            terms.append(number)
    total = terms[0]
    for name, term in zip(signs, terms[1:], strict=True):
        total = OPERATORS[name](total, term)
    return total


@functools.lru_cache(maxsize=8)  # the environments of one process share it
def _rows_of(file: str) -> tuple[Problem, ...]:
    table = load_table(file)
    problems = []
    for index in range(len(table)):
        row = table[index]
        question, answer = _pick(row, _QUESTION, file), _pick(row, _ANSWER, file)
        problems.append(Problem(str(question), str(answer)))
    return tuple(problems)


def _pick(row: Any, names: Sequence[str], file: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ConfigError(f"{file}: expected a column {' or '.join(names)}, found {', '.join(row)}")
