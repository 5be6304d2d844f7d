"""Sums, mathematics and tools."""

import contextlib
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import make
from roll.pipeline.agentic.env.questions import Problems, calculate


def answer(text: object) -> str:
    return f"<answer>{text}</answer>"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**9), digits=st.integers(1, 4), num_operands=st.integers(2, 5))
def test_sums_are_what_python_says(seed, digits, num_operands):
    source = Problems(digits=digits, num_operands=num_operands, operators=("+", "-", "*"))
    problem = source.draw(seed)
    assert str(eval(problem.question)) == problem.answer
    assert source.draw(seed) == problem


def test_problems_from_a_file(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"question": "2+2?", "answer": 4}, {"question": "3+3?", "answer": 6}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = {Problems(file=str(file)).draw(seed) for seed in range(20)}
    assert drawn == {("2+2?", "4"), ("3+3?", "6")}
    (tmp_path / "bad.jsonl").write_text('{"text": "x", "answer": 1}\n')
    message = r"bad.jsonl: expected a column prompt or question .* found text, answer"
    with pytest.raises(ConfigError, match=message):
        Problems(file=str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"operators": ["^"]}, r"operators: found \['\^'\], expected some of"),
        ({"operators": []}, r"operators: found \[\]"),
        ({"digits": 0}, "found digits 0 and num_operands 2, expected at least 1 and 2"),
        ({"num_operands": 1}, "found digits 3 and num_operands 1"),
        (
            {"digits": 90, "num_operands": 30},
            "found 90 and 30, expected smaller sums: expression too",
        ),
        ({"tool": "bash"}, 'tool: found "bash", expected "calculator" or "python"'),
    ],
)
def test_options_that_make_no_sense(config, message):
    with pytest.raises(ConfigError, match=message):
        make("tool_task", **config)


def test_mathematics_is_one_turn():
    pytest.importorskip("math_verify")
    env = make("math", format_penalty=-1.0, answer_pattern="<answer>(.*?)</answer>")
    question, info = env.reset(5)
    right = eval(question)
    assert info == {"env_instruction": "Solve the problem."}
    assert env.step(answer(right))[1:4] == (1.0, True, False)
    assert env.step(answer(f"\\frac{{{2 * right}}}{{2}}"))[1] == 1.0
    assert env.step(answer(right + 1))[:4] == ("wrong", 0.0, True, False)
    _, reward, terminated, _, info = env.step(str(right))
    assert (reward, terminated) == (-1.0, True)
    assert info["metrics"] == {"success": False, "action_is_valid": False}


def test_an_answer_that_cannot_be_compared_is_an_error_and_not_a_zero():
    pytest.importorskip("math_verify")
    env = make("math", timeout_s=3.0)
    env.reset(5)
    with pytest.raises(RuntimeError, match=r"could not be compared .*: timeout"):
        env.step(r"$\binom{10^9}{10^8}$")
    question, _ = env.reset(6)
    assert env.step(f"It is {eval(question)}.")[1] == 1.0


def test_math_from_a_dataset_folder_as_roll_names_it(tmp_path):
    (tmp_path / "data").mkdir()
    for split, number in (("train", 1), ("test", 2)):
        rows = f'{{"problem": "{number}+1", "solution": "{number + 1}", "answer": "no"}}\n'
        (tmp_path / "data" / f"{split}-00000.jsonl").write_text(rows)
    keys = {"question_key": "problem", "answer_key": "solution"}
    for split, question, right in (("train", "1+1", "2"), ("test", "2+1", "3")):
        env = make("roll_math", dataset_name=str(tmp_path), split=split, **keys)
        assert env.reset(0)[0] == question
        assert env.step(f"\\boxed{{{right}}}")[1] == 1.0
    with pytest.raises(ConfigError, match=r'split: found "val"'):
        make("roll_math", dataset_name=str(tmp_path), split="val")
    with pytest.raises(ConfigError, match=r"open-r1/DAPO.* is no file or folder here; download it"):
        make("roll_math", dataset_name="open-r1/DAPO-Math-17k")


def test_a_call_then_the_answer():
    env = make("tool_task", digits=3, call_reward=0.1)
    question, info = env.reset(2)
    assert "<tool>2+3</tool>" in info["env_instruction"]
    call = f"Let me see. <tool>{question}</tool>"
    observation, reward, terminated, truncated, info = env.step(call)
    assert (observation, reward, terminated, truncated) == (str(eval(question)), 0.1, False, False)
    assert info["metrics"] == {"success": False, "action_is_valid": True, "tool_calls": 1}
    assert info["metrics_agg_mode"] == {"success": "last", "tool_calls": "last"}
    observation, reward, terminated, _, info = env.step(answer(observation))
    assert (observation, reward, terminated) == ("correct", 1.0, True)
    assert info["metrics"]["success"] is True


def test_wrong_answers_malformed_ones_and_the_end():
    env = make("tool_task", max_steps=2, format_penalty=-0.2)
    question, _ = env.reset(2)
    assert env.step("hm")[:4] == ("invalid", -0.2, False, False)
    assert env.step("<tool>1+</tool>")[:4] == ("error: not an expression", 0.0, False, True)
    env.reset(2)
    assert env.step(answer(eval(question) + 1))[:4] == ("wrong", 0.0, True, False)
    env.reset(2)
    # An answer counts more than a call, and the last answer more than the first.
    assert env.step(f"<tool>1</tool>{answer('no')}{answer(f'{eval(question):,}')}")[1] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_python_tool_runs_in_the_sandbox():
    def say(code, timeout_s=60.0):
        env = make("tool_task", tool="python", max_steps=10, timeout_s=timeout_s, max_output=50)
        env.reset(0)
        return env.step(f"<tool>{code}</tool>")[0]

    assert say("print(sum(range(10)))") == "45"
    assert say("1/0") == "error: ZeroDivisionError: division by zero"
    assert say("print('x' * 1000)") == "x" * 50 + "..."
    # The latter on a busy machine.
    assert say("while True: pass", timeout_s=1.0) in ("error: cpu time", "error: timeout")
    assert "rror" in say("import socket; socket.create_connection(('127.0.0.1', 22))")
    assert say("import os; print(os.environ.get('HOME'))") == "None"


CALCULATED = """
2+3*4 = 14; (2+3)*4 = 20; -2**2 = -4; +7//2 = 3; -7%3 = 2; 1/4 = 0.25; 1/3 = 1/3; 0.1+0.2 = 0.3;
2**-1 = 0.5; 2**100 = 1267650600228229401496703205376
"""


@pytest.mark.parametrize("equation", CALCULATED.split(";"))
def test_the_calculator(equation):
    expression, value = equation.strip().split(" = ")
    assert calculate(expression) == value


REFUSED = [
    *["", "x", "f(1)", "__import__('os')", "'a'*3", "True", "9**9**9**9", "2**0.5", "[1]", "1;2"],
    *["1 if 1 else 2", "(" * 500, "1" * 2000, "2**99999", "10**1000*10**1000", "\x00"],
]


@pytest.mark.parametrize("expression", REFUSED)
def test_what_the_calculator_refuses(expression):
    with pytest.raises(ValueError):
        calculate(expression)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="0123456789+-*/%(). e", max_size=20))
def test_the_calculator_never_fails_otherwise(text):
    with contextlib.suppress(ValueError, ZeroDivisionError):
        assert calculate(text)
