"""The report in a real browser. See tests/browser_reader.py for how these tests wait."""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_reader import CHROMIUM, Reader, drawn, expect, sync_api
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

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]

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


@pytest.fixture
def reader(browser: Any) -> Iterator[Reader]:
    opened = Reader(browser)
    yield opened
    opened.context.close()
    assert opened.errors == [], "the console of the page has errors"


def test_from_the_curve_to_the_token(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    expect(page).to_have_title("reverse-digits – roll report")
    reader.see(".health", "Nothing looks wrong")
    drawn(page, 6)
    reader.picture("overview")
    reader.click("#tabs >> text=Samples", "samples")
    expect(page.locator(".step-label"), "the newest step comes first").to_have_text("Step 38")
    reader.click("button[aria-label='Step before']")
    expect(page.locator(".step-label")).to_have_text("Step 36")
    row = page.locator(".sample-row").nth(5)
    said = row.locator(".preview").inner_text()
    row.click()
    reader.settled("samples")
    expect(row).to_have_class(re.compile("selected"))
    expect(page.locator(".sample-row.selected .preview")).to_have_text(said)
    reader.see(".bubble.response", said)
    page.locator(".bubble.response .tok").nth(4).hover()
    numbers = ("Advantage", "Ratio", "Log-prob, trainer", "Log-prob gap", "KL to reference")
    for word in (*numbers, "Entropy", "trained on"):
        reader.see("#token-card", word)
    reader.picture("tokens")
    page.locator(".bubble.observation .tok").nth(3).hover()
    reader.see("#token-card", "not trained on")


def test_data_that_comes_late_does_not_overwrite_a_later_view(reader: Reader, runs: Path) -> None:
    page, held = reader.page, []
    page.route("**/run0/metrics.js", lambda route: held.append(route))
    reader.open(runs / "reverse-digits" / "report.html", "#samples")
    click = "document.querySelector('#tabs a[data-view=curves]').click()"
    ready = page.evaluate(f"() => {{ {click}; return document.body.dataset.ready; }}")
    assert ready is None, "from the click on, nothing is ready"
    expect(page.locator("body")).to_have_attribute("data-view", "curves")
    reader.click("#tabs >> text=Config", "config")
    assert len(held) == 1, "the curves are still waiting for their numbers"
    with page.expect_event("requestfinished", lambda request: request.url.endswith("metrics.js")):
        held[0].continue_()
    frame = "await new Promise(requestAnimationFrame); return true;"
    reader.holds(f"async () => {{ await window.R.metrics(0); {frame} }}")
    expect(page.locator("body")).to_have_attribute("data-ready", "config")
    expect(page.locator(".config")).to_be_visible()
    expect(page.locator("figure.curve")).to_have_count(0)


def test_the_numbers_of_a_token_are_those_of_the_file(reader: Reader, runs: Path) -> None:
    lines = (runs / "reverse-digits" / "rollouts" / "step-000010.jsonl").read_text().splitlines()
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=10/sample=6")
    tokens = json.loads(lines[6])["tokens"]
    start = tokens["mask"].index(1)
    page.locator(".bubble.response .tok").nth(2).hover()
    ids = tokens["ids"]
    reader.see(".card-note", f"token {start + 3} of {len(ids)} · id {ids[start + 2]} ·")
    shown = dict(zip(reader.texts("#token-card dt"), reader.texts("#token-card dd"), strict=True))
    number = {key: float(value.replace("−", "-")) for key, value in shown.items()}
    old, infer = tokens["old_log_probs"][start + 2], tokens["infer_log_probs"][start + 2]
    assert number["Log-prob, trainer"] == pytest.approx(old, abs=6e-4)
    assert number["Log-prob gap"] == pytest.approx(old - infer, abs=1.1e-4)
    assert number["Ratio"] == pytest.approx(np.exp(old - infer), abs=3e-4)
    assert number["Entropy"] == pytest.approx(tokens["entropy"][start + 2], abs=6e-3)
    assert number["Advantage"] == pytest.approx(tokens["advantages"][start + 2], abs=6e-4)


def test_colours_say_what_they_mean(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=10")
    modes = reader.texts(".colour-bar .segment")
    assert modes == ["Advantage", "Ratio", "Log-prob gap", "KL", "Entropy", "Surprise", "None"]
    backgrounds = {}
    for mode in modes:
        page.click(f".segment:text-is('{mode}')")
        button = page.locator(f".segment:text-is('{mode}')")
        expect(button).to_have_attribute("aria-pressed", "true")
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        backgrounds[mode] = tuple(page.locator(".bubble.response .tok").evaluate_all(script))
    assert len(set(backgrounds.values())) == len(modes), "every number paints another picture"
    assert set(backgrounds["None"]) == {"rgba(0, 0, 0, 0)"}
    assert len(set(backgrounds["Advantage"])) == 1, "one advantage for all tokens of an answer"
    expect(page.locator(".bubble.observation .tok").first).to_have_class(re.compile("masked"))


def test_a_trajectory_is_a_conversation(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "frozen-lake" / "report.html", "#samples/step=38")
    labels = page.locator(".trajectory .bubble header span:first-child")
    first = ["Observation 1", "Response 1", "Observation 2", "Response 2"]
    assert labels.all_text_contents()[:4] == first
    reader.see(".bubble.response header >> nth=0", "reward")
    kinds = (".bubble.observation", ".bubble.response")
    left, right = (page.locator(kind).first.bounding_box() for kind in kinds)
    assert right["x"] + right["width"] > left["x"] + left["width"]
    reader.picture("trajectory")


def test_searching_a_metric_and_smoothing_it(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#curves")
    expect(page.locator("figure.curve:visible")).to_have_count(16)
    page.keyboard.press("/")
    expect(page.locator("#metric-search")).to_be_focused()
    page.keyboard.type("grad norm")
    expect(page.locator("figure.curve:visible .curve-name")).to_have_text(["actor/grad_norm"])
    reader.see(".found", "1 metric found")
    drawn(page, 1)
    page.locator("#smoothing").fill("0.8")
    drawn(page, 2)
    expect(page, "a search can be shared as a link").to_have_url(re.compile("q=grad%20norm"))
    reader.picture("search")


def test_two_runs_on_top_of_each_other(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "compare.html", "#curves/q=ratio_mean")
    drawn(page, 2)
    reader.go("#curves/q=")
    drawn(page, 6)
    reader.picture("compare")
    page.click(".run-picker .chip >> nth=1")
    first = "document.querySelectorAll('figure.curve .scatterlayer')[0]"
    reader.holds(f"() => {first}.querySelectorAll('.trace').length === 1")
    reader.go("#samples")
    reader.click(".run-picker .chip >> nth=1", "samples")
    expect(page).to_have_url(re.compile("run=1"))
    expect(page.locator(".bubble.response")).to_be_visible()
    reader.go("#config/run=1")
    reader.see(".config", "reverse-digits-sick")


def test_the_health_panel_leads_to_the_step(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits-sick" / "report.html")
    titles = reader.texts(".finding h3")
    numbers = ("is not a number", "policy ratio is off 1", "log-prob gap is growing")
    for words in (*numbers, "was skipped", "cut off", "never varies"):
        assert any(words in title for title in titles), words
    reader.picture("health")
    finding = ".finding:has-text('log-prob gap is growing')"
    reader.click(f"{finding} .button:has-text('Samples of step')", "samples")
    expect(page.locator(".bubble.response")).to_be_visible()
    expect(page.locator(".step-label")).to_have_text("Step 38")
    reader.go("#overview")
    reader.click(".finding:has-text('gradient norm jumps') .button:has-text('Its curve')", "curves")
    expect(page.locator("figure.curve:visible .curve-name")).to_have_text(["actor/grad_norm"])


def test_discarded_samples_have_reasons(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    section = "section[aria-label='Discarded samples']"
    reader.see(section, "timeout: the reward took longer than 5 s")
    reader.click(f"{section} .step-link >> nth=0", "samples")
    reader.see(".notice.bad", "no signal: all answers of the group scored 0")
    expect(page.locator(".sample-row")).to_have_count(1)


def test_the_config_and_what_differs(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#config")
    row = page.locator(".config-changed", has_text="learning_rate")
    cells = [re.compile(r"learning_rate$"), "0.001", "0.00005", "differs"]
    expect(row.locator("td")).to_have_text(cells)
    expect(page.locator(".config tbody")).not_to_contain_text("seed")
    page.click("text=only what differs")
    page.fill("input[type=search]", "seed")
    expect(page.locator(".config tbody tr")).to_have_count(1)
    reader.see(".config tbody", "42")


def test_searching_and_sorting_samples(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html", "#samples/step=20")
    lines = (runs / "reverse-digits" / "rollouts" / "step-000020.jsonl").read_text().splitlines()
    page.fill("input[type=search]", "cannot")
    expect(page.locator(".sample-row")).to_have_count(1)
    reader.see(".found", f"1 of {len(lines)} samples")
    page.fill("input[type=search]", "")
    expect(page.locator(".found")).to_have_text("")
    page.select_option("select[aria-label=Order]", "worst")
    expect(page.locator(".group-row")).to_have_count(0)
    scores = [text for text in reader.texts(".sample-row .score") if text != "–"]
    assert len(scores) > 5 and scores == sorted(scores)


def test_everything_works_by_keyboard(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "reverse-digits" / "report.html")
    reader.press("3", "samples")
    reader.press("[", "samples")
    expect(page.locator(".step-label")).to_have_text("Step 36")
    detail = page.locator(".detail")
    first = detail.get_attribute("data-sample")
    assert first
    reader.press("j", "samples")
    expect(detail).not_to_have_attribute("data-sample", first)
    reader.press("k", "samples")
    expect(detail).to_have_attribute("data-sample", first)
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('tok')"):
            break
    else:
        pytest.fail("no token can be reached with the Tab key")
    before = int(page.evaluate("document.activeElement.dataset.i"))
    card, focused = page.locator("#token-card"), page.locator(".tok:focus")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("data-i", str(before + 1))
    expect(card).to_be_visible()
    page.keyboard.press("Home")
    expect(focused).to_have_attribute("data-i", "0")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("?")
    reader.see("dialog[open]", "Keyboard")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    for key, view in (("2", "curves"), ("4", "config"), ("1", "overview")):
        reader.press(key, view)


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
        reader.settled("samples")
        expect(page.locator(".sample-list")).to_be_hidden()
        page.locator(".bubble.response .tok").nth(3).tap()
        expect(page.locator("#token-card")).to_be_visible()
        # The card does not cover the token it speaks of, once the token was scrolled to its place.
        reader.holds(
            """() => {
                const box = (name) => document.querySelector(name)?.getBoundingClientRect();
                return box(".tok:focus") && box(".tok:focus").bottom <= box("#token-card").top;
            }"""
        )
        reader.picture("phone-token")
        reader.click(".back", "samples")
        expect(page.locator(".sample-list")).to_be_visible()
    assert reader.errors == []
    reader.context.close()


def test_pairs_of_a_preference_run(reader: Reader, tmp_path: Path) -> None:
    run, random = write_run(tmp_path / "pairs", steps=3, pipeline="dpo"), np.random.default_rng(0)
    shutil.rmtree(run / "rollouts")
    for step, margin in ((0, 0.0), (2, 1.0)):
        records = []
        for pair, sides in itertools.product(range(3), (("chosen", 1), ("rejected", -1))):
            side, sign = sides
            ranked = "tie" if step == 0 else "wrong" if pair == 1 else "right"
            facts = {"group": f"pair {pair}", "sample": f"{pair} {side}", "tag": side}
            facts |= {"ranked": ranked, "prompt": "2 + 2 = ", "response": ""}
            said = ["4" if side == "chosen" else "5", "<|im_end|>"]
            tokens = tokens_of(random, ["2 + 2 = "], said)
            for name in ("infer_log_probs", "entropy", "advantages"):
                del tokens[name]
            score = margin * sign * (-1 if pair == 1 else 1)
            records.append({**facts, "score": score, "tokens": tokens})
        write_rollouts(run, step, records, split="val")
    page = reader.open(build_report([run]), "#samples")
    expect(page.locator(".step-label")).to_have_text("Step 2")
    reader.see(".step-words", "2 of 3 pairs ranked right")
    flags = ["ranked right", "ranked wrong", "ranked right"]
    expect(page.locator(".group-row .flag")).to_have_text(flags)
    page.select_option("select[aria-label=Show]", "wrong")
    expect(page.locator(".sample-row")).to_have_count(2)
    reader.click(".sample-row:has-text('rejected')", "samples")
    reader.see(".facts", "ranked wrong")
    assert reader.texts(".colour-bar .segment") == ["KL", "Surprise", "None"]
    numbers = records[3]["tokens"]
    page.locator(".bubble.response .tok").first.hover()
    for label, value in (
        ("KL to reference", numbers["old_log_probs"][1] - numbers["ref_log_probs"][1]),
        ("Log-prob, trainer", numbers["old_log_probs"][1]),
    ):
        shown = page.locator(f"#token-card dt:text-is('{label}') + dd").inner_text()
        assert float(shown.replace("−", "-")) == pytest.approx(value, abs=2e-3)
    reader.picture("pairs")
    reader.press("[", "samples")
    reader.see(".step-words", "0 of 3 pairs ranked right")
    reader.go("#overview")
    # As a click on a point of a curve does: there are samples of validations.
    page.evaluate("window.R.openStep(0, 2)")
    reader.settled("samples")
    expect(page.locator(".step-label")).to_have_text("Step 2")


def test_hostile_texts_stay_texts(reader: Reader, runs: Path) -> None:
    page = reader.open(runs / "hostile" / "report.html")
    for view in ("#overview", "#curves", "#config"):
        reader.go(view)
    for number, name in enumerate(name for name in HOSTILE for _ in range(2)):
        reader.go(f"#samples/step=0/sample={number}")
        expect(page.locator(".detail")).to_have_attribute("data-sample", re.compile(f"{name}$"))
        shown = page.locator(".bubble.response .bubble-text").text_content()
        if name in ("script", "entities"):
            assert HOSTILE[name] in shown
        if name in ("right-to-left", "separators"):
            assert "U+20" in shown, "marks that turn text around are written out"
        markup = ".detail script, .detail img, .detail b, .sample-list b, .sample-list img"
        assert page.locator(markup).count() == 0
        if name == "long line":
            assert "more characters" in shown and len(shown) < 10_000
            page.click(".bubble.response .more")
            text = "document.querySelector('.bubble.response .bubble-text').textContent"
            reader.holds(f"() => {text}.length > 40_000")
        box = page.locator(".detail").bounding_box()
        assert box["width"] < 1280
    assert page.evaluate("window.pwned") is None
    reader.picture("hostile")


def test_the_page_asks_for_nothing_but_files(reader: Reader, runs: Path) -> None:
    reader.open(runs / "reverse-digits" / "report.html")
    for view in ("#curves", "#samples", "#config"):
        reader.go(view)
    assert reader.requests
    assert all(url.startswith(("file:", "data:", "blob:")) for url in reader.requests)


def test_the_policy_of_the_page_forbids_scripts_in_text(browser: Any, runs: Path) -> None:
    reader = Reader(browser)
    page = reader.open(runs / "reverse-digits" / "report.html")
    script = """() => {
        const box = document.createElement("div");
        box.innerHTML = "<img src=x onerror='window.pwned = 1'>";
        document.body.append(box);
    }"""
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate(script)  # the browser refuses, and says so
    assert page.evaluate("window.pwned") is None and reader.errors
    reader.context.close()


def test_without_plotly_there_are_sketches(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "plotly_script", lambda: None)
    page = reader.open(build_report([write_run(tmp_path / "plain", steps=12)]), "#curves")
    page.wait_for_selector(".chart svg polyline")
    reader.see(".notice", "pip install plotly")


def test_an_empty_run_and_odd_files_have_a_page(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "odd", steps=4)
    for name in ("run.json", "config.yaml", "metrics.jsonl", "rollouts/step-000000.jsonl"):
        (run / name).write_text("{ nonsense")
    page = reader.open(build_report([run]))
    reader.see(".problems summary", "could not be read")
    for view in ("#curves", "#samples/step=0", "#config"):
        reader.go(view)
        expect(page.locator("main")).not_to_contain_text("could not be shown")


def test_a_long_trajectory_is_drawn_as_it_is_read(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=2, prompts=1, samples_per_prompt=1)
    tokens = tokens_of(np.random.default_rng(0), ["start "], [f"w{i} " for i in range(30_000)])
    write_rollouts(run, 0, [{"sample": "long", "group": "g", "tokens": tokens}])
    page = reader.open(build_report([run]), "#samples/step=0/sample=0")
    assert page.locator(".tok").count() < 5_000
    page.locator(".bubble.response .tok").nth(3).focus()
    page.keyboard.press("End")
    expect(page.locator(".tok:focus")).to_have_attribute("data-i", "30000")


def test_following_a_run(reader: Reader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=6, status="running")
    with ReportServer(run, interval=0.0) as server:
        page = reader.open(server.url)
        expect(page.locator("#run-status")).to_have_text("running, following")
        steps = page.locator(".tile:has-text('Steps') .tile-value")
        expect(steps).to_have_text("6")
        write_metrics(run, 9, np.random.default_rng(1))
        expect(steps).to_have_text("9")
        reader.go("#samples")
        write_rollouts(run, 50, [{"sample": "new", "group": "g", "prompt": "p", "response": "r"}])
        expect(page.locator("button[aria-label='Step after']")).to_be_enabled()
        reader.press("]", "samples")
        expect(page.locator(".step-label")).to_have_text("Step 50")
        own = (f"http://127.0.0.1:{server.port}/", "data:", "blob:")
        assert all(url.startswith(own) for url in reader.requests)


def test_of_a_large_run_only_what_is_in_sight_is_loaded_and_drawn(
    reader: Reader, tmp_path: Path
) -> None:
    """Eight steps of 256 samples of 100 tokens, and 150 metrics."""
    run, random = tmp_path / "large", np.random.default_rng(0)
    run.mkdir()
    write_metrics(run, 200, random, extra=135)
    write_about(run, "rlvr", 200, "finished")
    for step in range(8):
        samples = [answer(random, step, 8, "1234", 100, False) for _ in range(256)]
        records = [{"sample": f"{i}", "group": f"{i // 8}", **s} for i, s in enumerate(samples)]
        write_rollouts(run, step, records)
    page_file = build_report([run])
    files = (run / "report" / "data").rglob("*.js")
    assert sum(path.stat().st_size for path in files) < 3e6
    page = reader.open(page_file, "#samples/step=5/sample=77")
    expect(page.locator(".detail")).to_have_attribute("data-sample", "77")
    pieces = [url for url in reader.requests if re.search(r"train-\d+-\d+\.js", url)]
    assert len(pieces) == 1, "one piece of 32 samples"
    reader.go("#curves")
    expect(page.locator("figure.curve")).to_have_count(151)
    drawn(page, 6)
    assert page.locator(".js-plotly-plot").count() < 60, "curves out of sight are not drawn"
