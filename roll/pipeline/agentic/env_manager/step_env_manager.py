"""One prompt for each turn, written anew from the current observation and a short history."""

from __future__ import annotations

from roll.datasets.chat_template import Message
from roll.pipeline.agentic.env_manager.base_env_manager import BaseEnvManager


class StepEnvManager(BaseEnvManager):
    """Each turn is a conversation of its own: the filled `agent_template`, whose {history} has the observations and
    answers of the last `history_length` turns. (ROLL's has only those turns whose action was invalid.)"""

    prompts_are_whole = True

    def next_messages(self) -> list[Message]:
        content = self.fill(
            self.template.agent_template,
            history=self.history(),
            history_length=self.template.history_length,
        )
        return [*self.system_messages(), {"role": "user", "content": content}]

    def history(self) -> str:
        """The last turns, oldest first; empty in the first turn."""
        done = len(self.turns)
        first = max(0, done - self.template.history_length)
        return "\n".join(
            f"Step {index + 1}:\n{self.observations[index]}\nAnswer: {self.actions[index]}"
            for index in range(first, done)
        )
