"""The run report: report.html, and beside it a folder with the page's scripts and its data.

The page opens from disk, without a server or a network. Such a page may load scripts and nothing
else, so every piece of data is a script that hands one string to the page (`R.put(key, string)`),
loaded when it is looked at. The string is JSON, deflated, in base64.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.viewer import health
from roll.viewer.config_diff import config_rows
from roll.viewer.run_data import RolloutFile, RunData, read_run
from roll.viewer.samples import StepData, StepStats, read_step, significant

STATIC = Path(__file__).parent / "static"
FORMAT = 2  # of the data files; files of another format are made anew
PLOTLY = "plotly.min.js"


def build_report(
    run_dirs: Sequence[str | Path], out: str | Path | None = None, *, live: bool = False
) -> Path:
    """Write the report of one run, or of several beside each other, and return its page.

    Only what changed since the last call is made again. Odd data never raises; the page says what
    could not be read.

    Args:
        run_dirs: run folders.
        out: the page to write. By default RUN/report.html, or RUN/compare.html in the first of
            several folders. Its scripts and data go to the folder of the same name beside it.
        live: whether the page asks for new data again and again; for the server only.

    Raises:
        FileNotFoundError: a folder is not there or holds no run.
        ValueError: no folder is given, or `out` is no .html file.
    """
    folders = [Path(folder) for folder in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run folder")
    page = folders[0] / ("report.html" if len(folders) == 1 else "compare.html")
    if out is not None:
        page = Path(out)
    if page.suffix != ".html":
        raise ValueError(f"out={str(page)!r}: expected the name of an .html file")
    runs = [read_run(folder) for folder in folders]
    assets = page.with_suffix("")
    data = assets / "data"
    data.mkdir(parents=True, exist_ok=True)
    for source in STATIC.iterdir():
        text = source.read_text(encoding="utf-8")
        if source.name == "report.html":
            _write(page, text.replace("{{assets}}", assets.name))
        else:
            _write(assets / source.name, text)
    library = plotly_script()
    if library is not None:
        target = assets / PLOTLY
        if not target.exists() or target.stat().st_size != library.stat().st_size:
            shutil.copyfile(library, target)
    # What was made from which state of which file, so that following a run costs little.
    try:
        cache = json.loads((data / "cache.json").read_text())
        known = cache["files"] if cache["format"] == FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError):
        known = {}
    made: dict[str, Any] = {}
    entries = [_write_run(run, i, data, known, made) for i, run in enumerate(runs)]
    _write(data / "cache.json", json.dumps({"format": FORMAT, "files": finite_json(made)}))
    has_plotly = (assets / PLOTLY).exists()
    _write_data(data, "index", {"runs": entries, "plotly": has_plotly, "live": live})
    return page


def plotly_script() -> Path | None:
    """The chart library of the plotly package, without importing it; None if it is not there."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    script = Path(next(iter(found.submodule_search_locations))) / "package_data" / PLOTLY
    return script if script.is_file() else None


def _write_run(
    run: RunData, number: int, data: Path, known: dict[str, Any], made: dict[str, Any]
) -> dict[str, Any]:
    """Write the data files of one run; its entry in the index."""
    folder = f"run{number}"
    (data / folder).mkdir(exist_ok=True)
    stats: list[StepStats] = []
    steps = []
    kept = {"metrics.js", "config.js"}
    for file in run.rollouts:
        name = f"{file.split}-{file.step:06d}"
        key = f"{run.path.resolve()}/{file.path.name}"
        entry: dict[str, Any] = known.get(key) or {}
        if entry.get("stamp") != file.stamp or not (data / folder / f"{name}.js").exists():
            entry = _write_step(file, data, f"{folder}/{name}")
        made[key] = entry
        for text in entry["problems"]:
            run.problem(text)
        stats.append(StepStats(**entry["stats"]))
        kept |= {f"{name}.js", *(f"{name}-{piece}.js" for piece in range(entry["pieces"]))}
        about = {"step": file.step, "split": file.split, "key": f"{folder}/{name}"}
        steps.append({**about, "stamp": file.stamp, "stats": entry["stats"]})
    for path in (data / folder).glob("*.js"):  # of steps that the run folder no longer holds
        if path.name not in kept:
            path.unlink(missing_ok=True)
    checks, config = [], []
    try:
        checks = [asdict(item) for item in health.check(run, stats)]
        config = [asdict(row) for row in config_rows(run.config, str(run.info.get("pipeline")))]
    except Exception as error:  # noqa: BLE001 - a report with a hole beats a failed run
        what = f"{type(error).__name__}: {error}"
        run.problem(f"The health panel or the config could not be made: {what}")
    columns = {name: list(map(significant, values)) for name, values in run.metrics.items()}
    metrics = {"steps": run.steps, "times": run.times, "metrics": columns}
    _write_data(data, f"{folder}/metrics", metrics)
    _write_data(data, f"{folder}/config", {"rows": config})
    times = [time for time in run.times if time is not None]
    return {
        "name": run.name,
        "info": run.info,
        "steps": steps,
        "logged": len(run.steps),
        "last": run.steps[-1] if run.steps else None,
        "times": [times[0], times[-1]] if times else [],
        "health": checks,
        "problems": run.problems,
    }


def _write_step(file: RolloutFile, data: Path, name: str) -> dict[str, Any]:
    """Write the data files of one step; what the cache knows of it."""
    problems: list[str] = []
    try:
        step = read_step(file, problems.append)
    except Exception as error:  # noqa: BLE001 - one odd file must not take the other steps away
        problems.append(f"{file.path.name} cannot be shown: {type(error).__name__}: {error}")
        nothing: dict[str, Any] = {"rows": [], "groups": [], "vocabulary": []}
        step = StepData(nothing, [], StepStats(file.step, file.split))
    for number, piece in enumerate(step.pieces):
        _write_data(data, f"{name}-{number}", piece)
    _write_data(data, name, step.listing)
    return {
        "stamp": file.stamp,
        "stats": asdict(step.stats),
        "pieces": len(step.pieces),
        "problems": problems[:20],
    }


def finite_json(value: Any) -> Any:
    """`value` with what JSON cannot hold replaced: odd floats and unknown objects by their text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return str(value)


def _write_data(data: Path, key: str, value: Any) -> None:
    text = json.dumps(finite_json(value), separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode("ascii"), wbits=-15)).decode("ascii")
    _write(data / f"{key}.js", f'R.put("{key}","{packed}");\n')


def _write(path: Path, text: str) -> None:
    """Replace a file in one move, so that no page loads half of it; leave an equal one alone."""
    data = text.encode("utf-8")
    if path.exists() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
