"""Questions with answers that can be checked: from a file, or sums made from a seed."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.datasets.tables import load_table
from roll.exceptions import ConfigError

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_QUESTION, _ANSWER = ("prompt", "question", "problem"), ("ground_truth", "answer")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str


class Problems:
    """A source of problems: `file` if there is one, otherwise sums of `num_operands` numbers of up to `digits` digits.

    A file has the columns `prompt` (or `question`, `problem`) and `ground_truth` (or `answer`), or those of `columns`.
    """

    def __init__(
        self,
        *,
        file: str | None = None,
        columns: tuple[str | None, str | None] = (None, None),
        digits: int = 2,
        num_operands: int = 2,
        operators: Sequence[str] = ("+",),
    ) -> None:
        unknown = [name for name in operators if name not in OPERATORS]
        if unknown or not operators:
            raise ConfigError(
                f"operators: found {list(operators)}, expected some of {', '.join(OPERATORS)}"
            )
        if digits < 1 or num_operands < 2:
            raise ConfigError(
                f"found digits {digits} and num_operands {num_operands}, expected at least 1 and 2"
            )
        self.digits, self.num_operands, self.operators = digits, num_operands, tuple(operators)
        self.rows = None if file is None else _rows_of(file, *columns)

    def draw(self, seed: int | None) -> Problem:
        """The problem of a seed."""
        rng = random.Random(seed)
        if self.rows is not None:
            return self.rows[rng.randrange(len(self.rows))]
        names = [rng.choice(self.operators) for _ in range(self.num_operands - 1)]
        numbers = [rng.randrange(10**self.digits) for _ in range(self.num_operands)]
        text = str(numbers[0]) + "".join(
            f"{name}{number}" for name, number in zip(names, numbers[1:], strict=True)
        )
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
def _rows_of(file: str, question_key: str | None, answer_key: str | None) -> tuple[Problem, ...]:
    questions = _QUESTION if question_key is None else (question_key,)
    answers = _ANSWER if answer_key is None else (answer_key,)
    table = load_table(file)
    problems = []
    for index in range(len(table)):
        row = table[index]
        problems.append(Problem(str(_pick(row, questions, file)), str(_pick(row, answers, file))))
    return tuple(problems)


def dataset_file(name: str, split: str | None) -> str:
    """What `load_table` reads for the `dataset_name` and `split` of a ROLL file.

    Raises:
        ConfigError: `name` is neither a file nor a folder here, as names of the Hugging Face hub are not.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(
            f'dataset_name: found "{name}", which is no file or folder here; download it, for example with `hf '
            f"download {name} --repo-type dataset --local-dir {path.name}`, and name the folder"
        )
    if split is None or not path.is_dir():
        return str(path)
    folders = [folder for folder in (path, path / "data") if any(folder.glob(f"{split}*"))]
    if not folders:
        raise ConfigError(
            f'split: found "{split}", but {path} has no file or folder whose name begins with it'
        )
    saved = folders[0] / split
    return str(saved if saved.is_dir() else folders[0] / f"{split}*")


def _pick(row: Any, names: Sequence[str], file: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ConfigError(f"{file}: expected a column {' or '.join(names)}, found {', '.join(row)}")
