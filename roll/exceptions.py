"""The errors that users of roll meet. Each also inherits the standard error that it specialises."""

from pathlib import Path


class RollError(Exception):
    """Every error that roll raises on purpose; the command line prints it without a traceback."""


class ConfigError(RollError, ValueError):
    """A configuration that cannot be used: key, what was found, what was expected and the fix."""


class DataError(RollError, ValueError):
    """A data file or batch that cannot be used; the message names file or column, and row."""


class MissingDependencyError(RollError, ImportError):
    """A feature needs a package that is not installed; the message names the extra to install."""


class WorkerError(RollError, RuntimeError):
    """A method failed on a worker; the message has its name, rank, method and traceback."""


class WorkerDiedError(WorkerError):
    """A worker process ended while it was needed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A remote call took longer than `rpc_timeout`; the message names who had not answered."""


def install_hint(extra: str) -> str:
    """The command that installs an optional part of roll; in a clone it names the clone's folder.

    There, the package of this name on an index would be another one, or none.
    """
    clone = Path(__file__).resolve().parents[1]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'roll-rl[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == clone else clone}[{extra}]'"
