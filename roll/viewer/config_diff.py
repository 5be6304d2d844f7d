"""The resolved config of a run as rows: key, value, default, and whether they differ."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from roll.configs.base import ConfigModel
from roll.exceptions import ConfigError

_ABSENT = object()
_NAMES = {"exp_name", "pretrain", "reward_pretrain", "output_dir"}  # other values are made of them


@dataclass(frozen=True)
class ConfigRow:
    """One value of a config.

    `kind` is "default"; "changed"; "follows" if it differs only because a key of the same name at
    the top does; "set" if there is no default for this key; "unknown" without anything to compare.
    """

    key: str
    value: Any
    default: Any
    kind: str


def config_rows(values: Mapping[str, Any], pipeline: str | None) -> list[ConfigRow]:
    """Every value of a resolved config beside what it would be in a config that sets nothing."""
    # Looked up by name: pipelines import the report, which works on a folder without them.
    try:
        model = pkgutil.resolve_name("roll.pipeline.registry:CONFIG_CLASSES").get(pipeline)
    except (ImportError, AttributeError):
        model = None
    if model is None:
        return [ConfigRow(key, value, None, "unknown") for key, value in _leaves(values, "")]
    # A config with nothing set but what it cannot be made without, which its error names.
    known = {key: values[key] for key in values if key in model.model_fields}
    given = _NAMES & known.keys()
    made: dict[str, Any] = {}
    while not made:
        try:
            made = model(**{key: known[key] for key in given}).to_dict()
        except ConfigError as error:
            missing = {key for key in known if key in re.findall(r"\w+", str(error))} - given
            if not missing:
                given = _NAMES
                break
            given |= missing
    # Sections that such a config does not have (`rewards.math`) have the defaults of their class.
    defaults = dict(_class_defaults(values, model, "")) | dict(_leaves(made, ""))
    rows = []
    for key, value in _leaves(values, ""):
        default = defaults.get(key, _ABSENT)
        section, _, name = key.rpartition(".")
        if default is _ABSENT or key in given:
            kind, default = "set", None
        elif value == default:
            kind = "default"
        else:
            is_of_top = values.get(name, _ABSENT) == value or name in ("name", "worker_cls")
            kind = "follows" if section and is_of_top else "changed"
        rows.append(ConfigRow(key, value, default, kind))
    return rows


def _class_defaults(
    values: Mapping[str, Any], model: type[ConfigModel], path: str
) -> Iterator[tuple[str, Any]]:
    """(key, default) of the fields that `values` has, sections included."""
    for name, value in values.items():
        field = model.model_fields.get(str(name))
        if field is None:
            continue
        # The annotation and everything inside it: of `dict[str, X] | None` also X.
        kinds = [field.annotation]
        for kind in kinds:
            kinds += get_args(kind)
        inner = None
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, ConfigModel):
                inner = kind
        if inner and isinstance(value, Mapping):
            sections: dict[str, Any] = {f"{path}{name}.": value}
            if any(get_origin(kind) is dict for kind in kinds):  # `rewards: {math: {...}}`
                sections = {f"{path}{name}.{key}.": section for key, section in value.items()}
            for prefix, section in sections.items():
                if isinstance(section, Mapping):
                    yield from _class_defaults(section, inner, prefix)
        elif not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            yield f"{path}{name}", default


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
