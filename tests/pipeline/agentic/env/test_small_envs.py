"""Guess the number, sums, mathematics and tools: one environment each, by hand."""

import contextlib
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.problems import Problems
from roll.pipeline.agentic.env.registry import make
from roll.pipeline.agentic.env.tool_task import calculate


def answer(text: object) -> str:
    return f"<answer>{text}</answer>"


# -- guess the number -----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), show_range=st.booleans())
def test_halving_always_wins(seed, show_range):
    env = make("guess_number", low=1, high=15, max_steps=4, show_range=show_range)
    assert env.reset(seed)[0] == "1-15"
    low, high = 1, 15
    for _ in range(4):
        guess = (low + high) // 2
        observation, reward, terminated, truncated, info = env.step(answer(guess))
        if terminated:
            break
        assert reward == 0.0
        if show_range:
            low, high = map(int, observation.split("-"))
        else:
            low, high = (guess + 1, high) if observation == "higher" else (low, guess - 1)
    assert terminated and not truncated and reward == 1.0 and info["metrics"]["success"] is True


def test_malformed_and_wrong_guesses():
    env = make("guess_number", high=10, max_steps=3, format_penalty=-0.5, wrong_penalty=-0.1)
    env.reset(1)
    assert env.step("five")[:4] == ("invalid", -0.5, False, False)
    assert env.step(answer(11))[:2] == ("invalid", -0.5)
    wrong = env._secret % 10 + 1
    observation, reward, terminated, truncated, info = env.step(answer(wrong))
    assert (reward, terminated, truncated) == (-0.1, False, True)
    assert observation == ("higher" if wrong < env._secret else "lower")
    assert info["metrics"] == {"success": False, "action_is_valid": True}


def test_seeds_spread_the_numbers():
    env = make("guess_number", high=10)
    secrets = set()
    for seed in range(60):
        env.reset(seed)
        secrets.add(env._secret)
    assert secrets == set(range(1, 11))
    with pytest.raises(ConfigError, match="high: found 1"):
        make("guess_number", high=1)


# -- problems -------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**9), digits=st.integers(1, 4), num_operands=st.integers(2, 5))
def test_sums_are_what_python_says(seed, digits, num_operands):
    source = Problems(digits=digits, num_operands=num_operands, operators=("+", "-", "*"))
    problem = source.draw(seed)
    tree = compile(problem.question.replace("--", "- -"), "sum", "eval", dont_inherit=True)
    assert str(eval(tree)) == problem.answer
    assert source.draw(seed) == problem


def test_problems_from_a_file(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"question": "2+2?", "answer": 4}, {"question": "3+3?", "answer": 6}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {Problems(file=str(file)).draw(seed).question for seed in range(20)} == {"2+2?", "3+3?"}
    (tmp_path / "bad.jsonl").write_text('{"text": "x", "answer": 1}\n')
    with pytest.raises(
        ConfigError, match=r"bad.jsonl: expected a column prompt or question .* found text, answer"
    ):
        Problems(file=str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize(
    "config", [{"operators": ["^"]}, {"operators": []}, {"digits": 0}, {"num_operands": 1}]
)
def test_bad_problems(config):
    with pytest.raises(ConfigError, match="found"):
        Problems(**config)


# -- mathematics ----------------------------------------------------------------------------------------------------


def test_mathematics_is_one_turn():
    pytest.importorskip("math_verify")
    env = make(
        "math", operators=["+"], format_penalty=-1.0, answer_pattern=r"<answer>(.*?)</answer>"
    )
    question, info = env.reset(5)
    right = eval(question)
    assert info == {"env_instruction": "Solve the problem."}
    assert env.step(answer(right))[1:4] == (1.0, True, False)
    env.reset(5)
    assert env.step(answer(f"\\frac{{{2 * right}}}{{2}}"))[1] == 1.0
    env.reset(5)
    assert env.step(answer(right + 1))[1:4] == (0.0, True, False)
    env.reset(5)
    _, reward, terminated, _, info = env.step(str(right))
    assert (reward, terminated, info["metrics"]) == (
        -1.0,
        True,
        {"success": False, "action_is_valid": False},
    )


def test_an_answer_that_cannot_be_compared_is_an_error_and_not_a_zero():
    pytest.importorskip("math_verify")
    env = make("math", timeout_s=3.0)
    env.reset(5)
    with pytest.raises(RuntimeError, match=r"could not be compared .*: timeout"):
        env.step(r"$\binom{10^9}{10^8}$")
    question, _ = env.reset(6)
    assert env.step(f"It is {eval(question)}.")[1] == 1.0


# -- tools ----------------------------------------------------------------------------------------------------------


def test_a_call_then_the_answer():
    env = make("tool_task", digits=3, call_reward=0.1)
    question, info = env.reset(2)
    assert "<tool>2+3</tool>" in info["env_instruction"]
    observation, reward, terminated, truncated, info = env.step(
        f"Let me see. <tool>{question}</tool>"
    )
    assert (observation, reward, terminated, truncated) == (str(eval(question)), 0.1, False, False)
    assert (
        info["metrics"] == {"success": False, "action_is_valid": True, "tool_calls": 1}
        and info["use_tool"]
    )
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
    assert env.step(f"<tool>1</tool>{answer(f'{eval(question):,}')}")[1] == 1.0


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


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-2**2", "-4"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("1/4", "0.25"),
        ("1/3", "1/3"),
        ("0.1+0.2", "0.3"),
        ("2**100", str(2**100)),
        ("2**-1", "0.5"),
    ],
)
def test_the_calculator(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "f(1)",
        "__import__('os')",
        "'a'*3",
        "True",
        "9**9**9**9",
        "2**0.5",
        "1 if 1 else 2",
        "(" * 500,
        "1" * 2000,
        "2**99999",
        "[1]",
        "1;2",
        "10**1000*10**1000",
        "\x00",
    ],
)
def test_what_the_calculator_refuses(expression):
    with pytest.raises(ValueError):
        calculate(expression)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="0123456789+-*/%(). e", max_size=20))
def test_the_calculator_never_fails_otherwise(text):
    with contextlib.suppress(ValueError, ZeroDivisionError):
        assert calculate(text)


def test_bad_tools():
    with pytest.raises(ConfigError, match='tool: found "bash"'):
        make("tool_task", tool="bash")


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"<answer>(.*?)</answer>", "<answer>5</answer>"),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think></think><answer>5</answer>"),
        (r"(\d+)", "5"),
        (r"\d+", "5"),
        (r"move: (\w+)", "move: 5"),
        (r"^=(.*)$", "=5"),
        (r"^(\d)$", "5"),
        (r"^[a-z]+(?P<n>\d)$", "5"),
    ],
)
def test_answers_that_a_pattern_accepts(pattern, expected):
    assert answer_with(pattern, "5") == expected


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
