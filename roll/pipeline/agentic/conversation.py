r"""What a policy reads in each turn of an episode, so that tokens it has seen or written are never made anew.

The first prompt is the whole conversation so far, rendered by the chat template. Every later one is only what the
template puts behind an answer: the end of the answer's turn, the new message, and the header of the next answer. With
ChatML and an answer that ended with `<|im_end|>`:

    first   <|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n         answer: B<|im_end|>
    next    \n<|im_start|>user\nC?<|im_end|>\n<|im_start|>assistant\n       answer: D<|im_end|>

A template may render a conversation differently once it has gone on (Qwen3 removes old thoughts). The policy did not
read that text, so training on it would be wrong: the tokens stay, and `DriftMonitor` shows the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.datasets.chat_template import ChatTemplate, Message, tokenize_rendered
from roll.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.rollout.types import Turn

logger = get_logger(__name__)

# Texts that no observation contains; templates render them like any other.
_QUESTION, _ANSWER = "question-5d1f27c0", "answer-5d1f27c0"
_CONTEXT = 40  # characters of a difference that are shown on each side


class Conversation:
    """Renders and tokenises the turns of conversations that share a template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.tokenizer: PreTrainedTokenizerBase = template.tokenizer

    def first_prompt(self, messages: Sequence[Message]) -> str:
        """The text of the first prompt: system message (if any) and first user message."""
        return self.template(messages)

    def next_prompt(self, message: Message, *, system: Message | None = None) -> str:
        """What follows an answer when `message` comes next, from the first character behind the answer's own text.

        It is cut out of a short conversation whose answer is known, so it depends on nothing before that answer.
        """
        head = [] if system is None else [system]
        known = [
            *head,
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        return self.template([*known, message]).rpartition(_ANSWER)[2]

    def tokenize(self, texts: Sequence[str], previous: Sequence[Sequence[int]]) -> list[list[int]]:
        """Ids of prompts; where an answer (`previous`, empty for first prompts) already ends with the token that the
        prompt would begin with, the prompt begins after it."""
        ids = tokenize_rendered(self.tokenizer, texts)
        return [
            new[1:] if answer and new and new[0] == answer[-1] else new
            for new, answer in zip(ids, previous, strict=True)
        ]

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decoded ids, without special tokens unless asked for."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if (
            backend is not None
        ):  # the same without the checks that transformers makes token by token
            return backend.decode(
                ids if isinstance(ids, list) else list(ids), skip_special_tokens=not special
            )
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class DriftMonitor:
    """Counts conversations that the chat template, asked for all of it at once, would have rendered differently.

    The first difference is logged as a warning, with both texts around it.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.checked = 0
        self.different = 0
        self.example: str | None = None

    def check(self, messages: Sequence[Message], turns: Sequence[Turn]) -> bool:
        """Whether prompts and answers, as tokens, spell what the template makes of `messages` (which have no answers:
        user messages in order, perhaps after a system message)."""
        answers = [self._answer_text(turns, index) for index in range(len(turns))]
        whole: list[Message] = []
        for message in messages:
            whole.append(message)
            if message["role"] == "user" and answers:
                whole.append({"role": "assistant", "content": answers.pop(0)})
        rendered = self.conversation.template(whole, add_generation_prompt=False)
        ids = [token for turn in turns for token in (*turn.prompt_ids, *turn.response_ids)]
        sampled = self.conversation.text(ids, special=True)
        # A token that is half a character decodes to a replacement mark; nothing can be compared then.
        same = rendered.startswith(sampled) or "\ufffd" in sampled
        self.checked += 1
        if not same:
            self.different += 1
            if self.example is None:
                self.example = first_difference(sampled, rendered)
                logger.warning(
                    "chat template %r renders a finished conversation differently from what the policy read turn by "
                    "turn. Training uses the tokens that were read and written. First difference:\n%s",
                    self.conversation.template.name,
                    self.example,
                )
        return same

    def _answer_text(self, turns: Sequence[Turn], index: int) -> str:
        """The text of an answer as the template wants it: without the token that ends its turn."""
        ids = list(turns[index].response_ids)
        ends = {self.conversation.tokenizer.eos_token_id, *self._closing_ids()}
        if turns[index].finish_reason == "stop" and ids and ids[-1] in ends:
            ids.pop()
        return self.conversation.text(ids, special=True)

    def _closing_ids(self) -> list[int]:
        if not hasattr(self, "_closing"):
            text = self.conversation.next_prompt({"role": "user", "content": _QUESTION})
            self._closing: list[int] = tokenize_rendered(self.conversation.tokenizer, [text])[0][:1]
        return self._closing


def first_difference(sampled: str, rendered: str) -> str:
    """Both texts around the first character in which they differ, one above the other."""
    pairs = zip(sampled, rendered, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(sampled), len(rendered)))
    begin, end = max(0, start - _CONTEXT), start + _CONTEXT
    before = "..." if begin else ""

    def shown(text: str) -> str:
        return f"{before}{text[begin:start]!r} >>> {text[start:end]!r}{'...' if end < len(text) else ''}"

    return f"  read and written: {shown(sampled)}\n  rendered at once: {shown(rendered)}"
