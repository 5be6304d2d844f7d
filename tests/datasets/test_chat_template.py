"""Chat templates: what each renders, and what is said where one cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tiny_tokenizer import BOS, EOS, bpe_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roll.datasets import chat_template
from roll.datasets.chat_template import (
    chat_templates,
    get_chat_template,
    register_chat_template,
    tokenize_rendered,
)
from roll.exceptions import ConfigError, DataError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"role": "tool", "content": "42"}

USER_CHATML = "<|im_start|>user\nhi<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"

STRICT = (  # as Gemma's and Llama 2's: refuses what it does not know
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FORGETFUL = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_the_names_of_roll_are_there() -> None:
    names = {
        "native",
        "qwen2_5",
        "qwen3",
        "chatml",
        "base",
        "empty",
        "longCOT_qwen2.5",
        "longcot_V3",
    }
    assert names <= set(chat_templates)


@pytest.mark.parametrize("name", ["native", "qwen2_5", "qwen3", "chatml", "empty"])
def test_chatml_tokenizer(name: str) -> None:
    template = get_chat_template(name, bpe_tokenizer())
    assert template([USER]) == USER_CHATML + HEADER
    assert template([USER], add_generation_prompt=False) == USER_CHATML
    assert (
        template([USER, ANSWER], add_generation_prompt=False)
        == USER_CHATML + HEADER + "yo<|im_end|>\n"
    )


def test_native_is_the_tokenizers_own_and_chatml_is_not() -> None:
    tokenizer = bpe_tokenizer(chat_template="{% for m in messages %}({{ m.content }}){% endfor %}")
    assert get_chat_template("native", tokenizer)([USER]) == "(hi)"
    assert get_chat_template("chatml", tokenizer)([USER]) == USER_CHATML + HEADER


def test_options_reach_the_template() -> None:
    tokenizer = bpe_tokenizer(
        chat_template="{{ messages[0].content }}{{ enable_thinking }}{{ tools }}"
    )
    assert get_chat_template("qwen3", tokenizer)([USER]) == "hiTrueNone"
    assert get_chat_template("qwen3", tokenizer)([USER], enable_thinking=False) == "hiFalseNone"
    assert get_chat_template("native", tokenizer)([USER], enable_thinking=1) == "hi1None"


def test_base_is_text_and_an_end() -> None:
    template = get_chat_template("base", bpe_tokenizer(chat_template=None))
    assert template([USER]) == "hi"
    assert template([USER, ANSWER], add_generation_prompt=False) == f"hiyo{EOS}"


def test_base_begins_as_the_tokenizer_would() -> None:
    tokenizer = bpe_tokenizer(adds_bos=True)
    template = get_chat_template("base", tokenizer)
    assert template([USER, ANSWER]) == f"{BOS}hiyo{EOS}"
    [ids] = tokenize_rendered(tokenizer, [template([USER])])
    assert ids == tokenizer("hi")["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_base_without_an_end_token() -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(
        ConfigError, match="ends an answer with the tokenizer's end token, and this one has none"
    ):
        get_chat_template("base", tokenizer)([USER, ANSWER])


@pytest.mark.parametrize("conversation", [[SYSTEM, USER], [ANSWER], [USER, ANSWER, USER]])
def test_base_takes_one_question(conversation: list[dict[str, Any]]) -> None:
    with pytest.raises(
        DataError, match=r"'base' takes one user message and its answer, found the roles \w+"
    ):
        get_chat_template("base", bpe_tokenizer())(conversation)


def test_long_thought_adds_a_system_text_and_a_hint_and_leaves_the_messages_alone() -> None:
    template = get_chat_template("longCOT_qwen2.5", bpe_tokenizer())
    conversation = [copy.deepcopy(USER)]
    text = template(conversation)
    assert text.startswith(f"<|im_start|>system\n{chat_template.LONG_THOUGHT_SYSTEM}<|im_end|>\n")
    assert text.endswith(
        "<|im_start|>user\nPut the final answer in \\boxed{}. hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversation == [USER]
    assert template(conversation) == text
    assert chat_template.LONG_THOUGHT_SYSTEM not in template([SYSTEM, USER])


def test_open_thought_only_where_the_model_goes_on() -> None:
    template = get_chat_template("longcot_V3", bpe_tokenizer())
    assert template([USER]).endswith(HEADER + "<think>\n")
    assert "<think>" not in template([USER, ANSWER], add_generation_prompt=False)


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"no chat template 'chat_ml'; did you mean 'chatml'\? Known are: base, chatml, ",
    ):
        get_chat_template("chat_ml", bpe_tokenizer())
    with pytest.raises(ConfigError, match=r"no chat template 'zzz'\. Known are"):
        get_chat_template("zzz", bpe_tokenizer())


def test_a_tokenizer_without_a_template() -> None:
    with pytest.raises(
        ConfigError,
        match=r"has no chat template of its own.* Set the template to chatml, or to base",
    ):
        get_chat_template("native", bpe_tokenizer(chat_template=None))([USER])
    assert (
        get_chat_template("chatml", bpe_tokenizer(chat_template=None))([USER])
        == USER_CHATML + HEADER
    )


def test_a_template_that_refuses_a_role() -> None:
    template = get_chat_template("native", bpe_tokenizer(chat_template=STRICT))
    assert template([USER]) == "[user]hi"
    expected = "'native' cannot render a conversation with the roles system, user: System role not supported. Change"
    with pytest.raises(DataError, match=expected):
        template([SYSTEM, USER])


def test_a_template_that_leaves_a_role_out() -> None:
    template = get_chat_template("native", bpe_tokenizer(chat_template=FORGETFUL))
    assert template([USER, ANSWER, USER]) == "[user]hi[assistant]yo[user]hi"
    with pytest.raises(
        DataError,
        match=r"'native' leaves out message 2, whose role is 'tool' \(the roles are user, tool\)",
    ):
        template([USER, TOOL])


def test_the_search_for_left_out_roles_is_not_fooled_by_an_empty_message() -> None:
    template = get_chat_template("native", bpe_tokenizer(chat_template=FORGETFUL))
    assert template([USER, {"role": "tool", "content": ""}]) == "[user]hi"
    with pytest.raises(DataError, match="leaves out message 2"):
        template([USER, TOOL])


def test_templates_that_change_contents_are_not_suspected() -> None:
    # As Qwen3's, which removes old thoughts, and as those that strip.
    shortening = "{% for m in messages %}[{{ m.content.split('</think>')[-1] | trim }}]{% endfor %}"
    template = get_chat_template("native", bpe_tokenizer(chat_template=shortening))
    assert template([{"role": "assistant", "content": "<think>long</think> 4 "}]) == "[4]"


def test_chatml_for_a_tokenizer_that_does_not_know_it(caplog: pytest.LogCaptureFixture) -> None:
    get_chat_template("chatml", bpe_tokenizer())
    assert caplog.text == ""
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    stranger = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")
    get_chat_template("base", stranger)
    assert caplog.text == ""
    get_chat_template("chatml", stranger)
    assert "'chatml' ends a turn with <|im_end|>, which this tokenizer does not have" in caplog.text


def test_no_messages() -> None:
    with pytest.raises(DataError, match="the conversation has no messages"):
        get_chat_template("chatml", bpe_tokenizer())([])


def test_own_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "chat_templates", dict(chat_templates))

    @register_chat_template("shout", default_system="LOUD", mark="!")
    def shout(tokenizer: Any, conversation: list[dict[str, Any]], mark: str, **options: Any) -> str:
        return " ".join(message["content"] for message in conversation) + mark

    assert get_chat_template("shout", bpe_tokenizer())([USER]) == "LOUD hi!"
    assert get_chat_template("shout", bpe_tokenizer())([SYSTEM, USER], mark="?") == "be kind hi?"
    with pytest.raises(ValueError, match="'shout' is registered already"):
        register_chat_template("shout")(shout)


def test_rendered_text_is_not_given_special_tokens_again() -> None:
    tokenizer = bpe_tokenizer(adds_bos=True)
    text = get_chat_template("chatml", tokenizer)([USER])
    [ids] = tokenize_rendered(tokenizer, [text])
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenize_rendered(tokenizer, []) == []
