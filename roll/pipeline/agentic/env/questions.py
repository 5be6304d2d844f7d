"""Questions with answers that can be checked: mathematics in one turn, and with a tool in several.

    17*23+4                      the question
    -> <tool>17*23+4</tool>      a call of the tool (ToolTaskEnv only)
    395                          what the tool says
    -> <answer>395</answer>      ends the episode: 1 if it is right, 0 if not

Questions are read from a file, or are sums made from a seed. The calculator is by hand because it
must neither run code nor take long, whatever a model writes.
"""

import ast
import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from roll.datasets.tables import load_table
from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import (
    ANSWER,
    Env,
    Reset,
    Step,
    answer_with,
    find_groups,
    step_info,
)
from roll.rewards.pool import ScorePool
from roll.rewards.sandbox import run_python

_MAX_BITS = 4096
_MAX_EXPRESSION = 1000


class Problem(NamedTuple):
    question: str
    answer: str


@dataclass(kw_only=True, eq=False)
class Problems:
    """A source of problems: those of a file, or sums of numbers of up to `digits` digits."""

    file: str | None = None
    question_key: str | None = None  # its column; `prompt`, `question` or `problem` if left out
    answer_key: str | None = None  # `ground_truth` or `answer` if left out
    digits: int = 2
    num_operands: int = 2
    operators: Sequence[str] = ("+",)

    def __post_init__(self) -> None:
        if not self.operators or set(self.operators) - set("+-*"):
            found = f"found {list(self.operators)}, expected some of +, -, *"
            raise ConfigError(f"operators: {found}")
        if self.digits < 1 or self.num_operands < 2:
            found = f"found digits {self.digits} and num_operands {self.num_operands}"
            raise ConfigError(f"{found}, expected at least 1 and 2")
        self._rows: tuple[Problem, ...] = ()
        if self.file is not None:
            self._rows = _read(self.file, self.question_key, self.answer_key)

    def draw(self, seed: int | None) -> Problem:
        """The problem of a seed."""
        rng = random.Random(seed)
        if self.file is not None:
            return self._rows[rng.randrange(len(self._rows))]
        names = [rng.choice(self.operators) for _ in range(self.num_operands - 1)]
        first, *rest = [rng.randrange(10**self.digits) for _ in range(self.num_operands)]
        text = str(first)
        for name, number in zip(names, rest, strict=True):
            text += f"{name}{number}"
        try:
            return Problem(text, calculate(text))
        except ValueError as error:
            found = f"digits and num_operands: found {self.digits} and {self.num_operands}"
            raise ConfigError(f"{found}, expected smaller sums: {error}") from None


@functools.lru_cache(maxsize=8)  # the environments of one process share it
def _read(file: str, question_key: str | None, answer_key: str | None) -> tuple[Problem, ...]:
    questions = ("prompt", "question", "problem") if question_key is None else (question_key,)
    answers = ("ground_truth", "answer") if answer_key is None else (answer_key,)
    table = load_table(file)
    problems = []
    for row in (table[index] for index in range(len(table))):
        cells = []
        for names in (questions, answers):
            present = [name for name in names if name in row]
            if not present:
                expected = " or ".join(names)
                raise ConfigError(f"{file}: expected a column {expected}, found {', '.join(row)}")
            cells.append(str(row[present[0]]))
        problems.append(Problem(*cells))
    return tuple(problems)


def dataset_file(name: str, split: str | None) -> str:
    """What `load_table` reads for the `dataset_name` and `split` of a ROLL file.

    Raises ConfigError where `name` is no file or folder here, as names of the Hugging Face hub are.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(
            f'dataset_name: found "{name}", which is no file or folder here; download it, for '
            f"example with `hf download {name} --repo-type dataset --local-dir {path.name}`, and "
            "name the folder"
        )
    if split is None or not path.is_dir():
        return str(path)
    folders = [folder for folder in (path, path / "data") if any(folder.glob(f"{split}*"))]
    if not folders:
        expected = f"but {path} has no file or folder whose name begins with it"
        raise ConfigError(f'split: found "{split}", {expected}')
    saved = folders[0] / split
    return str(saved if saved.is_dir() else folders[0] / f"{split}*")


@functools.lru_cache(maxsize=4)
def _math_pool(timeout_s: float) -> ScorePool:
    """One process for all environments of this one; it ends with it."""
    return ScorePool(
        "roll.rewards.math_answers:score",
        num_processes=1,
        timeout_s=timeout_s,
        memory_mb=2048,
    )


@dataclass(kw_only=True, eq=False)
class QuestionEnv(Env):
    """What both environments share: where the questions come from, and the start of an episode."""

    file: str | None = None  # problems; sums are made up if left out
    digits: int = 2  # what sums look like
    num_operands: int = 2
    operators: Sequence[str] = ("+",)
    format_penalty: float = 0.0  # reward of an answer that has not the form that is asked for
    env_instruction: str | None = None  # what the policy reads first; "" leaves it out

    def open(self, rules: str, **columns: str | None) -> None:
        self.problems = Problems(
            file=self.file,
            digits=self.digits,
            num_operands=self.num_operands,
            operators=self.operators,
            **columns,
        )
        if self.env_instruction is None:
            self.env_instruction = rules
        self.reset(0)

    def reset(self, seed: int | None = None) -> Reset:
        self._problem, self._random = self.problems.draw(seed), random.Random(seed)
        self._steps = self._calls = 0
        return self._problem.question, {"env_instruction": self.env_instruction}


@dataclass(kw_only=True, eq=False)
class MathEnv(QuestionEnv):
    """Mathematics as an environment of one turn: a question, an answer, 1 or 0.

    Answers are compared by value with math-verify, in a process that can be killed: a comparison
    that does not end, or fails, is an error of the episode and not a wrong answer.
    """

    dataset_name: str | None = None  # ROLL's name for `file`, which has to be here
    split: str | None = None  # of a folder with files of several splits, the one to read
    question_key: str | None = None  # columns with other names
    answer_key: str | None = None
    # Where the answer stands; looked for as math-verify does (a box, the last expression) if None.
    answer_pattern: str | None = None
    timeout_s: float = 10.0  # for comparing two answers

    def __post_init__(self) -> None:
        if self.file is None and self.dataset_name is not None:
            self.file = dataset_file(self.dataset_name, self.split)
        columns = {"question_key": self.question_key, "answer_key": self.answer_key}
        self.open("Solve the problem.", **columns)

    def step(self, action: str) -> Step:
        found = (
            [action] if self.answer_pattern is None else find_groups(self.answer_pattern, action)
        )
        reward, success = self.format_penalty, False
        if found is not None:
            question, truth = self._problem
            [score] = _math_pool(self.timeout_s).score(
                [{"prompt": question, "response": found[-1], "ground_truth": truth}]
            )
            if score.value is None:
                raise RuntimeError(
                    f"{question!r}: the answer could not be compared with {truth!r}: {score.reason}"
                )
            reward, success = score.value, score.value == 1.0
        info = step_info(success=success, action_is_valid=found is not None)
        return "correct" if success else "wrong", reward, True, False, info

    def sample_random_action(self) -> str:
        """An answer of the right form, for the random proxy: now and then the right one."""
        guess = self._problem.answer
        if self._random.random() >= 0.1:
            guess = str(self._random.randrange(100))
        return answer_with(self.answer_pattern, guess) if self.answer_pattern else guess


@dataclass(kw_only=True, eq=False)
class ToolTaskEnv(QuestionEnv):
    """Questions that are easier with a tool: call it, read what it says, answer.

    The `calculator` computes an arithmetic expression and runs no code; `python` runs a program in
    the sandbox and returns what it prints. A malformed answer costs a turn; so does a call.
    """

    tool: str = "calculator"  # or `python`
    digits: int = 3
    operators: Sequence[str] = ("+", "-", "*")
    max_steps: int = 4  # answers of an episode, calls included, after which it is truncated
    tool_pattern: str = r"<tool>(.*?)</tool>"  # where a call stands
    answer_pattern: str = ANSWER  # where the answer stands
    call_reward: float = 0.0  # of a call of the tool that worked
    max_output: int = 200  # characters of the tool's output that are shown
    timeout_s: float = 5.0  # limits of the python tool
    memory_mb: int = 256

    def __post_init__(self) -> None:
        if self.tool not in ("calculator", "python"):
            expected = 'expected "calculator" or "python"'
            raise ConfigError(f'tool_task: tool: found "{self.tool}", {expected}')
        call = answer_with(self.tool_pattern, "print(2+3)" if self.tool == "python" else "2+3")
        answer = answer_with(self.answer_pattern, "5")
        self.open(f"Use the tool ({call}) as you need, then answer ({answer}).")

    def step(self, action: str) -> Step:
        self._steps += 1
        # The last match counts: a model may change its mind.
        answer = find_groups(self.answer_pattern, action, last=True)
        call = find_groups(self.tool_pattern, action, last=True)
        reward, success, observation = self.format_penalty, False, "invalid"
        if answer is not None:
            given, truth = answer[-1].strip(), self._problem.answer.strip()
            try:
                success = Fraction(given.replace(",", "")) == Fraction(truth.replace(",", ""))
            except (ValueError, ZeroDivisionError):  # not both are numbers
                success = given.lower() == truth.lower()
            reward, observation = float(success), "correct" if success else "wrong"
        elif call is not None:
            self._calls += 1
            worked, observation = self._use_tool(call[-1].strip())
            reward = self.call_reward if worked else 0.0
        terminated = answer is not None
        truncated = not terminated and self._steps >= self.max_steps
        is_valid = terminated or call is not None
        info = step_info(success=success, action_is_valid=is_valid, tool_calls=self._calls)
        info["metrics_agg_mode"]["tool_calls"] = "last"
        return observation, reward, terminated, truncated, info

    def sample_random_action(self) -> str:
        """A call or an answer, for the random proxy."""
        if self._random.random() < 0.5:
            question = self._problem.question
            call = question if self.tool == "calculator" else f"print({question})"
            return answer_with(self.tool_pattern, call)
        number = self._random.randrange(10**self.problems.digits)
        return answer_with(self.answer_pattern, str(number))

    def _use_tool(self, call: str) -> tuple[bool, str]:
        """Whether the call worked, and what the tool says, cut to what is shown."""
        if self.tool == "calculator":
            try:
                worked, text = True, calculate(call)
            except (ValueError, ZeroDivisionError) as error:
                worked, text = False, f"error: {error}"
        else:
            result = run_python(
                call, cpu_s=self.timeout_s, wall_s=2 * self.timeout_s, memory_mb=self.memory_mb
            )
            worked = result.reason is None
            last_line = result.stderr.strip().rpartition("\n")[2]
            text = result.stdout.strip() if worked else f"error: {last_line or result.reason}"
        return worked, text if len(text) <= self.max_output else text[: self.max_output] + "..."


def calculate(expression: str) -> str:
    """The exact value of an expression of numbers, + - * / // % ** and parentheses.

    ValueError for anything else, and for numbers that are too large.
    Examples: calculate("2+3*4") == "14"; calculate("1/4") == "0.25"; calculate("1/3") == "1/3".
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError("expression too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    try:
        value = _evaluate(tree.body)
    except RecursionError:
        raise ValueError("expression too deep") from None
    if value.denominator == 1:
        return str(value.numerator)
    decimal = str(float(value)) if value.numerator.bit_length() < 64 else ""
    if decimal and Fraction(decimal) == value:
        return decimal
    return f"{value.numerator}/{value.denominator}"


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: base**exponent.numerator,
}


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow):
                if b.denominator != 1:
                    raise ValueError("only whole exponents")
                # A power is judged before it is computed: 9**9**9 would never end.
                if max(a.numerator.bit_length(), a.denominator.bit_length()) * abs(b) > _MAX_BITS:
                    raise ValueError("number too large")
            value = Fraction(_OPERATIONS[type(op)](a, b))
        case _:
            raise ValueError("only numbers and + - * / // % ** ( )")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("number too large")
    return value
