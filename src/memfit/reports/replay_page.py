"""A replay as one HTML page that needs nothing else: no server, no network, no second file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memfit.allocators.lab import Replay, chosen_events
from memfit.allocators.shortage import mib
from memfit.core.timeline import Timeline
from memfit.core.units import format_bytes
from memfit.reports import svg
from memfit.reports.elements import number, number_table, section, swatch
from memfit.reports.markup import Markup, script_json, tag
from memfit.reports.page import page, paint_css, script
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS
from memfit.reports.replay import KINDS, outcome_name, pin_text
from memfit.reports.segment_map import CSS, key_of_colours, segment_map
from memfit.reports.series import Points, StepSeries

CHART = "chart-replay"
POINTS = 900
MOST_PINNED = 40


def replay_page(result: Replay, *, name: str) -> str:
    """The page, as text to write to a file.

    Args:
        result: what to show.
        name: of the file that was replayed.
    """
    series = _series(result)
    parts: tuple[Callable[[Replay], Markup | None], ...] = (
        _shortage, _advice, _outcomes, _maps, _pinned, _notes,
    )  # fmt: skip
    main = tag("main", _head(result, name), _over_time(result, series), (part(result) for part in parts))
    css = paint_css(CATEGORY_PAINTS) + CSS
    return page(f"replay of {name}", main, _data(result, series), script(), css=css)


def _head(result: Replay, name: str) -> Markup:
    recording = result.recording
    settings = result.settings or "default settings"
    limit = (
        "no limit" if result.capacity_bytes is None else f"{format_bytes(result.capacity_bytes)} of memory"
    )
    subtitle = (
        f"{KINDS.get(recording.kind, recording.kind)} of {len(recording.trace):,} events, replayed through "
        f"PyTorch's caching allocator: {settings}, {limit}"
    )
    statements = [*_verdicts(result), *((None, text) for text in result.advice.sentences)]
    tiles = [
        ("Live at most", format_bytes(result.peak_requested_bytes), "what was asked for"),
        ("Allocated at most", format_bytes(result.peak_allocated_bytes), "the blocks that hold it"),
        ("Reserved at most", format_bytes(result.peak_reserved_bytes), "taken from the device"),
        ("Never needed", f"{100 * result.fragmentation:.1f} %", "of the reserved peak"),
    ]
    if result.bound is not None:
        what = "live blocks alone" if result.bound.packing_bytes is None else "by the best packing found"
        tiles.append(("Least possible", format_bytes(result.bound.best_bytes), what))
    return tag(
        "header",
        tag("h1", name),
        tag("p", subtitle, class_="muted"),
        tag(
            "ul",
            (
                tag("li", text, class_={True: "good", False: "bad", None: "neither"}[good])
                for good, text in statements
            ),
            class_="verdicts",
        ),
        tag(
            "dl",
            (tag("div", tag("dt", a), tag("dd", b, tag("small", c)), class_="tile") for a, b, c in tiles),
            class_="tiles",
        ),
    )


def _verdicts(result: Replay) -> list[tuple[bool | None, str]]:
    verdicts: list[tuple[bool | None, str]] = []
    if not result.main.failures:
        verdicts.append(
            (True, f"Every allocation is served; {mib(result.peak_reserved_bytes)} are reserved at most.")
        )
    else:
        verdicts.append((False, result.shortages[0].sentences()[0]))
    if result.main.compared_places:
        same, compared = result.main.same_places, result.main.compared_places
        text = f"{same:,} of {compared:,} allocations land where they were recorded."
        verdicts.append((True if same == compared else None, text))
    return verdicts


def _series(result: Replay) -> StepSeries:
    """Live bytes by category and reserved bytes over the events that were run."""
    run = result.main
    count = len(run.live_bytes)
    if not count:
        nothing = np.zeros(1, dtype=np.int64)
        return StepSeries(
            events=nothing,
            by_category={"other": nothing},
            reserved=None,
            phases=(),
            event_count=1,
            peak_point=0,
        )
    index = chosen_events(run, POINTS)
    live: Mapping[str, Points] = (
        Timeline.of(result.recording.trace).by_category(points=len(result.recording.trace)).bytes_by_category
    )
    by_category = {key: live[key][:count][index] for key in CATEGORY_PAINTS if key in live and key != "other"}
    named = sum(by_category.values(), np.zeros(len(index), dtype=np.int64))
    rest = np.maximum(run.live_bytes[index] - named, 0)
    if rest.any() or not by_category:
        by_category["other"] = rest
    return StepSeries(
        events=index,
        by_category=by_category,
        reserved=run.reserved_bytes[index],
        phases=(),
        event_count=count,
        peak_point=int(np.argmax(run.live_bytes[index])),
    )


def _top(result: Replay, series: StepSeries) -> int:
    highest = max(series.peak_bytes, 0 if series.reserved is None else int(series.reserved.max()), 1)
    capacity = result.capacity_bytes or 0
    return int(1.08 * max(highest, capacity if capacity < 2 * highest else 0))


def _over_time(result: Replay, series: StepSeries) -> Markup:
    label = (
        f"Live memory over {series.event_count} events, and what was reserved for it; the live peak is "
        f"{format_bytes(series.peak_bytes)}"
    )
    chart = svg.timeline(
        series,
        top_bytes=_top(result, series),
        budget_bytes=result.capacity_bytes,
        label=label,
        identifier=CHART,
        limit_name="capacity",
        x_title="events, in order",
    )
    labels = _labels(series)
    buttons = [
        tag("button", swatch(key), labels[key], type="button", data_toggle=key, aria_pressed="true")
        for key in series.by_category
    ]
    reset = tag("button", "All events", type="button", id="reset")
    note = (
        "The grey line is what the allocator has reserved: what lies between it and the live bytes is "
        "fragmentation and cache. Point at the chart for numbers, drag to look closer."
    )
    return section(
        "Memory over time",
        "over-time",
        tag("p", note, class_="muted"),
        tag("div", buttons, reset, class_="legend only-js", role="group", aria_label="Categories shown"),
        tag("figure", chart),
    )


def _shortage(result: Replay) -> Markup | None:
    if not result.shortages:
        return None
    return section("Why memory ran out", "shortage", _list(result.shortages[0].sentences()))


def _list(texts: Any) -> Markup:
    return tag("ul", (tag("li", text) for text in texts))


def _advice(result: Replay) -> Markup | None:
    advice = result.advice
    if advice.line is None:
        return None
    return section(
        "What to set", "advice", tag("pre", tag("code", advice.line)), tag("p", "Mind:"), _list(advice.risks)
    )


def _outcomes(result: Replay) -> Markup | None:
    if len(result.outcomes) < 2:
        return None
    largest = max(outcome.peak_reserved_bytes for outcome in result.outcomes) or 1
    rows = []
    for outcome in result.outcomes:
        bar = tag(
            "span",
            class_="bar fill-other",
            style=f"width:{100 * outcome.peak_reserved_bytes / largest:.2f}%",
        )
        through = "yes" if outcome.fits else f"no, event {outcome.out_of_memory_events[0]}"
        cells = [
            tag("th", outcome_name(outcome), scope="row"),
            number(format_bytes(outcome.peak_reserved_bytes)),
            number(str(outcome.retries) if outcome.retries else ""),
            tag("td", through),
            tag("td", bar, class_="bars", aria_hidden="true"),
        ]
        rows.append(tag("tr", cells, class_="chosen" if outcome.name == result.advice.setting else None))
    heads = [
        ("setting or policy", False),
        ("peak reserved", True),
        ("flushes", True),
        ("goes through", False),
        ("", False),
    ]
    caption = "The same events; a run that does not go through is shown up to where it ends"
    return section("Every setting and policy", "outcomes", number_table(caption, heads, rows))


def _maps(result: Replay) -> Markup:
    """Where memory ran out or most was reserved, and the events that were asked for."""
    events = [shortage.failure.event for shortage in result.shortages]
    layouts = {result.peak.event: result.peak, **dict(result.main.layouts)}
    shown = sorted(layouts, key=lambda event: (event not in events, event))
    maps = [segment_map(layouts[event], result.recording.trace) for event in shown]
    note = "Each strip is a segment, all on one scale. Point at a block to see what it is."
    return section("The segments", "segments", tag("p", note, class_="muted"), key_of_colours(), maps)


def _pinned(result: Replay) -> Markup | None:
    if not result.pinned:
        return None
    rows = [
        tag(
            "tr",
            number(format_bytes(pin.size_bytes)),
            number(format_bytes(pin.free_bytes)),
            tag("td", pin_text(pin)),
        )
        for pin in result.pinned[:MOST_PINNED]
    ]
    left_out = len(result.pinned) - len(rows)
    caption = f"The most free bytes first{f'; {left_out} more are left out' if left_out else ''}"
    heads = [("segment", True), ("free in it", True), ("kept by", False)]
    return section("Segments that cannot go back", "pinned", number_table(caption, heads, rows))


def _notes(result: Replay) -> Markup | None:
    notes = [*result.warnings, *result.recording.notes]
    return section("What to mind", "mind", _list(notes)) if notes else None


def _data(result: Replay, series: StepSeries) -> Markup:
    chart = {
        "count": series.event_count,
        "top": _top(result, series),
        "events": series.events.tolist(),
        "bytes": {key: values.tolist() for key, values in series.by_category.items()},
        "reserved": None if series.reserved is None else series.reserved.tolist(),
        "phases": [],
    }
    return script_json("data", {"charts": {CHART: chart}, "labels": _labels(series)})


def _labels(series: StepSeries) -> dict[str, str]:
    """Names of the layers; most files tell no categories, and then all that is live is one layer."""
    labels = {key: paint.label for key, paint in PAINTS.items()}
    return labels | ({"other": "Live"} if set(series.by_category) == {"other"} else {})
