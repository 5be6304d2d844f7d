"""Write docs/config-reference.md from the config classes: every key, its type, default and meaning.

python docs/generate_config_reference.py            # writes the page
python docs/generate_config_reference.py --check    # exit code 1 if the page is not current
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from roll.configs.base import ConfigModel
from roll.configs.roll_keys import WITHOUT_EFFECT, NotBuilt, keys_without_effect
from roll.configs.strategy_info import STRATEGIES
from roll.configs.worker_config import StrategyArguments
from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvTemplate
from roll.pipeline.registry import CONFIG_CLASSES

PAGE = Path(__file__).with_name("config-reference.md")

INTRODUCTION = """# Config reference

Every key that a config file may have, made from the classes that read it
(`python docs/generate_config_reference.py`). A key that is not here is an error, and the message
names the nearest one. `roll check CONFIG` prints what a file comes to.

Keys of a pipeline stand at the top level of its file; keys of a role stand under the role
(`actor_train:`, `reference:` ...). Every key of these tables changes a run:
`tests/configs/test_field_effects.py` holds them to it. The last section,
[Keys of ROLL without effect](#keys-of-roll-without-effect), has those that change nothing here.
"""

APPENDIX = """
## Keys of ROLL without effect

Accepted for the sake of ROLL's files; a file that has some gets one warning that names all of them.
Those that ask for something that is not built are refused unless they are switched off. A block has
the keys of the classes it builds on too: every pipeline those of BaseConfig, every role those of
WorkerConfig.

| block | keys | why |
|---|---|---|"""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for title, text, fields in _sections():
        lines += [f"\n## {title}\n", text, "", "| key | type | default | meaning |"]
        lines.append("|---|---|---|---|")
        for key, field in fields.items():
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            lines.append(f"| `{key}` | {_choices(field)} | {_default(key, field)} | {meaning} |")
    lines.append(APPENDIX)
    for block, keys in WITHOUT_EFFECT.items():
        by_reason: dict[str, list[str]] = {}
        for key, mark in keys.items():
            why = mark
            if isinstance(mark, NotBuilt):
                why = f"*refused unless {mark.off_in_yaml}*: not built yet: {mark.what}"
            by_reason.setdefault(str(why), []).append(f"`{key}`")
        lines += [f"| {block} | {', '.join(names)} | {why} |" for why, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def _sections() -> list[tuple[str, str, Mapping[str, FieldInfo]]]:
    """(title, text, fields) of every part of the page."""
    working = {name: _working(cls) for name, cls in CONFIG_CLASSES.items()}
    shared = {}
    for key, field in working["dpo"].items():
        others = [fields.get(key) for fields in working.values()]
        if all(other is not None and other.description == field.description for other in others):
            shared[key] = field
    sections = [("All pipelines", "Keys that every config file may have.", shared)]
    nested: dict[str, type[ConfigModel]] = {}
    for name, cls in CONFIG_CLASSES.items():
        own = {key: field for key, field in working[name].items() if key not in shared}
        sections.append((f"`pipeline: {name}`", _first_paragraph(cls), own))
        for field in working[name].values():
            _collect(field.annotation, nested)
        if cls is AgenticConfig:
            _collect(EnvTemplate, nested)
    names = [cls.__name__ for cls in nested.values()]
    for cls in nested.values():
        # Two pipelines may have a class of one name: the pipeline stands behind it.
        is_shared = names.count(cls.__name__) > 1
        title = f"{cls.__name__} ({cls.__module__.split('.')[2]})" if is_shared else cls.__name__
        sections.append((title, _first_paragraph(cls), _working(cls)))
    return sections


def _working(cls: type[ConfigModel]) -> dict[str, FieldInfo]:
    idle = keys_without_effect(cls)
    return {key: field for key, field in cls.model_fields.items() if key not in idle}


def _collect(annotation: Any, found: dict[str, type[ConfigModel]]) -> None:
    """Config classes inside a type, depth first, in the order in which a reader meets them."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        name = f"{annotation.__module__}.{annotation.__name__}"
        if name not in found:
            found[name] = annotation
            for field in _working(annotation).values():
                _collect(field.annotation, found)
            for info in STRATEGIES.values() if annotation is StrategyArguments else ():
                if not keys_without_effect(info.options).get("linear_logits"):  # vllm has none
                    _collect(info.options, found)
    for inner in get_args(annotation):
        _collect(inner, found)


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def _choices(field: FieldInfo) -> str:
    """The type of a field; for names that a dotted path may replace, the names."""
    if not field.examples:
        return _type(field.annotation)
    names = ", ".join(f"`{name}`" for name in field.examples)
    return f"{names} or a dotted path"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(inner) for inner in get_args(annotation))
    if get_origin(annotation) is not None:
        inner = ", ".join(_type(item) for item in get_args(annotation))
        return f"{get_origin(annotation).__name__} of {inner}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    names |= {types.NoneType: "null", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(key: str, field: FieldInfo) -> str:
    if key == "exp_name":
        return "the file's name"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ConfigModel):
        return "its defaults"
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not current; run python {Path(__file__).name}")


if __name__ == "__main__":
    main()
