"""A tokenizer as its files describe it, without transformers, whose import takes longer than checking a config may.

It renders and encodes as the real one does, closely enough to tell rows that fit from rows that do not. Training uses
the real one.
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
from roll.datasets.messages import Message

_ANY_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)


class FileTokenizer:
    """What `roll.datasets` asks of a tokenizer, from a folder with a tokenizer.json.

    Without such a folder (`None`), or for a tokenizer that is not in that form, it stands in for one: `is_exact` is
    False, a byte is a token, and any conversation can be rendered.
    """

    def __init__(self, folder: Path | None) -> None:
        settings = _read(folder, "tokenizer_config.json")
        self.is_exact = (
            folder is not None
            and (folder / "tokenizer.json").is_file()
            and "auto_map" not in settings
        )
        self.name_or_path = "" if folder is None else str(folder)
        special = _read(folder, "special_tokens_map.json") | settings
        self.special = {
            name: value["content"] if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := special.get(name))
        }
        self.chat_template: str | None = _ANY_TEMPLATE
        if self.is_exact:
            assert folder is not None
            read_json(
                folder / "tokenizer.json"
            )  # the library's own complaint about a broken file names no file
            self.chat_template = _own_template(folder, settings)
        self._folder = folder

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))  # pyrefly: ignore[unsupported-operation]

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab() if self.is_exact else {"<|im_end|>": 0}

    @property
    def bos_token(self) -> str | None:
        return self.special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        # Many classes of transformers have an end token that no file names.
        return self.special.get("eos_token", "</s>")

    @property
    def bos_token_id(self) -> int | None:
        return (
            self._backend.token_to_id(self.bos_token) if self.is_exact and self.bos_token else None
        )

    def __call__(
        self, texts: str | Sequence[str], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        given = [texts] if isinstance(texts, str) else list(texts)
        if self.is_exact:
            ids = [
                item.ids
                for item in self._backend.encode_batch(given, add_special_tokens=add_special_tokens)
            ]
        else:
            ids = [list(text.encode()) for text in given]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    @cached_property
    def _template(self) -> Template:
        # As transformers sets it up.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        names: dict[str, Any] = environment.globals
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        names["raise_exception"] = _refuse
        names["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")

    def apply_chat_template(
        self, conversation: Sequence[Message], tokenize: bool = False, **options: Any
    ) -> str:
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special, **options}
        return self._template.render(messages=list(conversation), **values)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    return read_json(folder / name) if folder is not None and (folder / name).is_file() else {}


def _own_template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = _read(folder, "chat_template.json").get("chat_template") or settings.get(
        "chat_template"
    )
    if isinstance(found, list):  # several, by name
        return next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found
