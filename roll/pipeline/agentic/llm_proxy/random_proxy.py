"""Random actions: what an environment gives to a policy that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence

from roll.engines.request import GenerationOutput
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import (
    BaseLLMProxy,
    TurnRequest,
    register_llm_proxy,
)


@register_llm_proxy("random")
class RandomProxy(BaseLLMProxy):
    """Answers with what the environment's `sample_random_action()` draws."""

    needs_random_actions = True
    needs_messages = False

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        return [self.spoken(turn.request, turn.random_action or "") for turn in requests]
