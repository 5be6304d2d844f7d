r"""Conversations, and the chat templates that turn them into the text that the model reads.

    template = get_chat_template("chatml", tokenizer)
    template([{"role": "user", "content": "hi"}])
    # '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'

    name                what it renders
    native, qwen2_5     the tokenizer's own chat template
    qwen3               the same, with enable_thinking=True unless told otherwise
    chatml, empty       <|im_start|>role ... <|im_end|>, with no default system text
    base                no markup: the user's text, then the answer and the tokenizer's end token
    longCOT_qwen2.5     native, with a system text that asks for a long thought before the solution,
                        and a hint that the answer belongs into \boxed{}
    longcot_V3          native, with <think> opened where the model goes on

Differs from ROLL, which wraps the question of `base` into a fixed instruction and takes a single
user message for `base` and `empty`: here both also render the answer, so that preference pairs can
use them. The text of a template has its special tokens in it: `tokenize_rendered` adds no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from roll.exceptions import ConfigError, DataError
from roll.utils.logging import get_logger

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

# "role" and "content", and what some templates read besides (tool_calls, name, ...), so Any.
Message = dict[str, Any]
# render(tokenizer, conversation, add_generation_prompt=..., **options of the template) -> text
RenderFunction = Callable[..., str]

CHATML_END = "<|im_end|>"
LONG_THOUGHT_SYSTEM = (
    "Work on the question in two parts. First think for as long as you need: take the question "
    "apart, try ideas, check each step, go back when a step fails. Write this between "
    "<|begin_of_thought|> and <|end_of_thought|>, with an empty line between steps. Then write the "
    "solution you arrived at, complete and concise, between <|begin_of_solution|> and "
    "<|end_of_solution|>."
)
BOXED_HINT = "Put the final answer in \\boxed{}. "
_OTHER_TEMPLATE = "Change the data, or choose another template (chatml takes any role)"
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

chat_templates: dict[str, RenderFunction] = {}


# --------------------------------------------------------------------------------------------------
# Conversations


def parse_messages(value: object) -> list[Message] | None:
    """The conversation that a cell holds, or None if it holds plain text or nothing.

    Taken as a conversation: a list of messages, such a list as JSON text (the only way to put one
    into a CSV file), and a single message. A message is {"role", "content"} or ShareGPT's {"from",
    "value"}; content may be a list of text parts. Keys that hold None are left out: columnar files
    give every message the keys of all the others.

    Raises ValueError, without a place, for a list or an object that is not a conversation.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None  # an answer that begins with a bracket
        for message in value or [None]:
            if not isinstance(message, dict) or not (
                message.keys() >= {"role", "content"} or message.keys() >= {"from", "value"}
            ):
                return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"expected text or a list of messages, found {_shown(value)}")
    if not value:
        raise ValueError("the list of messages is empty")
    return [_parse_message(message, number) for number, message in enumerate(value, start=1)]


def _parse_message(message: object, number: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is not an object with role and content but {_shown(message)}"
        )
    given = {key: value for key, value in message.items() if value is not None}
    if "from" in given and "role" not in given:
        role = given.pop("from")
        content = given.pop("value", None)
        given = {"role": _SHAREGPT_ROLES.get(role, role), "content": content, **given}
    if not isinstance(given.get("role"), str):
        keys = ", ".join(map(str, message)) or "none"
        raise ValueError(f"message {number} has no role; its keys are: {keys}")
    content = given.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or part.get("type") != "text":
                raise ValueError(
                    f"message {number} has a content part that is not text: {_shown(part)}"
                )
            texts.append(text)
        content = "".join(texts)
    if content is None and "tool_calls" in given:
        content = ""  # an assistant that only calls a tool says nothing
    if not isinstance(content, str):
        raise ValueError(
            f"message {number} (role {given['role']}) has {_shown(content)} as content, "
            "expected text"
        )
    return {**given, "content": content}


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"a {type(value).__name__}: {text[:60]}{'...' if len(text) > 60 else ''}"


def roles_of(conversation: Sequence[Message]) -> str:
    """`user, assistant`: for error messages."""
    return ", ".join(str(message["role"]) for message in conversation)


# --------------------------------------------------------------------------------------------------
# Templates by name


def register_chat_template(
    key: str, *, default_system: str | None = None, **defaults: Any
) -> Callable[[RenderFunction], RenderFunction]:
    """Decorator: make `render(tokenizer, conversation, **options) -> str` known as `key`.

    `default_system` is put in front of conversations that do not begin with a system message;
    `defaults` are passed at every call unless the caller gives others. Raises ValueError for a name
    that is taken.
    """

    def register(render: RenderFunction) -> RenderFunction:
        if key in chat_templates:
            raise ValueError(
                f"a chat template named {key!r} is registered already: choose another name"
            )

        def with_defaults(tokenizer: Any, conversation: list[Message], **options: Any) -> str:
            if default_system is not None and conversation[0]["role"] != "system":
                conversation = [{"role": "system", "content": default_system}, *conversation]
            return render(tokenizer, conversation, **{**defaults, **options})

        chat_templates[key] = with_defaults
        return render

    return register


def get_chat_template(key: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The template registered as `key`, for this tokenizer: `template(conversation) -> text`."""
    if key not in chat_templates:
        near = get_close_matches(str(key), chat_templates, n=1, cutoff=0.5)
        raise ConfigError(
            f"there is no chat template {key!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
            f"Known are: {', '.join(sorted(chat_templates))}"
        )
    if key in ("chatml", "empty") and CHATML_END not in tokenizer.get_vocab():
        get_logger(__name__).warning(
            "chat template %r ends a turn with %s, which this tokenizer does not have: the model "
            "will learn to spell it, and generation will not stop there unless it is a stop string",
            key,
            CHATML_END,
        )
    return ChatTemplate(key, tokenizer)


class ChatTemplate:
    """A named template bound to a tokenizer.

    Raises DataError for a conversation that the template refuses, or of which it leaves a message
    out without a word, as many templates do with roles that they do not know.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.tokenizer = name, tokenizer
        self._checked_roles: set[tuple[str, ...]] = set()

    def __call__(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text of `conversation`, and the header of the answer if `add_generation_prompt`.

        `options` go to the template (`tools`, `enable_thinking`, ...).
        """
        if not conversation:
            raise DataError(f"chat template {self.name!r}: the conversation has no messages")
        options = {**options, "add_generation_prompt": add_generation_prompt}
        roles = tuple(str(message["role"]) for message in conversation)
        if roles not in self._checked_roles:
            # Tried once for each sequence of roles, with contents that can be found again.
            probes = [dict(message) for message in conversation]
            for index, probe in enumerate(probes):
                probe["content"] = f"probe{index}end" if probe["content"] else ""
            text = self._render(probes, options)
            for index, probe in enumerate(probes):
                if probe["content"] not in text:
                    raise DataError(
                        f"chat template {self.name!r} leaves out message {index + 1}, whose role "
                        f"is {probe['role']!r} (the roles are {roles_of(conversation)}). "
                        f"{_OTHER_TEMPLATE}"
                    )
            # A message without content was not tried: the next conversation may have one there.
            if all(message["content"] for message in conversation):
                self._checked_roles.add(roles)
        return self._render(conversation, options)

    def _render(self, conversation: Sequence[Message], options: dict[str, Any]) -> str:
        try:
            return chat_templates[self.name](self.tokenizer, list(conversation), **options)
        except TemplateError as error:
            raise DataError(
                f"chat template {self.name!r} cannot render a conversation with the roles "
                f"{roles_of(conversation)}: {error.message or type(error).__name__}. "
                f"{_OTHER_TEMPLATE}"
            ) from error


def tokenize_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a chat template made, without further special tokens."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,
    )
    return encoded["input_ids"]


@register_chat_template("native")
@register_chat_template("qwen2_5")
@register_chat_template("qwen3", enable_thinking=True)
def render_native(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    if tokenizer.chat_template is None:
        name = tokenizer.name_or_path
        raise ConfigError(
            f"the tokenizer{f' of {name}' if name else ''} has no chat template of its own to "
            "render with. Set the template to chatml, or to base for a model that never saw chat "
            "markup"
        )
    options = {"add_generation_prompt": True, **options, "tokenize": False}
    text = tokenizer.apply_chat_template(conversation, **options)
    assert isinstance(text, str)
    return text


@register_chat_template("chatml")
@register_chat_template("empty")
def render_chatml(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Message],
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    turns = [
        f"<|im_start|>{message['role']}\n{message['content']}{CHATML_END}\n"
        for message in conversation
    ]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@register_chat_template("base")
def render_base(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    roles = [message["role"] for message in conversation]
    if roles not in (["user"], ["user", "assistant"]):
        raise DataError(
            "chat template 'base' takes one user message and its answer, found the roles "
            f"{roles_of(conversation)}: text without markup cannot tell them apart. Choose chatml, "
            "or native if the tokenizer has a chat template"
        )
    text = "".join(message["content"] for message in conversation)
    # What the tokenizer itself would put in front of a plain text, and nothing else.
    bos_id = tokenizer.bos_token_id
    if bos_id is not None and tokenizer("")["input_ids"][:1] == [bos_id]:
        text = tokenizer.bos_token + text
    if roles[-1] == "user":
        return text
    if tokenizer.eos_token is None:
        raise ConfigError(
            "chat template 'base' ends an answer with the tokenizer's end token, and this one has "
            "none"
        )
    return text + tokenizer.eos_token


@register_chat_template("longCOT_qwen2.5", default_system=LONG_THOUGHT_SYSTEM)
def render_long_thought(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    hinted = []
    for message in conversation:
        hint = BOXED_HINT if message["role"] == "user" else ""
        hinted.append({**message, "content": hint + message["content"]})
    return render_native(tokenizer, hinted, **options)


@register_chat_template("longcot_V3")
def render_open_thought(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    text = render_native(tokenizer, conversation, **options)
    return text + "<think>\n" if options.get("add_generation_prompt", True) else text
