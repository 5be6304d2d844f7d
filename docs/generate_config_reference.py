"""Write docs/config-reference.md from the config classes: every key, its type, its default and what it means.

python docs/generate_config_reference.py            # writes the page
python docs/generate_config_reference.py --check    # says whether the page is current, exit code 1 if it is not
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from roll.configs.config_model import ConfigModel, NoEffect
from roll.pipeline.registry import CONFIG_CLASSES

PAGE = Path(__file__).with_name("config-reference.md")

INTRODUCTION = """# Config reference

Every key that a config file may have, made from the classes that read it (`python docs/generate_config_reference.py`).
A key that is not here is an error, and the message names the nearest one. `roll check CONFIG` prints what a file comes
to.

Keys of a pipeline stand at the top level of its file; keys of a role stand under the role (`actor_train:`,
`reference:` ...). *No effect* marks keys that ROLL's files have and that change nothing here.
"""


def page() -> str:
    sections = [INTRODUCTION]
    shared = _shared_fields()
    sections.append(_section("All pipelines", "Keys that every config file may have.", shared))
    nested: dict[str, type[ConfigModel]] = {}
    for name, cls in CONFIG_CLASSES.items():
        own = {key: field for key, field in cls.model_fields.items() if key not in shared}
        sections.append(_section(f"`pipeline: {name}`", _first_paragraph(cls), own))
        for field in cls.model_fields.values():
            _collect(field.annotation, nested)
    for cls in nested.values():
        names = [other.__name__ for other in nested.values()]
        where = cls.__module__.split(".")[2] if names.count(cls.__name__) > 1 else ""
        sections.append(
            _section(f"{cls.__name__} {where and f'({where})'}".strip(), _first_paragraph(cls), cls.model_fields)
        )
    return "\n".join(sections)


def _shared_fields() -> dict[str, FieldInfo]:
    first, *others = CONFIG_CLASSES.values()
    return {
        key: field
        for key, field in first.model_fields.items()
        if all(key in cls.model_fields and cls.model_fields[key].description == field.description for cls in others)
    }


def _collect(annotation: Any, found: dict[str, type[ConfigModel]]) -> None:
    """Config classes inside a type, depth first, in the order in which a reader meets them."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        name = f"{annotation.__module__}.{annotation.__name__}"
        if name not in found:
            found[name] = annotation
            for field in annotation.model_fields.values():
                _collect(field.annotation, found)
    for inner in get_args(annotation):
        _collect(inner, found)


def _title(cls: type[ConfigModel], all_classes: dict[str, type[ConfigModel]]) -> str:
    """The class's name, with the pipeline behind it where two pipelines have one of that name."""
    is_shared = [other.__name__ for other in all_classes.values()].count(cls.__name__) > 1
    return f"{cls.__name__} ({cls.__module__.split('.')[2]})" if is_shared else cls.__name__


def _section(title: str, text: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"\n## {title}\n", text, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {_type(field.annotation)} | {_default(key, field)} | {_meaning(field)} |"
        for key, field in fields.items()
    ]
    return "\n".join(lines)


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


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
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(key: str, field: FieldInfo) -> str:
    if key == "exp_name":
        return "the file's name"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ConfigModel):
        return "its defaults"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    reasons = [item.why for item in field.metadata if isinstance(item, NoEffect)]
    return f"*No effect: {reasons[0]}.* {text}" if reasons else text


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not current; run python {Path(__file__).name}")


if __name__ == "__main__":
    main()
