"""A ladder as a figure: a bar of peak memory for each rung, with step times and losses beside it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from memfit.analysis.ladder_values import Ladder, Rung
from memfit.core.units import GIB, MIB, format_bytes
from memfit.reports.figures import GRID, MUTED, PLAIN, PLANNED, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160
ROOM = 1.3
"""How much wider than the longest bar the axis is, for the labels at its end."""


def ladder_figure(ladder: Ladder) -> Figure:
    """Peak memory by rung, top to bottom; then step time and loss where any is known."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rungs = ladder.climbed
    panels = [_draw_memory, *([_draw_seconds] if _any(rungs, "step_seconds") else [])]
    panels += [_draw_loss] if _any(rungs, "quality") else []
    style: Any = dict(STYLE)
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 1.2 + 0.36 * len(rungs)), layout="constrained")
        ratios = (3, 1.4, 1.6)[: len(panels)]
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axes, draw in zip(row, panels, strict=True):
            draw(axes, rungs)
        row[0].set_yticks(range(len(rungs)), [_label(rung) for rung in rungs])
        row[0].invert_yaxis()
    return figure


def ladder_png(ladder: Ladder) -> bytes:
    """The figure as PNG; the same ladder gives the same bytes."""
    import matplotlib as mpl

    style: Any = dict(STYLE)
    buffer = io.BytesIO()
    with mpl.rc_context(style):
        ladder_figure(ladder).savefig(
            buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None}
        )
    return buffer.getvalue()


def _any(rungs: tuple[Rung, ...], field: str) -> bool:
    return any(getattr(rung, field) is not None for rung in rungs)


def _label(rung: Rung) -> str:
    return ("" if rung.settings is None else "+ ") + rung.name.replace("_", " ")


def _draw_memory(axes: Axes, rungs: tuple[Rung, ...]) -> None:
    most = max(rung.peak_bytes or 0 for rung in rungs)
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    sizes = [(rung.peak_bytes or 0) / unit for rung in rungs]
    colours = [PLAIN if rung.settings is None else PLANNED for rung in rungs]
    axes.barh(range(len(rungs)), sizes, color=colours, height=0.62)
    for place, rung in enumerate(rungs):
        text = "–" if rung.peak_bytes is None else format_bytes(rung.peak_bytes)
        axes.annotate(
            text, (sizes[place], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, ROOM * max(sizes))
    axes.set_title("Peak of a step")
    axes.set_xlabel(name)
    axes.grid(axis="x", color=GRID)


def _draw_seconds(axes: Axes, rungs: tuple[Rung, ...]) -> None:
    known = [(place, rung) for place, rung in enumerate(rungs) if rung.step_seconds is not None]
    seconds = [1e3 * (rung.step_seconds or 0.0) for _, rung in known]
    axes.plot(seconds, [place for place, _ in known], "o", color=PLANNED, markersize=4)
    axes.set_xlim(0, ROOM * max(seconds))
    axes.set_title(f"Step, {known[0][1].step_seconds_kind}")
    axes.set_xlabel("ms")
    axes.grid(axis="x", color=GRID)


def _draw_loss(axes: Axes, rungs: tuple[Rung, ...]) -> None:
    """Differences to the plain loss, with the spread over seeds; shaded is what another seed does."""
    for place, rung in enumerate(rungs):
        if rung.quality is not None:
            axes.errorbar(
                rung.quality.difference,
                place,
                xerr=rung.quality.difference_spread,
                fmt="o",
                color=PLANNED,
                markersize=4,
                capsize=2,
            )
    first = next(rung.quality for rung in rungs if rung.quality is not None)
    axes.axvspan(-first.seed_spread, first.seed_spread, color=MUTED, alpha=0.12, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.set_title("Loss, to plain")
    axes.set_xlabel("shaded: another seed")
    axes.grid(axis="x", color=GRID)
