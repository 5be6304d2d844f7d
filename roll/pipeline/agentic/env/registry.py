"""Environments by id, by dotted path, and by what `register` adds.

register("my_game", "my_package.games:MyGame")       # or the class itself
env = make("my_game", size=4)                        # MyGame(size=4)
env = make("my_package.games.MyGame", size=4)        # the same without registering
env = make("gymnasium:Taxi-v3")                      # through an adapter
env = make("game:GuessTheNumber-v0")                 # one of GEM's, by GEM's own id
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from roll.configs.unsupported import UNSUPPORTED_ENVIRONMENTS
from roll.exceptions import ConfigError
from roll.utils.import_utils import import_from

EntryPoint = str | Callable[..., Any]

_HERE = "roll.pipeline.agentic.env"
_BUILT_IN: dict[str, EntryPoint] = {
    "frozen_lake": f"{_HERE}.frozen_lake:FrozenLakeEnv",
    "sokoban": f"{_HERE}.sokoban:SokobanEnv",
    "guess_number": f"{_HERE}.guess_number:GuessNumberEnv",
    "tool_task": f"{_HERE}.tool_task:ToolTaskEnv",
    "math": f"{_HERE}.math_env:MathEnv",
    "roll_math": f"{_HERE}.math_env:MathEnv",
    "roll_qa": f"{_HERE}.adapters:GemQaEnv",
    "roll_code": f"{_HERE}.adapters:GemCodeEnv",
}
# `prefix:rest` makes adapter(rest, **config).
_ADAPTERS: dict[str, EntryPoint] = {
    "gymnasium": f"{_HERE}.adapters:GymnasiumEnv",
    "gem": f"{_HERE}.adapters:GemEnv",
}
# What stands before the colon in the ids of GEM's own environments.
_GEM_FAMILIES = ("game", "math", "rg", "qa", "code", "logic", "eval")
_registered: dict[str, EntryPoint] = dict(_BUILT_IN)


def register(env_id: str, entry_point: EntryPoint) -> None:
    """Make `entry_point`, a class (or function) or its path `module:Class`, known as `env_id`.

    The last registration of an id counts. Environments run in other processes, which import the class by its module.
    """
    _registered[env_id] = entry_point


def registered_ids() -> list[str]:
    return sorted(_registered)


def entry_point_of(env_id: str) -> tuple[EntryPoint, tuple[str, ...]]:
    """What makes the environment, and the arguments in front of its own: for another process to call."""
    if env_id in _registered:
        return _registered[env_id], ()
    prefix, colon, rest = env_id.partition(":")
    if colon and prefix in _ADAPTERS:
        return _ADAPTERS[prefix], (rest,)
    if colon and prefix in _GEM_FAMILIES:
        return _ADAPTERS["gem"], (env_id,)
    if colon or "." in env_id:
        return env_id, ()
    if env_id in UNSUPPORTED_ENVIRONMENTS:
        raise ConfigError(
            f"the environment {env_id!r} is not built yet: {UNSUPPORTED_ENVIRONMENTS[env_id]}"
        )
    near = get_close_matches(env_id, _registered, n=1)
    raise ConfigError(
        f"there is no environment {env_id!r}{f'; did you mean {near[0]!r}?' if near else '.'} Known are "
        f"{', '.join(registered_ids())}, dotted paths such as my_package.games.MyGame, and "
        + ", ".join(f"{prefix}:ID" for prefix in (*_ADAPTERS, *_GEM_FAMILIES))
    )


def make(env_id: str, /, **config: Any) -> Any:
    """The environment `env_id`, made with `config`."""
    entry_point, leading = entry_point_of(env_id)
    return load_entry_point(entry_point)(*leading, **config)


def load_entry_point(entry_point: EntryPoint) -> Callable[..., Any]:
    """The class behind `module:Class`, `module.Class`, or the class itself."""
    if not isinstance(entry_point, str):
        return entry_point
    module_name, colon, name = entry_point.partition(":")
    if not colon:
        module_name, _, name = entry_point.rpartition(".")
    return import_from(module_name, name, named=f"environment {entry_point!r}")
