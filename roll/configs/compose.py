"""From YAML files to one mapping of plain values: `defaults` lists, `key=value` overrides and `${...}`.

The dialect is the part of hydra that ROLL's files use, without hydra. This is the only module that knows OmegaConf.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
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

from roll.exceptions import ConfigError

HYDRA_KEYS = ("defaults", "hydra")
COMMAND_LINE = "command line"

# The first name of `${name.more}`; `${env:X}` and `${.relative}` name no key of the top level.
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)\s*(?=[.\[}])")
_ENVIRONMENT_VARIABLE = re.compile(r"Environment variable '(\w+)' not found")
_MISSING_KEY = re.compile(r"Interpolation key '([^']*)' not found")
_FULL_KEY = re.compile(r"full_key: (\S+)")


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
        """`file:line` where a dotted key, or the nearest key above it, is written; `command line` for an override."""
        return _locate(key, self.files, self.overridden)


def compose(path: str | Path, overrides: Sequence[str] = ()) -> Composition:
    """Read a YAML file, what its `defaults` list names, and overrides such as `actor_train.infer_batch_size=4`.

    A list entry `../config/envs@_here_` or `base` is a file relative to the folder of the file that names it. Bases
    come first and the file itself over them, unless the entry `_self_` says otherwise. `name@some.key` puts a file
    under that key, and so does `group: name` with the file `group/name.yaml`. An override `+key=value` is the same as
    `key=value`; `~key` removes a key.

    Raises:
        ConfigError: a file is missing or not YAML, lists form a circle, an override is malformed, or a `${...}` does
            not resolve.
    """
    path = Path(path)
    files: list[Path] = []
    inherited: set[str] = set()
    tree = _compose_file(path, (), files, inherited)
    overridden = tuple(_apply_override(tree, override) for override in overrides)
    for key in HYDRA_KEYS:
        tree.pop(key, None)
    unresolved = OmegaConf.to_container(tree, resolve=False)
    referenced = frozenset(name for text in _texts(unresolved) for name in _REFERENCE.findall(text))
    return Composition(
        path=path,
        values=_resolve(tree, files, overridden),
        referenced=referenced,
        inherited=frozenset(inherited),
        files=tuple(files),
        overridden=overridden,
    )


def escape(value: Any) -> Any:
    """Plain values written so that `compose` reads them back unchanged: a literal `${` is not a reference."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list) else value


def _compose_file(
    path: Path, above: tuple[Path, ...], files: list[Path], inherited: set[str]
) -> DictConfig:
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
    layers: list[DictConfig] = []
    is_placed = False
    for entry in entries or []:
        if entry == "_self_":
            layers.append(own)
            is_placed = True
        else:
            layers += _base(path, entry, (*above, path), files, inherited)
    if not is_placed:
        layers.append(own)
    try:
        merged = OmegaConf.merge(*layers)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _base(
    path: Path, entry: Any, above: tuple[Path, ...], files: list[Path], inherited: set[str]
) -> list[DictConfig]:
    """One entry of a `defaults` list as a layer to merge; none for an optional file that is not there."""
    package = ""
    if isinstance(entry, DictConfig) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        if option is None:
            return []
        name, package = f"{group}/{option}", str(group)
    elif isinstance(entry, str):
        name = entry
    else:
        expected = "a file name such as `base` or `../config/envs@_here_`"
        raise ConfigError(f"{path}: defaults: found {entry!r}, expected {expected}")
    is_optional = name.startswith("optional ")
    name, _, given = name.removeprefix("optional ").strip().partition("@")
    package = given or package
    target = Path(os.path.normpath(path.parent / name))
    if target.suffix not in (".yaml", ".yml"):
        target = target.with_name(target.name + ".yaml")
    if is_optional and not target.exists():
        return []
    if package in ("", "_here_", "_global_"):
        return [_compose_file(target, above, files, inherited)]
    inherited.add(package.split(".")[0])
    layer = OmegaConf.create({})
    OmegaConf.update(layer, package, _compose_file(target, above, files, set()))
    return [layer]


def _read(path: Path, named_by: Path | None) -> DictConfig:
    by = f" (named in the defaults of {named_by})" if named_by else ""
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{by}{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder, expected a YAML file{by}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); expected YAML"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_first_line(error)}") from None
    except OmegaConfBaseException as error:
        key = _full_key(error)
        where = _locate(key, [path], [])
        raise ConfigError(
            f"{where}: {key}: the ${{...}} in it is malformed: {_first_line(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping (key: value) at the top, found a list")
    return tree


def _similar_file(path: Path) -> str:
    try:
        names = [item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f'; did you mean "{path.parent / near[0]}"?' if near else ""


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` texts alone: ["size=4", "a.b=x"] -> {"size": 4, "a": {"b": "x"}}."""
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
        parent = OmegaConf.select(tree, key.rpartition(".")[0]) if "." in key else tree
        name = key.rpartition(".")[2]
        if not OmegaConf.is_dict(parent) or name not in parent:
            raise ConfigError(f"{COMMAND_LINE}: {override}: there is no key {key} to remove")
        del parent[name]
        return key
    key, sign, text = override.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not re.fullmatch(r"[^\s.\[\]]+([.\[][^\s.\[\]]+\]?)*", key):
        raise ConfigError(
            f'{COMMAND_LINE}: found "{override}", expected key=value, such as max_steps=10'
        )
    try:
        parsed: Any = OmegaConf.to_container(
            OmegaConf.from_dotlist([f"value={text}"]), resolve=False
        )
        _write_out_references(tree, key)
        OmegaConf.update(tree, key, parsed["value"], merge=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{COMMAND_LINE}: {override}: {_first_line(error)}") from None
    return re.sub(r"\[(\w+)\]", r".\1", key)


def _write_out_references(tree: DictConfig, key: str) -> None:
    """Replace a reference to a mapping above `key` by a copy of that mapping, so that one value of it can change."""
    node: Any = tree
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            return
        if OmegaConf.is_interpolation(node, part) and OmegaConf.is_dict(node[part]):
            node[part] = OmegaConf.create(OmegaConf.to_container(node[part], resolve=False))
        node = node[part]


def _resolve(tree: DictConfig, files: Sequence[Path], overridden: Sequence[str]) -> dict[str, Any]:
    if not OmegaConf.has_resolver(
        "now"
    ):  # hydra's resolver; a program that runs under hydra has it already
        OmegaConf.register_new_resolver(
            "now", lambda form: datetime.now().strftime(form), use_cache=True
        )
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        problems = dict(_unresolved(tree)) or {_full_key(error): _why_unresolved(error)}
        lines = [
            f"{_locate(key, files, overridden)}: {key}: {why}" for key, why in problems.items()
        ]
        raise ConfigError("\n".join(lines)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


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
    if variable := _ENVIRONMENT_VARIABLE.search(text):
        name = variable[1]
        return f"the environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},default}}"
    if isinstance(error, InterpolationKeyError) and (missing := _MISSING_KEY.search(text)):
        return f"${{{missing[1]}}} does not resolve, because there is no key {missing[1]}"
    if isinstance(error, MissingMandatoryValue):
        return 'is "???", which stands for a value to be given; set it, here or on the command line'
    if isinstance(error, InterpolationResolutionError):
        return f"does not resolve: {_first_line(error)}"
    return f"the ${{...}} in it is malformed: {_first_line(error)}"


def _locate(key: str, files: Sequence[Path], overridden: Sequence[str]) -> str:
    if any(key == name or key.startswith(f"{name}.") for name in overridden):
        return COMMAND_LINE
    parts = key.split(".") if key else []
    found = [(path, *_deepest_line(path, parts)) for path in files]
    path, depth, line = max(
        found, key=lambda item: item[1]
    )  # the first of equals: the file itself, then its bases
    return f"{path}:{line}" if depth else str(files[0])


def _deepest_line(path: Path, parts: list[str]) -> tuple[int, int]:
    """(how many of `parts` the file has, the line of the last of them)."""
    try:
        node: Any = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return 0, 0
    line = 0
    for depth, part in enumerate(parts):
        if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((pair for pair in pairs if str(pair[0].value) == part), None)
        if found is None:
            return depth, line
        line = found[0].start_mark.line + 1
        node = found[1]
    return len(parts), line


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _full_key(error: Exception) -> str:
    found = _FULL_KEY.search(str(error))
    return found[1] if found else "a value"
