"""Whole episodes: every answer is given with everything before it in view."""

from __future__ import annotations

from roll.datasets.chat_template import Message
from roll.pipeline.agentic.env_manager.base_env_manager import BaseEnvManager


class TrajEnvManager(BaseEnvManager):
    """A conversation: system message, then the filled `agent_template` of each turn and the policy's answers.

    The environment's instruction stands in front of the first message, unless a template has a place for it.
    """

    prompts_are_whole = False

    def next_messages(self) -> list[Message]:
        content = self.fill(self.template.agent_template)
        if self.turns:
            return [{"role": "user", "content": content}]
        has_place = "{env_instruction}" in self.template.agent_template + (
            self.template.agent_system_template or ""
        )
        if self.instruction and not has_place:
            content = f"{self.instruction}\n{content}"
        return [*self.system_messages(), {"role": "user", "content": content}]
