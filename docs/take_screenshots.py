"""Pictures of a run's report for the documentation, taken with a real browser.

roll demo --all --folder output/demo
python docs/take_screenshots.py output/demo/digits/runs/grpo output/demo/frozen_lake/runs/frozen_lake_gigpo
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).with_name("images")


# The view stands complete, and every curve in sight is drawn.
READY = """() => document.body.dataset.ready && [...document.querySelectorAll(".chart")].every((chart) => {
    const { top, bottom } = chart.getBoundingClientRect();
    return bottom < 0 || top > innerHeight || chart.querySelector(".trace");
})"""


def picture(page: Page, name: str) -> None:
    page.wait_for_function(READY)
    page.wait_for_timeout(400)  # what has drawn itself may still move
    page.screenshot(path=IMAGES / f"{name}.png")


def main() -> None:
    grpo, lake = (Path(argument).resolve() / "report.html" for argument in sys.argv[1:3])
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
            page.goto(grpo.as_uri())
            picture(page, "report-overview" if scheme == "light" else "report-overview-dark")
            page.goto(f"{grpo.as_uri()}#samples")
            page.reload()
            picture(page, "report-tokens" if scheme == "light" else "report-tokens-dark")
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(f"{lake.as_uri()}#samples")
        picture(page, "report-trajectory")
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(grpo.as_uri())
        picture(page, "report-phone")
        browser.close()


if __name__ == "__main__":
    main()
