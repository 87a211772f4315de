"""Figures of the analyses, drawn with matplotlib's objects only: no pyplot, no global state, no display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memfit.core.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memfit.analysis.memory import MemoryAnalysis
    from memfit.analysis.performance import PerformanceAnalysis

COLOURS = {"compute": "#0f766e", "bandwidth": "#b45309", "overhead": "#7b8794"}
ACCENT, MUTED, GRID = "#0f766e", "#9aa5b1", "#e4e7eb"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def memory_figure(analysis: MemoryAnalysis) -> Figure | None:
    """Live against reserved memory over time, and how long blocks live; None where neither is known."""
    series = analysis.fragmentation.over_time if analysis.fragmentation is not None else ()
    lives = analysis.lifetimes
    if len(series) < 2 and lives is None:
        return None
    figure = new_figure(9.2, 3.2)
    left, right = figure.subplots(1, 2)
    unit, name = (GIB, "GiB") if analysis.peak_bytes >= GIB else (MIB, "MiB")
    if len(series) >= 2:
        events = [row[0] for row in series]
        left.fill_between(
            events, [row[2] / unit for row in series], step="post", color=MUTED, label="reserved"
        )
        left.fill_between(events, [row[1] / unit for row in series], step="post", color=ACCENT, label="live")
        left.legend(fontsize=8, loc="upper left", frameon=True)
    left.set_title("What is live, and what is reserved for it", fontsize=10, loc="left")
    left.set_xlabel("events", fontsize=8)
    left.set_ylabel(name, fontsize=8)
    if lives is not None:
        _bars(
            right,
            [f"≤ {row.most_events:,}" for row in lives.histogram],
            [row.bytes / unit for row in lives.histogram],
        )
        right.set_title(f"Bytes by how long they live ({lives.unit})", fontsize=10, loc="left")
        right.set_xlabel(name, fontsize=8)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _bars(axes: Any, names: Sequence[str], values: Sequence[float]) -> None:
    axes.barh(range(len(names)), values, color=ACCENT)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def roofline_figure(analysis: PerformanceAnalysis) -> Figure | None:
    """Operators under the GPU's roof: FLOPs a byte against FLOP/s reached; None without such operators."""
    points = [row for row in analysis.operators if row.flops and row.bytes_moved and row.seconds]
    if not points:
        return None
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    intensities = [row.flops / row.bytes_moved for row in points]
    low, high = min(*intensities, 0.5) / 2, max(*intensities, analysis.ridge) * 4
    xs = [low * (high / low) ** (step / 80) for step in range(81)]
    roof = [min(analysis.peak_flops_per_second, x * analysis.bandwidth_bytes_per_second) for x in xs]
    axes.plot(xs, roof, color="#1f2933", linewidth=1.4, label=f"{analysis.gpu}, nominal")
    for bound, colour in COLOURS.items():
        some = [
            (row.flops / row.bytes_moved, row.flops / row.seconds, row)
            for row in points
            if row.bound == bound
        ]
        if some:
            sizes = [20 + 400 * row.seconds / max(analysis.seconds, 1e-12) for *_, row in some]
            axes.scatter(
                [x for x, _, _ in some],
                [y for _, y, _ in some],
                s=sizes,
                color=colour,
                alpha=0.7,
                label=f"{bound}-bound",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte moved", fontsize=8)
    axes.set_ylabel("FLOP/s, predicted", fontsize=8)
    axes.set_title("Operators under the roofline; size is share of the step", fontsize=10, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(color=GRID, linewidth=0.6)
    axes.legend(fontsize=8)
    return figure
