"""A picture of what an allocator holds: every segment as a strip, its blocks in it, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from memfit.allocators.replay import BlockLayout, SegmentLayout
from memfit.allocators.running import Layout
from memfit.core.trace import Trace
from memfit.core.units import format_bytes
from memfit.reports.markup import Markup, tag

WIDTH = 1080.0
STRIP_HEIGHT = 13.0
GAP = 4.0
NARROWEST = 6.0
MOST_SEGMENTS = 600
MOST_RECTANGLES = 8_000
CLASSES = {"A": "used", "P": "waiting", "I": "free"}
WORDS = {"A": "in use", "P": "freed, waiting for another stream", "I": "free"}

CSS = (
    ".map{width:100%;height:auto;display:block}.map .used{fill:var(--accent)}.map .waiting{fill:var(--bad)}"
    ".map .free{fill:var(--line)}.map rect{stroke:var(--page);stroke-width:.5}"
    ".key{display:inline-block;width:11px;height:11px;border-radius:3px;margin:0 6px 0 14px;"
    "vertical-align:-1px}"
)


def segment_map(layout: Layout, trace: Trace) -> Markup:
    """The segments of a layout, the largest first, on one scale; a pointer on a block tells what it is."""
    segments = sorted(layout.segments, key=lambda segment: (-segment.size_bytes, segment.region))
    shown = segments[:MOST_SEGMENTS]
    scale = WIDTH / max((segment.size_bytes for segment in shown), default=1)
    rows = _rows(shown, scale)
    names = _Names(layout, trace)
    exact = sum(len(segment.blocks) for segment in shown) <= MOST_RECTANGLES
    strips = [
        _strip(segment, x, place * (STRIP_HEIGHT + GAP), scale, names if exact else None)
        for place, row in enumerate(rows)
        for x, segment in row
    ]
    height = max(len(rows), 1) * (STRIP_HEIGHT + GAP)
    label = (
        f"{len(segments)} segments after event {layout.event}: "
        f"{format_bytes(sum(segment.active_bytes for segment in segments))} in use of "
        f"{format_bytes(sum(segment.size_bytes for segment in segments))}"
    )
    picture = tag(
        "svg",
        tag("title", label),
        strips,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
        class_="map",
    )
    left_out = len(segments) - len(shown)
    note = f"{label}{f'; the {left_out} smallest are left out' if left_out else ''}."
    return tag("figure", tag("figcaption", note), picture)


def _rows(segments: Sequence[SegmentLayout], scale: float) -> list[list[tuple[float, SegmentLayout]]]:
    """Strips into rows, first fit, so that small segments share a row."""
    rows: list[list[tuple[float, SegmentLayout]]] = []
    ends: list[float] = []
    for segment in segments:
        width = max(segment.size_bytes * scale, NARROWEST)
        place = next((row for row, end in enumerate(ends) if end + width <= WIDTH + 0.01), None)
        if place is None:
            rows.append([])
            ends.append(0.0)
            place = len(rows) - 1
        rows[place].append((ends[place], segment))
        ends[place] += width + GAP
    return rows


class _Names:
    """Who asked for a block."""

    def __init__(self, layout: Layout, trace: Trace) -> None:
        self._owners = layout.owners
        self._trace = trace
        allocs = trace.block.tolist()
        self._born = {block: index for index, block in reversed(list(enumerate(allocs))) if block >= 0}

    def of(self, segment: SegmentLayout, block: BlockLayout) -> str:
        key = self._owners.get((segment.region, segment.offset_bytes + block.offset_bytes))
        born = None if key is None else self._born.get(key)
        if born is None:
            return ""
        where = self._trace.strings[self._trace.where[born]]
        return f", since event {born}{f', {where}' if where else ''}"


def _strip(segment: SegmentLayout, x: float, y: float, scale: float, names: _Names | None) -> Markup:
    scale = max(scale, NARROWEST / max(segment.size_bytes, 1))
    pieces = [[block] for block in segment.blocks] if names else _merged(segment.blocks)
    rectangles = []
    for piece in pieces:
        size = sum(block.size_bytes for block in piece)
        state = piece[0].state
        who = names.of(segment, piece[0]) if names and state != "I" else ""
        rectangles.append(
            tag(
                "rect",
                tag("title", f"{format_bytes(size)} {WORDS.get(state, state)}{who}"),
                x=f"{x + piece[0].offset_bytes * scale:.2f}",
                y=f"{y:g}",
                width=f"{size * scale:.2f}",
                height=f"{STRIP_HEIGHT:g}",
                class_=CLASSES.get(state, "free"),
            )
        )
    return tag("g", rectangles)


def _merged(blocks: Sequence[BlockLayout]) -> list[list[BlockLayout]]:
    """Neighbours in the same state as one piece, where there are too many to draw each."""
    return [list(group) for _, group in groupby(blocks, key=lambda block: block.state)]


def key_of_colours() -> Markup:
    """What the colours of the picture mean."""
    items = []
    for state in ("A", "P", "I"):
        colour = {"A": "var(--accent)", "P": "var(--bad)", "I": "var(--line)"}[state]
        items += [tag("span", class_="key", style=f"background:{colour}"), WORDS[state]]
    return tag("p", items, class_="muted")
