"""The page of report.py in a real browser: curves, controls, widths, colours, and no message in the console."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import report
from tests.test_report import HOSTILE, add_pictures, make

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; afterwards the console must be empty, and nothing but the page itself may have been asked for."""
    asked: list[str] = []

    def open_page(address: Path | str, width: int = 1280, dark: bool = False) -> Any:
        url = address if isinstance(address, str) else address.resolve().as_uri()
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        asked.append(url)
        browser.get(url)
        until(lambda: browser.execute_script("return document.documentElement.dataset.drawn"))
        return browser

    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    yield open_page
    assert browser.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert asked[0] in urls  # the log is on
    newer = (f"{asked[-1]}data?", f"{asked[-1]}picture?")
    assert [url for url in urls if not (url in asked or url.startswith(("data:", *newer)))] == []
    browser.get("about:blank")


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def lines(count: int, scale: float = 1.0) -> list[dict[str, Any]]:
    every = range(1, count + 1)
    return [{"step": n, "samples": 8 * n, "seconds": n / 2, "loss": scale / n, "lr": 0.01,
             "skipped_updates": int(n > 5), "grad_norm": None if n == 4 else n / 10,
             **({"valid/loss": scale / n} if n % 5 == 0 else {})} for n in every]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two runs, of which the second was resumed at update 7 and has pictures of other updates."""
    folder = tmp_path_factory.mktemp("two")
    runs = [make(folder / "one", lines(20), lr=0.01), make(folder / "two", lines(10, 3.0), lr=0.02)]
    start = json.loads((runs[1] / "starts.jsonl").read_text())
    (runs[1] / "starts.jsonl").write_text(
        "".join(json.dumps({**start, **more}) + "\n" for more in ({}, {"step": 7, "backend": "ddp", "world_size": 2}))
    )
    add_pictures(runs[0], [5, 10, 20], (600, 200))
    add_pictures(runs[1], [10])
    report.main([*map(str, runs), "--output", str(folder / "two.html")])
    return folder / "two.html"


def chart(page: Any, metric: str) -> Any:
    return page.find_element("css selector", f'figure[data-metric="{metric}"]')


def set_value(page: Any, name: str, value: Any, event: str = "input") -> None:
    script = (
        "const it = document.getElementById(arguments[0]); it.type === 'checkbox' ? it.checked = arguments[1]"
        ": it.value = arguments[1]; it.dispatchEvent(new Event(arguments[2]))"
    )
    page.execute_script(script, name, value, event)
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def plotted(page: Any, metric: str, row: int = 1) -> list[Any]:
    """A row of what uPlot draws, without what is not defined."""
    script = """return charts.get(arguments[0]).plot.data[arguments[1]].filter((value) => value !== undefined)
        .map((value) => value === null || Number.isFinite(value) ? value : String(value))"""
    found: list[Any] = page.execute_script(script, metric, row)
    return found


def test_every_metric_has_a_drawn_curve_in_its_group(opened: Any, two: Path) -> None:
    page = opened(two)
    groups = [each.text for each in page.find_elements("css selector", "#groups summary")]
    assert groups == ["Validation (1)", "Losses (1)", "Optimisation (3)"]
    for metric in ("valid/loss", "loss", "lr", "skipped_updates", "grad_norm"):
        script = """const canvas = charts.get(arguments[0]).plot.ctx.canvas;
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set(); for (let n = 0; n < pixels.length; n += 4) if (pixels[n + 3] === 255)
            seen.add(`${pixels[n]},${pixels[n + 1]},${pixels[n + 2]}`); return [...seen]"""
        colours = page.execute_script(script, metric)
        assert "184,71,11" in colours and ("11,98,168" in colours or metric in ("lr", "skipped_updates")), metric
    assert plotted(page, "grad_norm")[3] is None  # a gap
    assert page.execute_script("return charts.get('grad_norm').shown[0].nan") == [4]


def test_pointing_at_a_curve_shows_the_values_of_every_run_there(opened: Any, two: Path) -> None:
    from selenium.webdriver import ActionChains

    page = opened(two)
    figure = chart(page, "loss")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    over = figure.find_element("css selector", ".u-over")
    left = page.execute_script("return charts.get('loss').plot.valToPos(7, 'x')")
    ActionChains(page).move_to_element_with_offset(over, round(left - over.size["width"] / 2), 0).perform()
    text = figure.find_element("css selector", ".readout").text
    assert "0.14286 at update 7" in text and "0.42857 at update 7" in text
    assert "started again from update 7" in text and "from one process on cpu to ddp on 2 x cpu" in text
    set_value(page, "show-marks", False, "change")
    over = figure.find_element("css selector", ".u-over")
    ActionChains(page).move_to_element_with_offset(over, 0, 0).perform()
    assert over.is_displayed() and "started again" not in figure.find_element("css selector", ".readout").text


def test_a_resume_is_marked_in_the_charts_that_had_begun_and_what_is_always_0_is_folded_away(
    opened: Any, tmp_path: Path
) -> None:
    run = make(tmp_path / "run", [{**line, "bad_samples": 0} for line in lines(20)])
    start = json.loads((run / "starts.jsonl").read_text())
    (run / "starts.jsonl").write_text("".join(json.dumps({**start, "step": step}) + "\n" for step in (0, 2)))
    report.main([str(run)])
    page = opened(run / "report.html")
    signs = """const { plot } = charts.get(arguments[0]), drawn = [];
        plot.ctx.fillText = (text) => drawn.push(text);
        charts.get(arguments[0]).drawMarks();
        delete plot.ctx.fillText;
        return drawn"""
    assert "\u2716" in page.execute_script(signs, "loss")
    assert "\u2716" not in page.execute_script(signs, "valid/loss"), "its first value is of update 5"
    (group,) = page.find_elements("css selector", "#groups details:not([open])")
    assert group.text == "Always 0 (1)"
    page.execute_script("arguments[0].open = true", group)
    until(lambda: chart(page, "bad_samples").is_displayed())


def test_the_axes_are_updates_samples_and_seconds(opened: Any, two: Path) -> None:
    page = opened(two)
    for axis, factor in (("samples", 8), ("seconds", 0.5), ("step", 1)):
        set_value(page, "axis", axis, "change")
        assert plotted(page, "valid/loss", 0) == [factor * step for step in (5, 10, 15, 20)]


def test_smoothing_is_an_average_without_bias_and_the_log_scale_shows_logarithms(opened: Any, two: Path) -> None:
    page = opened(two)
    assert plotted(page, "loss")[:2] == [1, 0.5]
    set_value(page, "smooth", 10)
    before = math.exp(-1 / 1.9)  # the weight of the update before; the curve has a length of 19
    assert plotted(page, "loss")[:2] == pytest.approx([1, (0.5 + before) / (1 + before)])
    assert plotted(page, "loss", 2)[:2] == [1, 0.5]  # what is not smoothed stays visible
    assert page.find_element("id", "smooth-value").text == "10%"
    set_value(page, "smooth", 0)
    set_value(page, "log", True, "change")
    assert plotted(page, "loss")[:2] == pytest.approx([0, math.log10(0.5)])
    assert plotted(page, "skipped_updates")[4:6] == [None, 0]  # 0 has no logarithm


def test_the_slider_of_updates_shows_the_pictures_of_every_run(opened: Any, two: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened(two)

    def shown() -> list[str]:
        return [each.get_attribute("alt") for each in page.find_elements("css selector", "#pictures img")]

    assert shown() == ["Pictures of one at update 20", "Pictures of two at update 10"]
    slider = page.find_element("id", "sample")
    slider.send_keys(Keys.ARROW_LEFT)
    assert shown() == ["Pictures of one at update 10", "Pictures of two at update 10"]
    slider.send_keys(Keys.HOME)
    assert shown() == ["Pictures of one at update 5", "Pictures of two at update 10"]
    assert page.find_element("id", "sample-value").text == "5"
    sizes = "return [...document.querySelectorAll('#pictures img')].map((each) => each.naturalWidth)"
    assert page.execute_script(sizes) == [600, 20]


@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_is_wider_than_the_screen(opened: Any, tmp_path: Path, two: Path, width: int) -> None:
    long = "a_name_without_any_place_to_break" * 6
    runs = [make(tmp_path / f"{n}{long}"[:200], [{"step": 1, long: 1.0}, {"step": 2, long: 1e-30}], **{long: long * 5})
            for n in range(3)]  # fmt: skip
    add_pictures(runs[0], [1], (1500, 90))
    report.main([*map(str, runs), "--output", str(tmp_path / "long.html")])
    for path in (two, tmp_path / "long.html"):
        page = opened(path, width=width)
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        script = "[...document.querySelectorAll('.plot canvas')].map((each) => each.getBoundingClientRect().right)"
        found = page.execute_script(f"return {script}")
        assert found and max(found) <= width


def test_hostile_text_stays_text_and_hostile_numbers_are_drawn(opened: Any, tmp_path: Path) -> None:
    settings = {HOSTILE: HOSTILE, "__proto__": "x", "constructor": "y"}
    run = make(tmp_path / HOSTILE.replace("/", ""), [], **settings)
    numbers = {
        HOSTILE: [1, 2], "huge": [1e300, -1.7e308], "tiny": [1e-300, 5e-324], "same": [3e20, 3e20], "zero": [0, 0],
        "__proto__": [1, 2], "constructor": [1, 2], "none": [None, None], "far": [1e-30, 1e30],
    }  # fmt: skip
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **{name: row[n] for name, row in numbers.items()}}) + "\n"
                for n, step in enumerate((1, 1 << 53)))
    )  # fmt: skip
    report.main([str(run), str(make(tmp_path / "other")), "--output", str(tmp_path / "x.html")])
    page = opened(tmp_path / "x.html")
    assert page.title.startswith(run.name) and HOSTILE in page.find_element("id", "settings-table").text
    assert page.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
    for metric in numbers:
        (figure,) = [each for each in page.find_elements("css selector", ".chart")
                     if each.get_attribute("data-metric") == metric]  # fmt: skip
        assert ("no finite value" in figure.text) is (metric == "none"), metric
        assert (len(figure.find_elements("css selector", "canvas")) == 1) is (metric != "none"), metric
    labels = "return charts.get(arguments[0]).plot.axes[1]._values"  # as uPlot keeps them
    for metric in ("huge", "tiny", "same", "far"):
        assert len(set(page.execute_script(labels, metric))) > 1, metric
    set_value(page, "log", True, "change")
    assert plotted(page, "far") == [-30, 30]
