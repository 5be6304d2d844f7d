"""`roll view`: write a report and open it, or serve that of a run which is still going on.

The server gives out the page that `build_report` writes, its data folder and nothing else; asking
for the page's index brings it up to date first. It answers only pages that it served itself: a site
in another tab can name 127.0.0.1, or a name that resolves to it, and would otherwise read the run.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
import time
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from roll.viewer.report import build_report

_log = logging.getLogger(__name__)

# The only paths that the page asks for. Nothing is decoded, so no encoding can hide another path.
_PATH = re.compile(r"/report(?:\.html|(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)+)")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def view(
    runs: Sequence[str | Path],
    live: bool = False,
    port: int = 0,
    open_browser: bool = True,
    out: str | Path | None = None,
    host: str = "127.0.0.1",
) -> Path | None:
    """Write the report of these runs, overlaid if there are several, and open it; its page.

    With `live`, serve the report of the one run until Ctrl-C; the result is then None.

    Raises:
        FileNotFoundError: a folder is not there or holds no run.
        ValueError: no run, or `live` with several runs or with `out`.
    """
    if live:
        if len(runs) != 1 or out is not None:
            raise ValueError(
                "a live view follows exactly one run and writes no page of its own: give one run, "
                "no output"
            )
        serve(runs[0], host, port, open_browser=open_browser)
        return None
    page = build_report(runs, out)
    if open_browser:
        webbrowser.open(page.resolve().as_uri())
    return page


def serve(
    run_dir: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    open_browser: bool = False,
    interval: float = 2.0,
) -> None:
    """Serve the report of `run_dir` and follow the run until Ctrl-C. Prints the address."""
    server = ReportServer(run_dir, host, port, interval)
    warning = "" if is_loopback(host) else " (other machines can read it)"
    address = f"{server.url}{warning}"
    print(f"Following {server.root.name} at {address}. Ctrl-C stops.", flush=True)  # noqa: T201
    if open_browser:
        webbrowser.open(server.url)
    try:
        server.http.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ReportServer:
    """Serves the report of one run folder; as a context manager, in the background.

    Args:
        run_dir: the run folder.
        host: the address to listen on. Any but a loopback address lets other machines read the run.
        port: 0 takes a free one.
        interval: seconds between two looks at the run folder.
    """

    def __init__(
        self, run_dir: str | Path, host: str = "127.0.0.1", port: int = 0, interval: float = 2.0
    ) -> None:
        self.root = Path(run_dir).resolve()
        self.host = host
        self._interval = interval
        self._lock = threading.Lock()
        self._built = 0.0
        self.refresh()
        handler = type("Handler", (_Handler,), {"report": self})
        self.http = ThreadingHTTPServer((host, port), handler)
        self.http.daemon_threads = True
        self.port = int(self.http.server_address[1])
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/report.html"

    def refresh(self) -> None:
        """Bring the report up to date, unless that was done a moment ago."""
        with self._lock:
            if time.monotonic() - self._built >= self._interval or not self._built:
                build_report([self.root], live=True)
                self._built = time.monotonic()

    def refusal(self, headers: Any) -> str | None:
        """Why a request is not answered; None if it may be."""
        hosts, origins = headers.get_all("Host") or [], headers.get_all("Origin") or []
        if len(hosts) != 1 or not self._knows_host(hosts[0]):
            return "The Host header does not name this server."
        site = headers.get("Sec-Fetch-Site", "none")
        mode, target = headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")
        is_link = mode == "navigate" and target == "document"
        is_foreign = site not in ("none", "same-origin") and not is_link
        if is_foreign or any(origin != f"http://{hosts[0]}" for origin in origins):
            return "Pages of other origins may not read this."
        return None

    def _knows_host(self, host: str) -> bool:
        """Whether a Host header names this server by address. A name could be anyone's."""
        name, _, port = host.rpartition(":")
        if not name or port != str(self.port):
            return False
        name = name.strip("[]").lower()
        if name in ("localhost", self.host.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self.host)

    def read(self, target: str) -> tuple[str, bytes] | None:
        """Type and content of a request target; None for what is no part of the report."""
        path = target.partition("?")[0]
        if path == "/":
            path = "/report.html"
        if not _PATH.fullmatch(path) or any(part.endswith(".") for part in path.split("/")):
            return None
        try:
            file = (self.root / path[1:]).resolve(strict=True)
            inside = file.is_relative_to(self.root / "report") or file == self.root / "report.html"
            if not inside or file.suffix not in _TYPES or not file.is_file():
                return None
            # The path was checked; it must not become a link between then and now.
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except (OSError, RuntimeError):  # not there, or a link to itself
            return None
        with os.fdopen(descriptor, "rb") as opened:
            return _TYPES[file.suffix], opened.read()

    def close(self) -> None:
        if self._thread is not None:
            self.http.shutdown()
            self._thread.join()
        self.http.server_close()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(
            target=self.http.serve_forever, args=(0.05,), name="report-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    report: ReportServer
    timeout = 20  # a client that says nothing does not hold a thread for ever
    server_version = "roll"
    sys_version = ""

    def do_GET(self) -> None:
        code, kind = HTTPStatus.OK, "text/plain"
        found = None
        refusal = self.report.refusal(self.headers)
        if refusal is not None:
            code, body = HTTPStatus.FORBIDDEN, f"{refusal}\n".encode()
        else:
            if self.path.partition("?")[0] == "/report/data/index.js":
                try:
                    self.report.refresh()
                except OSError as error:  # a full disk: what was made before is still good
                    root = self.report.root
                    _log.warning("the report of %s is not brought up to date: %s", root, error)
            found = self.report.read(self.path)
            code, body = (
                HTTPStatus.NOT_FOUND,
                b"This server only gives out the report of one run.\n",
            )
        if found is not None:
            code, (kind, body) = HTTPStatus.OK, found
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the person who follows the run."""
