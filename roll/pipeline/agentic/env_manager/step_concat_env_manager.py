"""One prompt for each turn, with the observations before it one after the other: the prompts of GEM's games."""

from __future__ import annotations

from roll.datasets.chat_template import Message
from roll.pipeline.agentic.env_manager.step_env_manager import StepEnvManager


class StepConcatEnvManager(StepEnvManager):
    """As StepEnvManager, but {history} has the observations alone, and {current_observation} the environment's
    suffix, too."""

    def next_messages(self) -> list[Message]:
        current = f"{self.observation}\n{self.suffix}"
        content = self.fill(
            self.template.agent_template, history=self.history(), current_observation=current
        )
        return [*self.system_messages(), {"role": "user", "content": content}]

    def history(self) -> str:
        done = len(self.turns)
        return "\n".join(self.observations[max(0, done - self.template.history_length) : done])
