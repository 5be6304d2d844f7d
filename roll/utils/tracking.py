"""The numbers of a run: every step becomes a line of metrics.jsonl, and goes to the trackers.

    log = RunLog(folder, config)
    log.log(12, {"actor/loss": 0.43})      # {"step": 12, "time": 1760000000.1, "actor/loss": 0.43}
    log.close()

The file is always written and is what the viewer reads. Trackers are a convenience: one that is not
installed or that breaks is named once and left out, and training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from roll.configs.base import plain_values
from roll.configs.pipeline_config import BaseConfig
from roll.exceptions import MissingDependencyError, install_hint
from roll.utils.logging import get_logger
from roll.utils.run_folder import METRICS_FILE

logger = get_logger(__name__)

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLog:
    """Writes metrics.jsonl of the run in `run_dir`, forwards to the trackers of `track_with`.

    Args:
        first_step: the step that the run begins with. Lines from there on belong to an earlier
            attempt that is being repeated, and are cut off.
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
        lines = read_metrics(before) if before.is_file() else []
        # Replaced as a whole: a run that dies here loses no line.
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        kept = [_line(line) for line in lines if line["step"] < first_step]
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._trackers = make_trackers(Path(run_dir), config, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. A reducer tag at the end of a name (`actor/loss@sum`) is left out."""
        values = {untagged(name): float(value) for name, value in metrics.items()}
        self._file.write(_line({"step": step, "time": time.time(), **values}))
        self._file.flush()
        for tracker in list(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:  # noqa: BLE001 - whatever a network does, training goes on
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
    """The lines of a metrics.jsonl, with NaN and infinities, which JSON does not have, as numbers.

    A last line that was being written when the machine died is left out.
    """
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            continue
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = _NON_FINITE.get(value, value)
        lines.append(values)
    return lines


def _line(values: Mapping[str, Any]) -> str:
    written = dict(values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            written[name] = json.dumps(value)  # NaN, Infinity and -Infinity, as strings
    return json.dumps(written, allow_nan=False) + "\n"


# --------------------------------------------------------------------------------------------------
# Trackers. Each is made with the run's folder, its config, the config's `tracker_kwargs` and the
# first step.


class Tracker(Protocol):
    """Somewhere that shows curves."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardTracker:
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


class WandbTracker:
    """A run of Weights & Biases; `tracker_kwargs` go to `wandb.init`."""

    name = "wandb"

    def __init__(
        self, run_dir: Path, config: BaseConfig, options: dict[str, Any], first_step: int
    ) -> None:
        settings: dict[str, Any] = {"project": "roll", "name": run_dir.name}
        settings["config"] = plain_values(config)
        self._run = self._start(run_dir, settings | options)

    def _start(self, run_dir: Path, settings: dict[str, Any]) -> Any:
        import wandb

        settings.setdefault("dir", str(run_dir))
        return wandb.init(**settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(WandbTracker):
    """A run of trackio; `tracker_kwargs` go to `trackio.init`."""

    name = "trackio"

    def _start(self, run_dir: Path, settings: dict[str, Any]) -> Any:
        import trackio

        return trackio.init(**settings)


class StdoutTracker:
    """A line of the program's log for every step."""

    name = "stdout"

    def __init__(self, *_: Any) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = ", ".join(f"{name}={value:.6g}" for name, value in metrics.items())
        logger.info("step %d: %s", step, values)

    def close(self) -> None: ...


TRACKERS: Mapping[str, type] = {
    tracker.name: tracker
    for tracker in (TensorboardTracker, WandbTracker, TrackioTracker, StdoutTracker)
}


def make_trackers(run_dir: Path, config: BaseConfig, first_step: int = 0) -> list[Tracker]:
    """The trackers that `track_with` names and that start; the log names the others, once."""
    wanted = [config.track_with] if isinstance(config.track_with, str) else config.track_with
    is_default = "track_with" not in config.model_fields_set
    trackers: list[Tracker] = []
    for name in wanted:
        if name in ("jsonl", "none"):  # the file alone
            continue
        level = logging.WARNING
        try:
            if name not in TRACKERS:
                known = ", ".join(TRACKERS)
                raise MissingDependencyError(f"there is no tracker {name} here; known are {known}")
            options = dict(config.tracker_kwargs)
            trackers.append(TRACKERS[name](run_dir, config, options, first_step))
            continue
        except MissingDependencyError as error:
            reason = str(error)
        except ImportError as error:
            hint = install_hint("tracking")
            reason = f"{name} is not installed; {hint} brings it ({error})"
            # The default, tensorboard, is not worth a warning where it is not installed.
            level = logging.INFO if is_default else level
        except Exception as error:  # noqa: BLE001 - as in RunLog.log
            reason = f"{name} did not start ({type(error).__name__}: {error})"
        logger.log(level, "metrics go to %s only: %s", run_dir / METRICS_FILE, reason)
    return trackers
