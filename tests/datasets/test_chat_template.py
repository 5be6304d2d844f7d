"""Conversations and chat templates: what each renders, and what is said where one cannot."""

import copy
import json

import pytest
from tiny_models import make_model_folder, tiny_tokenizer
from tiny_tokenizer import BOS, EOS, bpe_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roll.datasets import chat_template
from roll.datasets.chat_template import (
    chat_templates,
    get_chat_template,
    parse_messages,
    register_chat_template,
    tokenize_rendered,
)
from roll.datasets.file_tokenizer import FileTokenizer
from roll.exceptions import ConfigError, DataError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"role": "tool", "content": "42"}
USER_CHATML = "<|im_start|>user\nhi<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"

STRICT = (  # as Gemma's and Llama 2's: refuses what it does not know
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)


# --- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [USER],
        USER,
        json.dumps([USER]),
        f"  {json.dumps([USER])}\n",
        [{"from": "human", "value": "hi"}],
        json.dumps([{"from": "human", "value": "hi"}]),
        [{"role": "user", "content": [{"type": "text", "text": text} for text in "hi"]}],
        [{**USER, "tool_calls": None, "name": None}],
    ],
)
def test_forms_of_one_message(value):
    assert parse_messages(value) == [USER]


def test_roles_of_sharegpt_and_other_keys():
    values = [{"from": role, "value": role} for role in ("system", "human", "gpt", "tool")]
    parsed = parse_messages(values)
    assert [message["role"] for message in parsed] == ["system", "user", "assistant", "tool"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert parse_messages([call]) == [{**call, "content": ""}], "a tool call needs no content"


@pytest.mark.parametrize(
    "value",
    [None, "hi", "", "[1, 2]", "[not json]", '["a"]', '{"role": "user", "content": "x"}', "[]"],
)
def test_plain_text_is_not_a_conversation(value):
    assert parse_messages(value) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "expected text or a list of messages, found a int: 5"),
        ([], "the list of messages is empty"),
        (["hi"], "message 1 is not an object with role and content but a str: 'hi'"),
        ([USER, {"content": "x"}], "message 2 has no role; its keys are: content"),
        ([{}], "message 1 has no role; its keys are: none"),
        (
            [USER, {"role": "assistant"}],
            r"message 2 \(role assistant\) has nothing as content, exp",
        ),
        (
            [{**USER, "content": 7}],
            r"message 1 \(role user\) has a int: 7 as content, expected text",
        ),
        (
            [{**USER, "content": [{"type": "image"}]}],
            "message 1 has a content part that is not text: a dict",
        ),
    ],
)
def test_what_is_not_a_conversation(value, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        parse_messages(value)


# --- what templates render ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["native", "qwen2_5", "qwen3", "chatml", "empty"])
def test_chatml_tokenizer(name):
    template = get_chat_template(name, bpe_tokenizer())
    assert template([USER]) == USER_CHATML + HEADER
    assert template([USER], add_generation_prompt=False) == USER_CHATML
    whole = template([USER, ANSWER], add_generation_prompt=False)
    assert whole == USER_CHATML + HEADER + "yo<|im_end|>\n"


def test_native_is_the_tokenizers_own_with_its_options_and_chatml_is_not():
    own = "{{ messages[0].content }}{{ enable_thinking }}{{ tools }}"
    tokenizer = bpe_tokenizer(chat_template=own)
    assert get_chat_template("qwen3", tokenizer)([USER]) == "hiTrueNone"
    assert get_chat_template("qwen3", tokenizer)([USER], enable_thinking=False) == "hiFalseNone"
    assert get_chat_template("native", tokenizer)([USER], enable_thinking=1) == "hi1None"
    assert get_chat_template("chatml", tokenizer)([USER]) == USER_CHATML + HEADER


def test_base_is_text_and_an_end():
    template = get_chat_template("base", bpe_tokenizer(chat_template=None))
    assert template([USER]) == "hi"
    assert template([USER, ANSWER], add_generation_prompt=False) == f"hiyo{EOS}"
    with_bos = bpe_tokenizer(adds_bos=True)  # begins as the tokenizer would
    template = get_chat_template("base", with_bos)
    assert template([USER, ANSWER]) == f"{BOS}hiyo{EOS}"
    assert tokenize_rendered(with_bos, [template([USER])]) == [with_bos("hi")["input_ids"]]
    for conversation in ([SYSTEM, USER], [ANSWER], [USER, ANSWER, USER]):
        with pytest.raises(DataError, match=r"'base' takes one user message .* roles \w+"):
            template(conversation)
    with_bos.eos_token = None
    with pytest.raises(ConfigError, match="ends an answer with the tokenizer's end token, and"):
        template([USER, ANSWER])


def test_long_thought_adds_a_system_text_and_a_hint_and_leaves_the_messages_alone():
    template = get_chat_template("longCOT_qwen2.5", bpe_tokenizer())
    conversation = [copy.deepcopy(USER)]
    text = template(conversation)
    assert text.startswith(f"<|im_start|>system\n{chat_template.LONG_THOUGHT_SYSTEM}<|im_end|>\n")
    hinted = "<|im_start|>user\nPut the final answer in \\boxed{}. hi<|im_end|>\n"
    assert text.endswith(hinted + HEADER)
    assert conversation == [USER] and template(conversation) == text
    assert chat_template.LONG_THOUGHT_SYSTEM not in template([SYSTEM, USER])


def test_open_thought_only_where_the_model_goes_on():
    template = get_chat_template("longcot_V3", bpe_tokenizer())
    assert template([USER]).endswith(HEADER + "<think>\n")
    assert "<think>" not in template([USER, ANSWER], add_generation_prompt=False)


def test_rendered_text_is_not_given_special_tokens_again():
    tokenizer = bpe_tokenizer(adds_bos=True)
    text = get_chat_template("chatml", tokenizer)([USER])
    [ids] = tokenize_rendered(tokenizer, [text])
    assert tokenizer.bos_token_id not in ids and tokenizer.decode(ids) == text
    assert tokenize_rendered(tokenizer, []) == []


# --- what cannot be rendered ----------------------------------------------------------------------


def test_unknown_names_and_tokenizers_without_a_template():
    with pytest.raises(
        ValueError, match=r"no chat template 'chat_ml'; did you mean 'chatml'\? Known are: base, "
    ):
        get_chat_template("chat_ml", bpe_tokenizer())
    with pytest.raises(ConfigError, match=r"no chat template 'zzz'\. Known are"):
        get_chat_template("zzz", bpe_tokenizer())
    bare = bpe_tokenizer(chat_template=None)
    with pytest.raises(ConfigError, match=r"has no chat template of its own.* Set the template to"):
        get_chat_template("native", bare)([USER])
    assert get_chat_template("chatml", bare)([USER]) == USER_CHATML + HEADER
    with pytest.raises(DataError, match="the conversation has no messages"):
        get_chat_template("chatml", bare)([])


def test_roles_that_a_template_refuses_or_leaves_out():
    template = get_chat_template("native", bpe_tokenizer(chat_template=STRICT))
    assert template([USER]) == "[user]hi"
    with pytest.raises(
        DataError,
        match="'native' cannot render a conversation with the roles system, user: System role not ",
    ):
        template([SYSTEM, USER])
    template = get_chat_template("native", bpe_tokenizer(chat_template=FORGETFUL))
    assert template([USER, ANSWER, USER]) == "[user]hi[assistant]yo[user]hi"
    assert template([USER, {"role": "tool", "content": ""}]) == "[user]hi", "nothing was left out"
    with pytest.raises(
        DataError,
        match=r"'native' leaves out message 2, whose role is 'tool' \(the roles are user, tool\)",
    ):
        template([USER, TOOL])
    # As Qwen3's, which removes old thoughts, and as those that strip: not suspected.
    shortening = "{% for m in messages %}[{{ m.content.split('</think>')[-1] | trim }}]{% endfor %}"
    template = get_chat_template("native", bpe_tokenizer(chat_template=shortening))
    assert template([{"role": "assistant", "content": "<think>long</think> 4 "}]) == "[4]"


def test_chatml_for_a_tokenizer_that_does_not_know_it(caplog):
    get_chat_template("chatml", bpe_tokenizer())
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    stranger = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")
    get_chat_template("base", stranger)
    assert caplog.text == ""
    get_chat_template("chatml", stranger)
    assert "'chatml' ends a turn with <|im_end|>, which this tokenizer does not have" in caplog.text


def test_own_templates(monkeypatch):
    monkeypatch.setattr(chat_template, "chat_templates", dict(chat_templates))

    @register_chat_template("shout", default_system="LOUD", mark="!")
    def shout(tokenizer, conversation, mark, **options):
        return " ".join(message["content"] for message in conversation) + mark

    assert get_chat_template("shout", bpe_tokenizer())([USER]) == "LOUD hi!"
    assert get_chat_template("shout", bpe_tokenizer())([SYSTEM, USER], mark="?") == "be kind hi?"
    with pytest.raises(ValueError, match="'shout' is registered already"):
        register_chat_template("shout")(shout)


# --- the tokenizer that checks use ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path)


@pytest.mark.parametrize("template", ["native", "chatml"])
@pytest.mark.parametrize("chat", [[USER], [SYSTEM, USER], [USER, ANSWER, USER]])
def test_it_renders_and_encodes_as_the_real_one(folder, template, chat):
    ours, real = FileTokenizer(folder), tiny_tokenizer()
    texts = [get_chat_template(template, tokenizer)(chat) for tokenizer in (ours, real)]
    assert texts[0] == texts[1]
    assert tokenize_rendered(ours, texts[:1]) == tokenize_rendered(real, texts[1:])


def test_templates_of_models_use_more_than_plain_jinja(folder):
    (folder / "chat_template.jinja").write_text(
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{%- if loop.index > 9 %}{% break %}{% endif %}{{ m | tojson }}{%- endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    chat = get_chat_template("native", FileTokenizer(folder))
    assert chat([USER]) == json.dumps(USER) + "4"
    with pytest.raises(DataError, match="no tools"):
        chat([TOOL])


def test_folders_without_a_template_without_a_tokenizer_and_broken_ones(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no chat template of its own"):
        get_chat_template("native", FileTokenizer(folder))([USER])
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json could not be read"):
        FileTokenizer(folder)
    stand_in = FileTokenizer(None)
    assert not stand_in.is_exact and stand_in("ab")["input_ids"] == [97, 98]
    assert "hi" in get_chat_template("native", stand_in)([USER])
