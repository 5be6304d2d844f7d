"""Programs against test cases, and the ways to pretend that they pass."""

import json
import sys

import pytest

from roll.pipeline.rlvr.rewards.code_answers import extract_code, score

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

ADD = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a, b): return (a, b)"
STDIN = [{"stdin": "2 3\n", "expected_stdout": "5\n"}, {"input": "1 1", "output": "2"}]
CALLS = [
    {"fn_name": "add", "args": [2, 3], "expected": 5},
    {"fn_name": "add", "args": ["a", "b"], "expected": "ab"},
]
ASSERTS = ["assert add(2, 3) == 5", {"assert_code": "assert add(0, 0) == 0\nassert add(1, 1) == 2"}]


def judge(code, cases, **options):
    return score(
        "", f"Here it is:\n```python\n{code}\n```\nDone.", None, test_cases=cases, **options
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_right_programs(as_json):
    for code, cases in [
        ("a, b = map(int, input().split())\nprint(a + b, '')", STDIN),
        (ADD, CALLS),
        (ADD, ASSERTS),
        (ADD, CALLS + ASSERTS),
        (METHOD, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["[1, 2]"]}),
        ("print(0.1 + 0.2 < 1)", {"inputs": [""], "outputs": ["True"]}),
        ("def half(x): return x / 2", [{"fn_name": "half", "args": [1], "expected": 0.5000000001}]),
    ]:
        assert judge(code, json.dumps(cases) if as_json else cases) == {
            "score": 1.0,
            "pass_rate": 1.0,
        }


def test_partly_right_programs():
    wrong = "def add(a, b):\n    return 5\n"
    assert judge(wrong, CALLS) == {"score": 0.0, "pass_rate": 0.5}
    assert judge(wrong, CALLS, reward_type="fraction") == {"score": 0.5, "pass_rate": 0.5}


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "print('[true, true]')\nprint('\\n' + '0' * 32 + '[true, true]')",
        "import sys\nprint(sys.stdin.read())",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "def add(a, b): return True",
        "def add(a, b):\n    while True: pass",
        "def add(a, b): return None",
        "",
        "def add(:",
    ],
)
def test_tricks_do_not_pass(trick):
    result = judge(trick, CALLS, case_timeout_s=1.0)
    assert result == {"score": 0.0, "pass_rate": 0.0}


def test_leaving_early_does_not_pass_assertions():
    for trick in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        assert judge(trick, ASSERTS) == {"score": 0.0, "pass_rate": 0.0}


def test_what_there_is_to_run():
    assert extract_code("```python\na\n```\nor\n```\nb\n```") == "b\n"
    assert extract_code("<think>```python\na\n```</think>x = 1") == "x = 1"
    assert extract_code("```bash\nls\n```") is None
    assert extract_code("") is None
    assert judge_text("no code ```") == {"score": 0.0, "pass_rate": 0.0}


def judge_text(response):
    return score("", response, None, test_cases=CALLS)


def test_without_test_cases_there_is_no_verdict():
    assert score("", "x = 1", None) is None
    assert score("", "x = 1", None, test_cases="[]") is None
    with pytest.raises(ValueError, match="a test case has none of args, stdin"):
        score("", "x = 1", None, test_cases=[{"question": "?"}])
