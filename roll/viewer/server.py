"""The report of a run that is still going on, served on this machine: `roll view --live RUN`.

The page is the one that `build_report` writes; asking for its index brings it up to date first. The server gives out
the page and its data folder and nothing else, and only to pages that it served itself: a site in another tab can name
127.0.0.1, or a name of its own that resolves to it, and would otherwise read the run.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
import time
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.viewer.report import build_report

_log = logging.getLogger(__name__)

# The only paths that the page asks for. Nothing is ever decoded, so no encoding can hide another path in one of these.
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


class ReportServer:
    """Serves the report of one run folder until closed; a context manager.

    Args:
        run_dir: the run folder.
        host: the address to listen on. Anything but a loopback address lets other machines read the run.
        port: 0 takes a free one.
        interval: seconds between two looks at the run folder.
    """

    def __init__(
        self, run_dir: str | Path, host: str = "127.0.0.1", port: int = 0, interval: float = 2.0
    ) -> None:
        self.root = Path(run_dir).resolve()
        self._interval = interval
        self._lock = threading.Lock()
        self._built = 0.0
        self.refresh()
        self._http = ThreadingHTTPServer((host, port), _handler_for(self))
        self._http.daemon_threads = True
        self.host, self.port = host, int(self._http.server_address[1])
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

    def knows_host(self, host: str | None) -> bool:
        """Whether a Host header names this server by address. A name could be anyone's that points here."""
        name, _, port = (host or "").rpartition(":")
        if not name or port != str(self.port):
            return False
        name = name.strip("[]").lower()
        if name == "localhost" or name == self.host.lower():
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self.host)

    def find(self, target: str) -> Path | None:
        """The file behind a request target; None for anything that is not part of the report."""
        path = "/report.html" if target.partition("?")[0] == "/" else target.partition("?")[0]
        if not _PATH.fullmatch(path) or any(part.endswith(".") for part in path.split("/")):
            return None
        try:
            file = (self.root / path[1:]).resolve(strict=True)
        except (OSError, RuntimeError):  # not there, or a link to itself
            return None
        inside = file.is_relative_to(self.root / "report") or file == self.root / "report.html"
        return file if inside and file.suffix in _TYPES and file.is_file() else None

    def start(self) -> None:
        """Serve in the background."""
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="report-server", daemon=True
        )
        self._thread.start()

    def serve_forever(self) -> None:
        """Serve until interrupted."""
        self._http.serve_forever()

    def close(self) -> None:
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> ReportServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
    print(f"Following {server.root.name} at {server.url}{warning}. Ctrl-C stops.", flush=True)  # noqa: T201
    if open_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
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


def _handler_for(server: ReportServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20  # a client that says nothing does not hold a thread for ever
        server_version = "roll"
        sys_version = ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if refusal := _refusal(self.headers, server):
                self._refuse(HTTPStatus.FORBIDDEN, refusal)
                return
            if self.path.partition("?")[0] == "/report/data/index.js":
                try:
                    server.refresh()
                except OSError as error:  # a full disk, a folder that was moved: what was made before is still good
                    _log.warning(
                        "the report of %s is not brought up to date: %s", server.root, error
                    )
            file = server.find(self.path)
            if file is None:
                self._refuse(
                    HTTPStatus.NOT_FOUND, "This server only gives out the report of one run."
                )
                return
            body = _read(file)
            if body is None:
                self._refuse(HTTPStatus.NOT_FOUND, "The file is not there any more.")
                return
            self.send_response(HTTPStatus.OK)
            self._headers(f"{_TYPES[file.suffix]}; charset=utf-8", len(body))
            if with_body:
                self.wfile.write(body)

        def _refuse(self, code: HTTPStatus, why: str) -> None:
            body = f"{why}\n".encode()
            self.send_response(code)
            self._headers("text/plain; charset=utf-8", len(body))
            if self.command != "HEAD":
                self.wfile.write(body)

        def _headers(self, kind: str, length: int) -> None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal belongs to the person who follows the run."""

    return Handler


def _refusal(headers: Any, server: ReportServer) -> str | None:
    """Why a request is not answered; None if it may be."""
    hosts, origins = headers.get_all("Host") or [], headers.get_all("Origin") or []
    if len(hosts) != 1 or not server.knows_host(hosts[0]):
        return "The Host header does not name this server."
    if any(origin not in (f"http://{hosts[0]}",) for origin in origins):
        return "Pages of other origins may not read this."
    site = headers.get("Sec-Fetch-Site", "none")
    is_navigation = (
        headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    )
    if site not in ("none", "same-origin") and not is_navigation:
        return "Pages of other origins may not read this."
    return None


def _read(file: Path) -> bytes | None:
    """The bytes of a file whose path was checked; None if it has become a link or is gone."""
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read()
