"""The judge, asked over a real connection: verdicts, retries, outages."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roll.pipeline.rlvr.rewards.judge_answers import read_verdict, score
from roll.utils.scoring.pool import ScorePool


class Judge(BaseHTTPRequestHandler):
    """Says YES when the response in the question is right; fails as often as the server was told to."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        if self.server.failures > 0:
            self.server.failures -= 1
            self.send_error(503)
            return
        if self.server.hangs:
            self.server.closing.wait()
        question = body["messages"][0]["content"]
        verdict = self.server.says or (
            "Verdict: YES" if "Response:\nParis" in question else "Hm. Verdict: NO"
        )
        answer = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    server.requests, server.failures, server.hangs, server.says = [], 0, False, None
    server.closing = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


ROW = {"prompt": "Capital of France?", "response": "Paris", "ground_truth": "Paris"}


def test_a_verdict(judge):
    assert score(**ROW, url=judge.url, model="judge-7b", api_key="key") == 1.0
    assert score(**{**ROW, "response": "Rome"}, url=judge.url) == 0.0
    path, body, key = judge.requests[0]
    assert path == "/v1/chat/completions" and body["model"] == "judge-7b" and key == "Bearer key"
    assert "Capital of France?" in body["messages"][0]["content"]
    assert judge.requests[1][2] is None


def test_a_template_of_ones_own_is_filled_in_once(judge):
    row = {**ROW, "response": "{ground_truth}"}
    assert score(**row, url=judge.url, template="{prompt}|{response}|{ground_truth}") == 0.0
    assert (
        judge.requests[0][1]["messages"][0]["content"] == "Capital of France?|{ground_truth}|Paris"
    )


def test_a_prompt_by_its_name_in_roll(judge):
    assert score(**ROW, url=judge.url, template="Qwen2.5-7B-Instruct-RLVR-prompt") == 1.0
    question = judge.requests[0][1]["messages"][0]["content"]
    assert "Capital of France?" in question and "Verdict: YES" in question


def test_a_short_outage_is_waited_out(judge):
    judge.failures = 1
    assert score(**ROW, url=judge.url) == 1.0
    assert len(judge.requests) == 2


def test_an_outage_drops_samples_and_is_never_a_zero(judge):
    judge.failures = 100
    options = {"url": judge.url, "timeout_s": 3}
    with ScorePool(
        "roll.pipeline.rlvr.rewards.judge_answers:score", num_processes=4, options=options
    ) as pool:
        down = pool.score([ROW] * 4)
        judge.failures = 0
        up = pool.score([ROW] * 4)
        judge.hangs = True
        hanging = pool.score([ROW])
    assert all(s.value is None and "did not answer: status 503" in s.reason for s in down)
    assert [s.value for s in up] == [1.0] * 4
    assert hanging[0].value is None and "timed out" in hanging[0].reason


def test_nobody_there():
    with pytest.raises(ConnectionError, match=r"did not answer: .*refused"):
        score(**ROW, url="http://127.0.0.1:9/v1", timeout_s=1)


def test_an_answer_without_a_verdict_is_no_verdict(judge):
    judge.says = "I cannot judge that."
    assert score(**ROW, url=judge.url) is None


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
