"""The run report: report.html, and beside it a folder with the page's scripts and its data in small files.

The page opens from disk, without a server or a network. Such a page may load scripts and nothing else, so every piece
of data is a script that hands one packed string to the page (`R.put(key, string)`), loaded when it is looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.viewer import config_diff, health
from roll.viewer.packing import finite_json, pack_json, significant
from roll.viewer.run_data import RolloutFile, RunData, read_run
from roll.viewer.samples import PackedStep, StepStats, pack_step

STATIC = Path(__file__).parent / "static"
FORMAT = 1  # of the data files; files of another format are made anew
PLOTLY = "plotly.min.js"


def build_report(
    run_dirs: Sequence[str | Path], out: str | Path | None = None, *, live: bool = False
) -> Path:
    """Write the report of one run, or of several beside each other, and return the path of its page.

    Only what changed since the last call is made again. Odd data never raises; the page says what could not be read.

    Args:
        run_dirs: run folders.
        out: the page to write. By default RUN/report.html, or RUN/compare.html in the first of several folders. Its
            scripts and data go to the folder of the same name beside it.
        live: whether the page asks for new data again and again; for the server only.

    Raises:
        FileNotFoundError: a folder is not there or holds no run.
        ValueError: no folder is given, or `out` is no .html file.
    """
    folders = [Path(folder) for folder in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run folder")
    page = (
        Path(out)
        if out is not None
        else folders[0] / ("report.html" if len(folders) == 1 else "compare.html")
    )
    if page.suffix != ".html":
        raise ValueError(f"out={str(page)!r}: expected the name of an .html file")
    runs = [read_run(folder) for folder in folders]
    assets = page.with_suffix("")
    (assets / "data").mkdir(parents=True, exist_ok=True)
    has_plotly = _copy_page(page, assets)
    cache = _Cache(assets / "data" / "cache.json")
    entries = [_write_run(run, i, assets / "data", cache) for i, run in enumerate(runs)]
    cache.save()
    index = {"runs": entries, "plotly": has_plotly, "live": live}
    _write_data(assets / "data", "index", pack_json(index))
    return page


class _Cache:
    """What was already made from which state of which file, so that following a run costs little."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        self._old = (
            known.get("files", {})
            if isinstance(known, dict) and known.get("format") == FORMAT
            else {}
        )
        self._new: dict[str, dict[str, Any]] = {}

    def get(self, key: str, stamp: str) -> dict[str, Any] | None:
        entry = self._old.get(key)
        return entry if entry and entry.get("stamp") == stamp else None

    def put(self, key: str, entry: dict[str, Any]) -> None:
        self._new[key] = entry

    def save(self) -> None:
        _write(self._path, json.dumps({"format": FORMAT, "files": finite_json(self._new)}))


def _copy_page(page: Path, assets: Path) -> bool:
    """The page and its scripts; whether there is a chart library. Files that are there already are left alone."""
    for source in STATIC.iterdir():
        if source.name != "report.html":
            _write(assets / source.name, source.read_text(encoding="utf-8"))
    _write(
        page,
        (STATIC / "report.html").read_text(encoding="utf-8").replace("{{assets}}", assets.name),
    )
    library = plotly_script()
    if library is not None:
        target = assets / PLOTLY
        if not target.exists() or target.stat().st_size != library.stat().st_size:
            shutil.copyfile(library, target)
    return (assets / PLOTLY).exists()


def plotly_script() -> Path | None:
    """The chart library that the plotly package brings, without importing that package; None if it is not there."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    script = Path(next(iter(found.submodule_search_locations))) / "package_data" / PLOTLY
    return script if script.is_file() else None


def _write_run(run: RunData, number: int, data: Path, cache: _Cache) -> dict[str, Any]:
    """Write the data files of one run; its entry in the index."""
    folder = f"run{number}"
    (data / folder).mkdir(exist_ok=True)
    stats: list[StepStats] = []
    steps = []
    kept = {"metrics.js", "config.js"}
    for file in run.rollouts:
        name = f"{file.split}-{file.step:06d}"
        made = _write_step(run, file, data, f"{folder}/{name}", cache)
        stats.append(StepStats(**made["stats"]))
        kept |= {f"{name}.js", *(f"{name}-{piece}.js" for piece in range(made["pieces"]))}
        key = f"{folder}/{name}"
        steps.append(
            {
                "step": file.step,
                "split": file.split,
                "key": key,
                "stamp": file.stamp,
                "stats": made["stats"],
            }
        )
    for path in (data / folder).glob("*.js"):  # of steps that the run folder no longer holds
        if path.name not in kept:
            path.unlink(missing_ok=True)
    try:
        checks = health.as_json(health.check(run, stats))
        config = config_diff.as_json(
            config_diff.config_rows(run.config, str(run.info.get("pipeline")))
        )
    except Exception as error:  # noqa: BLE001  a report with a hole is better than a run that fails at its end
        checks, config = [], []
        run.problem(
            f"The health panel or the config could not be made: {type(error).__name__}: {error}"
        )
    times = [time for time in run.times if time is not None]
    columns = {
        name: [significant(value) for value in values] for name, values in run.metrics.items()
    }
    _write_data(
        data,
        f"{folder}/metrics",
        pack_json({"steps": run.steps, "times": run.times, "metrics": columns}),
    )
    _write_data(data, f"{folder}/config", pack_json({"rows": config}))
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


def _write_step(
    run: RunData, file: RolloutFile, data: Path, name: str, cache: _Cache
) -> dict[str, Any]:
    """Write the data files of one step, unless they are there; what the cache knows of it: stats, number of pieces."""
    key = f"{run.path.resolve()}/{file.path.name}"
    made: dict[str, Any] | None = cache.get(key, file.stamp)
    if made is None or not (data / f"{name}.js").exists():
        problems: list[str] = []
        try:
            packed = pack_step(file, problems.append)
        except Exception as error:  # noqa: BLE001  one file that surprises us must not take the other steps away
            problems.append(f"{file.path.name} cannot be shown: {type(error).__name__}: {error}")
            nothing = {"fields": [], "rows": [], "groups": [], "vocabulary": []}
            packed = PackedStep(pack_json(nothing), [], StepStats(file.step, file.split))
        for number, piece in enumerate(packed.pieces):
            _write_data(data, f"{name}-{number}", piece)
        _write_data(data, name, packed.listing)
        stats, pieces = packed.stats.as_json(), len(packed.pieces)
        made = {"stamp": file.stamp, "stats": stats, "pieces": pieces, "problems": problems[:20]}
    for text in made["problems"]:
        run.problem(text)
    cache.put(key, made)
    return made


def _write_data(data: Path, key: str, packed: str) -> None:
    _write(data / f"{key}.js", f'R.put("{key}","{packed}");\n')


def _write(path: Path, text: str) -> None:
    """Replace a file in one move, so that a page that is open never loads half of it; leave equal ones alone."""
    data = text.encode("utf-8")
    if path.exists() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
