"""Who answers in an environment: the policy, a service, or chance.

    @register_llm_proxy("mine")
    class MyProxy(BaseLLMProxy):
        def generate(self, requests): ...

`llm_proxy: {proxy_type: mine, proxy_config: {...}}` then selects it, if the module is imported; a
dotted path as `proxy_type` needs no registration.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from roll.datasets.chat_template import Message
from roll.engines.request import FinishReason, GenerationOutput, GenerationRequest
from roll.exceptions import ConfigError
from roll.rollout.buffer import EngineGate
from roll.utils.import_utils import import_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.distributed.executor.cluster import Cluster
    from roll.pipeline.agentic.agentic_config import LLMProxyConfig


@dataclass(frozen=True)
class TurnRequest:
    """One turn that waits for an answer.

    Attributes:
        request: token ids and sampling, for those who answer with tokens.
        messages: the same as a conversation, for those who answer with text.
        random_action: an action that the environment drew, if the proxy is `random`.
    """

    request: GenerationRequest
    messages: Sequence[Message]
    random_action: str | None = None


class BaseLLMProxy:
    """Answers turns.

    Args:
        actor_infer: the workers that hold the policy; None if there are none.
        tokenizer: turns text into the ids of an answer.
        options: `proxy_config`.
    """

    needs_random_actions = False
    needs_messages = True

    def __init__(
        self,
        *,
        actor_infer: Cluster | None,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, Any],
    ) -> None:
        self.actor_infer, self.tokenizer, self.options = actor_infer, tokenizer, options

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        """One answer for each request, in order. A failure has the `finish_reason` "error"."""
        raise NotImplementedError

    def spoken(
        self, request: GenerationRequest, text: str, finish_reason: FinishReason = "stop"
    ) -> GenerationOutput:
        """The output for an answer that came as text: its ids (and an end token), no log-probs."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if finish_reason == "stop" and isinstance(end, int):
            ids.append(end)
        limit = request.sampling.max_new_tokens
        if len(ids) > limit:
            ids, finish_reason = ids[:limit], "length"
        return GenerationOutput(request.request_id, 0, ids, [], finish_reason, policy_version=0)


Proxy = TypeVar("Proxy", bound=type[BaseLLMProxy])
_proxies: dict[str, type[BaseLLMProxy]] = {}


def register_llm_proxy(name: str) -> Callable[[Proxy], Proxy]:
    """Decorator: makes a class known as `name`."""

    def register(cls: Proxy) -> Proxy:
        _proxies[name] = cls
        return cls

    return register


def create_llm_proxy(
    config: LLMProxyConfig, *, actor_infer: Cluster | None, tokenizer: PreTrainedTokenizerBase
) -> BaseLLMProxy:
    """The proxy that a config names."""
    found = _proxies.get(config.proxy_type)
    if found is None and "." in config.proxy_type:
        found = import_class(config.proxy_type)
    if found is None:
        raise ConfigError(
            f"llm_proxy.proxy_type: found {config.proxy_type!r}, expected one of "
            f"{', '.join(sorted(_proxies))}, or the dotted path of a class"
        )
    return found(actor_infer=actor_infer, tokenizer=tokenizer, options=dict(config.proxy_config))


@register_llm_proxy("random")
class RandomProxy(BaseLLMProxy):
    """Answers with what the environment's `sample_random_action()` draws."""

    needs_random_actions = True
    needs_messages = False

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        return [self.spoken(turn.request, turn.random_action or "") for turn in requests]


@register_llm_proxy("policy")
class PolicyProxy(BaseLLMProxy):
    """Hands all turns to the generating workers at once.

    A turn that was interrupted for a weight update goes on where it was, with the new weights; its
    policy version is that of its oldest tokens.
    """

    needs_messages = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.gate = None if self.actor_infer is None else EngineGate(self.actor_infer)

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        if self.gate is None:
            raise ConfigError("llm_proxy.proxy_type: policy needs the role actor_infer")
        done: dict[str, GenerationOutput] = {}
        pending: list[GenerationRequest] = [turn.request for turn in requests]
        while pending:
            again = []
            outputs = self.gate.generate_requests(pending)
            for request, output in zip(pending, outputs, strict=True):
                done[output.request_id] = joined(done.get(output.request_id), output)
                if output.finish_reason == "abort":
                    again.append(request.resume(output))
            pending = again
        return [done[turn.request.request_id] for turn in requests]


def joined(before: GenerationOutput | None, after: GenerationOutput) -> GenerationOutput:
    """Two parts of one answer as one. A part without a token says nothing of its policy."""
    if before is None or not before.token_ids:
        return after
    return replace(
        after,
        token_ids=[*before.token_ids, *after.token_ids],
        log_probs=[*before.log_probs, *after.log_probs],
        policy_version=before.policy_version,  # versions only grow
        newest_version=after.policy_version if after.token_ids else before.newest_version,
    )


@register_llm_proxy("openai")
class OpenAIProxy(BaseLLMProxy):
    """Answers of a service that speaks OpenAI's chat API: vLLM, SGLang, llama.cpp, or a provider.

        llm_proxy:
          proxy_type: openai
          proxy_config:
            base_url: http://127.0.0.1:8000/v1
            model_name: my-model
            api_key_env: MY_KEY    # the environment variable with the key; none is sent if left out
            max_concurrency: 16
            timeout: 120
            max_retries: 2

    It is one POST request by `urllib`, so that no package is needed for it.
    """

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
        problem = ""
        for _ in range(1 + self.max_retries):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    choice = json.load(response)["choices"][0]
                text = choice["message"]["content"] or ""
            except (OSError, ValueError, LookupError, TypeError) as error:
                problem = f"service: {self.url}: {type(error).__name__}: {error}"
                continue
            is_cut = choice.get("finish_reason") == "length"
            return self.spoken(turn.request, text, "length" if is_cut else "stop")
        return GenerationOutput(turn.request.request_id, 0, [], [], "error", 0, error=problem)
