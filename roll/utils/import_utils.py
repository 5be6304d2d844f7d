"""Classes named by dotted path, as configuration files name worker classes."""

import importlib
from typing import Any

from roll.exceptions import ConfigError
from roll.utils.logging import get_logger


def import_class(path: str) -> type:
    """The class at `"package.module.Class"`; a ConfigError says which part does not exist."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"{path!r} is not a dotted path to a class; expected 'package.module.Class'"
        )
    return import_from(module_name, class_name, named=repr(path))


def import_from(module_name: str, name: str, *, named: str) -> Any:
    """What a module calls `name`, dots allowed; else a ConfigError that begins with `named`."""
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists and fails on an import of its own is no wrong path.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        fix = "check the spelling, or put its folder on PYTHONPATH"
        raise ConfigError(f"{named}: there is no module {error.name!r}; {fix}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"{named}: module {module_name} has no {name!r}")
    return found


def safe_import_class(path: str) -> type | None:
    """As `import_class`, but None (and a logged warning) where the class cannot be imported."""
    try:
        return import_class(path)
    except ImportError as error:
        get_logger(__name__).warning("cannot import %s: %s", path, error)
    except ConfigError as error:
        get_logger(__name__).warning("%s", error)
    return None
