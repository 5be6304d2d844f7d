"""From a config file to a config object, with every problem of the file named at once."""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from roll.configs.compose import Composition, compose, escape
from roll.configs.config_model import ConfigModel, Entries, is_without_effect, plain_values
from roll.configs.pipeline_config import BaseConfig
from roll.configs.problems import Problem, members, problems_of
from roll.configs.strategy_options import OPTIONS, VLLM_IGNORED
from roll.configs.unsupported import unsupported_parts
from roll.configs.worker_config import StrategyArguments
from roll.exceptions import ConfigError

# Fields that hold what was written in a longer form.
SPELT_OUT = ("attn_implementation", "reward_fn")


class FileError(ConfigError):
    """All that is wrong with the values of a config file: one line per problem, each with file and line."""

    def __init__(self, composition: Composition, problems: list[Problem]) -> None:
        super().__init__("\n".join(located(composition, problems)))
        self.problems = problems


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
    """Keys that were accepted and have no effect; one that another key switches off has the reason behind it."""

    replaced: tuple[Replaced, ...]
    """Values that follow from other keys and were written differently."""

    def warnings(self) -> list[str]:
        """One sentence on all keys without effect, one on all values that were replaced, and the config's cautions."""
        sentences = []
        if self.ignored:
            sentences.append(f"accepted without effect: {', '.join(self.ignored)}")
        if self.replaced:
            sentences.append(
                "set from other keys: " + ", ".join(str(item) for item in self.replaced)
            )
        return sentences + self.config.cautions()


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The composed and resolved values of a config file; see `compose`."""
    return compose(path, overrides).values


def dump_yaml(config: ConfigModel) -> str:
    """YAML that loads again to an equal config."""
    try:
        return yaml.safe_dump(escape(plain_values(config)), sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(
            f"the config holds a value that YAML cannot express: {error.args[-1]!r}"
        ) from None


def refuse_unsupported(composition: Composition) -> None:
    """Raise a ConfigError that names the parts of a ROLL file which this project does not have, if there are any."""
    unsupported = [Problem(key, reason) for key, reason in unsupported_parts(composition.values)]
    if unsupported:
        raise FileError(composition, unsupported)


def build_config(
    composition: Composition, config_cls: type[BaseConfig], *, warn: bool = True
) -> LoadedConfig:
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
        raise FileError(composition, problems_of(error, config_cls)) from None
    replaced = tuple(
        item for item in _replaced(values, plain_values(config), "") if item.key not in ignored
    )
    idle = [f"{key} ({why})" for key, why in config.idle_keys().items()]
    loaded = LoadedConfig(composition.path, config, (*ignored, *idle), replaced)
    if warn:
        for sentence in loaded.warnings():
            warnings.warn(f"{composition.path}: {sentence}", ConfigWarning, stacklevel=2)
    return loaded


def located(composition: Composition, problems: Iterable[Problem]) -> list[str]:
    """Each problem with file and line, those that say the same once."""
    return list(
        dict.fromkeys(f"{composition.locate(problem.key)}: {problem}" for problem in problems)
    )


def build_in_part(
    composition: Composition, config_cls: type[BaseConfig]
) -> tuple[LoadedConfig | None, list[Problem], list[str]]:
    """Every problem of a file at once: (a config as far as one can be made, the problems, the keys that it lacks).

    Values are looked at together only once each of them is right by itself. So what is wrong is left out (a misspelt
    key gets its right name), and the rest is looked at again. Where a value was left out, a default stands in for it,
    and what does not fit together then says nothing about the file.
    """
    problems: list[Problem] = []
    left_out: list[str] = []
    while True:
        try:
            return build_config(composition, config_cls, warn=False), problems, left_out
        except FileError as error:
            if not left_out:
                problems += error.problems
            values = copy.deepcopy(composition.values)
            changed = [problem for problem in error.problems if _leave_out(values, problem)]
            if not changed:
                return None, problems, left_out
            left_out += [problem.key for problem in changed if problem.instead is None]
            composition = replace(composition, values=values)


def _leave_out(values: Any, problem: Problem) -> bool:
    """Remove the key of a problem from nested values, or rename it as was meant; False if there is no such key."""
    *parents, name = problem.key.split(".")
    for part in parents:
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, dict) or name not in values:
        return False
    value = values.pop(name)
    if problem.instead:
        values.setdefault(problem.instead, value)
    return True


def _without_variables(composition: Composition, config_cls: type[BaseConfig]) -> dict[str, Any]:
    # A key without effect may also be the name of one of the file's variables.
    known = config_cls.model_fields.keys() | (config_cls.ignored_keys - composition.referenced)
    return {
        key: value
        for key, value in composition.values.items()
        if key in known or not _is_variable(key, value, composition, config_cls)
    }


def _is_variable(
    key: str, value: Any, composition: Composition, config_cls: type[BaseConfig]
) -> bool:
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
            if (
                item is None
                and type(None) not in get_args(field.annotation)
                and _config_class(kinds[0])
            ):
                continue  # an empty section: `training_args:` with nothing below it
            entries = next(
                (mark.model for mark in field.metadata if isinstance(mark, Entries)), None
            )
            kept[key] = _sift_field(
                item, dict[str, entries] if entries else kinds[0], dotted, ignored
            )
    options = kept.get("strategy_config")
    if model is StrategyArguments and isinstance(options, dict):
        name, path = (
            str(kept.get("strategy_name", StrategyArguments().strategy_name)),
            f"{path}strategy_config.",
        )
        if name in OPTIONS:
            kept["strategy_config"] = _sift(options, OPTIONS[name], path, ignored)
        ignored += [f"{path}{key}" for key in options if name == "vllm" and key in VLLM_IGNORED]
    return kept


def _sift_field(item: Any, kind: Any, path: str, ignored: list[str]) -> Any:
    if model := _config_class(kind):
        return _sift(item, model, f"{path}.", ignored)
    model = (
        _config_class(members(get_args(kind)[-1])[0]) if get_origin(kind) in (dict, list) else None
    )
    if model and isinstance(item, dict):
        return {key: _sift(entry, model, f"{path}.{key}.", ignored) for key, entry in item.items()}
    if model and isinstance(item, list):
        return [
            _sift(entry, model, f"{path}.{index}.", ignored) for index, entry in enumerate(item)
        ]
    return item


def _config_class(kind: Any) -> type[ConfigModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, ConfigModel) else None


def _replaced(written: Any, effective: Any, path: str) -> list[Replaced]:
    """Values that the config holds with another value of the same kind than the file gave, or no longer at all."""
    if isinstance(written, dict) and isinstance(effective, dict):
        shared = [key for key in written if key in effective]
        return [
            item
            for key in shared
            for item in _replaced(
                written[key], effective[key], f"{path}.{key}" if path else str(key)
            )
        ]
    numbers = isinstance(written, (int, float)) and isinstance(effective, (int, float))
    is_same_kind = numbers or type(written) is type(effective) or effective is None
    is_other = is_same_kind and written != effective and path.rpartition(".")[2] not in SPELT_OUT
    return [Replaced(path, written, effective)] if is_other else []
