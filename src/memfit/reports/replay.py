"""A replay as text: the peaks, what ran out and why, every setting and policy, and what to set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.allocators.lab import Replay, chosen_events
from memfit.allocators.outcome import Outcome
from memfit.allocators.running import Layout
from memfit.allocators.shortage import Pinned
from memfit.core.units import format_bytes

KINDS = {
    "memory-snapshot": "memory snapshot",
    "profiler-trace": "torch.profiler trace",
    "rmm-log": "RMM log",
    "json-lines": "JSON lines",
    "memfit-trace": "memfit trace",
}
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 64
MAP_COLUMNS = 48
MOST_SEGMENTS = 12
MOST_PINNED = 5
WORST_PINNED_SHARE = 0.2


def replay_text(result: Replay, *, name: str, events: Sequence[int] = ()) -> RenderableType:
    """The whole outcome of a replay."""
    parts: list[RenderableType] = ["", _headline(result, name), "", _peaks(result)]
    parts += _section("Over time", _over_time(result))
    if result.shortages:
        parts += _section("Why memory ran out", _lines(result.shortages[0].sentences()))
    if result.pinned:
        parts += _section("Segments that cannot go back", _pinned(result))
    for layout in _shown_layouts(result, events):
        parts += _section(f"Segments after event {layout.event}", segment_map(layout))
    if len(result.outcomes) > 1:
        parts += _section("The same events otherwise", _outcomes(result))
    parts += _section("What to do", _advice(result))
    notes = [*result.warnings, *result.recording.notes]
    if notes:
        parts += _section("Mind", _lines(notes))
    return Group(*parts, "", _verdict(result))


def _headline(result: Replay, name: str) -> Text:
    recording = result.recording
    text = Text.assemble((name, "bold"), f": {KINDS.get(recording.kind, recording.kind)}, ")
    text.append(f"{len(recording.trace):,} events")
    limit = (
        "no limit" if result.capacity_bytes is None else f"{format_bytes(result.capacity_bytes)} of memory"
    )
    text.append(
        f"\nPyTorch's caching allocator, {result.settings or 'default settings'}; {limit}", style="dim"
    )
    if result.main.compared_places:
        same, compared = result.main.same_places, result.main.compared_places
        text.append(f"\n{same:,} of {compared:,} allocations land where they were recorded", style="dim")
    return text


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold cyan"), Padding(body, (0, 0, 0, 2))]


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in columns:
        table.add_column(justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    return table


def _peaks(result: Replay) -> Table:
    table = _plain_table("left", "right", "left")
    share = f"{100 * result.fragmentation:.1f} % of it live blocks never needed"
    rows = [
        ("Peak live", result.peak_requested_bytes, "what was asked for"),
        ("Peak allocated", result.peak_allocated_bytes, "the blocks that hold it"),
        ("Peak reserved", result.peak_reserved_bytes, share),
        ("Reserved at the end", result.main.total("reserved_bytes", 0), ""),
    ]
    if result.bound is not None:
        what = "live blocks alone" if result.bound.packing_bytes is None else "best packing found"
        rows.append(("Least possible", result.bound.best_bytes, what))
    for label, size, note in rows:
        table.add_row(label, format_bytes(size), Text(note, style="dim"))
    recorded = result.recording.recorded_peak_reserved_bytes
    if recorded is not None:
        difference = result.peak_reserved_bytes - recorded
        told = "the replay is equal" if not difference else f"the replay: {difference:+,} bytes"
        table.add_row("Reserved in the run", format_bytes(recorded), Text(told, style="dim"))
    return table


def _over_time(result: Replay) -> RenderableType:
    """Live and reserved bytes as two rows of bars on one scale, and the fragmentation of each stretch."""
    run = result.main
    if not len(run.reserved_bytes):
        return Text("no events")
    index = chosen_events(run, 4 * SPARK_COLUMNS)
    top = max(int(run.reserved_bytes.max()), 1)
    table = _plain_table("left", "left")
    for label, values in (("reserved", run.reserved_bytes), ("live", run.live_bytes)):
        table.add_row(label, spark([int(value) for value in values[index]], top))
    return table


def spark(values: Sequence[int], top: int, columns: int = SPARK_COLUMNS) -> str:
    """A row of bars: of each stretch the highest value, against ``top``."""
    stretches = min(columns, len(values))
    bars = []
    for place in range(stretches):
        stretch = values[place * len(values) // stretches : (place + 1) * len(values) // stretches]
        level = max(stretch) / top if top else 0.0
        bars.append(SPARKS[min(int(level * len(SPARKS)), len(SPARKS) - 1)])
    return "".join(bars)


def _lines(sentences: Iterable[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    for sentence in sentences:
        table.add_row("·", Text(sentence))
    return table


def _pinned(result: Replay) -> RenderableType:
    """The worst of the segments that blocks in use keep."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading in ("segment", "free in it", "kept by"):
        table.add_column(heading, justify="left" if heading == "kept by" else "right")
    for pin in result.pinned[:MOST_PINNED]:
        table.add_row(format_bytes(pin.size_bytes), format_bytes(pin.free_bytes), pin_text(pin))
    rest = result.pinned[MOST_PINNED:]
    if rest:
        table.add_row(f"{len(rest)} more", format_bytes(sum(pin.free_bytes for pin in rest)), "")
    return table


def pin_text(pin: Pinned) -> str:
    """Which blocks keep a segment: the largest, where it was asked for, when."""
    count = f"{pin.block_count} block{'' if pin.block_count == 1 else 's'}, {format_bytes(pin.live_bytes)}"
    if not pin.blocks:
        return count
    size, where, born, freed = pin.blocks[0]
    since = "there from the start" if born is None else f"since event {born}"
    until = "never freed" if freed is None else f"until {freed}"
    place = f" at {where}" if where else ""
    largest = f"; the largest {format_bytes(size)}" if pin.block_count > 1 else ""
    return f"{count}{largest}{place}, {since}, {until}"


def _shown_layouts(result: Replay, events: Sequence[int]) -> list[Layout]:
    """The layouts that were asked for; else where memory ran out."""
    wanted = list(events) or [shortage.failure.event for shortage in result.shortages]
    found = (result.layout_at(event) for event in wanted)
    return [layout for layout in found if layout is not None]


def segment_map(layout: Layout) -> RenderableType:
    """Each segment as a bar, the largest first: ``█`` in use, ``▒`` waiting for a stream, ``·`` free."""
    table = _plain_table("right", "left", "left")
    segments = sorted(layout.segments, key=lambda segment: -segment.size_bytes)
    for segment in segments[:MOST_SEGMENTS]:
        cells = [" "] * MAP_COLUMNS
        for block in segment.blocks:
            begin = block.offset_bytes * MAP_COLUMNS // max(segment.size_bytes, 1)
            end = (block.offset_bytes + block.size_bytes) * MAP_COLUMNS // max(segment.size_bytes, 1)
            mark = {"A": "█", "P": "▒"}.get(block.state, "·")
            for place in range(begin, max(end, begin + 1)):
                if place < MAP_COLUMNS and (cells[place] in " ·" or mark == "█"):
                    cells[place] = mark
        table.add_row(
            format_bytes(segment.size_bytes), "".join(cells), f"{segment.pool}, stream {segment.stream}"
        )
    rest = segments[MOST_SEGMENTS:]
    if rest:
        table.add_row(format_bytes(sum(s.size_bytes for s in rest)), f"in {len(rest)} smaller segments", "")
    return table


def _outcomes(result: Replay) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("setting or policy", overflow="fold")
    for heading in ("peak reserved", "against now", "flushes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("goes through")
    base = result.outcomes[0]
    for outcome in result.outcomes:
        chosen = outcome.name == result.advice.setting
        table.add_row(*_outcome_row(outcome, base), style="bold" if chosen else None)
    return table


def _outcome_row(outcome: Outcome, base: Outcome) -> tuple[str, ...]:
    change = outcome.peak_reserved_bytes - base.peak_reserved_bytes
    share = 100 * change / base.peak_reserved_bytes if base.peak_reserved_bytes else 0.0
    against = "" if outcome is base or not (outcome.fits and base.fits) else f"{share:+.1f} %"
    return (
        outcome_name(outcome),
        format_bytes(outcome.peak_reserved_bytes),
        against,
        str(outcome.retries) if outcome.retries else "",
        "yes" if outcome.fits else f"no, event {outcome.out_of_memory_events[0]}",
    )


def outcome_name(outcome: Outcome) -> str:
    """A setting or policy as a row names it."""
    if outcome.start == "recorded":
        return f"{outcome.name}, from the recorded state"
    return f"policy {outcome.name}" if outcome.kind == "policy" else outcome.name


def _advice(result: Replay) -> RenderableType:
    advice = result.advice
    parts: list[RenderableType] = [_lines(advice.sentences or ("Nothing to change.",))]
    if advice.line is not None:
        parts += ["", Padding(Text(advice.line, style="bold"), (0, 0, 0, 2)), "", _lines(advice.risks)]
    return Group(*parts)


def _verdict(result: Replay) -> Text:
    if result.selected is not None:
        outcome = result.selected[0]
        end = (
            "everything is served"
            if outcome.fits
            else f"out of memory at event {outcome.out_of_memory_events[0]}"
        )
        peak = format_bytes(outcome.peak_reserved_bytes)
        return Text(f"Policy {outcome.name}: {end}; its heap is {peak} high.", style="bold")
    if not result.fits:
        return Text(
            f"Does not fit: out of memory at event {result.main.failures[0].event}.", style="bold red"
        )
    peak = format_bytes(result.peak_reserved_bytes)
    if result.capacity_bytes is None:
        return Text(f"It reserves {peak} where nothing limits it.", style="bold")
    return Text(f"Fits: {peak} of {format_bytes(result.capacity_bytes)}.", style="bold green")
