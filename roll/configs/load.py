"""From YAML files to a config object, with every problem of the file named at once.

A file may have a `defaults` list of files that come before it and `${...}` references; `key=value`
texts of the command line come over it. OmegaConf merges and resolves; only this module knows it.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError

from roll.configs.base import ConfigModel, Problem, plain_values, problems_of
from roll.configs.pipeline_config import BaseConfig
from roll.configs.roll_keys import NotBuilt, keys_without_effect
from roll.exceptions import ConfigError

COMMAND_LINE = "command line"
SPELT_OUT = (
    "attn_implementation",
    "reward_fn",
)  # fields that hold a longer form of what was written
# The first name of `${name.more}`; `${env:X}` and `${.relative}` name no key of the top level.
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)\s*(?=[.\[}])")


@dataclass(frozen=True)
class Composition:
    """A composed file. `values` has everything resolved, and neither `defaults` nor `hydra`."""

    path: Path
    values: dict[str, Any]
    referenced: frozenset[str]  # top-level keys that some `${...}` uses
    inherited: frozenset[str]  # top-level keys that a file of a `defaults` list defines
    files: tuple[Path, ...]  # every file that was read, this one first
    overridden: tuple[str, ...]  # keys that the command line set

    def locate(self, key: str) -> str:
        """`file:line` of a dotted key, or of the nearest key above it; or `command line`."""
        return _locate(key, self.files, self.overridden)

    def located(self, problems: Iterable[Problem]) -> list[str]:
        """Each problem with file and line, those that say the same once."""
        lines = [f"{self.locate(problem.key)}: {problem}" for problem in problems]
        return list(dict.fromkeys(lines))


def compose(path: str | Path, overrides: Sequence[str] = ()) -> Composition:
    """Read a YAML file, what its `defaults` list names, and overrides such as `max_steps=4`.

    A list entry `../config/envs@_here_` or `base` is a file relative to the folder of the file that
    names it. Bases come first and the file itself over them, unless the entry `_self_` says
    otherwise. `+key=value` is the same as `key=value`; `~key` removes a key.

    Raises:
        ConfigError: a file is missing or not YAML, lists form a circle, an override is malformed,
            or a `${...}` does not resolve.
    """
    path = Path(path)
    files: list[Path] = []
    inherited: set[str] = set()
    tree = _merged(path, (), files, inherited)
    overridden = tuple(_apply_override(tree, override) for override in overrides)
    tree.pop("hydra", None)  # ROLL's launch lines set keys of it, too
    if not OmegaConf.has_resolver("now"):  # a program that runs under hydra has it already
        now = lambda form: datetime.now().strftime(form)  # noqa: E731
        OmegaConf.register_new_resolver("now", now, use_cache=True)
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        problems = dict(_unresolved(tree)) or {_key_in(error): _why_unresolved(error)}
        lines = [f"{_locate(key, files, overridden)}: {key}: {problems[key]}" for key in problems]
        raise ConfigError("\n".join(lines)) from None
    assert isinstance(values, dict)
    return Composition(
        path=path,
        values={str(key): value for key, value in values.items()},
        referenced=frozenset(_REFERENCE.findall(OmegaConf.to_yaml(tree))),
        inherited=frozenset(inherited),
        files=tuple(files),
        overridden=overridden,
    )


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The composed and resolved values of a config file; see `compose`."""
    return compose(path, overrides).values


def _merged(
    path: Path, above: tuple[Path, ...], files: list[Path], inherited: set[str]
) -> DictConfig:
    """A file over the files of its `defaults` list; adds to `files` and `inherited`."""
    if path.resolve() in [other.resolve() for other in above]:
        circle = " -> ".join(str(other) for other in (*above, path))
        raise ConfigError(f"{path}: the defaults lists form a circle: {circle}")
    own = _read(path, named_by=above[-1] if above else None)
    files.append(path)
    if above:
        inherited.update(str(key) for key in own)
    entries = own.pop("defaults", None)
    if entries is not None and not isinstance(entries, ListConfig):
        raise ConfigError(f"{path}: defaults: expected a list of files, such as `- base`")
    entries = list(entries or [])
    if "_self_" not in entries:
        entries.append("_self_")
    layers: list[DictConfig] = []
    for entry in entries:
        name, _, package = str(entry).partition("@")
        if not isinstance(entry, str) or package not in ("", "_here_", "_global_"):
            expected = "a file name such as `base` or `../config/envs@_here_`"
            raise ConfigError(f"{path}: defaults: found {entry!r}, expected {expected}")
        if name == "_self_":
            layers.append(own)
            continue
        target = Path(os.path.normpath(path.parent / name))
        if target.suffix not in (".yaml", ".yml"):
            target = target.with_name(target.name + ".yaml")
        layers.append(_merged(target, (*above, path), files, inherited))
    try:
        merged = OmegaConf.merge(*layers)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _read(path: Path, named_by: Path | None) -> DictConfig:
    by = f" (named in the defaults of {named_by})" if named_by else ""
    where, what = str(path), ""
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        folder = path.parent
        names = [item.name for item in folder.glob("*.y*ml")] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f'; did you mean "{folder / near[0]}"?' if near else ""
        what = f"no such file{by}{hint}"
    except IsADirectoryError:
        what = f"this is a folder, expected a YAML file{by}"
    except UnicodeDecodeError as error:
        what = f"not a text file in UTF-8 (byte {error.start}); expected YAML"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where += f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        what = f"not valid YAML: {error.problem or error.context}"
    except yaml.YAMLError as error:
        what = f"not valid YAML: {_first_line(error)}"
    except OmegaConfBaseException as error:
        where = _locate(_key_in(error), [path], [])
        what = f"{_key_in(error)}: {_why_unresolved(error)}"
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    else:
        if isinstance(tree, DictConfig):
            return tree
        what = "expected a mapping (key: value) at the top, found a list"
    raise ConfigError(f"{where}: {what}")


# -- the command line ------------------------------------------------------------------------------


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` texts: ["size=4", "a.b=x"] -> {"size": 4, "a": {"b": "x"}}."""
    tree = OmegaConf.create({})
    for override in overrides:
        _apply_override(tree, override)
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _apply_override(tree: DictConfig, override: str) -> str:
    """Change `tree` as an override says; returns the key."""
    if override.startswith("~"):
        key = override[1:].partition("=")[0]
        above, _, name = key.rpartition(".")
        parent = OmegaConf.select(tree, above) if above else tree
        if not OmegaConf.is_dict(parent) or name not in parent:
            raise ConfigError(f"{COMMAND_LINE}: {override}: there is no key {key} to remove")
        del parent[name]
        return key
    key, sign, text = override.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not re.fullmatch(r"[^\s.\[\]]+([.\[][^\s.\[\]]+\]?)*", key):
        expected = "expected key=value, such as max_steps=10"
        raise ConfigError(f'{COMMAND_LINE}: found "{override}", {expected}')
    try:
        dotlist = OmegaConf.from_dotlist([f"value={text}"])
        parsed: Any = OmegaConf.to_container(dotlist, resolve=False)
        # A reference to a mapping above the key becomes a copy, so that one value of it can change.
        node: Any = tree
        for part in key.split(".")[:-1]:
            if not isinstance(node, DictConfig) or part not in node:
                break
            if OmegaConf.is_interpolation(node, part) and OmegaConf.is_dict(node[part]):
                node[part] = OmegaConf.create(OmegaConf.to_container(node[part], resolve=False))
            node = node[part]
        OmegaConf.update(tree, key, parsed["value"], merge=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{COMMAND_LINE}: {override}: {_first_line(error)}") from None
    return re.sub(r"\[(\w+)\]", r".\1", key)


# -- references ------------------------------------------------------------------------------------


def _unresolved(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, reason) of every value below a mapping or list that cannot be resolved."""
    names: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    for name in names:
        key = f"{prefix}{name}"
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            yield key, _why_unresolved(error)
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, name):
            yield from _unresolved(value, f"{key}.")


def _why_unresolved(error: OmegaConfBaseException) -> str:
    text = str(error)
    if variable := re.search(r"Environment variable '(\w+)' not found", text):
        default = f"${{oc.env:{variable[1]},default}}"
        unset = f"the environment variable {variable[1]} is not set"
        return f"{unset}; set it, or give a default: {default}"
    missing = re.search(r"Interpolation key '([^']*)' not found", text)
    if isinstance(error, InterpolationKeyError) and missing:
        return f"${{{missing[1]}}} does not resolve, because there is no key {missing[1]}"
    if isinstance(error, MissingMandatoryValue):
        return 'is "???", which stands for a value to be given; set it, here or on the command line'
    if isinstance(error, InterpolationResolutionError):
        return f"does not resolve: {_first_line(error)}"
    return f"the ${{...}} in it is malformed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _key_in(error: Exception) -> str:
    """The key that an error of OmegaConf is about."""
    found = re.search(r"full_key: (\S+)", str(error))
    return found[1] if found else "a value"


def _locate(key: str, files: Sequence[Path], overridden: Sequence[str]) -> str:
    if any(key == name or key.startswith(f"{name}.") for name in overridden):
        return COMMAND_LINE
    best, where = 0, str(files[0])  # among equals the file itself, then its bases
    for path in files:
        try:
            node: Any = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            continue
        for depth, part in enumerate(key.split(".") if key else [], start=1):
            found = None
            if isinstance(node, yaml.SequenceNode) and part.isdigit():
                found = node = node.value[int(part)] if int(part) < len(node.value) else None
            elif isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if str(pair[0].value) == part]
                found, node = pairs[0] if pairs else (None, None)
            if found is None:
                break
            if depth > best:
                best, where = depth, f"{path}:{found.start_mark.line + 1}"
    return where


# -- the config ------------------------------------------------------------------------------------


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
    """Keys without effect; one that another key switches off has the reason behind it."""

    replaced: tuple[Replaced, ...]
    """Values that follow from other keys and were written differently."""

    def warnings(self) -> list[str]:
        """One sentence on keys without effect, one on replaced values, and the cautions."""
        sentences = []
        if self.ignored:
            sentences.append(f"accepted without effect: {', '.join(self.ignored)}")
        if self.replaced:
            sentences.append(f"set from other keys: {', '.join(map(str, self.replaced))}")
        return sentences + self.config.cautions()


def build_config(
    composition: Composition, config_cls: type[BaseConfig]
) -> tuple[LoadedConfig | None, list[Problem], list[str]]:
    """A config as far as one can be made, all problems of the file, and the keys that it lacks.

    Keys of the top level that `${...}` refers to, or that come from a file of a `defaults` list,
    are variables of the file and no part of the config. Values are looked at together only once
    each of them is right by itself. So what is wrong is left out (a misspelt key gets its right
    name), and the rest is looked at again. Where a value was left out a default stands in for it,
    and what does not fit together then says nothing about the file.
    """
    written = _without_variables(composition, config_cls)
    written.setdefault("exp_name", composition.path.stem)
    values = copy.deepcopy(written)
    problems: list[Problem] = []
    left_out: list[str] = []
    while True:
        try:
            config = config_cls.model_validate(values, context={"folder": composition.path.parent})
            break
        except ValidationError as error:
            found = problems_of(error, config_cls, values)
        if not left_out:
            problems += found
        is_changed = False
        for problem in found:
            *parents, name = problem.key.split(".")
            block: Any = values
            for part in parents:
                block = block.get(part) if isinstance(block, dict) else None
            if not isinstance(block, dict) or name not in block:
                continue
            is_changed, value = True, block.pop(name)
            if problem.instead:
                block.setdefault(problem.instead, value)
            if problem.instead is None:
                left_out.append(problem.key)
        if not is_changed:
            return None, problems, left_out
    ignored = list(_ignored(values, config, ""))
    replaced = [
        item
        for item in _replaced(values, plain_values(config), "")
        if not any(f"{item.key}.".startswith(f"{key}.") for key in ignored)
    ]
    ignored += [f"{key} ({why})" for key, why in config.idle_keys().items()]
    loaded = LoadedConfig(composition.path, config, tuple(ignored), tuple(replaced))
    return loaded, problems, left_out


def _without_variables(composition: Composition, config_cls: type[BaseConfig]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    absent = [name for name in config_cls.model_fields if name not in composition.values]
    for key, value in composition.values.items():
        # A key without effect may also be the name of one of the file's variables.
        is_ignored = key in keys_without_effect(config_cls) and key not in composition.referenced
        if key not in config_cls.model_fields and not is_ignored:
            is_misspelt = difflib.get_close_matches(key, absent, n=1, cutoff=0.9)
            if key in composition.inherited and isinstance(value, dict):
                continue
            if not is_misspelt and key in composition.referenced | composition.inherited:
                continue
        kept[key] = value
    return kept


def _ignored(written: Any, config: ConfigModel, path: str) -> Iterator[str]:
    """The dotted keys of `written` that have no effect in the config that was made of it."""
    for key, value in written.items():
        mark = keys_without_effect(type(config)).get(key)
        if mark is not None and not isinstance(mark, NotBuilt):
            yield f"{path}{key}"
        part = None if mark is not None else config.part(key)
        if isinstance(part, ConfigModel) and isinstance(value, dict):
            yield from _ignored(value, part, f"{path}{key}.")
        elif isinstance(part, dict | list) and isinstance(value, type(part)):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for name, entry in entries:
                if isinstance(part[name], ConfigModel) and isinstance(entry, dict):
                    yield from _ignored(entry, part[name], f"{path}{key}.{name}.")


def _replaced(written: Any, effective: Any, path: str) -> Iterator[Replaced]:
    """Values that the config holds with another value of the same kind, or no longer at all."""
    if isinstance(written, dict) and isinstance(effective, dict):
        for key in written:
            if key in effective:
                inner = f"{path}.{key}" if path else str(key)
                yield from _replaced(written[key], effective[key], inner)
        return
    numbers = isinstance(written, int | float) and isinstance(effective, int | float)
    is_same_kind = numbers or type(written) is type(effective) or effective is None
    if is_same_kind and written != effective and path.rpartition(".")[2] not in SPELT_OUT:
        yield Replaced(path, written, effective)


def dump_yaml(config: ConfigModel) -> str:
    """YAML that loads again to an equal config."""
    try:
        return yaml.safe_dump(_escape(plain_values(config)), sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        found = f"{error.args[-1]!r}"
        raise ConfigError(f"the config holds a value that YAML cannot express: {found}") from None


def _escape(value: Any) -> Any:
    """Plain values written so that they read back unchanged: a literal `${` is no reference."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    return [_escape(item) for item in value] if isinstance(value, list | tuple) else value
