"""What the live view gives out, and what it refuses.

Requests are written byte by byte: no client cleans them up.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_run import write_rollouts, write_run

from roll.viewer.server import ReportServer, is_loopback


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportServer]:
    folder = tmp_path_factory.mktemp("served")
    run = write_run(folder / "digits", steps=4)
    (folder / "secret.txt").write_text("SECRET outside")
    (run / "secret.js").write_text("SECRET in the run folder, not in the report")
    with ReportServer(run, interval=0.0) as served:
        yield served


def ask(
    server: ReportServer, target: str, *headers: str, method: str = "GET", host: str | None = None
) -> tuple[int, str]:
    """(status, whole answer) of a request whose target is sent as it is."""
    lines = [f"{method} {target} HTTP/1.1"]
    if host != "":
        lines.append(f"Host: {host or f'127.0.0.1:{server.port}'}")
    request = "\r\n".join([*lines, *headers, "Connection: close", "", ""])
    return send(server, request.encode("latin-1"))


def send(server: ReportServer, request: bytes) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=200) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    text = answer.decode("utf-8", "replace")
    return int(text.split(" ", 2)[1]) if text.startswith("HTTP") else 0, text


def test_the_page_and_its_files_are_served(server: ReportServer) -> None:
    data = "/report/data/index.js?t1"
    pages = ("/", "/report.html", "/report.html?x=../..")
    for target in (*pages, "/report/core.js", "/report/report.css", data):
        status, answer = ask(server, target)
        assert status == 200 and "SECRET" not in answer, target
    status, answer = ask(server, "/report.html", method="HEAD")
    assert status == 200 and answer.endswith("\r\n\r\n")
    assert server.url == f"http://127.0.0.1:{server.port}/report.html"
    # Answers forbid use by other sites.
    _, answer = ask(server, data)
    for header in ("Resource-Policy: same-origin", "Options: nosniff", "X-Frame-Options: DENY"):
        assert header in answer
    assert "Access-Control" not in answer


@pytest.mark.parametrize(
    "target",
    [
        "/../secret.txt",
        "/report/../../secret.txt",
        "/report/../secret.js",
        "/report/data/../../../secret.txt",
        "/report/./core.js",
        "/%2e%2e/secret.txt",
        "/report/%2e%2e/secret.js",
        "/report/..%2fsecret.js",
        "/report/%252e%252e/secret.js",
        "/report/..%5csecret.js",
        "/report/..\\secret.js",
        "/report\\..\\secret.js",
        "//etc/passwd",
        "/report//etc/passwd",
        "/etc/passwd",
        "/report/%00core.js",
        "/report/core.js%00.html",
        "/report/core.js/",
        "/report/core.js.",
        "/report/",
        "/report",
        "/secret.js",
        "/run.json",
        "/config.yaml",
        "/metrics.jsonl",
        "/rollouts/step-000000.jsonl",
        "/report/data/cache.json",
        "/report/.hidden.js",
        "file:///etc/passwd",
        "http://127.0.0.1/report.html",
        "http://evil.example/report.html",
        "*",
        "/report/\u00e9.js",
        "{secret}",
        "/{secret}",
        "/report/{secret}",
    ],
)
def test_everything_else_is_refused(server: ReportServer, target: str) -> None:
    status, answer = ask(server, target.format(secret=server.root.parent / "secret.txt"))
    assert status in (400, 404), answer[:200]
    assert "SECRET" not in answer and "root:" not in answer


def test_links_out_of_the_folder_are_refused(server: ReportServer, tmp_path: Path) -> None:
    (tmp_path / "outside.js").write_text("SECRET")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.js").write_text("SECRET")
    report = server.root / "report"
    (report / "file.js").symlink_to(tmp_path / "outside.js")
    (report / "folder").symlink_to(tmp_path / "outside")
    (report / "up.js").symlink_to(server.root / "secret.js")
    (report / "loop.js").symlink_to(report / "loop.js")
    for target in ("/report/file.js", "/report/folder/x.js", "/report/up.js", "/report/loop.js"):
        status, answer = ask(server, target)
        assert status == 404 and "SECRET" not in answer, target


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:{port}",
        "10.0.0.1:{port}",
        "localhost.evil.example:{port}",
        "",
    ],
)
def test_other_hosts_are_refused(server: ReportServer, host: str) -> None:
    status, _ = ask(server, "/report/data/index.js", host=host.format(port=server.port))
    assert status == 403
    assert ask(server, "/report.html", "Host: evil.example")[0] == 403, "two hosts"


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LOCALHOST:{port}"]
)
def test_names_of_this_machine_are_answered(server: ReportServer, host: str) -> None:
    assert ask(server, "/report.html", host=host.format(port=server.port))[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        "Origin: http://evil.example",
        "Origin: null",
        "Origin: https://127.0.0.1:{port}",
        "Origin: http://127.0.0.1:1",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ],
)
def test_other_origins_are_refused(server: ReportServer, header: str) -> None:
    status, answer = ask(server, "/report/data/index.js", header.format(port=server.port))
    assert status == 403 and "R.put" not in answer


def test_its_own_origin_and_links_from_elsewhere_are_answered(server: ReportServer) -> None:
    own = f"Origin: http://127.0.0.1:{server.port}"
    assert ask(server, "/report/data/index.js", own, "Sec-Fetch-Site: same-origin")[0] == 200
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    assert ask(server, "/report.html", *link)[0] == 200
    frame = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe")
    assert ask(server, "/report.html", *frame)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"])
def test_other_methods_are_refused(server: ReportServer, method: str) -> None:
    assert ask(server, "/report.html", method=method)[0] == 501


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET " + b"/a" * 40000 + b" HTTP/1.1\r\n\r\n"],
)
def test_noise_does_not_stop_the_server(server: ReportServer, request_bytes: bytes) -> None:
    assert send(server, request_bytes)[0] in (0, 400, 414)
    assert ask(server, "/report.html")[0] == 200


def test_the_index_follows_the_run(server: ReportServer) -> None:
    _, before = ask(server, "/report/data/index.js")
    write_rollouts(server.root, 90, [{"sample": "new", "prompt": "p", "response": "r"}])
    _, after = ask(server, "/report/data/index.js")
    assert before != after and ask(server, "/report/data/run0/train-000090.js")[0] == 200


def test_it_listens_on_loopback_only(server: ReportServer) -> None:
    assert is_loopback(server.host) and is_loopback("localhost") and is_loopback("::1")
    assert not any(map(is_loopback, ("0.0.0.0", "10.1.2.3", "example.org")))
    assert server.http.server_address[0] == "127.0.0.1"


def test_told_otherwise_it_answers_to_addresses_and_still_not_to_names(tmp_path: Path) -> None:
    with ReportServer(write_run(tmp_path / "digits", steps=2), host="0.0.0.0") as server:
        assert ask(server, "/report.html", host=f"10.0.0.1:{server.port}")[0] == 200
        assert ask(server, "/report.html", host=f"evil.example:{server.port}")[0] == 403


def test_looks_at_the_folder_are_rationed(tmp_path: Path) -> None:
    with ReportServer(write_run(tmp_path / "digits", steps=2), interval=1000.0) as server:
        built = server._built
        assert ask(server, "/report/data/index.js")[0] == 200
        assert server._built == built
