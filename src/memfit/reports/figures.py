"""Figures of a fit as PNG and SVG: memory over time, composition, account, and the front of candidates.

Drawn with matplotlib's objects only: no pyplot, no global state, no display.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from memfit.core.units import GIB, format_bytes, format_seconds
from memfit.reports.account import Account
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS, in_order
from memfit.reports.report import FitReport
from memfit.reports.series import StepSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
MUTED = "#616e7c"
GRID = "#e4e7eb"
BUDGET = "#111827"
PLAIN = "#7b8794"
PLANNED = "#0f766e"
DOTS_PER_INCH = 200
LABEL_BOX: dict[str, Any] = {
    "boxstyle": "round,pad=0.2",
    "facecolor": "white",
    "edgecolor": "none",
    "alpha": 0.85,
}

STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "memfit",
    "svg.fonttype": "none",
}


def timeline_figure(report: FitReport) -> Figure | None:
    """Memory over both steps by category, on one scale, with the budget; None without traces."""
    steps = [("Plain step", report.plain_series), ("Planned step", report.planned_series)]
    shown = [(title, series) for title, series in steps if series is not None]
    if not shown:
        return None
    highest = max(max(series.peak_bytes, _highest(series.reserved)) for _, series in shown)
    top = 1.08 * max(
        highest, report.result.budget_bytes if highest > report.result.budget_bytes / 3 else highest
    )
    figure = new_figure(width=9.6, height=3.9)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for one, (title, series) in zip(axes, shown, strict=True):
        _draw_step(one, title, series, report.result.budget_bytes)
        one.set_ylim(0, top / GIB)
    axes[0].set_ylabel("GiB")
    _share_legend(figure, axes)
    return figure


def _draw_step(axes: Axes, title: str, series: StepSeries, budget_bytes: int) -> None:
    names = list(series.by_category)
    layers = [series.by_category[name] / GIB for name in names]
    colours = [CATEGORY_PAINTS[name].light for name in names]
    labels = [CATEGORY_PAINTS[name].label for name in names]
    axes.stackplot(series.events, layers, labels=labels, colors=colours, alpha=0.82, linewidth=0, step="post")
    if series.reserved is not None:
        axes.step(
            series.events, series.reserved / GIB, where="post", color=MUTED, linewidth=1, label="Reserved"
        )
    axes.axhline(
        budget_bytes / GIB, color=BUDGET, linestyle=(0, (5, 3)), linewidth=1.3, label="Budget (reserved)"
    )
    _mark_peak(axes, series)
    _mark_phases(axes, series)
    axes.set_title(title, pad=16)
    axes.set_xlim(0, max(series.event_count - 1, 1))
    axes.set_xlabel("allocation events of the last step, in order")
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _mark_peak(axes: Axes, series: StepSeries) -> None:
    x, y = int(series.events[series.peak_point]), series.peak_bytes / GIB
    right = x > series.event_count / 2
    axes.plot([x], [y], marker="o", markersize=4, color=INK)
    axes.annotate(
        f"peak {format_bytes(series.peak_bytes)}",
        (x, y),
        xytext=(-6 if right else 6, 4),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
        bbox=LABEL_BOX,
        zorder=6,
    )


def _mark_phases(axes: Axes, series: StepSeries) -> None:
    """The name of each phase above its stretch, a hairline between; thin stretches stay unnamed."""
    for name, first, last in series.phase_labels():
        if first > 0:
            axes.axvline(first, color=INK, linewidth=0.5, alpha=0.35)
        if last - first > 0.1 * series.event_count:
            x, transform = (first + last) / 2, axes.get_xaxis_transform()
            axes.text(x, 1.01, name, transform=transform, ha="center", va="bottom", fontsize=8, color=MUTED)


def composition_figure(report: FitReport) -> Figure:
    """What is alive at the peak, category by category, plain over planned."""
    steps = [("plain", report.result.plain)]
    if report.changes_something and report.result.planned is not None:
        steps.append(("planned", report.result.planned))
    sizes = {label: in_order(figures.peak_by_category) for label, figures in steps}
    names = [name for name in CATEGORY_PAINTS if any(name in by_category for by_category in sizes.values())]
    figure = new_figure(width=7.6, height=0.8 + 0.55 * max(len(names), 1))
    axes = figure.subplots()
    height = 0.8 / len(steps)
    for place, (label, _) in enumerate(steps):
        for row, name in enumerate(names):
            size = sizes[label].get(name, 0)
            y = row + (place - (len(steps) - 1) / 2) * height
            paint = CATEGORY_PAINTS[name]
            axes.barh(
                y,
                size / GIB,
                height * 0.9,
                color=paint.light,
                alpha=0.45 if label == "plain" and len(steps) > 1 else 0.9,
            )
            axes.text(
                size / GIB, y, f"  {label} {format_bytes(size)}", va="center", fontsize=7.5, color=MUTED
            )
    axes.set_yticks(range(len(names)), [CATEGORY_PAINTS[name].label for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlabel("GiB of requested bytes, alive at the peak")
    axes.set_title("What is alive at the peak")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    return figure


def account_figure(report: FitReport) -> Figure:
    """The device's memory as one bar a step: context, libraries, categories, rounding, cache."""
    accounts: list[tuple[str, Account]] = [("plain", report.account(report.result.plain))]
    if report.changes_something and report.result.planned is not None:
        accounts.append(("planned", report.account(report.result.planned)))
    figure = new_figure(width=9.6, height=1.5 + 0.6 * len(accounts))
    axes = figure.subplots()
    seen: set[str] = set()
    for row, (_, account) in enumerate(accounts):
        left = 0.0
        for part in account.rows:
            width = part.size_bytes / GIB
            label = None if part.key in seen else part.label
            axes.barh(
                row,
                width,
                0.62,
                left=left,
                color=PAINTS[part.key].light,
                alpha=0.85,
                label=label,
                edgecolor="white",
            )
            seen.add(part.key)
            left += width
        axes.text(
            left, row, f"  {format_bytes(account.total_bytes)}", va="center", fontsize=8.5, fontweight="bold"
        )
    if report.capacity_bytes is not None:
        axes.axvline(
            report.capacity_bytes / GIB,
            color=BUDGET,
            linewidth=1.3,
            label=f"The GPU: {format_bytes(report.capacity_bytes)}",
        )
    axes.set_yticks(range(len(accounts)), [name for name, _ in accounts])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("GiB of the device, as nvidia-smi counts")
    axes.set_title("The account of the GPU's memory")
    _share_legend(figure, [axes])
    return figure


def front_figure(report: FitReport) -> Figure | None:
    """Everything that was tried: reserved memory against predicted time; None where nothing was kept."""
    result = report.result
    if not result.candidates:
        return None
    figure = new_figure(width=7.6, height=4.4)
    axes = figure.subplots()
    base = result.plain.step_seconds
    points = [
        (c, c.figures.peak_reserved_bytes / GIB, 100 * (c.figures.step_seconds / base - 1) if base else 0.0)
        for c in result.candidates
    ]
    for fits, colour, label in (
        (True, PLANNED, "fits the budget"),
        (False, PLAIN, "does not fit"),
        (None, PLAIN, "measured quickly"),
    ):
        some = [(x, y) for candidate, x, y in points if candidate.fits is fits]
        if some:
            xs, ys = ([point[axis] for point in some] for axis in (0, 1))
            inside = "none" if fits is None else colour
            axes.scatter(xs, ys, s=26, color=inside, edgecolor=colour, alpha=0.75, label=label)
    _mark_chosen(axes, report, points)
    axes.axvline(
        result.budget_bytes / GIB, color=BUDGET, linestyle=(0, (5, 3)), linewidth=1.3, label="budget"
    )
    if result.lower_bound_percent is not None:
        # It holds for plans within the budget, so the line ends there.
        left = axes.get_xlim()[0]
        reach = (left, result.budget_bytes / GIB)
        label = "least recompute within the budget"
        axes.hlines(result.lower_bound_percent, *reach, color=INK, linewidth=1.2, linestyle=":", label=label)
        axes.set_xlim(left=left)
    axes.set_xlabel("peak reserved, GiB")
    axes.set_ylabel("predicted time over the plain step, %")
    axes.set_title("What was tried")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(fontsize=8, loc="best")
    return figure


def _mark_chosen(axes: Axes, report: FitReport, points: list[tuple[Any, float, float]]) -> None:
    """A ring and a name at the plan; names at the schedules that people know, where they are not crowded."""
    result = report.result
    if result.planned is None:
        return
    x = result.planned.peak_reserved_bytes / GIB
    y = (
        100 * (result.planned.step_seconds / result.plain.step_seconds - 1)
        if result.plain.step_seconds
        else 0.0
    )
    axes.scatter([x], [y], s=130, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=5)
    text = f"the plan: {format_seconds(result.planned.step_seconds)}"
    axes.annotate(
        text,
        (x, y),
        xytext=(10, 10),
        textcoords="offset points",
        fontsize=8.5,
        fontweight="bold",
        bbox=LABEL_BOX,
    )


def _highest(values: Any) -> int:
    return 0 if values is None else int(values.max())


def new_figure(*, width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _share_legend(figure: Figure, axes: Any) -> None:
    handles = {
        label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)


FIGURES: Mapping[str, Callable[[FitReport], Figure | None]] = {
    "timeline": timeline_figure,
    "composition": composition_figure,
    "account": account_figure,
    "front": front_figure,
}


def render_figures(report: FitReport, *, kind: Literal["png", "svg"] = "png") -> dict[str, bytes]:
    """All figures that the report has data for, by name, as PNG (200 dots per inch) or SVG."""
    import matplotlib as mpl

    # Styles count when the objects are made as well as when they are drawn.
    style: Any = dict(STYLE)
    with mpl.rc_context(style):
        figures = {name: draw(report) for name, draw in FIGURES.items()}
        return {name: _render(figure, kind) for name, figure in figures.items() if figure is not None}


def render(draw: Callable[[], Figure], *, kind: Literal["png", "svg"] = "png") -> bytes:
    """One figure in the house's style, as PNG or SVG."""
    import matplotlib as mpl

    with mpl.rc_context(dict(STYLE)):  # type: ignore[arg-type]  # matplotlib's keys are literals
        return _render(draw(), kind)


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": "memfit"}
    figure.savefig(buffer, format=kind, dpi=DOTS_PER_INCH, facecolor="white", metadata=metadata)
    return buffer.getvalue()
