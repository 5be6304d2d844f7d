r"""One environment, one episode at a time: what the policy reads, and what becomes of its answers.

A manager is a small state machine without threads; `EnvSource` moves many of them at once:

    manager.begin(traj_id, traj_group_id)
    manager.observe(reply of reset)
    while True:
        text = manager.next_text()                     # -> token ids, for all managers at once
        request = manager.request(prompt_ids)          # None: no room left
        action = manager.answer(output of the policy)  # -> the environment
        stop_reason = manager.observe(reply of step)   # None: go on
    trajectory = manager.finish(stop_reason)

Tokens that the policy has read or written are never made anew. The first prompt is the whole
conversation so far, rendered by the chat template. Every later one is only what the template puts
behind an answer: the end of the answer's turn, the new message, and the header of the next answer.
With ChatML and an answer that ended with `<|im_end|>`:

    first   <|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n         answer: B<|im_end|>
    next    \n<|im_start|>user\nC?<|im_end|>\n<|im_start|>assistant\n       answer: D<|im_end|>

A template may render a conversation differently once it has gone on (Qwen3 removes old thoughts).
The policy did not read that text, so training on it would be wrong: the tokens stay, and
`DriftMonitor` shows the difference.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roll.datasets.chat_template import ChatTemplate, Message, tokenize_rendered
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.pipeline.agentic.agentic_config import EnvTemplate
from roll.pipeline.agentic.env_host import EnvReply
from roll.rollout.types import Trajectory, Turn, state_hash
from roll.utils.logging import get_logger

logger = get_logger(__name__)

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_AGGREGATIONS: dict[str, Any] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
# Texts that no observation contains; templates render them like any other.
_QUESTION, _ANSWER = "question-5d1f27c0", "answer-5d1f27c0"
_CONTEXT = 40  # characters of a difference that are shown on each side


class Conversation:
    """Renders and tokenises the turns of conversations that share a template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.tokenizer: Any = template.tokenizer

    def next_prompt(self, message: Message, *, system: Message | None = None) -> str:
        """What follows an answer when `message` comes next, from the end of the answer's own text.

        It is cut out of a short conversation whose answer is known, so it depends on nothing before
        that answer.
        """
        known = [] if system is None else [system]
        known += [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        return self.template([*known, message]).rpartition(_ANSWER)[2]

    def tokenize(self, texts: Sequence[str], previous: Sequence[Sequence[int]]) -> list[list[int]]:
        """Ids of prompts. `previous` are the answers before them, empty for first prompts.

        Where an answer already ends with the token that the prompt would begin with, the prompt
        begins after it.
        """
        prompts = tokenize_rendered(self.tokenizer, texts)
        for index, answer in enumerate(previous):
            if answer and prompts[index] and prompts[index][0] == answer[-1]:
                prompts[index] = prompts[index][1:]
        return prompts

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decoded ids, without special tokens unless asked for."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # without the checks that transformers makes token by token
            return backend.decode(list(ids), skip_special_tokens=not special)
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    @cached_property
    def closing_id(self) -> int | None:
        """The token with which the template ends an answer."""
        text = self.next_prompt({"role": "user", "content": _QUESTION})
        ids = tokenize_rendered(self.tokenizer, [text])[0]
        return ids[0] if ids else None


class DriftMonitor:
    """Counts conversations that the template would have rendered differently all at once.

    The first difference is logged as a warning, with both texts around it.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.checked = 0
        self.different = 0

    def check(self, messages: Sequence[Message], turns: Sequence[Turn]) -> bool:
        """Whether prompts and answers, as tokens, spell what the template makes of the messages.

        `messages` have no answers: user messages in order, perhaps after a system message.
        """
        conversation = self.conversation
        answers = []
        for turn in turns:
            ids = list(turn.response_ids)
            # The template adds the token that ends a turn by itself.
            ends = (conversation.tokenizer.eos_token_id, conversation.closing_id)
            if turn.finish_reason == "stop" and ids and ids[-1] in ends:
                ids.pop()
            answers.append(conversation.text(ids, special=True))
        whole = with_answers(messages, answers)
        rendered = conversation.template(whole, add_generation_prompt=False)
        ids = [token for turn in turns for token in (*turn.prompt_ids, *turn.response_ids)]
        sampled = conversation.text(ids, special=True)
        # A token that is half a character decodes to a replacement mark: nothing can be compared.
        same = rendered.startswith(sampled) or "\ufffd" in sampled
        self.checked += 1
        self.different += not same
        if not same and self.different == 1:
            logger.warning(
                "chat template %r renders a finished conversation differently from what the policy "
                "read turn by turn. Training uses the tokens that were read and written. First "
                "difference:\n%s",
                conversation.template.name,
                first_difference(sampled, rendered),
            )
        return same


def with_answers(messages: Sequence[Message], answers: Sequence[str]) -> list[Message]:
    """The conversation: each answer behind its user message."""
    whole: list[Message] = []
    left = list(answers)
    for message in messages:
        whole.append(message)
        if message["role"] == "user" and left:
            whole.append({"role": "assistant", "content": left.pop(0)})
    return whole


def first_difference(sampled: str, rendered: str) -> str:
    """Both texts around the first character in which they differ, one above the other."""
    start = 0
    while start < min(len(sampled), len(rendered)) and sampled[start] == rendered[start]:
        start += 1
    begin, end = max(0, start - _CONTEXT), start + _CONTEXT
    lines = []
    for name, text in (("read and written", sampled), ("rendered at once", rendered)):
        before, after = "..." if begin else "", "..." if end < len(text) else ""
        shown = f"{before}{text[begin:start]!r} >>> {text[start:end]!r}{after}"
        lines.append(f"  {name}: {shown}")
    return "\n".join(lines)


@dataclass(frozen=True)
class EnvEntry:
    """Which environment a manager has: its place among all, its tag and the tag's template."""

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
        prompts_are_whole: every turn has a prompt of its own, so a trajectory becomes one row for
            each turn. A prompt otherwise continues the turns before, and a trajectory becomes one
            row.
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
        self.entry, self.template, self.conversation = entry, entry.template, conversation
        self.max_response_length = sampling.max_new_tokens
        if entry.template.max_tokens_per_step is not None:
            limit = entry.template.max_tokens_per_step
            self.max_response_length = min(self.max_response_length, limit)
        self.sampling, self.sequence_length = sampling, sequence_length
        self.begin("", "")

    def next_messages(self) -> list[Message]:
        """The messages that this turn adds (the whole conversation, if `prompts_are_whole`)."""
        raise NotImplementedError

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
        """Take in the reply of reset (before any turn) or of a step.

        Returns why the episode ends, None if it does not.
        """
        info = reply.info
        if not self.turns:
            self.instruction = str(info.get("env_instruction") or "")
        self.observation, self.suffix = reply.observation, str(info.get("suffix") or "")
        self.observations.append(reply.observation)
        self._state = state_hash(info.get("state", reply.observation))
        for name, value in (info.get("metrics") or {}).items():
            if isinstance(value, bool | int | float) or hasattr(value, "item"):
                self._metrics.setdefault(name, []).append(float(value))
        for name, mode in (info.get("metrics_agg_mode") or {}).items():
            if mode in _AGGREGATIONS:
                self._agg_modes[name] = mode
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
            return self.conversation.template(new)
        system = self.messages[0] if self.messages[0]["role"] == "system" else None
        self.messages += new
        return self.conversation.next_prompt(new[-1], system=system)

    @property
    def last_answer(self) -> Sequence[int]:
        """The answer that the text of `next_text` follows."""
        return () if self.prompts_are_whole or not self.turns else self.turns[-1].response_ids

    def request(self, prompt_ids: Sequence[int]) -> GenerationRequest | None:
        """What is asked of the policy, given the ids of `next_text`; None if no token would fit."""
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
        """The conversation so far with its answers, for those who read messages, not tokens."""
        return with_answers(self.messages, [] if self.prompts_are_whole else self.actions)

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
        metrics = {}
        for name, values in self._metrics.items():
            metrics[name] = float(_AGGREGATIONS[self._agg_modes.get(name, "mean")](values))
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

    def fill(self, template: str, **more: object) -> str:
        """The template with its placeholders replaced; braces around anything else stay."""
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


class TrajEnvManager(BaseEnvManager):
    """Whole episodes: every answer is given with everything before it in view.

    A conversation: system message, then the filled `agent_template` of each turn and the policy's
    answers. The environment's instruction stands in front of the first message, unless a template
    has a place for it.
    """

    def next_messages(self) -> list[Message]:
        content = self.fill(self.template.agent_template)
        if self.turns:
            return [{"role": "user", "content": content}]
        templates = self.template.agent_template + (self.template.agent_system_template or "")
        if self.instruction and "{env_instruction}" not in templates:
            content = f"{self.instruction}\n{content}"
        return [*self.system_messages(), {"role": "user", "content": content}]


class StepEnvManager(BaseEnvManager):
    """One prompt for each turn, written anew: the filled `agent_template`.

    Its {history} has the observations and answers of the last `history_length` turns, oldest first.
    (ROLL's has only those turns whose action was invalid.)
    """

    prompts_are_whole = True

    def next_messages(self) -> list[Message]:
        length = self.template.history_length
        past = range(max(0, len(self.turns) - length), len(self.turns))
        content = self.fill(
            self.template.agent_template, history_length=length, **self.history(past)
        )
        return [*self.system_messages(), {"role": "user", "content": content}]

    def history(self, past: range) -> dict[str, str]:
        """The placeholders that tell of the turns `past`."""
        lines = [
            f"Step {index + 1}:\n{self.observations[index]}\nAnswer: {self.actions[index]}"
            for index in past
        ]
        return {"history": "\n".join(lines)}


class StepConcatEnvManager(StepEnvManager):
    """As StepEnvManager, with the prompts of GEM's games.

    {history} has the observations alone, and {current_observation} the environment's suffix, too.
    """

    def history(self, past: range) -> dict[str, str]:
        return {
            "history": "\n".join(self.observations[index] for index in past),
            "current_observation": f"{self.observation}\n{self.suffix}",
        }
