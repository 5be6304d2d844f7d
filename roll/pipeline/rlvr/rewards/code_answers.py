"""Programs, run against test cases in the sandbox.

`test_cases` is a list, or its JSON, of cases of these kinds, which may be mixed:

    {"stdin": "2 3\\n", "expected_stdout": "5\\n"}      run as a program; also as `input` and `output`
    {"fn_name": "add", "args": [2, 3], "expected": 5}  call a function; also as `inputs` and `outputs`
    {"assert_code": "assert add(2, 3) == 5"}           run after the program; or just the text

Expected outputs stay here: the program is given inputs, and what it answers is compared outside its process. Of code
that is run after the program, the verdict counts only with a word that the program does not know, so leaving early
(`sys.exit(0)`) is no pass.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from roll.utils.sandbox import SandboxResult, run_python
from roll.utils.scoring.answers import after_thinking

# The tests come on stdin, after the program has been loaded, so that it finds neither them nor the word to say.
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
            _owner = _space["Solution"]() if "Solution" in _space and _case["fn_name"] not in _space else None
            _function = getattr(_owner, _case["fn_name"]) if _owner else _space[_case["fn_name"]]
            _out.append([_function(*_case["args"])])
    except (Exception, SystemExit) as _error:
        _out.append(False)
print("\\n" + _job["word"] + _json.dumps(_out, default=repr), file=_say, flush=True)
"""


def score(
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
    """`score` 1.0 if all cases pass, 0.0 otherwise; with `reward_type: fraction` the share of cases that pass.

    None if there are no test cases.
    """
    cases = read_cases(test_cases if test_cases is not None else ground_truth)
    if test_case_function:
        cases.append({"assert_code": test_case_function})
    if not cases:
        return None
    code = extract_code(response)
    passed = (
        []
        if code is None
        else run_cases(code, cases, case_timeout_s=case_timeout_s, memory_mb=memory_mb)
    )
    fraction = sum(passed) / len(cases)
    value = fraction if reward_type == "fraction" else float(fraction == 1.0)
    return {"score": value, "pass_rate": fraction}


def extract_code(response: str) -> str | None:
    """The last fenced block that is Python or of no stated language; a response without fences is code itself."""
    answer = after_thinking(response)
    blocks = re.findall(
        r"```(?:python|py|python3)?[ \t]*\n(.*?)```", answer, re.DOTALL | re.IGNORECASE
    )
    if blocks:
        return blocks[-1]
    return None if "```" in answer or not answer else answer


def read_cases(value: Any) -> list[dict[str, Any]]:
    """Test cases in the three shapes of this module, from what a data file may hold."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = [value] if value.strip() else []
    if isinstance(value, Mapping):
        value = _columns(value)
    return [_case(item) for item in value or []]


def _columns(value: Mapping[str, Any]) -> Sequence[Any]:
    """`{"fn_name": ..., "inputs": [...], "outputs": [...]}`: one case for each pair. Anything else is one case."""
    if not isinstance(value.get("inputs"), list):
        return [value]
    name = {"fn_name": value["fn_name"]} if value.get("fn_name") else {}
    pairs = zip(value["inputs"], value["outputs"], strict=True)
    return [{**name, "inputs": given, "outputs": expected} for given, expected in pairs]


def _case(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"assert_code": item}
    if item.get("assert_code"):
        return {"assert_code": str(item["assert_code"])}
    given = _first(item, "args", "stdin", "input", "inputs")
    expected = _first(item, "expected", "expected_stdout", "output", "outputs", "expected_output")
    if item.get("fn_name"):
        if isinstance(given, str):
            given = [json.loads(line) for line in given.splitlines()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        return {"fn_name": item["fn_name"], "args": given, "expected": expected}
    lines = [
        "\n".join(map(str, text)) if isinstance(text, list) else str(text)
        for text in (given or "", expected)
    ]
    return {"stdin": lines[0], "expected_stdout": lines[1]}


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if key in item:
            return item[key]
    raise ValueError(
        f"a test case has none of {', '.join(keys)}: it has {', '.join(map(str, item))}"
    )


def run_cases(
    code: str, cases: list[dict[str, Any]], *, case_timeout_s: float, memory_mb: int
) -> list[bool]:
    """Which cases pass, programs first; stops at the first program run that fails for want of time."""
    limits: dict[str, Any] = {
        "cpu_s": case_timeout_s,
        "wall_s": 2 * case_timeout_s,
        "memory_mb": memory_mb,
    }
    passed: list[bool] = []
    for case in [case for case in cases if "stdin" in case]:
        result = run_python(code, stdin=case["stdin"], **limits)
        _check_started(result)
        passed.append(result.reason is None and _same_text(result.stdout, case["expected_stdout"]))
        if result.timed_out:
            break
    called = [case for case in cases if "stdin" not in case]
    if called:
        word = secrets.token_hex(16)
        sent = [{key: value for key, value in case.items() if key != "expected"} for case in called]
        job = json.dumps({"word": word, "cases": sent})
        result = run_python(_HARNESS, stdin=job, files={"solution.py": code}, **limits)
        _check_started(result)
        answers = _answers(result.stdout, word, len(called))
        passed += [_passes(case, answer) for case, answer in zip(called, answers, strict=True)]
    return passed


def _check_started(result: SandboxResult) -> None:
    if result.reason is not None and result.reason.startswith("sandbox"):
        raise RuntimeError(f"the sandbox failed: {result.stderr.strip()[-200:] or result.reason}")


def _answers(stdout: str, word: str, num_cases: int) -> list[Any]:
    lines = [line.removeprefix(word) for line in stdout.splitlines() if line.startswith(word)]
    answers = json.loads(lines[-1]) if lines else []
    return answers if len(answers) == num_cases else [False] * num_cases


def _passes(case: Mapping[str, Any], answer: Any) -> bool:
    if "assert_code" in case:
        return answer is True
    # Through JSON and back, as the answer was: tuples are lists, and keys are text.
    return isinstance(answer, list) and _same_value(
        answer[0], json.loads(json.dumps(case["expected"]))
    )


def _same_value(found: Any, expected: Any) -> bool:
    if type(expected) in (int, float) and type(found) in (int, float):
        return found == expected or (
            float in (type(found), type(expected))
            and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
        )
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(_same_value(left, right) for left, right in zip(found, expected, strict=True))
    return type(found) is type(expected) and found == expected


def _same_text(found: str, expected: str) -> bool:
    """Equal, but for space at the end of lines and of the text."""
    left, right = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (found, expected)
    )
    return left == right
