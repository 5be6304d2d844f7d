"""One environment, one episode at a time: what the policy reads, and what becomes of its answers.

A manager is a small state machine without threads or calls of its own; `RolloutScheduler` moves many of them at once:

    manager.begin(traj_id, traj_group_id)
    manager.observe(reply of reset)
    while True:
        text = manager.next_text()                     # -> token ids, made for all managers together
        request = manager.request(prompt_ids)          # None: no room left
        action = manager.answer(output of the policy)  # -> the environment
        stop_reason = manager.observe(reply of step)   # None: go on
    trajectory = manager.finish(stop_reason)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from roll.datasets.chat_template import Message
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.pipeline.agentic.agentic_config import EnvTemplate
from roll.pipeline.agentic.conversation import Conversation
from roll.pipeline.agentic.env_calls import EnvReply
from roll.rollout.types import Trajectory, Turn, state_hash

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_AGGREGATIONS: dict[str, Any] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


@dataclass(frozen=True)
class EnvEntry:
    """Which environment a manager has: its place among all, its tag and the tag's template from `custom_envs`."""

    env_id: int
    group_id: int
    tag: str
    template: EnvTemplate


class BaseEnvManager:
    """What managers share. Subclasses write the messages of a turn.

    Args:
        entry: the environment.
        conversation: chat template and tokenizer.
        sampling: how answers are drawn; `max_new_tokens` is the limit of one answer.
        sequence_length: longest row, in tokens.

    Attributes:
        prompts_are_whole: every turn has a prompt of its own, so a trajectory becomes one row for each turn. A prompt
            otherwise continues the turns before, and a trajectory becomes one row.
    """

    prompts_are_whole: ClassVar[bool] = False

    def __init__(
        self,
        entry: EnvEntry,
        conversation: Conversation,
        *,
        sampling: SamplingParams,
        sequence_length: int,
    ) -> None:
        self.entry = entry
        self.template = entry.template
        self.conversation = conversation
        limits = [sampling.max_new_tokens, entry.template.max_tokens_per_step]
        self.max_response_length = min(limit for limit in limits if limit is not None)
        self.sampling = sampling
        self.sequence_length = sequence_length
        self.begin("", "")

    # -- what a subclass defines ---------------------------------------------------------------------------------------

    def next_messages(self) -> list[Message]:
        """The messages that this turn adds to the conversation (all of it, if `prompts_are_whole`)."""
        raise NotImplementedError

    # -- an episode ----------------------------------------------------------------------------------------------------

    def begin(self, traj_id: str, traj_group_id: str) -> None:
        """Forget the last episode."""
        self.traj_id, self.traj_group_id = traj_id, traj_group_id
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.context: list[int] = []  # tokens that a new prompt continues
        self.observation, self.suffix, self.instruction = "", "", ""
        self.observations: list[str] = []
        self.actions: list[str] = []
        self._state = ""
        self._prompt: Sequence[int] = ()
        self._metrics: dict[str, list[float]] = {}
        self._agg_modes: dict[str, str] = {}

    def observe(self, reply: EnvReply) -> str | None:
        """Take in the answer of reset (before any turn) or of a step; returns why the episode ends, None if it does
        not."""
        info = reply.info
        if not self.turns:
            self.instruction = str(info.get("env_instruction") or "")
        self.observation, self.suffix = reply.observation, str(info.get("suffix") or "")
        self.observations.append(reply.observation)
        self._state = state_hash(info.get("state", reply.observation))
        self._add_metrics(info)
        if not self.turns:
            return None
        self.turns[-1].reward = reply.reward
        if reply.terminated:
            return "terminated"
        if reply.truncated:
            return "truncated"
        return "max_steps" if len(self.turns) >= self.template.max_steps else None

    def next_text(self) -> str:
        """The text that the policy reads next; behind its last answer unless prompts are whole."""
        new = self.next_messages()
        if self.prompts_are_whole or not self.turns:
            self.messages = list(new)
            return self.conversation.first_prompt(new)
        system = self.messages[0] if self.messages[0]["role"] == "system" else None
        self.messages += new
        return self.conversation.next_prompt(new[-1], system=system)

    @property
    def last_answer(self) -> Sequence[int]:
        """The answer that the text of `next_text` follows."""
        return () if self.prompts_are_whole or not self.turns else self.turns[-1].response_ids

    def request(self, prompt_ids: Sequence[int]) -> GenerationRequest | None:
        """What is asked of the policy, given the ids of `next_text`; None if no token would fit any more."""
        if self.prompts_are_whole:
            self.context = []
        self._prompt = prompt_ids
        room = self.sequence_length - len(self.context) - len(prompt_ids)
        if room < 1:
            return None
        self.context += prompt_ids
        name = f"{self.traj_id}:{len(self.turns)}"
        return GenerationRequest(
            request_id=name,
            prompt_ids=tuple(self.context),
            sampling=replace(self.sampling, max_new_tokens=min(self.max_response_length, room)),
            sample_keys=(name,),
        )

    def transcript(self) -> list[Message]:
        """The conversation so far, answers included, for those who read messages instead of tokens."""
        answers = [] if self.prompts_are_whole else list(self.actions)
        whole: list[Message] = []
        for message in self.messages:
            whole.append(message)
            if message["role"] == "user" and answers:
                whole.append({"role": "assistant", "content": answers.pop(0)})
        return whole

    def answer(self, output: GenerationOutput) -> str:
        """Take in the policy's answer; returns its text without special tokens, the action.

        (ROLL hands the special tokens over and lets every environment remove them.)
        """
        has_log_probs = len(output.log_probs) == len(output.token_ids)
        self.turns.append(
            Turn(
                prompt_ids=self._prompt,
                response_ids=output.token_ids,
                log_probs=output.log_probs if has_log_probs else None,
                policy_version=output.policy_version,
                finish_reason=output.finish_reason,
                state=self._state,
                newest_version=output.newest_version,
            )
        )
        self.context += output.token_ids
        self.actions.append(self.conversation.text(output.token_ids))
        return self.actions[-1]

    def finish(self, stop_reason: str) -> Trajectory:
        """The episode as it is."""
        metrics = {
            name: float(_AGGREGATIONS[self._agg_modes.get(name, "mean")](values))
            for name, values in self._metrics.items()
        }
        metrics["num_actions"] = float(len(self.turns))
        return Trajectory(
            traj_id=self.traj_id,
            traj_group_id=self.traj_group_id,
            tag=self.entry.tag,
            env_id=self.entry.env_id,
            group_id=self.entry.group_id,
            turns=self.turns,
            prompts_are_whole=self.prompts_are_whole,
            metrics=metrics,
            stop_reason=stop_reason,
        )

    # -- helpers -------------------------------------------------------------------------------------------------------

    def fill(self, template: str, **more: object) -> str:
        """The template with its placeholders replaced; braces around anything else stay as they are."""
        values: Mapping[str, object] = {
            "observation": self.observation,
            "current_observation": self.observation,
            "env_instruction": self.instruction,
            "suffix": self.suffix,
            "turn_idx": len(self.turns) + 1,
            "current_step": len(self.turns) + 1,
            "step_count": len(self.turns),
            "actions_left": self.template.max_steps - len(self.turns),
            "max_response_length": self.max_response_length,
            **more,
        }
        return _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), template)

    def system_messages(self) -> list[Message]:
        text = self.template.agent_system_template
        return [{"role": "system", "content": self.fill(text)}] if text else []

    def _add_metrics(self, info: Mapping[str, Any]) -> None:
        for name, value in (info.get("metrics") or {}).items():
            if isinstance(value, bool | int | float) or hasattr(value, "item"):
                self._metrics.setdefault(name, []).append(float(value))
        for name, mode in (info.get("metrics_agg_mode") or {}).items():
            if mode in _AGGREGATIONS:
                self._agg_modes[name] = mode
