"""Answers of a service that speaks OpenAI's chat API: vLLM, SGLang, llama.cpp, or a provider.

llm_proxy:
  proxy_type: openai
  proxy_config:
    base_url: http://127.0.0.1:8000/v1
    model_name: my-model
    api_key_env: MY_KEY          # the environment variable that holds the key; none is sent if left out
    max_concurrency: 16
    timeout: 120
    max_retries: 2
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roll.engines.request import GenerationOutput
from roll.exceptions import ConfigError
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import (
    BaseLLMProxy,
    TurnRequest,
    register_llm_proxy,
)


@register_llm_proxy("openai")
class OpenAIProxy(BaseLLMProxy):
    """Sends each conversation to `base_url`/chat/completions. Turns wait for their answers side by side."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for key in ("base_url", "model_name"):
            if not self.options.get(key):
                raise ConfigError(f"proxy_config.{key}: missing; the openai proxy needs it")
        self.url = str(self.options["base_url"]).rstrip("/") + "/chat/completions"
        self.timeout = float(self.options.get("timeout", 120.0))
        self.max_retries = int(self.options.get("max_retries", 2))

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        if not requests:
            return []
        workers = min(len(requests), int(self.options.get("max_concurrency", 16)))
        with ThreadPoolExecutor(workers, thread_name_prefix="roll-openai") as pool:
            return list(pool.map(self._answer, requests))

    def _answer(self, turn: TurnRequest) -> GenerationOutput:
        problem = ""
        for _ in range(1 + self.max_retries):
            try:
                choice = self._post(turn)["choices"][0]
                text = choice["message"]["content"] or ""
            except (OSError, ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            return self.spoken(turn.request, text, reason)
        request_id = turn.request.request_id
        return GenerationOutput(
            request_id, 0, [], [], "error", 0, error=f"service: {self.url}: {problem}"
        )

    def _post(self, turn: TurnRequest) -> Any:
        sampling = turn.request.sampling
        body = {
            "model": self.options["model_name"],
            "messages": list(turn.messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **({"stop": list(sampling.stop_strings)} if sampling.stop_strings else {}),
            **self.options.get("extra_body", {}),
        }
        headers = {"Content-Type": "application/json"}
        variable = self.options.get("api_key_env")
        key = os.environ.get(variable, "") if variable else self.options.get("api_key")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            return json.load(response)
