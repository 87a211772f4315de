"""The sections of the page that are tables and lists: composition, account, what would help, plan, cost,
candidates, verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.core.units import format_bytes, format_seconds
from memfit.planning.figures import Candidate, StepFigures
from memfit.reports import svg, verdict
from memfit.reports.account import Account
from memfit.reports.elements import gpu_name, number, number_table, percent, section, steps_shown, swatch
from memfit.reports.markup import Markup, join, tag
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS, in_order
from memfit.reports.report import FitReport
from memfit.reports.text import PEAKS
from memfit.reports.words import EXACTNESS_WORDS, ORDINALS, mentions_ordinals, plan_rows

MOST_CANDIDATES = 60


def composition(report: FitReport) -> Markup:
    """What is alive at the peak, plain beside planned."""
    steps = steps_shown(report)
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
                    number(format_bytes(by_category.get(key, 0))),
                    number(percent(by_category.get(key, 0), figures.peak_requested_bytes)),
                ]
            )
            for by_category, (_, figures) in zip(sizes, steps, strict=True)
        ]
        rows.append(
            tag(
                "tr",
                tag("th", swatch(key), PAINTS[key].label, scope="row"),
                numbers,
                tag("td", bars, class_="bars", aria_hidden="true"),
            )
        )
    totals = [
        join([number(format_bytes(figures.peak_requested_bytes)), number("100.0 %")]) for _, figures in steps
    ]
    rows.append(tag("tr", tag("th", "Requested peak", scope="row"), totals, tag("td"), class_="sum"))
    heads = [
        ("category", False),
        *((text, True) for name, _ in steps for text in (name, "share")),
        ("", False),
    ]
    return section(
        "What is alive at the peak",
        "composition",
        number_table("Requested bytes when they are at their highest", heads, rows),
    )


def _complete(figures: StepFigures) -> dict[str, int]:
    """The categories at the peak, and what has no category as ``other``, so that they add up to it."""
    sizes = in_order(figures.peak_by_category)
    unnamed = figures.peak_requested_bytes - sum(sizes.values())
    if unnamed > 0:
        sizes["other"] = sizes.get("other", 0) + unnamed
    return sizes


def account(report: FitReport) -> Markup:
    """The device's memory, part by part, as bars and as a table."""
    accounts = [(name, report.account(figures)) for name, figures in steps_shown(report)]
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
            tag("th", swatch(key), PAINTS[key].label, scope="row"),
            (number(format_bytes(_size(a, key))) for _, a in accounts),
        )
        for key in keys
    ]
    rows.append(
        tag(
            "tr",
            tag("th", "Device total", scope="row"),
            (number(format_bytes(a.total_bytes)) for _, a in accounts),
            class_="sum",
        )
    )
    if report.capacity_bytes is not None:
        rows.append(
            tag(
                "tr",
                tag("th", f"{gpu_name(report)} has", scope="row"),
                (number(format_bytes(report.capacity_bytes)) for _ in accounts),
            )
        )
    note = "The parts add up to what nvidia-smi would show for this process at its highest."
    heads = [("part", False), *((name, True) for name, _ in accounts)]
    table = number_table("Device memory, part by part", heads, rows)
    return section(
        "The account of the GPU's memory",
        "account",
        tag("p", note, class_="muted"),
        tag("figure", bars),
        table,
    )


def _size(account: Account, key: str) -> int:
    return sum(row.size_bytes for row in account.rows if row.key == key)


def _stack(account: Account, scale: int) -> Markup:
    """The account as one bar, with a mark where the device ends."""
    parts = [
        tag(
            "span",
            class_=f"fill-{row.key}",
            style=f"width:{100 * row.size_bytes / scale:.3f}%",
            title=f"{row.label}: {format_bytes(row.size_bytes)}",
        )
        for row in account.rows
    ]
    end = account.capacity_bytes
    if end is not None and end < scale:
        title = f"the device ends here: {format_bytes(end)}"
        parts.append(tag("i", class_="end", style=f"left:{100 * end / scale:.3f}%", title=title))
    label = ", ".join(f"{row.label} {format_bytes(row.size_bytes)}" for row in account.rows)
    return tag("div", parts, class_="stack", role="img", aria_label=label)


def plan(report: FitReport) -> Markup | None:
    """What changes in which part of the model, and the lines that apply it; ``None`` without a plan."""
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
    if report.is_refuted:
        code = [tag("p", "Do not use it: it was not confirmed on real values, see below.")]
    caption = ORDINALS if mentions_ordinals(report.result.techniques) else "What changes"
    return section("The plan", "plan", tag("p", exactness), number_table(caption, heads, rows), code)


def cost(report: FitReport) -> Markup | None:
    """Peaks and times, plain beside planned; ``None`` without a plan."""
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
    if result.planned.host_bytes:
        rows.append(_cost_row("Host memory", "–", format_bytes(result.planned.host_bytes), ""))
    heads = [("", False), ("plain", True), ("planned", True), ("change", True)]
    note = "Peaks are measured; times are predicted from the GPU's rates, operator by operator."
    return section("What it costs", "cost", tag("p", verdict.cost(result)), number_table(note, heads, rows))


def _cost_row(label: str, *numbers: str) -> Markup:
    return tag("tr", tag("th", label, scope="row"), (number(text) for text in numbers))


def tried(report: FitReport) -> Markup | None:
    """The front of everything that was tried; ``None`` where nothing was kept."""
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
        "details", tag("summary", f"The numbers ({len(candidates)} rows)"), number_table(caption, heads, rows)
    )
    count = report.result.evaluations
    text = f"{count} ways of training were run on the instrument; each point is one that was kept."
    if report.result.best_named:
        text += f" The best schedule with a name that fits is {report.result.best_named}."
    return section("What was tried", "tried", tag("p", text, class_="muted"), tag("figure", chart), table)


def _candidate_row(candidate: Candidate, report: FitReport) -> Markup:
    figures, result = candidate.figures, report.result
    numbers = (
        format_bytes(figures.peak_reserved_bytes),
        format_bytes(figures.peak_requested_bytes),
        format_seconds(figures.step_seconds),
        f"{candidate.recompute_percent:.1f} %",
    )
    within = figures.peak_reserved_bytes <= result.budget_bytes
    quick = "within, measured quickly" if within else "over, measured quickly"
    fits = {True: "yes", False: "no", None: quick}[candidate.fits]
    chosen = "chosen" if result.planned is not None and candidate.techniques == result.techniques else None
    cells = [tag("th", candidate.name, scope="row"), *(number(text) for text in numbers), tag("td", fits)]
    return tag("tr", cells, class_=chosen)


def verified(report: FitReport) -> Markup | None:
    """What real steps showed; ``None`` where there was nothing to compare."""
    verified = report.result.verified
    if not report.changes_something:
        return None
    rows: list[tuple[str, Any]] = []
    if verified is not None:
        rows = [
            ("device", verified.device),
            ("scale", verified.scale or "full size"),
            ("optimizer steps", verified.steps),
            ("bitwise equal", "yes" if verified.bitwise else "no"),
            ("took", format_seconds(verified.wall_seconds)),
        ]
    cells = [tag("tr", tag("th", name, scope="row"), tag("td", str(value))) for name, value in rows]
    table = (
        number_table("How it was run", [("", False), ("", False)], cells)
        if cells and verified and verified.passed is not None
        else None
    )
    return section(
        "Verified on real values", "verified", tag("p", verdict.verification(report.result).text), table
    )


def helpful(report: FitReport) -> Markup | None:
    """What would help where no plan fits, in the words of the text, with what other trainings were measured
    to need; ``None`` with a plan."""
    if report.result.planned is not None:
        return None
    steps = verdict.next_steps(report.result, allow=report.allow)
    return section("What would help", "helpful", tag("ul", (tag("li", step) for step in steps)))


def mind(report: FitReport) -> Markup | None:
    """What limits the result; ``None`` where nothing does."""
    lines = verdict.to_mind(report.result)
    if not lines:
        return None
    return section("What to mind", "mind", tag("ul", (tag("li", line) for line in lines)))


def again(report: FitReport) -> Markup:
    """The command, the times and the versions behind the page."""
    planning, wall = report.result.planning_seconds, report.result.wall_seconds
    seconds = f"Planning took {format_seconds(planning)} of {format_seconds(wall)}."
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    command = tag("pre", tag("code", report.command)) if report.command else None
    return section("Make this again", "again", command, tag("p", f"{seconds} {versions}", class_="muted"))


SECTIONS: tuple[Callable[[FitReport], Markup | None], ...] = (
    composition,
    account,
    helpful,
    plan,
    cost,
    tried,
    verified,
    mind,
    again,
)
"""In the order in which the page has them; a section without anything to say is ``None``."""
