"""The package's logger: visible by default, out of the way of an application's own logging."""

import subprocess
import sys

import pytest


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


HELLO = """
from roll.utils.logging import get_logger
get_logger("roll.worker").info("hello")
get_logger(__name__).debug("details")
get_logger().warning("careful")
"""


def test_lines_go_to_stderr_once_and_from_info_on() -> None:
    done = run(HELLO)
    assert done.stdout == ""
    assert [line.split("] ")[1] for line in done.stderr.splitlines()] == [
        "INFO hello",
        "WARNING careful",
    ]


def test_the_level_comes_from_the_environment() -> None:
    assert "DEBUG details" in run(HELLO, ROLL_LOG_LEVEL="debug").stderr
    assert run(HELLO, ROLL_LOG_LEVEL="error").stderr == ""
    wrong = run(HELLO, ROLL_LOG_LEVEL="loud")
    assert wrong.returncode != 0
    assert "ROLL_LOG_LEVEL=LOUD is not a log level; use one of CRITICAL" in wrong.stderr


def test_an_application_with_its_own_handlers_sees_every_line_once() -> None:
    done = run("import logging\nlogging.basicConfig(format='mine: %(message)s')\n" + HELLO)
    assert done.stderr.splitlines() == ["mine: hello", "mine: careful"]


def test_names_below_the_package(caplog: pytest.LogCaptureFixture) -> None:
    from roll.utils.logging import get_logger

    assert get_logger("script").name == "roll.script"
    assert get_logger("roll.worker").name == "roll.worker"
    with caplog.at_level("INFO", logger="roll"):
        get_logger("script").info("seen by tests")
    assert caplog.messages == ["seen by tests"]
