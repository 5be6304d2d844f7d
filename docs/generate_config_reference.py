"""Write docs/config-reference.md from the config classes: every key, its type, its default and what it means.

python docs/generate_config_reference.py            # writes the page
python docs/generate_config_reference.py --check    # says whether the page is current, exit code 1 if it is not
python docs/generate_config_reference.py --fields   # prints one table of all fields: class, field, default, effect
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from roll.configs.config_model import ConfigModel, Entries, NoEffect, NotBuilt
from roll.configs.strategy_options import OPTIONS
from roll.configs.worker_config import StrategyArguments
from roll.pipeline.registry import CONFIG_CLASSES

PAGE = Path(__file__).with_name("config-reference.md")

INTRODUCTION = """# Config reference

Every key that a config file may have, made from the classes that read it (`python docs/generate_config_reference.py`).
A key that is not here is an error, and the message names the nearest one. `roll check CONFIG` prints what a file comes
to.

Keys of a pipeline stand at the top level of its file; keys of a role stand under the role (`actor_train:`,
`reference:` ...). The column *effect* says whether a key *works*, is accepted for the sake of ROLL's files and changes
nothing (*none*, with the reason; a file that has it gets one warning), or is *refused* unless it is switched off.
`tests/configs/test_field_effects.py` holds every key to it: a run reads it, or a test shows what it changes.
"""


def page() -> str:
    """The whole page."""
    sections = [_section(title, text, fields) for title, text, fields in _sections()]
    return "\n".join([INTRODUCTION, *sections])


def fields_table() -> str:
    """All fields in one table, each class with all of its own."""
    lines = ["| class | field | default | effect |", "|---|---|---|---|"]
    for title, _, fields in _sections():
        lines += [
            f"| {title} | `{key}` | {_default(key, field)} | {_effect(field)} |"
            for key, field in fields.items()
        ]
    return "\n".join(lines)


def _sections() -> list[tuple[str, str, Mapping[str, FieldInfo]]]:
    """(title, text, fields) of every part of the page."""
    shared = _shared_fields()
    sections: list[tuple[str, str, Mapping[str, FieldInfo]]] = [
        ("All pipelines", "Keys that every config file may have.", shared)
    ]
    nested: dict[str, type[ConfigModel]] = {}
    for name, cls in CONFIG_CLASSES.items():
        own = {key: field for key, field in cls.model_fields.items() if key not in shared}
        sections.append((f"`pipeline: {name}`", _first_paragraph(cls), own))
        for field in cls.model_fields.values():
            _collect(field, nested)
    sections += [
        (_title(cls, nested), _first_paragraph(cls), cls.model_fields) for cls in nested.values()
    ]
    return sections


def _shared_fields() -> dict[str, FieldInfo]:
    first, *others = CONFIG_CLASSES.values()
    return {
        key: field
        for key, field in first.model_fields.items()
        if all(key in cls.model_fields and _same(field, cls.model_fields[key]) for cls in others)
    }


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    return (one.description, _effect(one)) == (other.description, _effect(other))


def _collect(field: FieldInfo, found: dict[str, type[ConfigModel]]) -> None:
    """Config classes inside a field that works, depth first, in the order in which a reader meets them."""
    if _effect(field) != "works":
        return
    _collect_type(field.annotation, found)
    for mark in field.metadata:
        if isinstance(mark, Entries):
            _collect_type(mark.model, found)


def _collect_type(annotation: Any, found: dict[str, type[ConfigModel]]) -> None:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        name = f"{annotation.__module__}.{annotation.__name__}"
        if name not in found:
            found[name] = annotation
            for field in annotation.model_fields.values():
                _collect(field, found)
            for options in OPTIONS.values() if annotation is StrategyArguments else ():
                _collect_type(options, found)
    for inner in get_args(annotation):
        _collect_type(inner, found)


def _title(cls: type[ConfigModel], all_classes: dict[str, type[ConfigModel]]) -> str:
    """The class's name, with the pipeline behind it where two pipelines have one of that name."""
    is_shared = [other.__name__ for other in all_classes.values()].count(cls.__name__) > 1
    return f"{cls.__name__} ({cls.__module__.split('.')[2]})" if is_shared else cls.__name__


def _section(title: str, text: str, fields: Mapping[str, FieldInfo]) -> str:
    lines = [
        f"\n## {title}\n",
        text,
        "",
        "| key | type | default | effect | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{key}` | {_choices(field)} | {_default(key, field)} | {_effect(field)} | {_meaning(field)} |"
        for key, field in fields.items()
    ]
    return "\n".join(lines)


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
    if annotation is type(None):
        return "null"
    names = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        Any: "anything",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(key: str, field: FieldInfo) -> str:
    if key == "exp_name":
        return "the file's name"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ConfigModel):
        return "its defaults"
    return (
        f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
    )


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _effect(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, NoEffect):
            return f"*none: {mark.why}*"
        if isinstance(mark, NotBuilt):
            return f"*refused unless {mark.off_in_yaml}: not built yet: {mark.what}*"
    return "works"


def main() -> None:
    if "--fields" in sys.argv:
        sys.stdout.write(fields_table() + "\n")
    elif "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not current; run python {Path(__file__).name}")


if __name__ == "__main__":
    main()
