"""One logger for the package: lines on stderr, silent where the application has its own logging."""

import logging
import os
import sys

_PACKAGE = "roll"
LEVEL_VARIABLE = "ROLL_LOG_LEVEL"


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now, while the application has no handler of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger(name: str = _PACKAGE) -> logging.Logger:
    """The logger called `name`, `roll` or below it. `ROLL_LOG_LEVEL` sets the level (INFO)."""
    package = logging.getLogger(_PACKAGE)
    if not any(isinstance(handler, _StderrHandler) for handler in package.handlers):
        level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
        known = logging.getLevelNamesMapping()
        if level not in known:
            raise ValueError(
                f"{LEVEL_VARIABLE}={level} is not a log level; use one of {', '.join(known)}"
            )
        handler = _StderrHandler()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] %(levelname)s %(message)s", "%H:%M:%S")
        )
        package.addHandler(handler)
        package.setLevel(level)
    if name != _PACKAGE and not name.startswith(f"{_PACKAGE}."):
        name = f"{_PACKAGE}.{name}"
    return logging.getLogger(name)
