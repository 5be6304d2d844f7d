"""Answers of the policy under training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.engines.request import GenerationOutput, GenerationRequest
from roll.exceptions import ConfigError
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import (
    BaseLLMProxy,
    TurnRequest,
    register_llm_proxy,
)
from roll.pipeline.engine_gate import EngineGate


@register_llm_proxy("policy")
class PolicyProxy(BaseLLMProxy):
    """Hands all turns to the generating workers at once.

    A turn that was interrupted for a weight update goes on where it was, with the new weights; its policy version is
    that of its oldest tokens.
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
            outputs = self.gate.generate_requests(pending)
            again = []
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
