r"""Score functions that come along: multiple choice, programs, the verdict of a judge.

`math_answers` and `ifeval` hold two more. Each takes a prompt, a response, a ground truth and
columns of the row by name; None means that it cannot judge the row (docs/custom-reward.md).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from roll.rewards.sandbox import SandboxResult, run_python


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; everything if there is none."""
    return text.rpartition("</think>")[2].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, inner braces included.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}".
    """
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : position]
        end = start
    return None


# -- multiple choice -------------------------------------------------------------------------------


def choice_score(prompt: str, response: str, ground_truth: Any, **row: Any) -> float | None:
    r"""1.0 if the letters in the last `\boxed{}` are those of the ground truth, in any order."""
    right = _choices(str(ground_truth or ""))
    if not right:
        return None
    boxed = last_boxed(after_thinking(response))
    return float(boxed is not None and _choices(boxed) == right)


def _choices(text: str) -> frozenset[str]:
    r"""The letters of an answer: `B`, `(b)`, `B. Paris`, `\text{B}`, `A, C` and `AC` (two)."""
    text = re.sub(r"\\[a-zA-Z]+", "", last_boxed(text) or text)
    text = text.strip(" {}()[].:$\n")
    if re.fullmatch(r"[A-Z]{1,10}", text):
        return frozenset(text)
    letters = re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z'])", text)
    # Of "B. a cat" only the label counts; of "A, C" or "A and C" both do.
    if re.match(r"[A-Za-z]\s*[.:)]\s*\S", text):
        letters = letters[:1]
    return frozenset(letter.upper() for letter in letters)


# What an answer is worth by ROLL's `reward_type`: (right and boxed, right, boxed, neither).
CROSSTHINK_REWARDS = {
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}


def crossthink_score(
    prompt: str, response: str, ground_truth: Any, *, reward_type: str = "soft", **row: Any
) -> dict[str, float] | None:
    """`score` is 1.0 or 0.0 for the first letter. The reward is the sum of the other two parts:

    `answer`, from the table of `reward_type`, and `repetition`, down to -0.5 for a response whose
    runs of three words are all the same.
    """
    if not str(ground_truth or ""):
        return None
    letter, is_boxed = _first_letter(response)
    is_right = letter == str(ground_truth)[0]
    answer = CROSSTHINK_REWARDS[reward_type][2 * (not is_right) + (not is_boxed)]
    words = response.lower().split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    repeated = 0.0
    if triples:
        repeated = 1 - len(set(triples)) / len(triples)
    return {"score": float(answer > 0), "answer": answer, "repetition": -0.5 * repeated}


def general_val_score(
    prompt: str, response: str, ground_truth: Any, *, tag: str = "", **row: Any
) -> float | None:
    """1.0 if the first letter of the answer is that of the ground truth, 0.0 otherwise.

    None for tags of no benchmark with one choice. (ROLL repeats the score of the row before.)
    """
    tags = ("ceval", "race_high", "mmlu_pro", "commonsense_qa")
    if tag not in tags or not str(ground_truth or ""):
        return None
    return float(_first_letter(response)[0] == str(ground_truth)[0])


def _first_letter(response: str) -> tuple[str | None, bool]:
    """The first capital letter of the last box, else of what follows the last "answer is", else of
    the whole answer; and whether there was a box."""
    answer = after_thinking(response)
    boxed = last_boxed(answer)
    text = boxed or answer
    start = answer.lower().rfind("answer is")
    if not boxed and start >= 0:
        text = answer[start + len("answer is") :]
    return next((char for char in text if char.isupper()), None), bool(boxed)


# -- programs --------------------------------------------------------------------------------------

# The program is loaded first and the tests come on stdin afterwards, so that it finds neither them
# nor the word to say. Expected values stay outside of its process. Only an answer with the word
# counts, so leaving early (`sys.exit(0)`) is no pass.
_HARNESS = """
import json as _json, sys as _sys
_say = _sys.__stdout__
with open("solution.py") as _file:
    _code = compile(_file.read(), "solution.py", "exec")
_space = {"__name__": "solution"}
exec(_code, _space)
_job = _json.loads(_sys.__stdin__.read())
_out = []
for _case in _job["cases"]:
    try:
        if "assert_code" in _case:
            exec(compile(_case["assert_code"], "tests.py", "exec"), dict(_space))
            _out.append(True)
        else:
            _name, _owner = _case["fn_name"], None
            if "Solution" in _space and _name not in _space:
                _owner = _space["Solution"]()
            _function = getattr(_owner, _name) if _owner else _space[_name]
            _out.append([_function(*_case["args"])])
    except (Exception, SystemExit) as _error:
        _out.append(False)
print("\\n" + _job["word"] + _json.dumps(_out, default=repr), file=_say, flush=True)
"""


def code_score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    test_cases: Any = None,
    test_case_function: str | None = None,
    reward_type: str | None = None,
    case_timeout_s: float = 5.0,
    memory_mb: int = 512,
    **row: Any,
) -> dict[str, float] | None:
    """`score` 1.0 if all cases pass, else 0.0; with `reward_type: fraction` the share that passes.

    `test_cases` is a list, or its JSON, of cases of these kinds, which may be mixed:

        {"stdin": "2 3\\n", "expected_stdout": "5\\n"}      a program; also as `input` and `output`
        {"fn_name": "add", "args": [2, 3], "expected": 5}  a call; also as `inputs` and `outputs`
        {"assert_code": "assert add(2, 3) == 5"}           run after the program; or just the text
    """
    cases = _read_cases(test_cases if test_cases is not None else ground_truth)
    if test_case_function:
        cases.append({"assert_code": test_case_function})
    if not cases:
        return None
    code = extract_code(response)
    passed = 0
    if code is not None:
        limits: dict[str, Any] = {"memory_mb": memory_mb}
        limits |= {"cpu_s": case_timeout_s, "wall_s": 2 * case_timeout_s}
        passed = _num_passed(code, cases, limits)
    fraction = passed / len(cases)
    value = fraction if reward_type == "fraction" else float(fraction == 1.0)
    return {"score": value, "pass_rate": fraction}


def extract_code(response: str) -> str | None:
    """The last fenced block that is Python or of no stated language; without fences, all of it."""
    answer = after_thinking(response)
    fence = r"```(?:python|py|python3)?[ \t]*\n(.*?)```"
    blocks = re.findall(fence, answer, re.DOTALL | re.IGNORECASE)
    if blocks:
        return blocks[-1]
    return None if "```" in answer or not answer else answer


def _read_cases(value: Any) -> list[dict[str, Any]]:
    """Test cases in the three shapes of `code_score`, from what a data file may hold."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = [value] if value.strip() else []
    if isinstance(value, Mapping):
        if isinstance(value.get("inputs"), list):  # columns: one case for each pair
            pairs = zip(value["inputs"], value["outputs"], strict=True)
            name = value.get("fn_name")
            value = [{"fn_name": name, "inputs": i, "outputs": o} for i, o in pairs]
        else:
            value = [value]
    cases: list[dict[str, Any]] = []
    for item in value or []:
        if isinstance(item, str) or item.get("assert_code"):
            code = item if isinstance(item, str) else str(item["assert_code"])
            cases.append({"assert_code": code})
            continue
        given = _first(item, "args", "stdin", "input", "inputs")
        outputs = ("expected", "expected_stdout", "output", "outputs", "expected_output")
        expected = _first(item, *outputs)
        if item.get("fn_name"):
            if isinstance(given, str):  # one line of JSON for each argument
                given = [json.loads(line) for line in given.splitlines()]
                expected = json.loads(expected) if isinstance(expected, str) else expected
            cases.append({"fn_name": item["fn_name"], "args": given, "expected": expected})
            continue
        lines = []
        for text in (given or "", expected):
            lines.append("\n".join(map(str, text)) if isinstance(text, list) else str(text))
        cases.append({"stdin": lines[0], "expected_stdout": lines[1]})
    return cases


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if key in item:
            return item[key]
    found = ", ".join(map(str, item))
    raise ValueError(f"a test case has none of {', '.join(keys)}: it has {found}")


def _num_passed(code: str, cases: list[dict[str, Any]], limits: dict[str, Any]) -> int:
    """How many cases pass; programs stop at the first that takes too long."""
    passed = 0
    for case in [case for case in cases if "stdin" in case]:
        result = _run(code, stdin=case["stdin"], **limits)
        # Equal, but for space at the end of lines and of the text.
        left, right = (
            [line.rstrip() for line in text.rstrip().splitlines()]
            for text in (result.stdout, case["expected_stdout"])
        )
        passed += result.reason is None and left == right
        if result.timed_out:
            break
    called = [case for case in cases if "stdin" not in case]
    if not called:
        return passed
    word = secrets.token_hex(16)
    sent = [{key: value for key, value in case.items() if key != "expected"} for case in called]
    job = json.dumps({"word": word, "cases": sent})
    result = _run(_HARNESS, stdin=job, files={"solution.py": code}, **limits)
    said = [line.removeprefix(word) for line in result.stdout.splitlines() if line.startswith(word)]
    answers = json.loads(said[-1]) if said else []
    if len(answers) != len(called):
        return passed
    for case, answer in zip(called, answers, strict=True):
        if "assert_code" in case:
            passed += answer is True
        elif isinstance(answer, list):
            # Through JSON and back, as the answer was: tuples are lists, and keys are text.
            passed += _same_value(answer[0], json.loads(json.dumps(case["expected"])))
    return passed


def _run(code: str, **options: Any) -> SandboxResult:
    result = run_python(code, **options)
    if result.reason is not None and result.reason.startswith("sandbox"):
        raise RuntimeError(f"the sandbox failed: {result.stderr.strip()[-200:] or result.reason}")
    return result


def _same_value(found: Any, expected: Any) -> bool:
    if type(expected) in (int, float) and type(found) in (int, float):
        if found == expected or float not in (type(found), type(expected)):
            return found == expected
        return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(_same_value(left, right) for left, right in zip(found, expected, strict=True))
    return type(found) is type(expected) and found == expected


# -- a language model that judges ------------------------------------------------------------------

DEFAULT_PROMPT = """Judge whether the response answers the question correctly. \
The reference is correct.

Question:
{prompt}

Reference:
{ground_truth}

Response:
{response}

Think briefly, then end with a line "Verdict: YES" or "Verdict: NO"."""

# ROLL's names of prompts. Like the one that stands there, it asks for YES or NO.
JUDGE_PROMPTS = {"Qwen2.5-7B-Instruct-RLVR-prompt": DEFAULT_PROMPT}

_VERDICTS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
_WORTH_A_RETRY = (None, 408, 409, 425, 429, 500, 502, 503, 504)
_NUM_TRIES = 3


def judge_score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    template: str | None = None,
    timeout_s: float = 30.0,
    **row: Any,
) -> float | None:
    """The verdict of the model at `url` (`http://host:8000/v1`), as a number; see `read_verdict`.

    An outage or a refusal raises, which drops the sample: it never looks like a wrong answer.
    """
    address = url if url.endswith("/chat/completions") else url.rstrip("/") + "/chat/completions"
    question = judge_question(template, prompt, response, ground_truth)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "temperature": 0.0}
    if model is not None:
        body["model"] = model
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + timeout_s
    tries = 0
    while True:
        tries += 1
        left_s = max(0.1, deadline - time.monotonic())
        try:
            with urllib.request.urlopen(request, timeout=left_s) as reply:
                answer = json.loads(reply.read())["choices"][0]["message"]["content"]
                return read_verdict(answer or "")
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            status = getattr(error, "code", None)
            what = getattr(error, "reason", error) if status is None else f"status {status}"
        pause = 0.5 * 2 ** (tries - 1)
        is_late = tries == _NUM_TRIES or time.monotonic() + pause >= deadline
        if is_late or status not in _WORTH_A_RETRY:
            raise ConnectionError(f"the judge at {address} did not answer: {what} ({tries} tries)")
        time.sleep(pause)


def judge_question(template: str | None, prompt: str, response: str, ground_truth: Any) -> str:
    """What the judge is asked: the template, a text or a name of ROLL's, with its places filled."""
    template = JUDGE_PROMPTS.get(template or "", template) or DEFAULT_PROMPT
    values = {"prompt": prompt, "response": response, "ground_truth": str(ground_truth)}
    # In one pass: a placeholder that the response itself contains stays what it is.
    return re.sub(r"\{(prompt|response|ground_truth)\}", lambda match: values[match[1]], template)


def read_verdict(answer: str) -> float | None:
    """The last verdict of an answer: YES is 1, NO is 0, a number is itself.

    It stands as `Verdict: YES`, as `[[7.5]]`, or is all that the answer says. None without one.
    """
    words = "|".join((*_VERDICTS, r"-?\d+(?:\.\d+)?"))
    marked = re.findall(r"\[\[\s*(\w+|-?\d+(?:\.\d+)?)\s*\]\]", answer)
    if not marked:
        label = rf"(?:verdict|score|rating|judge?ment)\W*?({words})\b"
        marked = re.findall(label, answer, re.IGNORECASE)
    text = (marked[-1] if marked else answer).strip().strip(".*\"'`").lower()
    if text in _VERDICTS:
        return _VERDICTS[text]
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None
