"""Score functions by name: `my_file.py:score` or `package.module:score`.

A function is loaded in the process that calls it. Nothing here imports more than the standard library.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from roll.exceptions import ConfigError, RollError

SIGNATURE = "score(prompt, response, ground_truth, **row)"


def absolute_spec(spec: str) -> str:
    """`spec` with the path of its file made absolute; a ConfigError if there is no such file."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ConfigError(
            f"{spec!r} names no function; expected my_file.py:score or package.module:score"
        )
    if not path.endswith(".py"):
        return spec
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        near = difflib.get_close_matches(
            file.name, [other.name for other in file.parent.glob("*.py")], n=1
        )
        hint = f"did you mean {near[0]}?" if near else "give the path from here, or in full"
        raise ConfigError(f"{spec!r}: there is no file {file}; {hint}")
    return f"{file}:{name}"


def spec_of(function: Callable[..., Any]) -> str:
    """A spec by which another process finds `function`; it has to stand at the top of a module."""
    name, module_name = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"{function!r} cannot be found from another process; write it as a function at the top of a file, and name "
            "it as my_file.py:score"
        )
    found = importlib.util.find_spec(module_name) if module_name not in ("__main__", "") else None
    if found is not None and found.origin is not None and sys.modules.get(module_name) is not None:
        return f"{module_name}:{name}"
    file = inspect.getsourcefile(function)
    if file is None:
        raise ConfigError(
            f"{function!r} has no source file; write it into a file, and name it as my_file.py:score"
        )
    return f"{Path(file).absolute()}:{name}"


def load_function(spec: str, options: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """The function behind an absolute spec, as a function of one row; `options` go along with every row.

    Raises:
        ConfigError: what is wrong, with the line of the user's file where there is one.
    """
    path, _, name = spec.rpartition(":")
    module = _import(path, spec)
    function = getattr(module, name, None)
    if function is None:
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        near = difflib.get_close_matches(name, known, n=1)
        has = (
            f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'no functions'}"
        )
        raise ConfigError(f"{spec!r}: {Path(path).name} has no {name!r}; {has}")
    if not callable(function):
        raise ConfigError(
            f"{spec!r}: {name} is {function!r} ({type(function).__name__}); expected a function"
        )
    return _caller(function, spec, options)


def user_line(error: BaseException, path: str | None = None) -> str:
    """`my_file.py:12`: where in the user's own code an error comes from; the innermost line if that is unknown."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == path] or frames[-1:]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "unknown line"


def _import(path: str, spec: str) -> ModuleType:
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        sys.path.insert(0, str(Path(path).parent))  # so that the file can import its neighbours
        name = Path(path).stem
        found = importlib.util.spec_from_file_location(
            name if name not in sys.modules else f"{name}_reward", path
        )
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{spec!r}: there is no module {error.name!r}; check the spelling, or name the file as my_file.py:score"
            ) from None
        raise ConfigError(
            f"{spec!r} cannot be imported: {error} ({user_line(error, path)})"
        ) from None
    except RollError as error:  # one of ours, which says all there is to say
        raise ConfigError(str(error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code, which may raise anything, runs here
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{spec!r} cannot be imported: {text} ({user_line(error, path)})"
        ) from None


def _caller(
    function: Callable[..., Any], spec: str, options: Mapping[str, Any]
) -> Callable[[dict[str, Any]], Any]:
    """Adapt what is in a row to what the function takes: by name if it uses our names, by position otherwise."""
    parameters = inspect.signature(function).parameters
    kinds = inspect.Parameter
    named = [
        n
        for n, p in parameters.items()
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    positional = [
        n
        for n, p in parameters.items()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    takes_any_name = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    takes_any_position = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())

    def call_by_name(row: dict[str, Any]) -> Any:
        given = {"ground_truth": None, **options, **row}
        return function(
            **(given if takes_any_name else {key: given[key] for key in named if key in given})
        )

    if "response" in named:
        return call_by_name
    if len(positional) < 3 and not takes_any_position:
        found = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
        raise ConfigError(f"{spec!r}: expected a function {SIGNATURE}, found {found}")
    rest = set(named) - set(positional[:3])

    def call_by_position(row: dict[str, Any]) -> Any:
        given = {**options, **row}
        first = [given.pop(key, None) for key in ("prompt", "response", "ground_truth")]
        return function(
            *first, **(given if takes_any_name else {k: v for k, v in given.items() if k in rest})
        )

    return call_by_position
