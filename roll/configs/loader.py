"""From a config file to a config object, with every problem of the file named at once."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from roll.configs.compose import Composition, compose, escape
from roll.configs.config_model import ConfigModel, is_without_effect, plain_values
from roll.configs.pipeline_config import BaseConfig
from roll.configs.problems import Problem, members, problems_of
from roll.configs.unsupported import unsupported_parts
from roll.configs.worker_config import StrategyArguments, is_megatron_key
from roll.exceptions import ConfigError


class ConfigWarning(UserWarning):
    """A config that works, but not in every point as it is written."""


@dataclass(frozen=True)
class Replaced:
    """A value that was written down and gave way to one that follows from other keys."""

    key: str
    written: Any
    effective: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.written} became {self.effective}"


@dataclass(frozen=True)
class LoadedConfig:
    """A config and what a reader of its file should know."""

    path: Path
    config: BaseConfig
    ignored: tuple[str, ...]
    """Keys that were accepted and have no effect."""

    replaced: tuple[Replaced, ...]
    """Values that follow from other keys and were written differently."""

    def warnings(self) -> list[str]:
        """At most two sentences: all keys without effect, all values that were replaced."""
        sentences = []
        if self.ignored:
            sentences.append(f"accepted without effect: {', '.join(self.ignored)}")
        if self.replaced:
            sentences.append("set from other keys: " + ", ".join(str(item) for item in self.replaced))
        return sentences


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The composed and resolved values of a config file; see `compose`."""
    return compose(path, overrides).values


def dump_yaml(config: ConfigModel) -> str:
    """YAML that loads again to an equal config."""
    try:
        return yaml.safe_dump(escape(plain_values(config)), sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(f"the config holds a value that YAML cannot express: {error.args[-1]!r}") from None


def refuse_unsupported(composition: Composition) -> None:
    """Raise a ConfigError that names the parts of a ROLL file which this project does not have, if there are any."""
    unsupported = [Problem(key, reason) for key, reason in unsupported_parts(composition.values)]
    if unsupported:
        raise _error(composition, unsupported)


def build_config(composition: Composition, config_cls: type[BaseConfig], *, warn: bool = True) -> LoadedConfig:
    """Validate composed values as `config_cls`.

    Keys of the top level that `${...}` refers to, or that come from a file of a `defaults` list, are variables of the
    file and no part of the config. Keys without effect are collected, and named in one warning if `warn` is set.

    Raises:
        ConfigError: one line per problem, each with file and line, key, what was found and what was expected.
    """
    ignored: list[str] = []
    values = _sift(_without_variables(composition, config_cls), config_cls, "", ignored)
    values.setdefault("exp_name", composition.path.stem)
    try:
        config = config_cls.model_validate(values, context={"folder": composition.path.parent})
    except ValidationError as error:
        raise _error(composition, problems_of(error, config_cls)) from None
    replaced = tuple(_replaced(values, plain_values(config), ""))
    loaded = LoadedConfig(composition.path, config, tuple(ignored), replaced)
    if warn:
        for sentence in loaded.warnings():
            warnings.warn(f"{composition.path}: {sentence}", ConfigWarning, stacklevel=2)
    return loaded


def _error(composition: Composition, problems: list[Problem]) -> ConfigError:
    lines = [f"{composition.locate(problem.key)}: {problem}" for problem in problems]
    return ConfigError("\n".join(lines))


def _without_variables(composition: Composition, config_cls: type[BaseConfig]) -> dict[str, Any]:
    # A key without effect may also be the name of one of the file's variables.
    known = config_cls.model_fields.keys() | (config_cls.ignored_keys - composition.referenced)
    return {
        key: value
        for key, value in composition.values.items()
        if key in known or not _is_variable(key, value, composition, config_cls)
    }


def _is_variable(key: str, value: Any, composition: Composition, config_cls: type[BaseConfig]) -> bool:
    """Whether a key that is no field was meant to be one of the file's variables rather than misspelt."""
    if key in composition.inherited and isinstance(value, dict):
        return True
    absent = [name for name in config_cls.model_fields if name not in composition.values]
    if difflib.get_close_matches(key, absent, n=1, cutoff=0.9):
        return False
    return key in composition.referenced or key in composition.inherited


def _sift(value: Any, model: type[ConfigModel], path: str, ignored: list[str]) -> Any:
    """`value` without the keys that `model` ignores; appends those, and the fields without effect, to `ignored`."""
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        dotted = f"{path}{key}"
        field = model.model_fields.get(key)
        if field is None and key in model.ignored_keys:
            ignored.append(dotted)
        elif field is None:
            kept[key] = item  # validation reports it
        else:
            if is_without_effect(field):
                ignored.append(dotted)
            kinds = members(field.annotation)
            if item is None and type(None) not in get_args(field.annotation) and _config_class(kinds[0]):
                continue  # an empty section: `training_args:` with nothing below it
            kept[key] = _sift_field(item, kinds[0], dotted, ignored)
    if model is StrategyArguments and str(kept.get("strategy_name")).startswith(("hf_", "fsdp2_")):
        options = kept.get("strategy_config")
        if isinstance(options, dict):
            ignored += [f"{path}strategy_config.{key}" for key in options if is_megatron_key(key)]
            kept["strategy_config"] = {key: item for key, item in options.items() if not is_megatron_key(key)}
    return kept


def _sift_field(item: Any, kind: Any, path: str, ignored: list[str]) -> Any:
    if model := _config_class(kind):
        return _sift(item, model, f"{path}.", ignored)
    model = _config_class(members(get_args(kind)[-1])[0]) if get_origin(kind) in (dict, list) else None
    if model and isinstance(item, dict):
        return {key: _sift(entry, model, f"{path}.{key}.", ignored) for key, entry in item.items()}
    if model and isinstance(item, list):
        return [_sift(entry, model, f"{path}.{index}.", ignored) for index, entry in enumerate(item)]
    return item


def _config_class(kind: Any) -> type[ConfigModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, ConfigModel) else None


def _replaced(written: Any, effective: Any, path: str) -> list[Replaced]:
    """Numbers and switches that the config holds with another value than the file gave."""
    if isinstance(written, dict) and isinstance(effective, dict):
        shared = [key for key in written if key in effective]
        return [
            item
            for key in shared
            for item in _replaced(written[key], effective[key], f"{path}.{key}" if path else str(key))
        ]
    is_simple = isinstance(written, (bool, int, float)) and isinstance(effective, (bool, int, float))
    return [Replaced(path, written, effective)] if is_simple and written != effective else []
