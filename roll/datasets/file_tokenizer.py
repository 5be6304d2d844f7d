"""A tokenizer as its files describe it, for `roll check`.

It renders and encodes closely enough to tell rows that fit from rows that do not. Training uses
the one of transformers, whose import takes longer than checking a config may.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roll.configs.model_files import read_json
from roll.datasets.chat_template import Message

_ANY_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)


class FileTokenizer:
    """What `roll.datasets` asks of a tokenizer, from a folder with a tokenizer.json.

    Without such a folder (`None`), or for a tokenizer that is not in that form, it stands in for
    one: `is_exact` is False, a byte is a token, and any conversation can be rendered.
    """

    def __init__(self, folder: Path | None) -> None:
        def read(name: str) -> dict[str, Any]:
            if folder is None or not (folder / name).is_file():
                return {}
            return read_json(folder / name)

        settings = read("tokenizer_config.json")
        special = read("special_tokens_map.json") | settings
        self.special: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = special.get(name)
            if value:
                self.special[name] = value["content"] if isinstance(value, dict) else value
        self.bos_token = self.special.get("bos_token")
        # Many classes of transformers have an end token that no file names.
        self.eos_token = self.special.get("eos_token", "</s>")
        self.name_or_path = "" if folder is None else str(folder)
        # The library's own complaint about a broken tokenizer.json names no file: read it first.
        self.is_exact = bool(read("tokenizer.json")) and "auto_map" not in settings
        self.chat_template: str | None = _ANY_TEMPLATE
        if self.is_exact and folder is not None:
            template: Any = read("chat_template.json").get("chat_template")
            template = template or settings.get("chat_template")
            if isinstance(template, list):  # several, by name
                named = {entry.get("name"): entry["template"] for entry in template}
                template = named.get("default")
            if (folder / "chat_template.jinja").is_file():
                template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            self.chat_template = template

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(Path(self.name_or_path) / "tokenizer.json"))

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab() if self.is_exact else {"<|im_end|>": 0}

    @property
    def bos_token_id(self) -> int | None:
        if not self.is_exact or self.bos_token is None:
            return None
        return self._backend.token_to_id(self.bos_token)

    def __call__(
        self, texts: str | Sequence[str], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        given = [texts] if isinstance(texts, str) else list(texts)
        if self.is_exact:
            encoded = self._backend.encode_batch(given, add_special_tokens=add_special_tokens)
            ids = [item.ids for item in encoded]
        else:
            ids = [list(text.encode()) for text in given]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    @cached_property
    def _template(self) -> Template:
        def refuse(message: str) -> None:
            raise TemplateError(message)

        # As transformers sets it up.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        names: dict[str, Any] = environment.globals
        names["raise_exception"] = refuse
        names["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")

    def apply_chat_template(
        self, conversation: Sequence[Message], tokenize: bool = False, **options: Any
    ) -> str:
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special, **options}
        return self._template.render(messages=list(conversation), **values)
