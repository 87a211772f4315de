from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from memfit.core.units import format_bytes
from memfit.planning.figures import Advice
from memfit.reports.html import fit_page
from memfit.reports.markup import Markup, script_json, tag
from memfit.reports.series import StepSeries
from memfit.reports.verdict import next_steps

from .conftest import make_trace

EVIL = "<script>alert(1)</script>\"'&"
VOID = {"meta", "br", "input", "col", "hr"}


class Outline(HTMLParser):
    """Elements, text and ids of a page; complains about tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_needs_nothing_from_outside(fitted):
    page = fit_page(fitted)
    assert not re.search(r"https?://", page)
    assert not re.search(r"@import|src=|url\((?!#)", page)
    assert "default-src &#x27;none&#x27;" in page


def test_the_page_is_well_formed_and_its_ids_are_unique(fitted, unfitted):
    for report in (fitted, unfitted):
        found = outline(fit_page(report))
        assert len(found.ids) == len(set(found.ids))
        assert found.counts["h1"] == 1
        assert found.counts["script"] == 2


def test_the_numbers_of_the_charts_are_in_tables(fitted):
    text = " ".join(outline(fit_page(fitted)).text)
    for figures in (fitted.result.plain, fitted.result.planned):
        for size in (
            figures.peak_reserved_bytes,
            figures.peak_requested_bytes,
            *figures.peak_by_category.values(),
        ):
            assert format_bytes(size) in text
        assert format_bytes(fitted.account(figures).total_bytes) in text


def test_charts_say_what_they_show(fitted):
    page = fit_page(fitted)
    charts = re.findall(r"<svg[^>]*>", page)
    assert len(charts) == 3
    assert all('role="img"' in chart and "aria-label=" in chart for chart in charts)


def test_text_of_the_user_cannot_break_out(fitted):
    techniques = ({"technique": "gradient_checkpointing", "blocks": {EVIL: [EVIL]}}, {"technique": EVIL})
    candidates = tuple(replace(candidate, name=EVIL) for candidate in fitted.result.candidates)
    result = replace(
        fitted.result, workload=EVIL, techniques=techniques, candidates=candidates,
        not_modelled=(EVIL,), notes=(EVIL,),
        engine="portable", engine_reason=EVIL, torch=EVIL, best_named=EVIL, plan_name=EVIL,
        value_reads=({"file": EVIL},),
    )  # fmt: skip
    page = fit_page(replace(fitted, result=result, command=EVIL, plan_path=EVIL, versions={EVIL: EVIL}))
    assert "<script>alert" not in page
    found = outline(page)
    assert found.counts["script"] == 2
    assert "".join(found.text).count("<script>alert(1)</script>") > 8


def test_data_cannot_close_its_element():
    assert "</script><b>" not in script_json("data", {"a": "</script><b>"})
    assert tag("p", "<b>", Markup("<i>x</i>"), None, title='"') == '<p title="&quot;">&lt;b&gt;<i>x</i></p>'


def test_a_long_trace_stays_small_and_keeps_its_peak(fitted):
    builder_trace = make_trace(recompute=True, steps=1)
    series = StepSeries.of(builder_trace)
    many = 200_000
    rng = np.random.default_rng(0)
    by_category = {name: rng.integers(0, 2**34, many) for name in series.by_category}
    total = sum(by_category.values())
    long = StepSeries.of(builder_trace, points=50)
    page = fit_page(replace(fitted, plain_series=long))
    assert (
        max(map(sum, zip(*data_of(page)["charts"]["chart-plain"]["bytes"].values(), strict=True)))
        == series.peak_bytes
    )
    assert total.shape == (many,)
    assert len(page) < 1_500_000


def test_without_traces_there_are_no_charts_over_time(fitted):
    page = fit_page(replace(fitted, plain_series=None, planned_series=None))
    assert data_of(page)["charts"] == {}
    assert "Memory over one step" not in page


def test_no_plan_says_the_least_budget(unfitted):
    text = " ".join(outline(fit_page(unfitted)).text)
    assert "2.54 GiB" in text
    assert "Use it" not in text


def test_advice_is_on_the_page_in_the_words_of_the_text(fitted, unfitted):
    measured = (
        Advice(what="weights <in> bf16", exactness="approximate", techniques=(),
               peak_reserved_bytes=1500 * 2**20, fits=False),
        Advice(what="adapters (LoRA, rank 8)", exactness="changes training", techniques=(),
               peak_reserved_bytes=900 * 2**20, fits=True),
    )  # fmt: skip
    advised = replace(unfitted, result=replace(unfitted.result, advice=measured))
    page = fit_page(advised)
    text = "".join(outline(page).text)
    steps = next_steps(advised.result, allow=advised.allow)
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert "adapters (LoRA, rank 8) (changes training), with every block recomputed, reserves 900" in text
    assert "<in>" not in page
    assert "What would help" in text
    assert "What would help" not in fit_page(fitted)


PROBE = """<script>
const svg = document.getElementById("chart-plain");
const paths = () => [...svg.querySelectorAll(".areas path")].map((path) => path.getAttribute("d")).join();
const [button, sent] = [document.querySelector("[data-toggle=activation]"), paths()];
button.click();
const hidden = paths();
button.click();
const box = svg.getBoundingClientRect();
const place = { clientX: box.left + box.width * 0.4, clientY: box.top + 50, pointerType: "mouse" };
svg.dispatchEvent(new PointerEvent("pointermove", place));
const tip = document.querySelector(".tip").innerText;
document.title = "PROBE " + JSON.stringify([sent !== hidden, sent === paths(), tip]);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_script_runs_in_a_browser(fitted, tmp_path):
    """Hiding a category redraws, showing it again gives the drawing that was sent, a hover tells."""
    page = tmp_path / "r.html"
    page.write_text(fit_page(fitted).replace("</body>", PROBE), encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        profile,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    redrawn, restored, tip = json.loads(re.search(r"<title>PROBE (.*?)</title>", done.stdout)[1])
    assert redrawn and restored
    assert "backward" in tip and "Activations\t3.75 GiB" in tip
