"""The report in a real browser: headless Chromium, driven by playwright.

Set ROLL_SCREENSHOTS to a folder to keep pictures of what the tests see.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import (
    HOSTILE,
    answer,
    tokens_of,
    write_about,
    write_hostile_run,
    write_metrics,
    write_rollouts,
    write_run,
)

from roll.viewer import build_report, report
from roll.viewer.server import ReportServer

np = pytest.importorskip("numpy")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

LIGHT = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "reverse-digits")
    write_run(folder / "reverse-digits-sick", sick=True, seed=3)
    write_run(folder / "frozen-lake", pipeline="agentic", seed=2)
    write_hostile_run(folder / "hostile")
    for run in list(folder.iterdir()):
        build_report([run])
    build_report([folder / "reverse-digits", folder / "reverse-digits-sick"])
    return folder


class Reader:
    """A page with everything that its console said."""

    def __init__(self, browser: Any, **options: Any) -> None:
        options.setdefault("viewport", LIGHT)
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, page: Path | str, view: str = "") -> Any:
        self.page.goto(f"{page.as_uri() if isinstance(page, Path) else page}{view}")
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def go(self, view: str) -> None:
        """Another place of the open page, as a link would."""
        self.page.evaluate("hash => { delete document.body.dataset.ready; location.hash = hash; }", view)
        self.page.wait_for_selector("body[data-ready]")

    def picture(self, name: str) -> None:
        folder = os.environ.get("ROLL_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(400)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def reader(browser: Any) -> Iterator[Reader]:
    opened = Reader(browser)
    yield opened
    opened.context.close()
    assert opened.errors == [], "the console of the page has errors"


def drawn(page: Any, count: int) -> None:
    """Wait until that many curves are on the page."""
    page.wait_for_function(
        "count => document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= count", arg=count
    )


def test_from_the_curve_to_the_token(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    assert page.title() == "reverse-digits – roll report"
    assert "Nothing looks wrong" in page.inner_text(".health")
    drawn(page, 6)
    reader.picture("overview")
    page.click("text=Samples >> visible=true")
    page.wait_for_selector("body[data-ready=samples] .bubble.response")
    assert page.inner_text(".step-label") == "Step 38", "the newest step comes first"
    page.click("button[aria-label='Step before']")
    page.wait_for_function("() => document.querySelector('.step-label').textContent === 'Step 36'")
    page.locator(".sample-row").nth(5).click()
    name = page.locator(".sample-row.selected .preview").inner_text()
    page.wait_for_selector(".sample-row.selected")
    response = page.locator(".bubble.response")
    assert name.replace("<|im_end|>", "") in response.inner_text()
    response.locator(".tok").nth(4).hover()
    card = page.inner_text("#token-card")
    for word in ("Advantage", "Ratio", "Log-prob, trainer", "Log-prob gap", "KL to reference", "Entropy", "trained on"):
        assert word in card
    reader.picture("tokens")
    page.locator(".bubble.observation .tok").nth(3).hover()
    assert "not trained on" in page.inner_text("#token-card")


def test_the_numbers_of_a_token_are_those_of_the_file(reader: Reader, runs: Path) -> None:
    records = [json.loads(line) for line in (runs / "reverse-digits" / "rollouts" / "step-000010.jsonl").open()]
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=10/sample=6")
    page.wait_for_selector(".bubble.response .tok")
    tokens = records[6]["tokens"]
    start = tokens["mask"].index(1)
    page.locator(".bubble.response .tok").nth(2).hover()
    shown = dict(zip(reader.texts("#token-card dt"), reader.texts("#token-card dd"), strict=True))
    number = {key: float(value.replace("−", "-")) for key, value in shown.items()}
    old, infer = tokens["old_log_probs"][start + 2], tokens["infer_log_probs"][start + 2]
    assert number["Log-prob, trainer"] == pytest.approx(old, abs=6e-4)
    assert number["Log-prob gap"] == pytest.approx(old - infer, abs=1.1e-4)
    assert number["Ratio"] == pytest.approx(np.exp(old - infer), abs=3e-4)
    assert number["Entropy"] == pytest.approx(tokens["entropy"][start + 2], abs=6e-3)
    assert number["Advantage"] == pytest.approx(tokens["advantages"][start + 2], abs=6e-4)
    assert f"id {tokens['ids'][start + 2]}" in page.inner_text(".card-note")


def test_colours_say_what_they_mean(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=10")
    page.wait_for_selector(".bubble.response .tok")
    modes = reader.texts(".colour-bar .segment")
    assert modes == ["Advantage", "Ratio", "Log-prob gap", "KL", "Entropy", "Surprise", "None"]
    backgrounds = {}
    for mode in modes:
        page.click(f".segment:text-is('{mode}')")
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        backgrounds[mode] = tuple(page.locator(".bubble.response .tok").evaluate_all(script))
    assert len(set(backgrounds.values())) == len(modes), "every number paints another picture"
    assert set(backgrounds["None"]) == {"rgba(0, 0, 0, 0)"}
    assert len(set(backgrounds["Advantage"])) == 1, "all tokens of an answer have the same advantage here"
    masked = page.locator(".bubble.observation .tok").first
    assert "masked" in masked.get_attribute("class")


def test_a_trajectory_is_a_conversation(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "frozen-lake" / "report.html", "#samples/step=38")
    page.wait_for_selector(".trajectory .bubble")
    labels = [text.split("\n")[0] for text in reader.texts(".bubble header")]
    assert labels[:4] == ["Observation 1", "Response 1", "Observation 2", "Response 2"]
    assert "reward" in page.inner_text(".bubble.response header >> nth=0")
    left, right = (page.locator(f".bubble.{kind}").first.bounding_box() for kind in ("observation", "response"))
    assert right["x"] + right["width"] > left["x"] + left["width"]
    reader.picture("trajectory")


def test_searching_a_metric_and_smoothing_it(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#curves")
    assert page.locator("figure.curve:visible").count() == 16
    page.keyboard.press("/")
    page.keyboard.type("grad norm")
    page.wait_for_function("() => document.querySelectorAll('figure.curve:not([hidden])').length === 1")
    assert reader.texts("figure.curve:visible .curve-name") == [
        "actor/grad_norm"
    ] and "1 metric found" in page.inner_text(".found")
    drawn(page, 1)
    page.locator("#smoothing").fill("0.8")
    drawn(page, 2)
    assert "q=grad%20norm" in page.url, "a search can be shared as a link"
    reader.picture("search")


def test_two_runs_on_top_of_each_other(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "compare.html", "#curves/q=ratio_mean")
    drawn(page, 2)
    reader.go("#curves/q=")
    drawn(page, 6)
    reader.picture("compare")
    page.click(".run-picker .chip >> nth=1")
    page.wait_for_function(
        "() => document.querySelectorAll('figure.curve .scatterlayer')[0].querySelectorAll('.trace').length === 1"
    )
    reader.go("#samples")
    page.click(".run-picker .chip >> nth=1")
    page.wait_for_function("() => location.hash.includes('run=1') && document.querySelector('.bubble.response')")
    reader.go("#config/run=1")
    assert "reverse-digits-sick" in page.inner_text(".config")


def test_the_health_panel_leads_to_the_step(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits-sick" / "report.html")
    titles = reader.texts(".finding h3")
    for words in (
        "is not a number",
        "policy ratio is off 1",
        "log-prob gap is growing",
        "was skipped",
        "cut off",
        "never varies",
    ):
        assert any(words in title for title in titles), words
    reader.picture("health")
    page.click(".finding:has-text('log-prob gap is growing') .button:has-text('Samples of step')")
    page.wait_for_selector("body[data-ready=samples] .bubble.response")
    assert page.inner_text(".step-label") == "Step 38"
    reader.go("#overview")
    page.click(".finding:has-text('gradient norm jumps') .button:has-text('Its curve')")
    page.wait_for_selector("figure.curve:visible")
    assert reader.texts("figure.curve:visible .curve-name") == ["actor/grad_norm"]


def test_discarded_samples_have_reasons(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    assert "timeout: the reward took longer than 5 s" in page.inner_text("section[aria-label='Discarded samples']")
    page.click("section[aria-label='Discarded samples'] .step-link >> nth=0")
    page.wait_for_selector(".notice.bad")
    assert "no signal: all answers of the group scored 0" in page.inner_text(".notice.bad")
    assert page.locator(".sample-row").count() == 1


def test_the_config_and_what_differs(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#config")
    page.wait_for_selector(".config-changed")
    assert "learning_rate\t0.001\t0.00005\tdiffers" in page.inner_text(".config")
    assert "seed" not in page.inner_text(".config tbody")
    page.click("text=only what differs")
    page.fill("input[type=search]", "seed")
    page.wait_for_function("() => document.querySelectorAll('.config tbody tr').length === 1")
    assert "42" in page.inner_text(".config tbody")


def test_searching_and_sorting_samples(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=20")
    page.wait_for_selector(".sample-row")
    total = len([json.loads(line) for line in (runs / "reverse-digits" / "rollouts" / "step-000020.jsonl").open()])
    page.fill("input[type=search]", "cannot")
    page.wait_for_function("() => document.querySelectorAll('.sample-row').length === 1")
    assert f"1 of {total} samples" in page.inner_text(".found")
    page.fill("input[type=search]", "")
    page.select_option("select[aria-label=Order]", "worst")
    page.wait_for_function("() => document.querySelectorAll('.group-row').length === 0")
    scores = [text for text in reader.texts(".sample-row .score") if text != "–"]
    assert scores == sorted(scores)


def test_everything_works_by_keyboard(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    page.keyboard.press("3")
    page.wait_for_selector("body[data-ready=samples] .bubble.response")
    page.keyboard.press("[")
    page.wait_for_function("() => document.querySelector('.step-label').textContent === 'Step 36'")
    page.wait_for_selector(".detail[data-sample]")
    first = page.get_attribute(".detail", "data-sample")
    page.keyboard.press("j")
    page.wait_for_function("first => document.querySelector('.detail').dataset.sample !== first", arg=first)
    page.keyboard.press("k")
    page.wait_for_function("first => document.querySelector('.detail').dataset.sample === first", arg=first)
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('tok')"):
            break
    else:
        pytest.fail("no token can be reached with the Tab key")
    before = int(page.evaluate("document.activeElement.dataset.i"))
    page.keyboard.press("ArrowRight")
    assert int(page.evaluate("document.activeElement.dataset.i")) == before + 1
    assert page.is_visible("#token-card")
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.i") == "0"
    page.keyboard.press("Escape")
    assert not page.is_visible("#token-card")
    page.keyboard.press("?")
    assert "Keyboard" in page.inner_text("dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    for key, view in (("2", "curves"), ("4", "config"), ("1", "overview")):
        page.keyboard.press(key)
        page.wait_for_selector(f"body[data-ready={view}]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Any, runs: Path, scheme: str) -> None:
    reader = Reader(browser, color_scheme=scheme)
    page = reader.open(runs / "reverse-digits-sick" / "report.html")
    red, green, blue = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (red + green + blue > 600) == (scheme == "light")
    reader.picture(f"health-{scheme}")
    for view, name in (("#curves", "curves"), ("#samples/step=30", "tokens")):
        reader.go(view)
        if name == "tokens":
            page.click(".segment:text-is('Log-prob gap')")
        reader.picture(f"{name}-{scheme}")
    assert reader.errors == []
    reader.context.close()


@pytest.mark.parametrize("view", ["overview", "curves", "samples", "config"])
def test_nothing_sticks_out_on_a_phone(browser: Any, runs: Path, view: str) -> None:
    reader = Reader(browser, viewport=PHONE, has_touch=True, is_mobile=True)
    for run in ("reverse-digits-sick", "frozen-lake", "hostile"):
        page = reader.open(runs / run / "report.html", f"#{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        reader.page.goto("about:blank")
    page = reader.open(runs / "reverse-digits" / "report.html", f"#{view}")
    reader.picture(f"phone-{view}")
    if view == "samples":
        page.locator(".sample-row").nth(2).tap()
        page.wait_for_selector(".bubble.response .tok")
        assert not page.is_visible(".sample-list")
        page.locator(".bubble.response .tok").nth(3).tap()
        page.wait_for_timeout(300)
        token, card = (page.locator(name).bounding_box() for name in (".tok:focus", "#token-card"))
        assert token["y"] + token["height"] <= card["y"], "the card does not cover the token it speaks of"
        reader.picture("phone-token")
        page.click(".back")
        page.wait_for_selector(".sample-list", state="visible")
    assert reader.errors == []
    reader.context.close()


def test_hostile_texts_stay_texts(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "hostile" / "report.html")
    for view in ("#overview", "#curves", "#config"):
        reader.go(view)
    for number, name in enumerate(name for name in HOSTILE for _ in range(2)):
        reader.go(f"#samples/step=0/sample={number}")
        page.wait_for_function("name => document.querySelector('.detail').dataset.sample.endsWith(name)", arg=name)
        shown = page.locator(".bubble.response .bubble-text").inner_text()
        if name in ("script", "entities"):
            assert HOSTILE[name] in shown
        if name in ("right-to-left", "separators"):
            assert "U+20" in shown, "marks that turn text around are written out"
        assert page.locator(".detail script, .detail img, .detail b, .sample-list b, .sample-list img").count() == 0
        if name == "long line":
            assert "more characters" in shown and len(shown) < 10_000
            page.click(".bubble.response .more")
            assert len(page.locator(".bubble.response .bubble-text").inner_text()) > 40_000
        box = page.locator(".detail").bounding_box()
        assert box["width"] < 1280
    assert page.evaluate("window.pwned") is None
    reader.picture("hostile")


def test_the_page_asks_for_nothing_but_files(reader: Reader, runs: Path) -> None:
    reader.open(runs / "reverse-digits" / "report.html")
    for view in ("#curves", "#samples", "#config"):
        reader.go(view)
    assert reader.requests and all(url.startswith(("file:", "data:", "blob:")) for url in reader.requests)


def test_the_policy_of_the_page_forbids_scripts_in_text(browser: Any, runs: Path) -> None:
    reader = Reader(browser)
    page = reader.open(runs / "reverse-digits" / "report.html")
    script = """() => {
        const box = document.createElement("div");
        box.innerHTML = "<img src=x onerror='window.pwned = 1'>";
        document.body.append(box);
    }"""
    page.evaluate(script)
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None and reader.errors, "the browser refused and said so"
    reader.context.close()


def test_without_plotly_there_are_sketches(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "plotly_script", lambda: None)
    page = reader.open(build_report([write_run(tmp_path / "plain", steps=12)]), "#curves")
    page.wait_for_selector(".chart svg polyline")
    assert "pip install 'roll-rl[report]'" in page.inner_text(".notice")


def test_an_empty_run_and_odd_files_have_a_page(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "odd", steps=4)
    for name in ("run.json", "config.yaml", "metrics.jsonl", "rollouts/step-000000.jsonl"):
        (run / name).write_text("{ nonsense")
    page = reader.open(build_report([run]))
    assert "could not be read" in page.inner_text(".problems summary")
    for view in ("#curves", "#samples/step=0", "#config"):
        reader.go(view)
        assert "could not be shown" not in page.inner_text("main")


def test_a_long_trajectory_is_drawn_as_it_is_read(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=2, prompts=1, samples_per_prompt=1)
    tokens = tokens_of(np.random.default_rng(0), ["start "], [f"w{i} " for i in range(30_000)])
    write_rollouts(run, 0, [{"sample": "long", "group": "g", "prompt": "", "response": "", "tokens": tokens}])
    page = reader.open(build_report([run]), "#samples/step=0/sample=0")
    page.wait_for_selector(".bubble.response .tok")
    assert page.locator(".tok").count() < 5_000
    page.locator(".bubble.response .tok").nth(3).focus()
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.i") == "30000"


def test_following_a_run(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=6, status="running")
    with ReportServer(run, interval=0.0) as server:
        page = reader.open(server.url)
        assert page.inner_text("#run-status") == "running, following"
        assert page.inner_text(".tile:has-text('Steps') .tile-value") == "6"
        write_metrics(run, 9, np.random.default_rng(1))
        page.wait_for_function("() => document.querySelectorAll('.tile-value')[2].textContent === '9'", timeout=20_000)
        reader.go("#samples")
        write_rollouts(run, 50, [{"sample": "new", "group": "g", "prompt": "p", "response": "r"}])
        page.wait_for_selector("button[aria-label='Step after']:enabled", timeout=20_000)
        page.keyboard.press("]")
        page.wait_for_function("() => document.querySelector('.step-label').textContent === 'Step 50'")
        assert all(url.startswith((f"http://127.0.0.1:{server.port}/", "data:", "blob:")) for url in reader.requests)


@pytest.fixture
def large_run(tmp_path: Path) -> Iterator[Path]:
    """200 steps of 256 samples of 100 tokens and 150 metrics; eight steps differ, the others repeat them."""
    folder = tmp_path / "large"
    folder.mkdir()
    random = np.random.default_rng(0)
    write_metrics(folder, 200, random, extra=135)
    write_about(folder, "rlvr", 200, "finished")
    for step in range(8):
        records = [
            {"sample": f"{i}", "group": f"{i // 8}", **answer(random, step, 8, "1234", 100, False)} for i in range(256)
        ]
        write_rollouts(folder, step, records)
    for step in range(8, 200):
        text = (folder / "rollouts" / f"step-{step % 8:06d}.jsonl").read_text()
        (folder / "rollouts" / f"step-{step:06d}.jsonl").write_text(
            text.replace(f'{{"step": {step % 8},', f'{{"step": {step},')
        )
    yield folder
    shutil.rmtree(folder)  # half a gigabyte


def test_a_large_run_opens_fast_and_stays_small(reader: Reader, large_run: Path) -> None:
    page_file = build_report([large_run])
    size = (
        sum(path.stat().st_size for path in (large_run / "report").rglob("*") if path.is_file())
        + page_file.stat().st_size
    )
    started = time.perf_counter()
    page = reader.open(page_file)
    opened = time.perf_counter() - started
    reader.go("#samples/step=150")
    page.wait_for_selector(".bubble.response .tok")
    script = """async ([step, sample]) => {
        const started = performance.now();
        location.hash = `#samples/step=${step}/sample=${sample}`;
        const label = () => document.querySelector(".step-label").textContent;
        while (document.querySelector(".detail")?.dataset.sample !== String(sample) || label() !== `Step ${step}`)
            await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        return performance.now() - started;
    }"""
    same_step = [page.evaluate(script, [150, sample]) for sample in (40, 100, 170, 255)]
    other_step = [page.evaluate(script, [step, 77]) for step in (10, 60, 120, 199)]
    # Medians: a browser that collects garbage, or a busy machine, may hold up one of them.
    same, other = statistics.median(same_step), statistics.median(other_step)
    times = f"page {opened:.2f} s, sample {same:.0f} ms, of another step {other:.0f} ms"
    sys.stderr.write(f"report of 200 x 256 samples: {size / 1e6:.1f} MB, {times}\n")
    assert size < 60e6
    assert opened < 5.0  # 2 s on a machine that does nothing else
    assert same < 200 and other < 200
    reader.go("#curves")
    assert page.locator("figure.curve").count() == 151
    drawn(page, 6)
    assert page.locator(".js-plotly-plot").count() < 60, "curves out of sight are not drawn"
