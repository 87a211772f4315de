"""The charts of the page as inline SVG, coloured by classes so that light and dark both fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.core.units import GIB, format_bytes, format_seconds
from memfit.reports.markup import Markup, tag
from memfit.reports.palette import CATEGORY_PAINTS
from memfit.reports.report import FitReport
from memfit.reports.series import StepSeries

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The rectangle that a chart is drawn in, in SVG units, and the ranges of its two axes."""

    width: float = 640
    height: float = 340
    left: float = 46
    right: float = 10
    top: float = 30
    bottom: float = 52
    x_low: float = 0.0
    x_high: float
    y_low: float = 0.0
    y_high: float

    @property
    def inner_width(self) -> float:
        return self.width - self.left - self.right

    @property
    def inner_height(self) -> float:
        return self.height - self.top - self.bottom

    def x(self, value: float) -> float:
        return self.left + self.inner_width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.top + self.inner_height * (1 - (value - self.y_low) / (self.y_high - self.y_low))

    def tag(self, *content: Markup | None, label: str, **attributes: str) -> Markup:
        box = f"0 0 {self.width:g} {self.height:g}"
        title = tag("title", label)
        return tag("svg", title, *content, viewBox=box, role="img", aria_label=label, **attributes)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values within ``low … high``, about `count` of them, in steps of 1, 2 or 5 powers of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def timeline(
    series: StepSeries, *, top_bytes: int, budget_bytes: int | None, label: str, identifier: str,
    limit_name: str = "budget", x_title: str = "allocation events of the last step, in order",
) -> Markup:  # fmt: skip
    """One step's memory by category, stacked, with its phases, its peak and the budget.

    Args:
        series: what to draw.
        top_bytes: the top of the scale, the same for charts that are compared.
        budget_bytes: where the limit's line lies; ``None`` draws none.
        label: what a screen reader says.
        identifier: the element's id, by which the page's script finds it.
        limit_name: what the limit is called.
        x_title: what the horizontal axis counts.
    """
    frame = Frame(x_high=float(max(series.event_count, 1)), y_high=top_bytes / GIB)
    areas = tag("g", _areas(series, frame), class_="areas", clip_path=f"url(#{identifier}-clip)")
    reserved = _reserved_line(series, frame)
    cursor = tag(
        "line", class_="cursor", y1=frame.top, y2=frame.top + frame.inner_height, visibility="hidden"
    )
    clip_box = tag("rect", x=frame.left, y=frame.top, width=frame.inner_width, height=frame.inner_height)
    clip = tag("clipPath", clip_box, id=f"{identifier}-clip")
    over = tag("g", reserved, _peak(series, frame), class_="over", clip_path=f"url(#{identifier}-clip)")
    return frame.tag(
        clip, _grid(frame, "GiB"), areas, over, _phases(series, frame),
        _level(frame, budget_bytes, limit_name), _x_ticks(frame), cursor, _x_title(frame, x_title),
        label=label, id=identifier, class_="chart timeline", tabindex="0",
    )  # fmt: skip


def _areas(series: StepSeries, frame: Frame) -> list[Markup]:
    below = np.zeros(len(series.events))
    areas = []
    for name, values in series.by_category.items():
        above = below + values / GIB
        path = _step_area(series.events.astype(float), below, above, float(series.event_count), frame)
        areas.append(
            tag(
                "path",
                tag("title", CATEGORY_PAINTS[name].label),
                d=path,
                class_=f"fill-{name}",
                data_key=name,
            )
        )
        below = above
    return areas


def _step_area(events: Floats, below: Floats, above: Floats, end: float, frame: Frame) -> str:
    """A stacked layer: along its upper edge in steps to the right, back along its lower edge."""
    if not len(events):
        return ""
    edges = np.append(events, end)
    there = "".join(f"H{frame.x(edges[i]):.1f}V{frame.y(above[i]):.1f}" for i in range(len(events)))
    back = "".join(f"V{frame.y(below[i]):.1f}H{frame.x(edges[i]):.1f}" for i in reversed(range(len(events))))
    return f"M{frame.x(edges[0]):.1f},{frame.y(above[0]):.1f}{there}H{frame.x(end):.1f}{back}Z"


def _reserved_line(series: StepSeries, frame: Frame) -> Markup | None:
    if series.reserved is None:
        return None
    heights = series.reserved / GIB
    start = f"M{frame.x(float(series.events[0])):.1f},{frame.y(heights[0]):.1f}"
    steps = "".join(
        f"H{frame.x(float(e)):.1f}V{frame.y(h):.1f}" for e, h in zip(series.events, heights, strict=True)
    )
    return tag(
        "path", tag("title", "Reserved"), d=f"{start}{steps}H{frame.x(frame.x_high):.1f}", class_="reserved"
    )


def _peak(series: StepSeries, frame: Frame) -> Markup:
    event = float(series.events[series.peak_point])
    x, y = frame.x(event + 0.5), frame.y(series.peak_bytes / GIB)
    side = "end" if event > series.event_count / 2 else "start"
    text = tag("text", f"peak {format_bytes(series.peak_bytes)}", x=f"{x + (-7 if side == 'end' else 7):.1f}",
               y=f"{y - 6:.1f}", text_anchor=side, class_="mark")  # fmt: skip
    return tag("g", tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.5), text, class_="peak")


def _phases(series: StepSeries, frame: Frame) -> Markup:
    marks: list[Markup] = []
    for name, first, last in series.phase_labels():
        if first > 0:
            x = f"{frame.x(first):.1f}"
            marks.append(tag("line", x1=x, x2=x, y1=frame.top - 14, y2=frame.top + frame.inner_height))
        if last - first > 0.12 * series.event_count:
            middle = f"{frame.x((first + last + 1) / 2):.1f}"
            marks.append(tag("text", name, x=middle, y=frame.top - 6, text_anchor="middle"))
    return tag("g", marks, class_="phases")


def _level(frame: Frame, budget_bytes: int | None, name: str) -> Markup | None:
    if budget_bytes is None:
        return None
    height = budget_bytes / GIB
    if height > frame.y_high:
        return None
    y = frame.y(height)
    line = tag("line", x1=frame.left, x2=frame.width - frame.right, y1=f"{y:.1f}", y2=f"{y:.1f}")
    text = tag(
        "text",
        f"{name} {format_bytes(budget_bytes)}",
        x=frame.width - frame.right - 4,
        y=f"{y - 5:.1f}",
        text_anchor="end",
    )
    return tag("g", line, text, class_="budget")


def _grid(frame: Frame, unit: str) -> Markup:
    marks: list[Markup] = []
    for value in nice_ticks(frame.y_low, frame.y_high):
        y = f"{frame.y(value):.1f}"
        marks.append(tag("line", x1=frame.left, x2=frame.width - frame.right, y1=y, y2=y))
        marks.append(tag("text", f"{value:g}", x=frame.left - 6, y=y, dy="0.32em", text_anchor="end"))
    marks.append(tag("text", unit, x=frame.left - 6, y=frame.top - 12, text_anchor="end", class_="unit"))
    return tag("g", marks, class_="grid")


def _x_title(frame: Frame, text: str) -> Markup:
    return tag(
        "text",
        text,
        x=frame.left + frame.inner_width / 2,
        y=frame.height - 8,
        text_anchor="middle",
        class_="title",
    )


def _x_ticks(frame: Frame) -> Markup:
    y = frame.top + frame.inner_height
    ticks = [tag("text", f"{value:g}", x=f"{frame.x(value):.1f}", y=y + 18, text_anchor="middle")
             for value in nice_ticks(frame.x_low, frame.x_high)]  # fmt: skip
    return tag("g", ticks, class_="ticks")


def front(report: FitReport) -> Markup | None:
    """Every way of training that was tried: reserved memory against predicted time, the plan ringed."""
    result = report.result
    base = result.plain.step_seconds
    if not result.candidates or not base:
        return None
    xs = [candidate.figures.peak_reserved_bytes / GIB for candidate in result.candidates]
    ys = [100 * (candidate.figures.step_seconds / base - 1) for candidate in result.candidates]
    frame = _front_frame([*xs, result.budget_bytes / GIB], [*ys, result.lower_bound_percent or 0.0])
    dots = [
        _dot(frame, x, y, candidate.name, candidate.fits)
        for candidate, x, y in zip(result.candidates, xs, ys, strict=True)
    ]
    budget_x = f"{frame.x(result.budget_bytes / GIB):.1f}"
    budget = tag("g", tag("line", x1=budget_x, x2=budget_x, y1=frame.top, y2=frame.top + frame.inner_height),
                 tag("text", "budget", x=budget_x, y=frame.top - 6, text_anchor="middle"),
                 class_="budget")  # fmt: skip
    bound = _bound(frame, result.lower_bound_percent, result.budget_bytes)
    return frame.tag(
        _grid(frame, "%"), _x_ticks(frame), budget, bound, tag("g", dots),
        _ring(frame, report), _x_title(frame, "peak reserved, GiB (upwards: time over the plain step)"),
        label="Reserved memory against predicted time for all that was tried; the table has the numbers",
        class_="chart front",
    )  # fmt: skip


def sweep_front(
    front: Sequence[tuple[float, float, str]],
    peers: Sequence[tuple[float, float, str]],
    bound: Sequence[tuple[float, float, str]],
) -> Markup:
    """Plans as stairs, known schedules as rings, the bound as a dotted line: each point is GiB, percent,
    name."""
    everything = [*front, *peers, *bound]
    frame = _front_frame([x for x, _, _ in everything], [y for _, y, _ in everything])
    stairs = "".join(
        f"{'M' if number == 0 else 'H'}{frame.x(x):.1f}{',' if number == 0 else 'V'}{frame.y(y):.1f}"
        for number, (x, y, _) in enumerate(front)
    )
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y, _ in bound)
    return frame.tag(
        _grid(frame, "%"), _x_ticks(frame),
        tag("polyline", tag("title", "no schedule can be below"), points=line, class_="bound", fill="none",
            stroke="currentColor", stroke_dasharray="2 3"),
        tag("path", tag("title", "memfit's plans"), d=stairs, class_="reserved", fill="none"),
        tag("g", [_dot(frame, x, y, name, False) for x, y, name in peers]),
        tag("g", [_dot(frame, x, y, name, True) for x, y, name in front]),
        _x_title(frame, "peak reserved, GiB (upwards: time over the plain step)"),
        label="Reserved memory against predicted time: plans, known schedules and the certified bound; the "
        "table has the numbers",
        class_="chart front",
    )  # fmt: skip


def _front_frame(xs: Sequence[float], ys: Sequence[float]) -> Frame:
    width, height = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    return Frame(
        x_low=min(xs) - 0.06 * width,
        x_high=max(xs) + 0.06 * width,
        y_low=min(ys) - 0.08 * height,
        y_high=max(ys) + 0.08 * height,
    )


def _dot(frame: Frame, x: float, y: float, name: str, fits: bool | None) -> Markup:
    kind = {True: "fits", False: "fits-not", None: "undecided"}[fits]
    title = tag("title", f"{name}: {x:.2f} GiB, {y:+.1f} %")
    return tag("circle", title, cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=4.5, class_=f"dot {kind}")


def _bound(frame: Frame, percent: float | None, budget_bytes: int) -> Markup | None:
    """The least recomputation: left of the budget, where it holds, with its name beside the budget's line."""
    if percent is None:
        return None
    x, y = f"{frame.x(budget_bytes / GIB):.1f}", f"{frame.y(percent):.1f}"
    line = tag("line", x1=frame.left, x2=x, y1=y, y2=y)
    label = tag("text", f"least {percent:.1f} % within the budget", x=x, y=y, dx="0.5em", dy="0.32em")
    return tag("g", line, label, class_="bound")


def _ring(frame: Frame, report: FitReport) -> Markup | None:
    result = report.result
    if result.planned is None:
        return None
    x = frame.x(result.planned.peak_reserved_bytes / GIB)
    y = frame.y(100 * (result.planned.step_seconds / result.plain.step_seconds - 1))
    text = tag(
        "text",
        f"the plan, {format_seconds(result.planned.step_seconds)}",
        x=f"{x + 13:.1f}",
        y=f"{y - 9:.1f}",
        class_="mark",
    )
    return tag("g", tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=9), text, class_="ring")
