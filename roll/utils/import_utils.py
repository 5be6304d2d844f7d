"""Classes named by dotted path, as configuration files name worker classes."""

import importlib

from roll.exceptions import ConfigError
from roll.utils.logging import get_logger


def import_class(path: str) -> type:
    """The class at `"package.module.Class"`; a ConfigError says which part of the path does not exist."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{path!r} is not a dotted path to a class; expected 'package.module.Class'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists and fails on an import of its own is that module's news, not a wrong path.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{path!r}: there is no module {error.name!r}; check the spelling, or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"{path!r}: module {module_name} has no {class_name!r}")
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
