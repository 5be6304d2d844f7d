"""What `roll view` does."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from roll.viewer.report import build_report
from roll.viewer.server import serve


def view(
    runs: Sequence[str | Path],
    live: bool = False,
    port: int = 0,
    open_browser: bool = True,
    out: str | Path | None = None,
    host: str = "127.0.0.1",
) -> Path | None:
    """Write the report of these runs, overlaid if there are several, and open it. Returns the path of the page.

    With `live`, serve the report of the one run and follow it until Ctrl-C; the result is then None.

    Raises:
        FileNotFoundError: a folder is not there or holds no run.
        ValueError: no run, or `live` with several runs or with `out`.
    """
    if live:
        if len(runs) != 1 or out is not None:
            raise ValueError(
                "a live view follows exactly one run and writes no page of its own: give one run, no output"
            )
        serve(runs[0], host, port, open_browser=open_browser)
        return None
    page = build_report(runs, out)
    if open_browser:
        webbrowser.open(page.resolve().as_uri())
    return page
