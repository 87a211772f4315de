"""Analyses as one HTML page that needs nothing else: each with its sentences, figure and tables."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from memfit.analysis.analyses import Analysed
from memfit.analysis.results import Result, Table
from memfit.core.units import format_bytes
from memfit.reports import svg
from memfit.reports.elements import number_row, number_table, section, swatch
from memfit.reports.figures import STYLE
from memfit.reports.markup import Markup, script_json, tag
from memfit.reports.page import FIGURE_CSS, page, paint_css, script
from memfit.reports.palette import PAINTS
from memfit.reports.series import StepSeries

CHART = "chart-analysis"
DOTS_PER_INCH = 160


def analysis_page(analysed: Analysed) -> str:
    """The page, as text to write to a file."""
    name = analysed.subject.name or "a job"
    trace = analysed.subject.trace
    series = None if trace is None else StepSeries.of(trace)
    sections = [_over_time(series), *(_section(key, result) for key, result in analysed.results.items())]
    main = tag("main", _head(analysed, name), sections, _skipped(analysed))
    return page(f"analysis of {name}", main, _data(series), script(), css=paint_css() + FIGURE_CSS)


def _head(analysed: Analysed, name: str) -> Markup:
    gpu = analysed.subject.gpu
    subtitle = f"read from {', '.join(analysed.subject.kinds())}" + (f", for {gpu.name}" if gpu else "")
    first = (next(iter(result.sentences()), None) for result in analysed.results.values())
    points = (tag("li", sentence, class_="neither") for sentence in first if sentence)
    return tag(
        "header", tag("h1", name), tag("p", subtitle, class_="muted"), tag("ul", points, class_="verdicts")
    )


def _over_time(series: StepSeries | None) -> Markup | None:
    if series is None or series.event_count < 2:
        return None
    label = (
        f"Live memory by category over {series.event_count} events; the peak is "
        f"{format_bytes(series.peak_bytes)}"
    )
    chart = svg.timeline(series, top_bytes=_top(series), budget_bytes=None, label=label, identifier=CHART)
    buttons = [
        tag("button", swatch(key), PAINTS[key].label, type="button", data_toggle=key, aria_pressed="true")
        for key in series.by_category
    ]
    reset = tag("button", "All events", type="button", id="reset")
    return section(
        "Memory over the last step",
        "over-time",
        tag("div", buttons, reset, class_="legend only-js", role="group", aria_label="Categories shown"),
        tag("figure", chart),
    )


def _top(series: StepSeries) -> int:
    return int(1.08 * max(series.peak_bytes, 1))


def _section(key: str, result: Result) -> Markup:
    sentences = tag("ul", (tag("li", sentence) for sentence in result.sentences()))
    tables = (_table(table) for table in result.tables() if table.rows)
    return section(result.title, f"analysis-{key}", sentences, _figure(result), tables)


def _figure(result: Result) -> Markup | None:
    """The analysis's own picture, inside the page."""
    import matplotlib as mpl

    style: Any = dict(STYLE)
    with mpl.rc_context(style):
        figure = result.figure()
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(
            buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None}
        )
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return tag("figure", tag("img", src=f"data:image/png;base64,{data}", alt=f"{result.title}: figure"))


def _table(table: Table) -> Markup:
    rows = (number_row(row, table.columns) for row in table.rows)
    return number_table(table.title, list(table.columns), rows)


def _skipped(analysed: Analysed) -> Markup | None:
    if not analysed.skipped:
        return None
    points = (tag("li", f"{name}: {why}") for name, why in analysed.skipped.items())
    return section("Not analysed", "skipped", tag("ul", points))


def _data(series: StepSeries | None) -> Markup:
    charts: Mapping[str, Any] = {} if series is None else {CHART: _chart(series)}
    labels = {key: paint.label for key, paint in PAINTS.items()}
    return script_json("data", {"charts": charts, "labels": labels})


def _chart(series: StepSeries) -> dict[str, Any]:
    return {
        "count": series.event_count,
        "top": _top(series),
        "events": series.events.tolist(),
        "bytes": {key: values.tolist() for key, values in series.by_category.items()},
        "reserved": None if series.reserved is None else series.reserved.tolist(),
        "phases": [[span.phase, span.first, span.last] for span in series.phases],
    }
