"""Questions that are easier with a tool: call it, read what it says, answer.

    17*23+4                      the question
    -> <tool>17*23+4</tool>      a call
    395                          what the tool says
    -> <answer>395</answer>      ends the episode: 1 if it is right, 0 if not

Two tools: a `calculator`, which computes an arithmetic expression and runs no code, and `python`, which runs a program
in the sandbox (see `roll.utils.sandbox`) and returns what it prints. A malformed answer gives `format_penalty` and
costs a turn; so does a call, which is worth `call_reward`.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.base import Env, Info, Reset, Step
from roll.pipeline.agentic.env.problems import Problem, Problems
from roll.utils.sandbox import run_python

_MAX_BITS = 4096
_MAX_EXPRESSION = 1000
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: _power(a, b),
}


class ToolTaskEnv(Env):
    """Questions with a tool.

    Args:
        tool: `calculator` or `python`.
        file: problems, with columns `prompt` and `ground_truth`; sums are made up if left out.
        digits, num_operands, operators: what sums look like.
        max_steps: answers of an episode, calls included, after which it is truncated.
        tool_pattern, answer_pattern: where a call and the answer stand.
        call_reward: reward of a call of the tool that worked.
        format_penalty: reward of an answer with neither a call nor an answer in it.
        max_output: characters of the tool's output that are shown.
        timeout_s, memory_mb: limits of the python tool.
        env_instruction: the rules as the policy reads them; "" leaves them out.
    """

    def __init__(
        self,
        *,
        tool: str = "calculator",
        file: str | None = None,
        digits: int = 3,
        num_operands: int = 2,
        operators: Sequence[str] = ("+", "-", "*"),
        max_steps: int = 4,
        tool_pattern: str = r"<tool>(.*?)</tool>",
        answer_pattern: str = r"<answer>(.*?)</answer>",
        call_reward: float = 0.0,
        format_penalty: float = 0.0,
        max_output: int = 200,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        env_instruction: str | None = None,
    ) -> None:
        if tool not in ("calculator", "python"):
            raise ConfigError(f'tool_task: tool: found "{tool}", expected "calculator" or "python"')
        self.problems = Problems(
            file=file, digits=digits, num_operands=num_operands, operators=operators
        )
        self.tool, self.max_steps, self.max_output = tool, max_steps, max_output
        self.tool_pattern, self.answer_pattern = tool_pattern, answer_pattern
        self.call_reward, self.format_penalty = call_reward, format_penalty
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        call = answer_with(tool_pattern, "print(2+3)" if tool == "python" else "2+3")
        rules = (
            f"Use the tool ({call}) as you need, then answer ({answer_with(answer_pattern, '5')})."
        )
        self.instruction = rules if env_instruction is None else env_instruction
        self._problem = Problem("", "")
        self._steps = self._calls = 0
        self._random = random.Random(0)

    def reset(self, seed: int | None = None) -> Reset:
        self._problem = self.problems.draw(seed)
        self._random = random.Random(seed)
        self._steps = self._calls = 0
        return self._problem.question, {"env_instruction": self.instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        answer, call = (
            _last(pattern, action) for pattern in (self.answer_pattern, self.tool_pattern)
        )
        reward, success, terminated = self.format_penalty, False, answer is not None
        observation = "invalid"
        if answer is not None:
            success = _same(answer, self._problem.answer)
            reward, observation = float(success), "correct" if success else "wrong"
        elif call is not None:
            self._calls += 1
            worked, observation = self._use_tool(call)
            reward = self.call_reward if worked else 0.0
        truncated = not terminated and self._steps >= self.max_steps
        is_valid = answer is not None or call is not None
        metrics = {"success": success, "action_is_valid": is_valid, "tool_calls": self._calls}
        info: Info = {
            "metrics": metrics,
            "metrics_agg_mode": {"success": "last", "tool_calls": "last"},
        }
        return (
            observation,
            reward,
            terminated,
            truncated,
            info | {"use_tool": call is not None and answer is None},
        )

    def sample_random_action(self) -> str:
        """A call or an answer, for the random proxy."""
        question = self._problem.question
        if self._random.random() < 0.5:
            return answer_with(
                self.tool_pattern, question if self.tool == "calculator" else f"print({question})"
            )
        return answer_with(
            self.answer_pattern, str(self._random.randrange(10**self.problems.digits))
        )

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
    """The exact value of an expression of numbers, + - * / // % ** and parentheses; ValueError for anything else.

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
    return (
        decimal
        if decimal and Fraction(decimal) == value
        else f"{value.numerator}/{value.denominator}"
    )


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("only numbers and + - * / // % ** ( )")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("number too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("only whole exponents")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > _MAX_BITS:
        raise ValueError("number too large")
    return Fraction(base**exponent.numerator)


def _last(pattern: str, text: str) -> str | None:
    """What the last group of the last match of `pattern` holds."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return (
        None
        if not matches
        else ((matches[-1].groups() or (matches[-1].group(0),))[-1] or "").strip()
    )


def _same(answer: str, truth: str) -> bool:
    """Equal as numbers where both are numbers, as texts otherwise."""
    try:
        return Fraction(answer.replace(",", "")) == Fraction(truth.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return answer.strip().lower() == truth.strip().lower()
