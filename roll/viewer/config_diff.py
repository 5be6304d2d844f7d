"""The resolved config of a run as rows: key, value, default, and whether they differ."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_origin

from roll.configs.base import ConfigModel
from roll.exceptions import ConfigError

_ABSENT = object()
_NAMES = (
    "exp_name",
    "pretrain",
    "reward_pretrain",
    "output_dir",
)  # what other values are made from


@dataclass(frozen=True)
class ConfigRow:
    """One value of a config."""

    key: str
    value: Any
    default: Any
    kind: str
    """"default"; "changed"; "follows": differs only because a key of the same name at the top does; "set": there is no
    default for this key; "unknown": there is nothing to compare with."""


def config_rows(values: Mapping[str, Any], pipeline: str | None) -> list[ConfigRow]:
    """Every value of a resolved config beside what it would be in a config that sets nothing."""
    model = _config_class(pipeline)
    if model is None:
        return [ConfigRow(key, value, None, "unknown") for key, value in _leaves(values, "")]
    made, given = _made_config(values, model)
    # Sections that a config without them does not have (`rewards.math`) have the defaults of their own class.
    defaults = dict(_class_defaults(values, model, "")) | dict(_leaves(made, ""))
    rows = []
    for key, value in _leaves(values, ""):
        default = defaults.get(key, _ABSENT)
        section, _, name = key.rpartition(".")
        if default is _ABSENT or key in given:
            rows.append(ConfigRow(key, value, None, "set"))
        elif value == default:
            rows.append(ConfigRow(key, value, default, "default"))
        else:
            follows = section and (
                values.get(name, _ABSENT) == value or name in ("name", "worker_cls")
            )
            rows.append(ConfigRow(key, value, default, "follows" if follows else "changed"))
    return rows


def as_json(rows: list[ConfigRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _config_class(pipeline: str | None) -> type[ConfigModel] | None:
    # Looked up by name: pipelines import the report, which works on a folder alone and does not need them to be there.
    try:
        return pkgutil.resolve_name("roll.pipeline.registry:CONFIG_CLASSES").get(pipeline)
    except (ImportError, AttributeError):
        return None


def _made_config(
    values: Mapping[str, Any], model: type[ConfigModel]
) -> tuple[dict[str, Any], set[str]]:
    """The config with nothing set but what it cannot be made without, and the names of these keys. The
    config is {} if the values of the run do not help to make one."""
    known = {key: values[key] for key in values if key in model.model_fields}
    given = {key for key in _NAMES if key in known}
    while True:
        try:
            return model(**{key: known[key] for key in given}).to_dict(), given
        except ConfigError as error:
            missing = {key for key in known if key in re.findall(r"\w+", str(error))} - given
            if not missing:
                return {}, set(_NAMES)
            given |= missing


def _class_defaults(
    values: Mapping[str, Any], model: type[ConfigModel], path: str
) -> Iterator[tuple[str, Any]]:
    """(key, default) of the fields that `values` has, sections included."""
    for name, value in values.items():
        field = model.model_fields.get(str(name))
        if field is None:
            continue
        key = f"{path}{name}"
        kinds = _members(field.annotation)
        inner = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ConfigModel)),
            None,
        )
        if inner and isinstance(value, Mapping):
            by_name = any(
                get_origin(kind) is dict for kind in kinds
            )  # `rewards: {math: {...}, code: {...}}`
            for entry, section in value.items() if by_name else [("", value)]:
                if isinstance(section, Mapping):
                    yield from _class_defaults(
                        section, inner, f"{key}.{entry}." if entry else f"{key}."
                    )
        elif not field.is_required():
            yield key, field.get_default(call_default_factory=True, validated_data={})


def _members(annotation: Any) -> tuple[Any, ...]:
    """The annotation and everything inside it: `dict[str, X] | None` has dict[str, X] and X among them."""
    return (annotation, *(member for item in get_args(annotation) for member in _members(item)))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
