"""The report of a fit as one HTML page that needs nothing else: no server, no network, no second file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from memfit.core.units import format_bytes, format_seconds
from memfit.planning.figures import Candidate, StepFigures
from memfit.reports import svg, verdict
from memfit.reports.account import Account
from memfit.reports.markup import Content, Markup, join, script_json, tag
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS, in_order
from memfit.reports.report import FitReport
from memfit.reports.series import StepSeries
from memfit.reports.text import PEAKS
from memfit.reports.words import EXACTNESS_WORDS, plan_rows

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MOST_CANDIDATES = 60


def fit_page(report: FitReport) -> str:
    """The page, as text to write to a file. It opens from disk, in light and dark, on a screen and on a phone."""
    title = f"{report.result.workload} on {_gpu_name(report)}"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"memfit: {title}"),
        tag("style", Markup(_static("page.css") + _paint_css())),
    ]
    sections = (_head, _timelines, _composition, _account, _plan, _cost, _tried, _verified, _mind, _again)
    body = [
        tag("main", (section(report) for section in sections)),
        _data(report),
        tag("script", Markup(_static("page.js"))),
    ]
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _static(name: str) -> str:
    return files("memfit.reports").joinpath("static", name).read_text(encoding="utf-8")


def _paint_css() -> str:
    """A class per category and kind of account row, in the colours of both schemes."""
    light = "".join(f".fill-{key}{{color:{paint.light}}}" for key, paint in PAINTS.items())
    dark = "".join(f".fill-{key}{{color:{paint.dark}}}" for key, paint in PAINTS.items())
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _gpu_name(report: FitReport) -> str:
    return report.result.gpu if report.gpu is None else report.gpu.name


def _section(title: str, identifier: str, *content: Content) -> Markup:
    return tag("section", tag("h2", title, id=identifier), *content, aria_labelledby=identifier)


def _head(report: FitReport) -> Markup:
    result = report.result
    engine = (
        "a dry run on a made-up GPU"
        if result.engine == "dryrun"
        else f"the portable engine ({result.engine_reason})"
    )
    torch = f" with PyTorch {result.torch}" if result.torch else ""
    subtitle = f"for {_gpu_name(report)}, within {format_bytes(result.budget_bytes)} of reserved memory; measured by {engine}{torch}"
    statements = [
        tag("li", statement.text, class_={True: "good", False: "bad", None: "neither"}[statement.good])
        for statement in (*verdict.verdicts(result), verdict.verification(result))
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


def _steps(report: FitReport) -> list[tuple[str, StepFigures]]:
    """The steps to show side by side: the plain one, and the planned one where it differs."""
    steps = [("plain", report.result.plain)]
    if report.changes_something and report.result.planned is not None:
        steps.append(("planned", report.result.planned))
    return steps


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
        tag("button", _swatch(key), PAINTS[key].label, type="button", data_toggle=key, aria_pressed="true")
        for key in keys
    ]
    reset = tag("button", "Whole step", type="button", id="reset")
    note = (
        "Both charts have one scale. Point at a chart for the numbers at an event, drag to look closer, "
        "choose a category to hide it. The grey line is what PyTorch has reserved; the budget bounds that line."
    )
    return _section(
        "Memory over one step",
        "over-time",
        tag("p", note, class_="muted"),
        tag("div", buttons, reset, class_="legend only-js", role="group", aria_label="Categories shown"),
        tag("div", charts, class_="charts"),
    )


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


def _swatch(key: str) -> Markup:
    return tag("span", class_=f"swatch fill-{key}", aria_hidden="true")


def _table(caption: str, heads: Sequence[tuple[str, bool]], rows: Iterable[Markup]) -> Markup:
    """A table that scrolls by itself where the screen is narrow; each head says whether its column holds numbers."""
    cells = [tag("th", text, scope="col", class_="number" if number else None) for text, number in heads]
    table = tag("table", tag("caption", caption), tag("thead", tag("tr", cells)), tag("tbody", rows))
    return tag("div", table, class_="scroll")


def _number(text: str) -> Markup:
    return tag("td", text, class_="number")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _composition(report: FitReport) -> Markup:
    steps = _steps(report)
    sizes = [_complete(figures) for _, figures in steps]
    largest = max((size for by_category in sizes for size in by_category.values()), default=1)
    rows = []
    for key in (key for key in CATEGORY_PAINTS if any(key in by_category for by_category in sizes)):
        bars = [
            tag("span", class_=f"bar fill-{key}{' faint' if place == 0 and len(sizes) > 1 else ''}",
                style=f"width:{100 * by_category.get(key, 0) / largest:.2f}%")
            for place, by_category in enumerate(sizes)
        ]  # fmt: skip
        numbers = [
            join(
                [
                    _number(format_bytes(by_category.get(key, 0))),
                    _number(_percent(by_category.get(key, 0), figures.peak_requested_bytes)),
                ]
            )
            for by_category, (_, figures) in zip(sizes, steps, strict=True)
        ]
        rows.append(
            tag(
                "tr",
                tag("th", _swatch(key), PAINTS[key].label, scope="row"),
                numbers,
                tag("td", bars, class_="bars", aria_hidden="true"),
            )
        )
    totals = [
        join([_number(format_bytes(figures.peak_requested_bytes)), _number("100.0 %")])
        for _, figures in steps
    ]
    rows.append(tag("tr", tag("th", "Requested peak", scope="row"), totals, tag("td"), class_="sum"))
    heads = [
        ("category", False),
        *((text, True) for name, _ in steps for text in (name, "share")),
        ("", False),
    ]
    return _section(
        "What is alive at the peak",
        "composition",
        _table("Requested bytes when they are at their highest", heads, rows),
    )


def _complete(figures: StepFigures) -> dict[str, int]:
    """The categories at the peak, and what has no category as ``other``, so that they add up to it."""
    sizes = in_order(figures.peak_by_category)
    unnamed = figures.peak_requested_bytes - sum(sizes.values())
    if unnamed > 0:
        sizes["other"] = sizes.get("other", 0) + unnamed
    return sizes


def _account(report: FitReport) -> Markup:
    accounts = [(name, report.account(figures)) for name, figures in _steps(report)]
    scale = max(*(account.total_bytes for _, account in accounts), report.capacity_bytes or 0)
    bars = [
        join(
            [
                tag("figcaption", f"{name.capitalize()} step: {format_bytes(account.total_bytes)}"),
                _stack(account, scale),
            ]
        )
        for name, account in accounts
    ]
    keys = [
        key
        for key in ("context", "libraries", *CATEGORY_PAINTS, "rounding", "cached")
        if any(_size(a, key) for _, a in accounts)
    ]
    rows = [
        tag(
            "tr",
            tag("th", _swatch(key), PAINTS[key].label, scope="row"),
            (_number(format_bytes(_size(a, key))) for _, a in accounts),
        )
        for key in keys
    ]
    rows.append(
        tag(
            "tr",
            tag("th", "Device total", scope="row"),
            (_number(format_bytes(a.total_bytes)) for _, a in accounts),
            class_="sum",
        )
    )
    if report.capacity_bytes is not None:
        rows.append(
            tag(
                "tr",
                tag("th", f"{_gpu_name(report)} has", scope="row"),
                (_number(format_bytes(report.capacity_bytes)) for _ in accounts),
            )
        )
    note = "The parts add up to what nvidia-smi would show for this process at its highest."
    heads = [("part", False), *((name, True) for name, _ in accounts)]
    table = _table("Device memory, part by part", heads, rows)
    return _section(
        "The account of the GPU's memory",
        "account",
        tag("p", note, class_="muted"),
        tag("figure", bars),
        table,
    )


def _size(account: Account, key: str) -> int:
    return sum(row.size_bytes for row in account.rows if row.key == key)


def _stack(account: Account, scale: int) -> Markup:
    parts = [
        tag(
            "span",
            class_=f"fill-{row.key}",
            style=f"width:{100 * row.size_bytes / scale:.3f}%",
            title=f"{row.label}: {format_bytes(row.size_bytes)}",
        )
        for row in account.rows
    ]
    label = ", ".join(f"{row.label} {format_bytes(row.size_bytes)}" for row in account.rows)
    return tag("div", parts, class_="stack", role="img", aria_label=label)


def _plan(report: FitReport) -> Markup | None:
    if not report.changes_something:
        return None
    rows = [
        tag("tr", tag("th", row.where, scope="row"), tag("td", row.keeps), tag("td", row.recomputes or "–"))
        for row in plan_rows(report.result.techniques)
    ]
    heads = [
        ("where", False),
        ("kept in memory between forward and backward", False),
        ("computed again", False),
    ]
    exactness = f"{report.result.exactness.capitalize()}: {EXACTNESS_WORDS[report.result.exactness]}."
    lines = verdict.apply_lines(report.result, report.plan_path or "plan.json")
    saved = (
        "In your training script:"
        if report.plan_path
        else "Save the plan with --plan plan.json; then, in your training script:"
    )
    code = [tag("p", saved), tag("pre", tag("code", "\n".join(["import memfit", "", *lines])))]
    return _section("The plan", "plan", tag("p", exactness), _table("What changes", heads, rows), code)


def _cost(report: FitReport) -> Markup | None:
    result = report.result
    if not report.changes_something or result.planned is None:
        return None
    rows = []
    for label, name in PEAKS:
        plain, planned = (int(getattr(figures, name)) for figures in (result.plain, result.planned))
        change = verdict.signed_percent(100 * (planned / plain - 1)) if plain else ""
        rows.append(_cost_row(label.capitalize(), format_bytes(plain), format_bytes(planned), change))
    times = [format_seconds(figures.step_seconds) for figures in (result.plain, result.planned)]
    rows.append(
        _cost_row(
            "Step time, predicted", *times, verdict.signed_percent(verdict.time_change_percent(result) or 0.0)
        )
    )
    heads = [("", False), ("plain", True), ("planned", True), ("change", True)]
    note = "Peaks are measured; times are predicted from the GPU's rates, operator by operator."
    return _section("What it costs", "cost", tag("p", verdict.cost(result)), _table(note, heads, rows))


def _cost_row(label: str, *numbers: str) -> Markup:
    return tag("tr", tag("th", label, scope="row"), (_number(text) for text in numbers))


def _tried(report: FitReport) -> Markup | None:
    chart = svg.front(report)
    if chart is None:
        return None
    candidates = sorted(report.result.candidates, key=lambda candidate: candidate.figures.peak_reserved_bytes)
    rows = [_candidate_row(candidate, report) for candidate in candidates[:MOST_CANDIDATES]]
    left_out = len(candidates) - len(rows)
    caption = "By reserved memory" + (f"; the {left_out} largest are left out here" if left_out else "")
    heads = [
        ("way of training", False),
        ("reserved", True),
        ("requested", True),
        ("step time", True),
        ("recompute", True),
        ("fits", False),
    ]
    table = tag(
        "details", tag("summary", f"The numbers ({len(candidates)} rows)"), _table(caption, heads, rows)
    )
    text = f"{report.result.evaluations} ways of training were run on the instrument; each point is one that was kept."
    if report.result.best_named:
        text += f" The best schedule with a name that fits is {report.result.best_named}."
    return _section("What was tried", "tried", tag("p", text, class_="muted"), tag("figure", chart), table)


def _candidate_row(candidate: Candidate, report: FitReport) -> Markup:
    figures = candidate.figures
    numbers = (
        format_bytes(figures.peak_reserved_bytes),
        format_bytes(figures.peak_requested_bytes),
        format_seconds(figures.step_seconds),
        f"{candidate.recompute_percent:.1f} %",
    )
    fits = {True: "yes", False: "no", None: "not decided"}[candidate.fits]
    chosen = (
        "chosen" if report.result.planned is not None and candidate.name == report.result.plan_name else None
    )
    return tag(
        "tr",
        tag("th", candidate.name, scope="row"),
        (_number(text) for text in numbers),
        tag("td", fits),
        class_=chosen,
    )


def _verified(report: FitReport) -> Markup | None:
    verified = report.result.verified
    if not report.changes_something:
        return None
    rows: list[tuple[str, Any]] = []
    if verified is not None:
        rows = [("device", verified.device), ("scale", verified.scale or "full size"), ("optimizer steps", verified.steps),
                ("bitwise equal", "yes" if verified.bitwise else "no"), ("took", format_seconds(verified.wall_seconds))]  # fmt: skip
    cells = [tag("tr", tag("th", name, scope="row"), tag("td", str(value))) for name, value in rows]
    table = (
        _table("How it was run", [("", False), ("", False)], cells)
        if cells and verified and verified.passed is not None
        else None
    )
    return _section(
        "Verified on real values", "verified", tag("p", verdict.verification(report.result).text), table
    )


def _mind(report: FitReport) -> Markup | None:
    result = report.result
    lines = [
        *result.notes,
        *(f"Not modelled: {text}" for text in result.not_modelled),
        *(_read_text(read) for read in result.value_reads),
    ]
    if not lines:
        return None
    return _section("What to mind", "mind", tag("ul", (tag("li", line) for line in lines)))


def _read_text(read: Any) -> str:
    """A read of a device value that the dry run does not know: where, and what was answered."""
    if not isinstance(read, dict):
        return f"A value was read from the device: {read}"
    return f"A value was read from the device at {read.get('file')}:{read.get('line')} ({read.get('op')}); answered {read.get('answer')}"


def _again(report: FitReport) -> Markup:
    seconds = f"Planning took {format_seconds(report.result.planning_seconds)} of {format_seconds(report.result.wall_seconds)}."
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    command = tag("pre", tag("code", report.command)) if report.command else None
    return _section("Make this again", "again", command, tag("p", f"{seconds} {versions}", class_="muted"))
