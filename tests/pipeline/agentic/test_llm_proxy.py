"""Who answers: the policy with interruptions, a service on this machine, chance."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.exceptions import ConfigError
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.agentic_config import LLMProxyConfig
from roll.pipeline.agentic.llm_proxy import (
    BaseLLMProxy,
    TurnRequest,
    create_llm_proxy,
    register_llm_proxy,
)

TOKENIZER = character_tokenizer()


def turn(name="r", text="hi", **options):
    sampling = SamplingParams(max_new_tokens=4, temperature=0.5, stop_strings=("!",))
    request = GenerationRequest(name, (5, 6), sampling)
    return TurnRequest(request, [{"role": "user", "content": text}], **options)


def proxy(kind, actor_infer=None, **options):
    config = LLMProxyConfig(proxy_type=kind, proxy_config=options)
    return create_llm_proxy(config, actor_infer=actor_infer, tokenizer=TOKENIZER)


def test_random_actions_become_tokens():
    (output,) = proxy("random").generate([turn(random_action="ab")])
    assert output.token_ids == [*TOKENIZER("ab")["input_ids"], TOKENIZER.eos_token_id]
    assert output.log_probs == []
    # Of four tokens the end is one.
    for text, reason in (("abc", "stop"), ("abcd", "length"), ("abcdef", "length")):
        (output,) = proxy("random").generate([turn(random_action=text)])
        assert output.finish_reason == reason and len(output.token_ids) == 4


class Interrupted:
    """A policy whose first call is interrupted after one token of every other request."""

    backend_name = "ray"

    def __init__(self):
        self.calls = []

    def generate_requests(self, requests):
        self.calls.append(requests)
        first = len(self.calls) == 1
        return [
            GenerationOutput(item.request_id, 0, [7], [-0.1], "abort", 0)
            if first and index % 2 == 0
            else GenerationOutput(
                item.request_id, 0, [8, 9], [-0.2, -0.3], "stop", len(self.calls) - 1
            )
            for index, item in enumerate(requests)
        ]


def test_an_interrupted_turn_goes_on_where_it_was():
    policy = Interrupted()
    first, second = proxy("policy", policy).generate([turn("a"), turn("b")])
    assert (first.token_ids, first.log_probs) == ([7, 8, 9], [-0.1, -0.2, -0.3])
    assert (first.policy_version, first.newest_version) == (0, 1)
    assert second.token_ids == [8, 9]
    (again,) = policy.calls[1]
    assert again.prefix_ids == (7,) and again.prompt_ids == (5, 6)


class Service(BaseHTTPRequestHandler):
    seen: list = []  # noqa: RUF012
    failures = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Service.seen.append((self.path, body, self.headers.get("Authorization")))
        if Service.failures > 0:
            Service.failures -= 1
            self.send_error(503)
            return
        text = body["messages"][-1]["content"].upper()
        answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    Service.seen, Service.failures = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service(address, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    before = threading.active_count()
    options = {"api_key_env": "MY_KEY", "extra_body": {"top_k": 3}}
    service = proxy("openai", base_url=address, model_name="m", **options)
    outputs = service.generate([turn("a", "hi"), turn("b", "ho")])
    texts = TOKENIZER.batch_decode([item.token_ids for item in outputs], skip_special_tokens=True)
    assert texts == ["HI", "HO"]
    path, body, key = Service.seen[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret"
    sent = {"model": "m", "max_tokens": 4, "stop": ["!"], "top_k": 3, "temperature": 0.5}
    assert sent.items() <= body.items()
    assert threading.active_count() <= before + 4  # nothing piles up


def test_a_service_that_fails(address):
    Service.failures = 2
    service = proxy("openai", base_url=address, model_name="m", max_retries=2)
    assert service.generate([turn()])[0].error is None
    Service.failures = 2
    service = proxy("openai", base_url=address, model_name="m", max_retries=1)
    (output,) = service.generate([turn()])
    assert output.finish_reason == "error" and "503" in str(output.error)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("oracle", {}, "expected one of openai, policy, random"),
        ("openai", {"base_url": "http://x"}, r"proxy_config.model_name: missing"),
        (
            "openai",
            {"url": 1},
            r"proxy_config.url: unknown key; the openai proxy has base_url, mod",
        ),
    ],
)
def test_configs_that_name_no_proxy(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        proxy(kind, **options)


def test_the_policy_needs_its_role():
    with pytest.raises(ConfigError, match="policy needs the role actor_infer"):
        proxy("policy").generate([turn()])


def test_proxies_of_ones_own():
    @register_llm_proxy("silent")
    class Silent(BaseLLMProxy):
        def generate(self, requests):
            return [self.spoken(item.request, "") for item in requests]

    assert isinstance(proxy("silent"), Silent)
    path = "roll.pipeline.agentic.llm_proxy.random_proxy.RandomProxy"
    assert type(proxy(path)).__name__ == "RandomProxy"
