"""The numbers of a run: every step becomes a line of metrics.jsonl, and goes to the trackers that were asked for.

    log = RunLog(folder, config)
    log.log(12, {"actor/loss": 0.43})      # {"step": 12, "time": 1760000000.1, "actor/loss": 0.43}
    log.close()

The file is always written and is what the viewer reads. Trackers are a convenience: one that is not installed or that
breaks is named once and left out, and training goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roll.configs.config_model import plain_values
from roll.configs.pipeline_config import BaseConfig
from roll.exceptions import MissingDependencyError, install_hint
from roll.utils.logging import get_logger
from roll.utils.run_folder import METRICS_FILE

logger = get_logger(__name__)

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLog:
    """Writes metrics.jsonl of the run in `run_dir` and forwards to the trackers of `config.track_with`.

    Args:
        first_step: the step that the run begins with. Lines from there on belong to an earlier attempt that is being
            repeated, and are cut off.
        history: the metrics.jsonl of the run that this one continues, if that is another one.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: BaseConfig,
        *,
        first_step: int = 0,
        history: Path | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        before = history if history is not None else self.path
        kept = (
            [line for line in read_metrics(before) if line["step"] < first_step]
            if before.is_file()
            else []
        )
        _replace(self.path, kept)
        self._file = self.path.open("a", encoding="utf-8")
        self._trackers = make_trackers(Path(run_dir), config, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. A reducer tag at the end of a name (`actor/loss@sum`) has done its work and is left out."""
        values = {untagged(name): float(value) for name, value in metrics.items()}
        self._file.write(_line({"step": step, "time": time.time(), **values}))
        self._file.flush()
        for tracker in list(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:  # noqa: BLE001 - whatever a tracker's network does, training goes on
                self._trackers.remove(tracker)
                logger.warning(
                    "%s failed and is left out from here on (%s: %s); %s has all metrics",
                    tracker.name,
                    type(error).__name__,
                    error,
                    self.path,
                )

    def close(self) -> None:
        """Finish the trackers. Safe to call again."""
        self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as in `log`
                logger.warning(
                    "%s did not finish (%s: %s)", tracker.name, type(error).__name__, error
                )
        self._trackers = []


def untagged(name: str) -> str:
    """`actor/loss@sum` is logged as `actor/loss`."""
    return name.rpartition("@")[0] or name


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, with the strings for numbers that JSON does not have turned back.

    A last line that was being written when the machine died is left out.
    """
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            continue
        lines.append(
            {name: _NON_FINITE.get(v, v) if isinstance(v, str) else v for name, v in values.items()}
        )
    return lines


def _line(values: Mapping[str, Any]) -> str:
    return (
        json.dumps({name: _json_number(value) for name, value in values.items()}, allow_nan=False)
        + "\n"
    )


def _json_number(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _replace(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(_line(line) for line in lines), encoding="utf-8")
    os.replace(temporary, path)


# ---------------------------------------------------------------------------------------------------------------------
# Trackers


class Tracker(ABC):
    """Somewhere that shows curves. `options` are the config's `tracker_kwargs`."""

    name: str

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:  # noqa: B027  (doing nothing is the right default)
        """Send what is left."""


class TensorboardTracker(Tracker):
    """Event files in RUN/tensorboard, or in `log_dir`/RUN's name."""

    name = "tensorboard"

    def __init__(
        self, run_dir: Path, config: BaseConfig, options: dict[str, Any], first_step: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        log_dir = options.pop("log_dir", None)
        folder = run_dir / "tensorboard" if log_dir is None else Path(log_dir) / run_dir.name
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=first_step or None, **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases; `tracker_kwargs` go to `wandb.init`."""

    name = "wandb"

    def __init__(
        self, run_dir: Path, config: BaseConfig, options: dict[str, Any], first_step: int
    ) -> None:
        import wandb

        settings: dict[str, Any] = {"project": "roll", "name": run_dir.name, "dir": str(run_dir)}
        settings |= {"config": plain_values(config), **options}
        self._run = wandb.init(**settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(Tracker):
    """A run of trackio; `tracker_kwargs` go to `trackio.init`."""

    name = "trackio"

    def __init__(
        self, run_dir: Path, config: BaseConfig, options: dict[str, Any], first_step: int
    ) -> None:
        import trackio

        settings: dict[str, Any] = {
            "project": "roll",
            "name": run_dir.name,
            "config": plain_values(config),
        }
        self._run = trackio.init(**(settings | options))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class StdoutTracker(Tracker):
    """A line of the program's log for every step."""

    name = "stdout"

    def __init__(
        self, run_dir: Path, config: BaseConfig, options: dict[str, Any], first_step: int
    ) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        logger.info(
            "step %d: %s", step, ", ".join(f"{name}={value:.6g}" for name, value in metrics.items())
        )


TRACKERS: Mapping[str, type] = {
    tracker.name: tracker
    for tracker in (TensorboardTracker, WandbTracker, TrackioTracker, StdoutTracker)
}
FILE_ONLY = ("jsonl", "none")


def make_trackers(run_dir: Path, config: BaseConfig, first_step: int = 0) -> list[Tracker]:
    """The trackers that `track_with` names and that start; the others are named in the log, once.

    The default, tensorboard, is not worth a warning where it is not installed.
    """
    wanted = [config.track_with] if isinstance(config.track_with, str) else config.track_with
    is_default = "track_with" not in config.model_fields_set
    trackers = []
    for name in wanted:
        if name in FILE_ONLY:
            continue
        try:
            trackers.append(_start(name, run_dir, config, first_step))
        except Exception as error:  # noqa: BLE001 - as in RunLog.log
            is_missing = isinstance(error, MissingDependencyError)
            logger.log(
                20 if is_default and is_missing else 30,
                "metrics go to %s only: %s",
                run_dir / METRICS_FILE,
                error if is_missing else f"{name} did not start ({type(error).__name__}: {error})",
            )
    return trackers


def _start(name: str, run_dir: Path, config: BaseConfig, first_step: int) -> Tracker:
    if name not in TRACKERS:
        raise MissingDependencyError(
            f"there is no tracker {name} here; known are {', '.join(TRACKERS)}"
        )
    try:
        return TRACKERS[name](run_dir, config, dict(config.tracker_kwargs), first_step)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} is not installed; {install_hint('tracking')} brings it ({error})"
        ) from error
