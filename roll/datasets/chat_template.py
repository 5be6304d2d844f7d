r"""Chat templates by name: a conversation in, the text that the model reads out.

    template = get_chat_template("chatml", tokenizer)
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
    template([question])
    # '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    template([question, answer], add_generation_prompt=False)
    # '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n'

    name                what it renders
    native, qwen2_5     the tokenizer's own chat template
    qwen3               the same, with enable_thinking=True unless told otherwise
    chatml, empty       <|im_start|>role ... <|im_end|>, whatever the tokenizer's own template is; no default system
    base                no markup: the user's text, then the answer and the tokenizer's end token. For models without a
                        chat format, and for data whose prompts already are complete texts
    longCOT_qwen2.5     native, with a system text that asks for a long thought before the solution, and a hint that
                        the answer belongs into \boxed{}
    longcot_V3          native, with <think> opened where the model goes on

Differs from ROLL, which wraps the question of `base` into a fixed instruction and takes a single user message for
`base` and `empty`: here both also render the answer, so preference pairs can use them. `longCOT_qwen2.5` leaves the
caller's messages as they are (ROLL's adds its hint to them again at every call) and words its texts in its own way;
`longcot_V3` opens <think> only where a generation prompt is asked for.

The text of a template already has its special tokens in it: turn it into ids with `tokenize_rendered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from roll.datasets.messages import Message, roles_of
from roll.exceptions import ConfigError, DataError
from roll.utils.logging import get_logger

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

# render(tokenizer, conversation, add_generation_prompt=..., **options of the template) -> text
RenderFunction = Callable[..., str]

CHATML_END = "<|im_end|>"
LONG_THOUGHT_SYSTEM = (
    "Work on the question in two parts. First think for as long as you need: take the question apart, try ideas, check "
    "each step, go back when a step fails. Write this between <|begin_of_thought|> and <|end_of_thought|>, with an "
    "empty line between steps. Then write the solution you arrived at, complete and concise, between "
    "<|begin_of_solution|> and <|end_of_solution|>."
)
BOXED_HINT = "Put the final answer in \\boxed{}. "
_OTHER_TEMPLATE = "Change the data, or choose another template (chatml takes any role)"

chat_templates: dict[str, RenderFunction] = {}


def register_chat_template(
    key: str, *, default_system: str | None = None, **defaults: Any
) -> Callable[[RenderFunction], RenderFunction]:
    """Decorator: makes `render(tokenizer, conversation, add_generation_prompt=..., **options) -> str` known as `key`.

    `default_system` is put in front of conversations that do not begin with a system message; `defaults` are options
    that are passed at every call unless the caller gives others. Raises ValueError for a name that is taken.
    """

    def register(render: RenderFunction) -> RenderFunction:
        if key in chat_templates:
            raise ValueError(
                f"a chat template named {key!r} is registered already: choose another name"
            )
        chat_templates[key] = partial(_render_with_system, render, default_system, **defaults)
        return render

    return register


def _render_with_system(
    render: RenderFunction,
    default_system: str | None,
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Message],
    **options: Any,
) -> str:
    if default_system is not None and conversation[0]["role"] != "system":
        conversation = [{"role": "system", "content": default_system}, *conversation]
    return render(tokenizer, conversation, **options)


def get_chat_template(key: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The template registered as `key`, for this tokenizer: a callable `template(conversation, **options) -> str`."""
    if key not in chat_templates:
        near = get_close_matches(str(key), chat_templates, n=1, cutoff=0.5)
        raise ConfigError(
            f"there is no chat template {key!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
            f"Known are: {', '.join(sorted(chat_templates))}"
        )
    if key in ("chatml", "empty") and CHATML_END not in tokenizer.get_vocab():
        get_logger(__name__).warning(
            "chat template %r ends a turn with %s, which this tokenizer does not have: the model will learn to spell "
            "it, and generation will not stop there unless it is a stop string",
            key,
            CHATML_END,
        )
    return ChatTemplate(key, tokenizer)


@dataclass(frozen=True)
class ChatTemplate:
    """A named template bound to a tokenizer.

    Raises DataError for a conversation that the template refuses, or of which it silently leaves a message out.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    _checked_roles: set[tuple[str, ...]] = field(default_factory=set, repr=False)

    def __call__(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text of `conversation`, with the header of the answer at its end if `add_generation_prompt`.

        `options` go to the template (`tools`, `enable_thinking`, ...).
        """
        if not conversation:
            raise DataError(f"chat template {self.name!r}: the conversation has no messages")
        options = {**options, "add_generation_prompt": add_generation_prompt}
        self._check_every_message_is_rendered(conversation, options)
        return self._render(conversation, options)

    def _render(self, conversation: Sequence[Message], options: dict[str, Any]) -> str:
        try:
            return chat_templates[self.name](self.tokenizer, list(conversation), **options)
        except TemplateError as error:
            raise DataError(
                f"chat template {self.name!r} cannot render a conversation with the roles {roles_of(conversation)}: "
                f"{error.message or type(error).__name__}. {_OTHER_TEMPLATE}"
            ) from error

    def _check_every_message_is_rendered(
        self, conversation: Sequence[Message], options: dict[str, Any]
    ) -> None:
        """Many templates skip roles they do not know. Tried once per sequence of roles, with contents to look for."""
        roles = tuple(str(message["role"]) for message in conversation)
        if roles in self._checked_roles:
            return
        probes = [
            {**message, "content": f"probe{index}end"} if message["content"] else message
            for index, message in enumerate(conversation)
        ]
        text = self._render(probes, options)
        for index, message in enumerate(probes):
            if message["content"] and message["content"] not in text:
                raise DataError(
                    f"chat template {self.name!r} leaves out message {index + 1}, whose role is {message['role']!r} "
                    f"(the roles are {roles_of(conversation)}). {_OTHER_TEMPLATE}"
                )
        # A message without content was not tried: the next conversation with these roles may have one there.
        if all(message["content"] for message in conversation):
            self._checked_roles.add(roles)


def tokenize_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a chat template made, without the special tokens that a tokenizer adds to plain text."""
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
def render_native(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    if tokenizer.chat_template is None:
        name = tokenizer.name_or_path
        raise ConfigError(
            f"the tokenizer{f' of {name}' if name else ''} has no chat template of its own to render with. Set the "
            "template to chatml, or to base for a model that never saw chat markup"
        )
    options = {"add_generation_prompt": True, **options, "tokenize": False}
    text = tokenizer.apply_chat_template(conversation, **options)
    assert isinstance(text, str)
    return text


@register_chat_template("qwen3")
def render_qwen3(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    return render_native(tokenizer, conversation, **{"enable_thinking": True, **options})


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
            f"chat template 'base' takes one user message and its answer, found the roles {roles_of(conversation)}: "
            "text without markup cannot tell them apart. Choose chatml, or native if the tokenizer has a chat template"
        )
    # What the tokenizer itself would put in front of a plain text, and nothing else.
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]
    text = (tokenizer.bos_token if starts_with_bos else "") + "".join(
        message["content"] for message in conversation
    )
    if roles[-1] == "user":
        return text
    if tokenizer.eos_token is None:
        raise ConfigError(
            "chat template 'base' ends an answer with the tokenizer's end token, and this one has none"
        )
    return text + tokenizer.eos_token


@register_chat_template("longCOT_qwen2.5", default_system=LONG_THOUGHT_SYSTEM)
def render_long_thought(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: Any
) -> str:
    hinted = [
        {**message, "content": BOXED_HINT + message["content"]}
        if message["role"] == "user"
        else message
        for message in conversation
    ]
    return render_native(tokenizer, hinted, **options)


@register_chat_template("longcot_V3")
def render_open_thought(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Message],
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    text = render_native(
        tokenizer, conversation, add_generation_prompt=add_generation_prompt, **options
    )
    return text + "<think>\n" if add_generation_prompt else text
