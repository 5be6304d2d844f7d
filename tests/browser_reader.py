"""A browser that reads a run's report, for tests: headless Chromium, driven by playwright.

A browser does things in its own time, so no test reads the page right after a click:
`Reader.settled` waits until the view that was asked for stands complete, and `expect` waits until
what it names holds.

    ROLL_SCREENSHOTS=folder      keeps pictures of what the tests see
    ROLL_BROWSER_THROTTLE=6      slows the page's scripts down, to find tests that do not wait
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
THROTTLE = float(os.environ.get("ROLL_BROWSER_THROTTLE", "1"))
SCREEN = {"width": 1280, "height": 860}

expect = sync_api.expect
expect.set_options(timeout=30_000)


class Reader:
    """A page with everything that its console said."""

    def __init__(self, browser: Any, **options: Any) -> None:
        options.setdefault("viewport", SCREEN)
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning") and self.errors.append(message.text)
            ),
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        if THROTTLE != 1:
            session = self.context.new_cdp_session(self.page)
            session.send("Emulation.setCPUThrottlingRate", {"rate": THROTTLE})

    def settled(self, view: str = "") -> None:
        """Wait until the place in the address bar is on the screen, all of it."""
        self.page.wait_for_function(
            """view => {
                const ready = document.body?.dataset.ready;
                return ready && window.R.shown === location.hash && (!view || ready === view);
            }""",
            arg=view,
        )

    def open(self, page: Path | str, view: str = "") -> Any:
        self.page.goto(f"{page.as_uri() if isinstance(page, Path) else page}{view}")
        self.settled()
        return self.page

    def go(self, view: str) -> None:
        """Another place of the open page, as a link would."""
        self.page.evaluate("hash => { location.hash = hash; }", view)
        self.settled()

    def click(self, selector: str, view: str = "") -> None:
        """Click what leads to another place, and wait until that is there."""
        self.page.click(selector)
        self.settled(view)

    def press(self, key: str, view: str = "") -> None:
        """The same with a key."""
        self.page.keyboard.press(key)
        self.settled(view)

    def see(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until the text stands there. What is scrolled out of sight counts as well."""
        expect(self.page.locator(selector)).to_contain_text(text)

    def holds(self, script: str, arg: Any = None) -> None:
        """Wait until an expression of JavaScript is true."""
        self.page.wait_for_function(script, arg=arg)

    def picture(self, name: str) -> None:
        folder = os.environ.get("ROLL_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(400)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


def drawn(page: Any, count: int) -> None:
    """Wait until that many curves are on the page."""
    page.wait_for_function(
        "n => document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= n",
        arg=count,
    )
