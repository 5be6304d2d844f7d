"""Who answers in an environment: the policy, a service, or chance.

    @register_llm_proxy("mine")
    class MyProxy(BaseLLMProxy):
        def generate(self, requests): ...

`llm_proxy: {proxy_type: mine, proxy_config: {...}}` then selects it, if the module is imported; a dotted path as
`proxy_type` needs no registration.
"""

from roll.pipeline.agentic.llm_proxy.base_llm_proxy import (
    BaseLLMProxy,
    TurnRequest,
    create_llm_proxy,
    register_llm_proxy,
)
from roll.pipeline.agentic.llm_proxy.openai_proxy import OpenAIProxy
from roll.pipeline.agentic.llm_proxy.policy_proxy import PolicyProxy
from roll.pipeline.agentic.llm_proxy.random_proxy import RandomProxy

__all__ = [
    "BaseLLMProxy",
    "OpenAIProxy",
    "PolicyProxy",
    "RandomProxy",
    "TurnRequest",
    "create_llm_proxy",
    "register_llm_proxy",
]
