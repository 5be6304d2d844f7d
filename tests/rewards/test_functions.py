"""What score functions may return, and the ones that come along."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.functions import (
    after_thinking,
    choice_score,
    code_score,
    crossthink_score,
    extract_code,
    general_val_score,
    judge_score,
    last_boxed,
    read_verdict,
)
from roll.rewards.pool import Score, ScorePool, to_score

ONES = [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor([[1]])]


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        *[(one, Score(1.0)) for one in ONES],
        ({"a": 0.5, "b": np.float64(0.25)}, Score(0.75, {"a": 0.5, "b": 0.25})),
        ({"a": 0.5, "score": 2}, Score(2.0, {"a": 0.5, "score": 2.0})),
    ],
)
def test_numbers_and_parts_that_add_up_unless_one_is_the_score(returned, score):
    assert to_score(returned) == score


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "none"),
        ({}, "none"),
        (float("nan"), "nan"),
        (float("inf"), "nan"),
        ({"a": 1.0, "b": float("nan")}, "nan"),
        ("1", "type: returned '1' (str); expected a number, a dict of numbers or None"),
        ([1.0], "type: returned [1.0] (list)"),
        (np.array([1.0, 2.0]), "type: "),
        (torch.ones(2), "type: "),
        ({"a": "x"}, "type: part 'a' is 'x' (str); expected a number"),
        ({"a": None}, "type: part 'a' is None"),
        (1j, "type: "),
        ("x" * 100, f"type: returned '{'x' * 56}... (str)"),
    ],
)
def test_what_is_no_score(returned, reason):
    score = to_score(returned)
    assert score.value is None and score.parts == {} and score.reason.startswith(reason)


LEAVES = st.none() | st.floats() | st.text() | st.booleans()


@settings(max_examples=50, deadline=None)
@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_a_score_has_a_value_or_a_reason(returned):
    score = to_score(returned)
    assert (score.value is None) == (score.reason is not None)
    assert score.value is None or np.isfinite(score.value)


def test_where_an_answer_stands():
    assert last_boxed(r"so \boxed{4}") == "4"
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} then \boxed{cut off") == "1"
    assert last_boxed("none") is None
    assert after_thinking("<think>4?</think> no </think>\n5 ") == "5"
    assert after_thinking("5") == "5"


# -- mathematics -----------------------------------------------------------------------------------


def math_scores(rows, timeout_s=60.0, **options):
    pytest.importorskip("math_verify")
    rows = [{"prompt": "", "response": text, "ground_truth": truth} for text, truth in rows]
    with ScorePool("roll.rewards.math_answers:score", timeout_s=timeout_s, options=options) as pool:
        return pool.score(rows)


def test_math_answers_are_compared_by_value():
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
    values = [score.value for score in math_scores(right + wrong + unknown)]
    assert values == [1.0] * len(right) + [0.0] * len(wrong) + [None] * len(unknown)


def test_the_format_of_a_math_answer_counts_where_it_is_asked_for():
    rows = [(r"<answer>\boxed{2}</answer>", "2"), (r"\boxed{2}", "2")]
    found = math_scores(rows, format_pattern="<answer>.*</answer>")
    assert [score.value for score in found] == [1.0, 0.0]


def test_a_comparison_that_does_not_end_is_a_timeout_and_not_a_wrong_answer():
    hard, easy = math_scores([(r"$\binom{10^9}{10^8}$", "1"), ("2", "2")], timeout_s=3.0)
    assert (hard.value, hard.reason, easy.value) == (None, "timeout", 1.0)


# -- multiple choice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["B", "(b)", "B.", "B. Paris", r"\text{B}", r"\mathbf{(B)}", "B: a cat", "b) a dog"]
)
def test_one_letter_in_many_spellings(answer):
    assert choice_score("", rf"I think \boxed{{{answer}}}", "B") == 1.0
    assert choice_score("", rf"I think \boxed{{{answer}}}", "C") == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        (r"\boxed{C, A}", "AC", 1.0),
        (r"\boxed{A and C}", "A,C", 1.0),
        (r"\boxed{A}", "AC", 0.0),
        (r"<think>\boxed{B}</think> \boxed{A}", "B", 0.0),
        (r"\boxed{A} or rather \boxed{B}", "B", 1.0),
        ("B", "B", 0.0),
        (r"\boxed{}", "B", 0.0),
        (r"\boxed{B}", None, None),
        (r"\boxed{B}", "", None),
    ],
)
def test_choices_of_the_last_box(response, truth, value):
    assert choice_score("", response, truth) == value


@pytest.mark.parametrize(
    ("response", "truth", "rewards"),  # loose, soft, strict: what ROLL's function gives
    [
        (r"<think>A</think>so \boxed{B}", "B", (1.0, 1.0, 1.0)),
        ("The answer is C.", "C", (1.0, 0.5, -1.0)),
        ("the answer is b, or B", "B", (1.0, 0.5, -1.0)),
        ("A or B", "B", (-1.0, -1.0, -1.0)),
        (r"\boxed{A}", "B", (-1.0, -0.5, -1.0)),
        ("nothing", "B", (-1.0, -1.0, -1.0)),
        (r"\boxed{\text{D}}", "D. four", (1.0, 1.0, 1.0)),
        ("I think the Answer Is: C", "C", (1.0, 0.5, -1.0)),
        (r"\boxed{} B", "B", (1.0, 0.5, -1.0)),
    ],
)
def test_crossthink_gives_part_of_the_credit_for_the_form(response, truth, rewards):
    for reward_type, reward in zip(("loose", "soft", "strict"), rewards, strict=True):
        found = crossthink_score("", response, truth, reward_type=reward_type)
        assert found == {"score": float(reward > 0), "answer": reward, "repetition": 0.0}


def test_crossthink_takes_off_what_is_repeated():
    # Of seven runs of three words three are repetitions: 0.5 * 3 / 7.
    found = crossthink_score("", "no no no no no no answer is A", "A")
    assert found is not None and found["repetition"] == pytest.approx(-0.5 * 3 / 7)
    assert crossthink_score("", "A", None) is None


def test_general_val_knows_its_benchmarks_and_drops_the_others():
    assert general_val_score("", "the answer is B", "B", tag="mmlu_pro") == 1.0
    assert general_val_score("", "the answer is C", "B", tag="ceval") == 0.0
    assert general_val_score("", "the answer is B", "B", tag="math") is None


# -- programs --------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
ADD = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a, b): return (a, b)"
STDIN = [{"stdin": "2 3\n", "expected_stdout": "5\n"}, {"input": "1 1", "output": "2"}]
CALLS = [
    {"fn_name": "add", "args": [2, 3], "expected": 5},
    {"fn_name": "add", "args": ["a", "b"], "expected": "ab"},
]
ASSERTS = ["assert add(2, 3) == 5", {"assert_code": "assert add(0, 0) == 0\nassert add(1, 1) == 2"}]
FAILED = {"score": 0.0, "pass_rate": 0.0}


def judge_code(code, cases, **options):
    response = f"Here it is:\n```python\n{code}\n```\nDone."
    return code_score("", response, None, test_cases=cases, **options)


@on_linux
@pytest.mark.parametrize("as_json", [True, False])
def test_right_programs(as_json):
    for code, cases in [
        ("a, b = map(int, input().split())\nprint(a + b, '')", STDIN),
        (ADD, CALLS + ASSERTS),
        (METHOD, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["[1, 2]"]}),
        ("print(0.1 + 0.2 < 1)", {"inputs": [""], "outputs": ["True"]}),
        (
            "def half(x): return x / 2",
            [
                {"fn_name": "half", "args": [1], "expected": 0.5000000001},
                {"fn_name": "half", "args": [2000001], "expected": 1000000.6},
            ],
        ),
    ]:
        found = judge_code(code, json.dumps(cases) if as_json else cases)
        assert found == {"score": 1.0, "pass_rate": 1.0}


@on_linux
def test_partly_right_programs():
    wrong = "def add(a, b):\n    return 5\n"
    assert judge_code(wrong, CALLS) == {"score": 0.0, "pass_rate": 0.5}
    assert judge_code(wrong, CALLS, reward_type="fraction") == {"score": 0.5, "pass_rate": 0.5}
    stop = [{"stdin": "", "expected_stdout": "1"}, {"stdin": "", "expected_stdout": ""}]
    assert judge_code("print(1)", stop) == {"score": 0.0, "pass_rate": 0.5}


@on_linux
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
    assert judge_code(trick, CALLS, case_timeout_s=1.0) == FAILED
    if "exit" in trick.lower():
        assert judge_code(trick, ASSERTS) == FAILED


def test_what_there_is_to_run():
    assert extract_code("```python\na\n```\nor\n```\nb\n```") == "b\n"
    assert extract_code("<think>```python\na\n```</think>x = 1") == "x = 1"
    assert extract_code("```bash\nls\n```") is None
    assert extract_code("") is None
    assert code_score("", "no code ```", None, test_cases=CALLS) == FAILED


def test_without_test_cases_there_is_no_verdict():
    assert code_score("", "x = 1", None) is None
    assert code_score("", "x = 1", None, test_cases="[]") is None
    with pytest.raises(ValueError, match="a test case has none of args, stdin"):
        code_score("", "x = 1", None, test_cases=[{"question": "?"}])


# -- a judge, asked over a real connection ---------------------------------------------------------


class Judge(BaseHTTPRequestHandler):
    """Says YES when the response in the question is right; fails as often as it was told to."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        if self.server.failures > 0:
            self.server.failures -= 1
            self.send_error(self.server.status)
            return
        if self.server.hangs:
            self.server.closing.wait()
        is_right = "Response:\nParis" in body["messages"][0]["content"]
        verdict = self.server.says or ("Verdict: YES" if is_right else "Hm. Verdict: NO")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": verdict}}]}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    server.requests, server.failures, server.hangs, server.says = [], 0, False, None
    server.status, server.closing = 503, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


ROW = {"prompt": "Capital of France?", "response": "Paris", "ground_truth": "Paris"}


def test_a_verdict(judge):
    assert judge_score(**ROW, url=judge.url, model="judge-7b", api_key="key") == 1.0
    assert judge_score(**{**ROW, "response": "Rome"}, url=judge.url) == 0.0
    path, body, key = judge.requests[0]
    assert path == "/v1/chat/completions" and body["model"] == "judge-7b" and key == "Bearer key"
    assert "Capital of France?" in body["messages"][0]["content"]
    assert judge.requests[1][2] is None
    judge.says = "I cannot judge that."
    assert judge_score(**ROW, url=judge.url) is None


def test_a_template_is_filled_in_once_and_may_be_a_name_of_rolls(judge):
    row = {**ROW, "response": "{ground_truth}"}
    assert judge_score(**row, url=judge.url, template="{prompt}|{response}|{ground_truth}") == 0.0
    assert judge_score(**ROW, url=judge.url, template="Qwen2.5-7B-Instruct-RLVR-prompt") == 1.0
    own, named = (body["messages"][0]["content"] for _, body, _ in judge.requests)
    assert own == "Capital of France?|{ground_truth}|Paris"
    assert "Capital of France?" in named and "Verdict: YES" in named


def test_a_short_outage_is_waited_out_and_a_refusal_is_not(judge):
    judge.failures = 1
    assert judge_score(**ROW, url=judge.url) == 1.0
    assert len(judge.requests) == 2
    judge.failures, judge.status = 1, 401
    with pytest.raises(ConnectionError, match=r"did not answer: status 401 \(1 tries\)"):
        judge_score(**ROW, url=judge.url)
    with pytest.raises(ConnectionError, match=r"did not answer: .*refused"):
        judge_score(**ROW, url="http://127.0.0.1:9/v1", timeout_s=2)


@pytest.mark.slow
def test_an_outage_drops_samples_and_is_never_a_zero(judge):
    judge.failures = 100
    options = {"url": judge.url, "timeout_s": 3}
    spec = "roll.rewards.functions:judge_score"
    with ScorePool(spec, num_processes=4, options=options) as pool:
        down = pool.score([ROW] * 4)
        judge.failures = 0
        up = pool.score([ROW] * 4)
        judge.hangs = True
        hanging = pool.score([ROW])
    assert all(s.value is None and "did not answer: status 503" in s.reason for s in down)
    assert [s.value for s in up] == [1.0] * 4
    assert hanging[0].value is None and "timed out" in hanging[0].reason


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Verdict: YES", 1.0),
        ("**Verdict:** no", 0.0),
        ("Verdict: NO at first.\nVerdict: Yes", 1.0),
        ("Rating: [[7.5]]", 7.5),
        ("Score: 3", 3.0),
        ("yes", 1.0),
        ("No.", 0.0),
        ("0.25", 0.25),
        ("Perhaps", None),
        ("", None),
        ("Yes and no", None),
    ],
)
def test_verdicts(answer, value):
    assert read_verdict(answer) == value
