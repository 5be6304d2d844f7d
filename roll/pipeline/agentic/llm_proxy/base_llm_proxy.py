"""The interface of proxies, and how a config chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from roll.datasets.chat_template import Message
from roll.engines.request import FinishReason, GenerationOutput, GenerationRequest
from roll.exceptions import ConfigError
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
        messages: the same as a conversation, answers included, for those who answer with text.
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
        self.actor_infer = actor_infer
        self.tokenizer = tokenizer
        self.options = options

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        """One answer for each request, in order. A failure is an output with `finish_reason` "error"."""
        raise NotImplementedError

    def spoken(
        self, request: GenerationRequest, text: str, finish_reason: FinishReason = "stop"
    ) -> GenerationOutput:
        """The output for an answer that came as text: its ids (and an end token), without log-probabilities."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if finish_reason == "stop" and isinstance(end, int):
            ids.append(end)
        limit = request.sampling.max_new_tokens
        return GenerationOutput(
            request_id=request.request_id,
            sample_index=0,
            token_ids=ids[:limit],
            log_probs=[],
            finish_reason=finish_reason if len(ids) <= limit else "length",
            policy_version=0,
        )


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
            f"llm_proxy.proxy_type: found {config.proxy_type!r}, expected one of {', '.join(sorted(_proxies))}, or the "
            "dotted path of a class"
        )
    return found(actor_infer=actor_infer, tokenizer=tokenizer, options=dict(config.proxy_config))
