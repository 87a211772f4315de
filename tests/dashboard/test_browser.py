"""The page in a real browser: nothing from outside, live values, alerts, keys, schemes, hostile names, a
million events."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dashboard.conftest import MIB, Serve, a_long_trace, a_trace, live_feed, trace_feed
from memfit.dashboard.server import Dashboard
from memfit.monitor import AlertRule
from memfit.monitor.samples import Sample
from monitor.fakes import GIB, FakeSource, a_gpu, a_rank

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
HOSTILE = '<img src=x onerror="window.hacked=1"></td></script><script>window.hacked=1</script>{{7*7}}'

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens a page; at the end, every request must have gone to its server, and nothing may have failed."""
    contexts, told, requested = [], [], []

    def open_page(served: Dashboard, scheme: str = "light") -> Any:
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("request", lambda request: requested.append((request.url, served.url)))
        page.on(
            "console",
            lambda message: told.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: told.append(str(error)))
        page.goto(served.first_url)
        page.wait_for_selector("#tiles .tile")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert told == []
    assert requested and all(url.startswith((server, "data:")) for url, server in requested)


def text(page: Any, selector: str) -> str:
    return str(page.inner_text(selector))


def drawn(page: Any) -> int:
    """How many different colours the chart has: more than a few once something is drawn."""
    return int(
        page.evaluate(
            "() => { const c = document.querySelector('#timeline-plot canvas');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
            "for (let i = 0; i < d.length; i += 404) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]);"
            "return seen.size }"
        )
    )


def test_a_trace_its_keys_and_its_schemes(serve: Serve, visit: Open) -> None:
    advice = {"action": "Free it.", "typed": "del kept", "saving_bytes": 5 * MIB, "cost": None, "risks": None}
    finding = {"rule": "R", "severity": "warning", "summary": "Too much is kept.", "evidence": ["5 MiB"]}
    findings = [{**finding, "bytes": 5 * MIB, "where": None, "advice": [advice]}]
    page = visit(serve(trace_feed(a_trace(), findings=lambda sample: findings)))
    page.wait_for_selector("#timeline-plot canvas")
    assert "t.memfit-trace" in page.title()
    assert "All of the device 1.00 GiB" in text(page, "#account-parts").replace("\n", " ")
    page.wait_for_selector("#sites-rows tr")
    assert "train.py:7 step" in text(page, "#sites-rows") and "50.00 MiB" in text(page, "#sites-rows")
    page.click("#findings-list summary")
    assert "Free it." in text(page, "#findings-list") and "del kept" in text(page, "#findings-list pre")

    whole = text(page, "#timeline-range")
    page.keyboard.press("+")
    page.wait_for_function("old => document.querySelector('#timeline-range').innerText !== old", arg=whole)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    page.wait_for_function("old => document.querySelector('#timeline-range').innerText === old", arg=whole)
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("model")
    assert "train.py" not in text(page, "#sites-rows") and "model.py:3 init" in text(page, "#sites-rows")
    page.keyboard.press("Escape")

    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    page.wait_for_selector("#tiles .tile")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    other = visit(serve(trace_feed(a_trace())), scheme="dark")
    assert other.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_live_values_change_and_an_alert_appears(serve: Serve, visit: Open) -> None:
    class Growing(FakeSource):
        second = 0
        full = False

        def read(self, now_seconds: float) -> Sample:
            self.second += 1
            held = (5 + self.second / 8) * GIB
            ranks = tuple(
                a_rank(
                    rank, allocated_bytes=int(held), active_bytes=int(held), reserved_bytes=int(held) + GIB
                )
                for rank in (0, 1)
            )
            devices = (
                a_gpu(
                    0, used_bytes=79 * GIB if self.full else 30 * GIB, free_bytes=0 if self.full else 49 * GIB
                ),
                a_gpu(1),
            )
            return Sample(time_seconds=now_seconds, devices=devices, allocators=ranks)

    rule = AlertRule(
        name="full", quantity="device_used_ratio", above=0.9, severity="error", summary="it is full"
    )
    source = Growing(Sample(time_seconds=0))
    page = visit(serve(live_feed(source, rules=(rule,)), interval_seconds=0.1))
    assert text(page, "#live") == "live" and page.locator(".subject").count() == 4
    assert "Nothing is wrong" in text(page, "#alerts-now")
    tensors = page.locator(".tile", has_text="Tensors").locator("dd")
    first = tensors.inner_text()
    page.wait_for_function(
        "old => [...document.querySelectorAll('.tile')].some("
        "tile => tile.innerText.startsWith('Tensors') && !tile.innerText.includes(old))",
        arg=first,
    )
    source.full = True
    page.wait_for_selector(".toast.error")
    assert "gpu0: it is full (98.8 %, over 90.0 %)" in text(page, "#alerts-now")
    assert page.title().startswith("✗")
    page.keyboard.press("]")
    pressed = page.locator(".subject[aria-pressed='true'] .name")
    assert pressed.inner_text() == "gpu1"
    page.locator(".subject", has_text="rank 1").click()
    assert pressed.inner_text() == "rank 1" and "train rank 1 gpu1" in text(page, "#ranks-rows")


def test_hostile_names_do_nothing(serve: Serve, visit: Open) -> None:
    advice = {"action": HOSTILE, "typed": HOSTILE, "saving_bytes": None, "cost": HOSTILE, "risks": None}
    finding = {"rule": HOSTILE, "severity": "warning", "summary": HOSTILE, "evidence": [HOSTILE], "bytes": 1}
    findings = [{**finding, "where": HOSTILE, "advice": [advice]}]
    feed = trace_feed(a_trace(name=HOSTILE, module=HOSTILE), findings=lambda sample: findings)
    page = visit(serve(feed))
    page.wait_for_selector("#sites-rows tr")
    page.click("#findings-list summary")
    assert HOSTILE in text(page, "#sites-rows") and HOSTILE in text(page, "#findings-list")
    page.locator("#timeline-plot .u-over").hover()
    live = live_feed(FakeSource(Sample(
        time_seconds=1.0, devices=(a_gpu(),), allocators=(a_rank(job=HOSTILE, world_size=1),),
        notes=(HOSTILE,),
    )))  # fmt: skip
    other = visit(serve(live))
    assert HOSTILE in text(other, "#ranks-rows") and HOSTILE in text(other, "#notes")
    for one in (page, other):
        assert one.evaluate("window.hacked") is None
        assert one.locator("img").count() == 1 and one.locator("script").count() == 3


def test_a_million_events_zoom_and_scroll(serve: Serve, visit: Open) -> None:
    trace, peak = a_long_trace(1_000_000)
    page = visit(serve(trace_feed(trace)))
    page.wait_for_selector("#timeline-plot canvas")
    assert text(page, "#timeline-range") == "events 0 to 999,999 of 1,000,000"
    assert drawn(page) > 3
    box = page.locator("#timeline-plot .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * peak / 1e6, box["y"] + 60)
    for _ in range(30):
        page.mouse.wheel(0, -100)
    page.wait_for_function("() => !document.querySelector('#timeline-range').innerText.includes('999,999')")

    def stretch() -> tuple[int, int]:
        begin, end = re.findall(r"[\d,]+", text(page, "#timeline-range"))[:2]
        return int(begin.replace(",", "")), int(end.replace(",", ""))

    page.wait_for_function(
        "() => { const [a, b] = document.querySelector('#timeline-range').innerText.match(/[\\d,]+/g)"
        ".map(t => +t.replaceAll(',', '')); return b - a < 5000 }"
    )
    before = stretch()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "old => +document.querySelector('#timeline-range').innerText"
        ".match(/[\\d,]+/)[0].replaceAll(',', '') > old",
        arg=before[0],
    )
    assert stretch()[1] - stretch()[0] < 5000 and drawn(page) > 3
    page.keyboard.press("p")
    page.wait_for_function(
        "peak => { const [a, b] = document.querySelector('#timeline-range').innerText.match(/[\\d,]+/g)"
        ".map(t => +t.replaceAll(',', '')); return a <= peak && peak <= b && b - a < 10000 }",
        arg=peak,
    )
    assert f"after event {peak:,}, the peak" in text(page, "#sites-note")
    assert "900.00 MiB" in text(page, "#sites-rows")


def test_without_a_gpu_and_with_a_token(serve: Serve, browser: Any) -> None:
    """No device at all: the page says why, and shows what there is. The token leaves the address at once."""
    served = serve(
        live_feed(FakeSource(Sample(time_seconds=1.0, notes=("no NVIDIA driver here (x)",)))), token="t" * 20
    )
    context = browser.new_context()
    page = context.new_page()
    assert page.goto(served.url).status == 401 and "has the token" in text(page, "body")
    page.goto(served.first_url)
    page.wait_for_selector("#notes li")
    assert page.url == served.url and "no NVIDIA driver here" in text(page, "#notes")
    assert not page.is_visible("#timeline") and page.is_visible("#alerts")
    assert page.evaluate("document.cookie") == ""
    context.close()
