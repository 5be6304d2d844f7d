"""A score from a language model that judges, behind an OpenAI-compatible address or in this run.

The judge is asked for a verdict; what it says is the score. An outage, a refusal or an answer without a verdict is an
exception or None, which drops the sample: it never looks like a wrong answer.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from typing import Any

DEFAULT_PROMPT = """Judge whether the response answers the question correctly. The reference is correct.

Question:
{prompt}

Reference:
{ground_truth}

Response:
{response}

Think briefly, then end with a line "Verdict: YES" or "Verdict: NO"."""

# ROLL's names of prompts. Like the one that stands there, it asks for YES or NO.
PROMPTS = {"Qwen2.5-7B-Instruct-RLVR-prompt": DEFAULT_PROMPT}

_VERDICTS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
_WORDS = "|".join((*_VERDICTS, r"-?\d+(?:\.\d+)?"))
_WORTH_A_RETRY = (408, 409, 425, 429, 500, 502, 503, 504)
_NUM_TRIES = 3


def score(
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
    """The judge's verdict, as a number: YES is 1, NO is 0, a number is itself. None if there is no verdict."""
    question = question_for(template, prompt, response, ground_truth)
    answer = ask(question, url=url, model=model, api_key=api_key, timeout_s=timeout_s)
    return read_verdict(answer)


def question_for(template: str | None, prompt: str, response: str, ground_truth: Any) -> str:
    """What the judge is asked: the template, a text or a name of ROLL's, with its places filled."""
    template = PROMPTS.get(template or "", template) or DEFAULT_PROMPT
    values = {"prompt": prompt, "response": response, "ground_truth": str(ground_truth)}
    # In one pass: a placeholder that the response itself contains stays what it is.
    return re.sub(r"\{(prompt|response|ground_truth)\}", lambda match: values[match[1]], template)


def ask(
    question: str, *, url: str, model: str | None, api_key: str | None, timeout_s: float
) -> str:
    """The answer of the model at `url` (`http://host:8000/v1`, or the full address of its chat completions)."""
    address = url if url.endswith("/chat/completions") else url.rstrip("/") + "/chat/completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "temperature": 0.0}
    if model is not None:
        body["model"] = model
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + timeout_s
    for tries in range(1, _NUM_TRIES + 1):
        try:
            with urllib.request.urlopen(
                request, timeout=max(0.1, deadline - time.monotonic())
            ) as reply:
                return json.loads(reply.read())["choices"][0]["message"]["content"] or ""
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            pause = 0.5 * 2 ** (tries - 1)
            is_final = tries == _NUM_TRIES or time.monotonic() + pause >= deadline
            if is_final or (status is not None and status not in _WORTH_A_RETRY):
                what = (
                    f"status {status}"
                    if status is not None
                    else str(getattr(error, "reason", error))
                )
                raise ConnectionError(
                    f"the judge at {address} did not answer: {what} ({tries} tries)"
                ) from None
            time.sleep(pause)
    raise AssertionError("unreachable")


def read_verdict(answer: str) -> float | None:
    """The last verdict of an answer: `Verdict: YES`, `[[7.5]]`, or an answer that is only YES, NO or a number."""
    bracketed = re.findall(r"\[\[\s*(\w+|-?\d+(?:\.\d+)?)\s*\]\]", answer)
    marked = bracketed or re.findall(
        rf"(?:verdict|score|rating|judge?ment)\W*?({_WORDS})\b", answer, re.IGNORECASE
    )
    text = (marked[-1] if marked else answer).strip().strip(".*\"'`").lower()
    if text in _VERDICTS:
        return _VERDICTS[text]
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None
