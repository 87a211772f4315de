"""The report of a fit as one HTML page that needs nothing else: no server, no network, no second file."""

from __future__ import annotations

from memfit.core.units import format_bytes, format_seconds
from memfit.reports import svg, verdict
from memfit.reports.elements import gpu_name, section, steps_shown, swatch
from memfit.reports.markup import Markup, script_json, tag
from memfit.reports.page import page, paint_css, script
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS
from memfit.reports.report import FitReport
from memfit.reports.sections import SECTIONS
from memfit.reports.series import StepSeries


def fit_page(report: FitReport) -> str:
    """The page, as text to write to a file. It opens from disk, in light and dark, also on a phone."""
    title = f"{report.result.workload} on {gpu_name(report)}"
    parts = (_head, _timelines, *SECTIONS)
    main = tag("main", (part(report) for part in parts))
    return page(title, main, _data(report), script(), css=paint_css())


def _head(report: FitReport) -> Markup:
    result = report.result
    reason = f" ({result.engine_reason})" if result.engine_reason else ""
    engine = "a dry run on a made-up GPU" if result.engine == "dryrun" else f"the portable engine{reason}"
    torch = f" with PyTorch {result.torch}" if result.torch else ""
    limit = f"within {format_bytes(result.budget_bytes)} of reserved memory"
    subtitle = f"for {gpu_name(report)}, {limit}; measured by {engine}{torch}"
    statements = [
        tag("li", statement.text, class_={True: "good", False: "bad", None: "neither"}[statement.good])
        for statement in (*verdict.verdicts(result, allow=report.allow), verdict.verification(result))
    ]
    return tag(
        "header",
        tag("h1", result.workload),
        tag("p", subtitle, class_="muted"),
        tag("ul", statements, class_="verdicts"),
        _tiles(report),
    )


def _tiles(report: FitReport) -> Markup:
    result = report.result
    tiles = [("Plain step reserves", format_bytes(result.plain.peak_reserved_bytes), "at its peak")]
    if report.changes_something and result.planned is not None:
        change = 100 * (result.planned.peak_reserved_bytes / max(result.plain.peak_reserved_bytes, 1) - 1)
        tiles.append(
            (
                "Planned step reserves",
                format_bytes(result.planned.peak_reserved_bytes),
                verdict.signed_percent(change),
            )
        )
    tiles.append(("Budget", format_bytes(result.budget_bytes), "of reserved memory"))
    time = verdict.time_change_percent(result)
    if report.changes_something and result.planned is not None and time is not None:
        seconds = f"{format_seconds(result.planned.step_seconds)} a step, predicted"
        tiles.append(("Time", verdict.signed_percent(time), seconds))
    if result.planned is None and result.least_budget_bytes is not None:
        tiles.append(
            ("Least budget that would do", format_bytes(result.least_budget_bytes), "of what was tried")
        )
    return tag(
        "dl",
        (tag("div", tag("dt", a), tag("dd", b, tag("small", c)), class_="tile") for a, b, c in tiles),
        class_="tiles",
    )


def _shown_series(report: FitReport) -> list[tuple[str, StepSeries]]:
    both = (
        ("plain", report.plain_series),
        ("planned", report.planned_series if report.changes_something else None),
    )
    return [(name, series) for name, series in both if series is not None]


def _timelines(report: FitReport) -> Markup | None:
    shown = _shown_series(report)
    if not shown:
        return None
    top = _top_bytes(report)
    charts = [_timeline(name, series, top, report) for name, series in shown]
    keys = [key for key in CATEGORY_PAINTS if any(key in series.by_category for _, series in shown)]
    buttons = [
        tag("button", swatch(key), PAINTS[key].label, type="button", data_toggle=key, aria_pressed="true")
        for key in keys
    ]
    reset = tag("button", "Whole step", type="button", id="reset")
    note = (
        "Both charts have one scale. Point at a chart for the numbers at an event, drag to look closer, "
        f"choose a category to hide it.{_reserved_note(report)}"
    )
    return section(
        "Memory over one step",
        "over-time",
        tag("p", note, class_="muted"),
        tag("div", buttons, reset, class_="legend only-js", role="group", aria_label="Categories shown"),
        tag("div", charts, class_="charts"),
    )


def _reserved_note(report: FitReport) -> str:
    """What the charts show of the budget's subject, and how far they fall short of the measured peak."""
    shown = _shown_series(report)
    if any(series.reserved is not None for _, series in shown):
        return " The grey line is what PyTorch has reserved; the budget bounds it."
    figures = dict(steps_shown(report))
    missing = max(figures[name].peak_requested_bytes - series.peak_bytes for name, series in shown)
    text = " They show tensors as requested; the budget bounds what PyTorch reserves for them, which is more"
    return f"{text}, and {format_bytes(missing)} of library workspaces." if missing > 0 else f"{text}."


def _top_bytes(report: FitReport) -> int:
    highest = max(
        max(series.peak_bytes, 0 if series.reserved is None else int(series.reserved.max()))
        for _, series in _shown_series(report)
    )
    budget = report.result.budget_bytes
    return int(1.08 * max(highest, budget if budget < 2 * highest else 0, 1))


def _timeline(name: str, series: StepSeries, top: int, report: FitReport) -> Markup:
    label = (
        f"{name.capitalize()} step: live memory by category over {series.event_count} allocation events; "
        f"the peak is {format_bytes(series.peak_bytes)}"
    )
    budget = report.result.budget_bytes
    chart = svg.timeline(series, top_bytes=top, budget_bytes=budget, label=label, identifier=f"chart-{name}")
    return tag("figure", tag("figcaption", f"{name.capitalize()} step"), chart)


def _data(report: FitReport) -> Markup:
    """What the script needs: the points of both charts and the names of the categories."""
    charts = {
        f"chart-{name}": {
            "count": series.event_count,
            "top": _top_bytes(report),
            "events": series.events.tolist(),
            "bytes": {key: values.tolist() for key, values in series.by_category.items()},
            "reserved": None if series.reserved is None else series.reserved.tolist(),
            "phases": [[span.phase, span.first, span.last] for span in series.phases],
        }
        for name, series in _shown_series(report)
    }
    return script_json(
        "data", {"charts": charts, "labels": {key: paint.label for key, paint in PAINTS.items()}}
    )
