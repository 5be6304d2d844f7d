"""The errors that users of roll meet. Each also inherits the standard error that it specialises."""

from pathlib import Path


class RollError(Exception):
    """Base of every error that roll raises on purpose. The command line prints its message without a traceback."""


class ConfigError(RollError, ValueError):
    """A configuration that cannot be used: the message names the key, what was found, what was expected and the fix."""


class DataError(RollError, ValueError):
    """A data file or a batch that cannot be used: the message names the file or column and the row."""


class MissingDependencyError(RollError, ImportError):
    """A feature needs a package that is not installed: the message names the extra to install."""


class WorkerError(RollError, RuntimeError):
    """A method failed on a worker: the message carries worker name, rank, method and the worker's own traceback."""


class WorkerDiedError(WorkerError):
    """A worker process ended while it was needed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A remote call took longer than `rpc_timeout`: the message names the workers that had not answered."""


def install_hint(extra: str) -> str:
    """The command that installs an optional part of roll, for this reader: in a clone, a path and not a package's name.

    A package of this name on an index is another one, or none; pip takes it for satisfied only where it is installed.
    """
    clone = Path(__file__).resolve().parents[1]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'roll-rl[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == clone else clone}[{extra}]'"
