"""The front of a workload as text, as a page and as a figure: budget against predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import GIB, format_bytes, format_seconds
from memfit.planning.figures import Candidate
from memfit.planning.sweep import SweepPoint, SweepResult
from memfit.reports import figures, svg
from memfit.reports.elements import number_row, number_table, section
from memfit.reports.markup import tag
from memfit.reports.page import page
from memfit.reports.verdict import signed_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = (
    ("budget", True),
    ("plan reserves", True),
    ("slower by", True),
    ("cannot be below", True),
    ("what the plan changes", False),
    ("best known schedule", False),
    ("slower by", True),
)
NOTE = (
    "Reserved bytes are measured, time is predicted. The bound is certified for schedules that only keep and "
    "recompute (one that offloads may take less); known schedules are run as they are, with the default "
    "allocator or expandable segments."
)


def sweep_text(result: SweepResult) -> RenderableType:
    """The front as a table, a row per budget."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name, is_number in HEADS:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for point in result.points:
        table.add_row(*row(point))
    head = Text.assemble((result.workload, "bold"), " on ", (result.gpu, "bold"))
    engine = "made-up GPU (dry run)" if result.engine == "dryrun" else "portable engine"
    head.append(f"\n{engine}; {result.allow} plans; {_effort(result)}", style="dim")
    lines = [Text(f"· {line}", style="dim") for line in (NOTE, *result.notes)]
    return Group(head, "", Padding(table, (0, 0, 0, 2)), "", *lines)


def row(point: SweepPoint) -> tuple[str, ...]:
    """The cells of one budget, as text."""
    plan, peer, bound = point.plan, point.peer, point.lower_bound_percent
    return (
        format_bytes(point.budget_bytes),
        "none fits" if plan is None else format_bytes(plan.figures.peak_reserved_bytes),
        "–" if plan is None else signed_percent(plan.recompute_percent),
        "–" if bound is None else f"{bound:.1f} %",
        "" if plan is None else changes(plan),
        "none fits" if peer is None else peer.name,
        "–" if peer is None else signed_percent(peer.recompute_percent),
    )


_BLOCKS = {
    "activation_offload": "offloaded",
    "memory_compression": "packed",
    "parameter_offload": "with parameters on the host",
}
"""What techniques that name blocks do to them, where it is not recomputation."""


def changes(plan: Candidate) -> str:
    """What a plan changes, in a few words: ``"9 of its blocks recomputed, expandable segments"``."""
    words = []
    for settings in plan.techniques:
        blocks = settings.get("blocks")
        if blocks:
            what = _BLOCKS.get(str(settings["technique"]), "recomputed")
            words.append(f"{len(blocks)} block{'s' if len(blocks) > 1 else ''} {what}")
        elif settings["technique"] == "allocator_settings":
            words.append("expandable segments")
        elif settings["technique"] == "micro_batching":
            words.append(f"{settings.get('micro_batches', 2)} micro-batches")
        else:
            words.append(str(settings["technique"]).replace("_", " "))
    return ", ".join(words) or "nothing"


def _effort(result: SweepResult) -> str:
    return f"{result.evaluations} ways of training run in {format_seconds(result.planning_seconds)}"


def sweep_page(result: SweepResult, *, command: str | None = None) -> str:
    """The front as one HTML page that needs nothing else."""
    title = f"{result.workload} on {result.gpu}: memory against time"
    rows = [number_row(row(point), HEADS) for point in result.points]
    main = tag(
        "main",
        tag("header", tag("h1", title), tag("p", f"{result.allow} plans; {_effort(result)}", class_="muted")),
        section("The front", "front", tag("figure", svg.sweep_front(*curves(result))), tag("p", NOTE)),
        section("The numbers", "numbers", number_table("A row per budget", HEADS, rows)),
        section("Make this again", "again", tag("pre", tag("code", command))) if command else None,
    )
    return page(title, main)


Points = list[tuple[float, float, str]]


def curves(result: SweepResult) -> tuple[Points, Points, Points]:
    """Plans of the front, known schedules, and the bound, as ``(GiB, percent, name)``."""
    return (
        _points(result.front),
        _points(result.peers),
        [
            (point.budget_bytes / GIB, point.lower_bound_percent, "certified bound")
            for point in result.points
            if point.lower_bound_percent is not None
        ],
    )


def _points(candidates: Sequence[Candidate]) -> Points:
    return [(c.figures.peak_reserved_bytes / GIB, c.recompute_percent, c.name) for c in candidates]


def sweep_figure(result: SweepResult) -> Figure:
    """The front for print: the plans as stairs, known schedules as named points, the bound dotted."""
    front, peers, bound = curves(result)
    figure = figures.new_figure(width=7.6, height=4.4)
    axes = figure.subplots()
    xs, ys = [x for x, _, _ in front], [y for _, y, _ in front]
    axes.step(xs, ys, where="post", color=figures.PLANNED, linewidth=1.6, label="memfit's plans")
    axes.scatter(xs, ys, s=22, color=figures.PLANNED, zorder=3)
    axes.scatter(
        [x for x, _, _ in peers], [y for _, y, _ in peers], s=26, facecolor="none",
        edgecolor=figures.PLAIN, label="known schedules",
    )  # fmt: skip
    for x, y, name in _uncrowded(peers):
        axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7)
    label = "no schedule can be below"
    axes.plot(
        [x for x, _, _ in bound], [y for _, y, _ in bound], color=figures.INK, linestyle=":", label=label
    )
    axes.set_xlabel("peak reserved, GiB")
    axes.set_ylabel("predicted time over the plain step, %")
    axes.set_title(f"{result.workload}: memory against time")
    axes.grid(color=figures.GRID, linewidth=0.8)
    axes.legend(fontsize=8, loc="best")
    return figure


def _uncrowded(points: Points) -> Points:
    """The points to name: those whose names would not lie over one that is there."""
    width = max((x for x, _, _ in points), default=0.0) - min((x for x, _, _ in points), default=0.0)
    height = max((y for _, y, _ in points), default=0.0) - min((y for _, y, _ in points), default=0.0)
    named: Points = []
    for x, y, name in sorted(points, key=lambda point: (len(point[2]), point)):
        if all(abs(x - a) > 0.4 * width or abs(y - b) > 0.035 * height for a, b, _ in named):
            named.append((x, y, name))
    return named


def sweep_png(result: SweepResult) -> bytes:
    """`sweep_figure` as PNG."""
    return figures.render(lambda: sweep_figure(result), kind="png")
