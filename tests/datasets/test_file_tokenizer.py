"""The tokenizer that checks use: what it says of rows is what the real one says."""

import json

import pytest
from tiny_models import make_model_folder, tiny_tokenizer

from roll.datasets.chat_template import get_chat_template, tokenize_rendered
from roll.datasets.file_tokenizer import FileTokenizer
from roll.exceptions import ConfigError, DataError

CHATS = [
    [{"role": "user", "content": "2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path)


@pytest.mark.parametrize("template", ["native", "chatml"])
@pytest.mark.parametrize("chat", CHATS)
def test_it_renders_and_encodes_as_the_real_one(folder, template, chat):
    ours, real = FileTokenizer(folder), tiny_tokenizer()
    texts = [get_chat_template(template, tokenizer)(chat) for tokenizer in (ours, real)]
    assert texts[0] == texts[1]
    assert tokenize_rendered(ours, texts[:1]) == tokenize_rendered(real, texts[1:])


def test_templates_of_models_use_more_than_plain_jinja(folder):
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{%- if loop.index > 9 %}{% break %}{% endif %}{{ m | tojson }}{%- endfor %}{{ strftime_now('%Y') | length }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    chat = get_chat_template("native", FileTokenizer(folder))
    assert chat(CHATS[0]) == json.dumps(CHATS[0][0]) + "4"
    with pytest.raises(DataError, match="no tools"):
        chat([{"role": "tool", "content": "x"}])


def test_a_folder_without_a_template_is_told(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no chat template of its own"):
        get_chat_template("native", FileTokenizer(folder))(CHATS[0])


def test_a_stand_in_renders_anything_and_knows_no_lengths():
    tokenizer = FileTokenizer(None)
    assert not tokenizer.is_exact and tokenizer("ab")["input_ids"] == [97, 98]
    assert "2 + 2?" in get_chat_template("native", tokenizer)(CHATS[0])


def test_a_broken_file_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json could not be read"):
        FileTokenizer(folder)
