"""`MemoryAnalyzer`: where memory goes: the peak, fragmentation, leaks, and how long blocks live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from memfit.allocators.lab import replay
from memfit.analysis.blocks import Blocks, whole_trace
from memfit.analysis.growth import WARM_UP_STEPS, Slope, growth_of, slope_of
from memfit.analysis.lifetimes import LifetimeStatistics, lifetimes_of_graph, lifetimes_of_trace
from memfit.analysis.results import SCHEMA_VERSION, Result, Table, byte_table, layers_together, share_text
from memfit.analysis.steps import phase_at_events, step_ends
from memfit.analysis.subject import Subject
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.snapshot import Snapshot
from memfit.core.timeline import Timeline
from memfit.core.trace import CATEGORIES
from memfit.core.units import format_bytes
from memfit.profiling.profile import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS: Mapping[str, str] = {
    "category": "what it is",
    "module": "module",
    "op": "operator",
    "where": "line",
    "phase": "phase of allocation",
}
"""Text columns of a trace, and what their tables' first column is headed."""
MOST_REPLAYED_EVENTS = 300_000
MOST_SITES = 10
MOST_TEXTS = 200
SERIES_POINTS = 200
LEAK_FIT = 0.9
"""A rising line counts as a leak where it explains this share of the variance of the ends of steps."""
LEAST_LEAK_BYTES = 1024
FEWEST_LEAK_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place that allocates: the line, or else the module and operator."""

    where: str
    bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """What the allocator held beyond what was live.

    Attributes:
        peak_reserved_bytes: the most that was taken from the device.
        live_bytes: live at that moment, as requested.
        largest_free_bytes: the largest block that was free in the cache then; 0 where that is not known.
        over_time: ``(event, live bytes, reserved bytes)`` at chosen events.
        source: ``"replay"`` (PyTorch's allocator was replayed), ``"recorded"`` or ``"snapshot"``.
    """

    peak_reserved_bytes: int
    live_bytes: int
    largest_free_bytes: int = 0
    over_time: tuple[tuple[int, int, int], ...] = ()
    source: str = "replay"

    @property
    def ratio(self) -> float:
        """The share of the reserved peak that live blocks did not need."""
        return 1 - self.live_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Memory that is kept a little more with each step.

    Attributes:
        bytes_per_step: the median slope of the live bytes at the ends of steps.
        fit: the share of their variance that this line explains.
        steps: how many steps it was seen over.
        sites: who allocated what piles up, with its bytes per step.
    """

    bytes_per_step: float
    fit: float
    steps: int
    sites: tuple[Site, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryAnalysis(Result):
    """Where a job's memory goes. ``print(analysis)`` shows it.

    Attributes:
        name: of what was analysed.
        event_count: how many events it has.
        peak_bytes: the most bytes that were live at once, as requested.
        peak_event: the event at which.
        peak_phase: the phase in which.
        composition: label of `LABELS` → text → bytes live at the peak, the largest first.
        phase_peaks: the most live bytes in each phase.
        top_sites: who allocated the most of what is live at the peak.
        fragmentation, leak, lifetimes: None where the source does not tell, or there is none.
        capacity_bytes: what PyTorch can have of the device, where known.
        notes: what the figures leave out.
    """

    title: ClassVar[str] = "Memory"

    name: str
    event_count: int
    peak_bytes: int
    peak_event: int
    peak_phase: str
    composition: Mapping[str, Mapping[str, int]]
    phase_peaks: Mapping[str, int]
    top_sites: tuple[Site, ...]
    fragmentation: Fragmentation | None = None
    leak: Leak | None = None
    lifetimes: LifetimeStatistics | None = None
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    def sentences(self) -> Sequence[str]:
        where = f", in the {self.peak_phase} phase" if self.peak_phase not in ("other", "init", "") else ""
        said = [f"{format_bytes(self.peak_bytes)} are live at the peak{where}."]
        categories = self.composition.get("category", {})
        if set(categories) - {"other"}:
            parts = list(categories.items())[:3]
            text = ", ".join(
                f"{name.replace('_', ' ')} {share_text(size, self.peak_bytes)}" for name, size in parts
            )
            said.append(f"Most of it: {text}.")
        if self.capacity_bytes:
            share = share_text(self.peak_bytes, self.capacity_bytes)
            said.append(f"That is {share} of the {format_bytes(self.capacity_bytes)} that PyTorch can have.")
        said += self._fragmentation_sentence() + self._leak_sentence()
        said += [] if self.lifetimes is None else self.lifetimes.sentences()
        return [*said, *self.notes]

    def _fragmentation_sentence(self) -> list[str]:
        found = self.fragmentation
        if found is None:
            return []
        how = {"replay": "replayed", "recorded": "as recorded", "snapshot": "in the snapshot"}[found.source]
        return [
            f"{format_bytes(found.peak_reserved_bytes)} are reserved at most ({how}); "
            f"{100 * found.ratio:.1f} % of that is not live: cache, rounding and holes."
        ]

    def _leak_sentence(self) -> list[str]:
        if self.leak is None:
            return []
        worst = f", most of it from {self.leak.sites[0].where}" if self.leak.sites else ""
        return [
            f"Memory grows by {format_bytes(self.leak.bytes_per_step)} a step over {self.leak.steps} "
            f"steps{worst}: something is kept that should not be."
        ]

    def tables(self) -> Sequence[Table]:
        tables = [
            byte_table(f"At the peak, by {head}", head, self._shown(label), self.peak_bytes)
            for label, head in LABELS.items()
            if set(self.composition.get(label, ())) - {"", "other"}
        ]
        tables.append(byte_table("Highest in each phase", "phase", self.phase_peaks, self.peak_bytes))
        tables.append(_site_table("Top sites at the peak", self.top_sites))
        if self.leak is not None:
            tables.append(_site_table("What grows, by step", self.leak.sites))
        return [*tables, *([] if self.lifetimes is None else self.lifetimes.tables())]

    def _shown(self, label: str) -> Mapping[str, int]:
        rows = self.composition[label]
        if label == "category":
            return {name.replace("_", " "): size for name, size in rows.items()}
        return layers_together(rows) if label == "module" else rows

    def to_json(self) -> dict[str, Any]:
        fragmentation = self.fragmentation
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "event_count": self.event_count,
            "peak_bytes": self.peak_bytes,
            "peak_event": self.peak_event,
            "peak_phase": self.peak_phase,
            "capacity_bytes": self.capacity_bytes,
            "composition": {label: dict(rows) for label, rows in self.composition.items()},
            "phase_peaks": dict(self.phase_peaks),
            "top_sites": [asdict(site) for site in self.top_sites],
            "fragmentation": None
            if fragmentation is None
            else {**asdict(fragmentation), "ratio": round(fragmentation.ratio, 6)},
            "leak": None if self.leak is None else asdict(self.leak),
            "lifetimes": None if self.lifetimes is None else self.lifetimes.to_json(),
            "notes": list(self.notes),
        }

    def figure(self) -> Figure | None:
        from memfit.analysis.pictures import memory_figure

        return memory_figure(self)


def _site_table(title: str, sites: Sequence[Site]) -> Table:
    return Table(
        title=title,
        heads=("where", ">bytes", ">blocks"),
        rows=tuple(
            (site.where, format_bytes(site.bytes), f"{site.blocks:,}" if site.blocks else "")
            for site in sites
        ),
    )


class MemoryAnalyzer:
    """Says where memory goes, from a trace, recording, snapshot, profile, step graph, or a file of one.

    Args:
        source: what to look at; a path is read by its content.
        gpu: the GPU that it is for: peaks are then compared with what it has.

    Examples:
        >>> from memfit.core.trace import TraceBuilder
        >>> builder = TraceBuilder()
        >>> weights = builder.alloc(3 << 20, category="parameter")
        >>> builder.free(builder.alloc(1 << 20, category="activation", phase="forward", module="mlp"))
        >>> analysis = MemoryAnalyzer(builder.build()).analyze()
        >>> analysis.peak_bytes, analysis.composition["category"]
        (4194304, {'parameter': 3145728, 'activation': 1048576})
    """

    def __init__(self, source: Any, *, gpu: Any = None) -> None:
        self.subject = Subject.of(source, gpu=gpu)

    def analyze(self) -> MemoryAnalysis:
        """Look at everything that the source tells.

        Raises:
            UsageError: it tells nothing of memory.
        """
        return analyze_memory(self.subject)


def analyze_memory(subject: Subject) -> MemoryAnalysis:
    """The memory analysis of a subject; see `MemoryAnalyzer`."""
    subject = subject if subject.trace is not None else subject.with_graph()
    recording = subject.recording
    if recording is not None and not len(recording.trace) and recording.end is not None:
        return _of_snapshot(subject, recording.end)
    trace = subject.trace
    if trace is None:
        raise UsageError("this source tells nothing of memory: give a trace, a snapshot, a profile or a step")
    whole = trace if recording is None else whole_trace(recording)
    timeline, blocks = Timeline.of(whole), Blocks.of(whole)
    live = timeline.live_at()
    phases = phase_at_events(whole)
    graph = subject.graph if recording is None and subject.profile is None else None
    return MemoryAnalysis(
        name=subject.name,
        event_count=len(whole),
        peak_bytes=timeline.peak_bytes,
        peak_event=timeline.peak_index,
        peak_phase=whole.strings[phases[timeline.peak_index]] if len(whole) else "",
        composition={label: _kept(live.by(label), label) for label in LABELS},
        phase_peaks=timeline.peak_by_phase(),
        top_sites=_sites(blocks, blocks.live_after(timeline.peak_index)),
        fragmentation=_fragmentation(recording or Recording(trace=whole)),
        leak=_leak_of_profile(subject.profile)
        if recording is None and subject.profile is not None
        else _leak(blocks, timeline, step_ends(whole)),
        lifetimes=lifetimes_of_trace(blocks) if graph is None else lifetimes_of_graph(graph),
        capacity_bytes=subject.capacity_bytes,
        notes=_notes(subject, graph is not None),
    )


def _notes(subject: Subject, of_graph: bool) -> tuple[str, ...]:
    if of_graph:
        return ("Of a captured step: what operators ask for, without the libraries' workspaces.",)
    return () if subject.recording is None else subject.recording.notes


def _kept(rows: Mapping[str, int], label: str) -> dict[str, int]:
    """The largest texts; categories in the order of `CATEGORIES` where they are equal."""
    order: dict[str, int] = (
        {name: place for place, name in enumerate(CATEGORIES)} if label == "category" else {}
    )
    listed = sorted(rows.items(), key=lambda item: (-item[1], order.get(item[0], 0), item[0]))
    kept = dict(listed[:MOST_TEXTS])
    rest = sum(rows.values()) - sum(kept.values())
    return {**kept, "…": rest} if rest else kept


def _sites(blocks: Blocks, mask: Any) -> tuple[Site, ...]:
    return tuple(
        Site(where=where, bytes=size, blocks=count)
        for where, size, count in blocks.largest_sites(mask, MOST_SITES)
    )


def _fragmentation(recording: Recording) -> Fragmentation | None:
    """Live against reserved bytes over time: PyTorch's allocator is replayed over the events."""
    count = len(recording.trace)
    if not 0 < count <= MOST_REPLAYED_EVENTS:
        return _recorded_fragmentation(Timeline.of(recording.trace))
    result = replay(recording, compare=False)
    run = result.main
    if not len(run.reserved_bytes):
        return None
    peak = int(run.reserved_bytes.max())
    highest = np.flatnonzero(run.reserved_bytes == peak)
    at = int(highest[np.argmax(run.live_bytes[highest])])
    last = len(run.live_bytes) - 1
    chosen = np.unique(np.linspace(0, last, min(SERIES_POINTS, last + 1)).astype(int))
    free = [b.size_bytes for s in result.peak.segments for b in s.blocks if b.state == "I"]
    return Fragmentation(
        peak_reserved_bytes=peak,
        live_bytes=int(run.live_bytes[at]),
        largest_free_bytes=max(free, default=0),
        over_time=tuple((int(i), int(run.live_bytes[i]), int(run.reserved_bytes[i])) for i in chosen),
    )


def _recorded_fragmentation(timeline: Timeline) -> Fragmentation | None:
    """Of a trace that is too long to be replayed: by its own segments, where it has them."""
    if not timeline.peak_reserved_bytes:
        return None
    highest = np.flatnonzero(timeline.reserved_bytes == timeline.peak_reserved_bytes)
    at = int(highest[np.argmax(timeline.live_bytes[highest])])
    chosen = np.linspace(0, len(timeline.live_bytes) - 1, SERIES_POINTS).astype(int)
    return Fragmentation(
        peak_reserved_bytes=timeline.peak_reserved_bytes,
        live_bytes=int(timeline.live_bytes[at]),
        over_time=tuple(
            (int(i), int(timeline.live_bytes[i]), int(timeline.reserved_bytes[i])) for i in chosen
        ),
        source="recorded",
    )


def _leak(blocks: Blocks, timeline: Timeline, ends: Sequence[int]) -> Leak | None:
    growth = growth_of(blocks, timeline.live_bytes, ends)
    if growth is None or growth.slope.steps + 1 < FEWEST_LEAK_STEPS or not _is_leak(growth.slope):
        return None
    steps = len(set(growth.step_of[growth.mask].tolist())) or 1
    return Leak(
        bytes_per_step=growth.slope.per_step,
        fit=growth.slope.r_squared,
        steps=growth.slope.steps + 1,
        sites=tuple(
            Site(where=where, bytes=size // steps, blocks=max(count // steps, 1))
            for where, size, count in blocks.largest_sites(growth.mask, MOST_SITES)
        ),
    )


def _is_leak(slope: Slope) -> bool:
    return slope.per_step >= LEAST_LEAK_BYTES and slope.r_squared >= LEAK_FIT


def _leak_of_profile(profile: Profile) -> Leak | None:
    """Growth over all detailed steps, also those whose events were not kept, after the warm-up.

    What the steps between them keep was not noted, so each detailed step adds what one step does.
    """
    steps = profile.detailed_steps[WARM_UP_STEPS:]
    if len(steps) < FEWEST_LEAK_STEPS:
        return None
    slope = slope_of([step.end_bytes for step in steps])
    if not _is_leak(slope):
        return None
    first, last = steps[0].end_by_site, steps[-1].end_by_site
    grown = {site: (size - first.get(site, 0)) // slope.steps for site, size in last.items()}
    ordered = sorted(
        ((site, size) for site, size in grown.items() if size > 0), key=lambda row: (-row[1], row[0])
    )
    return Leak(
        bytes_per_step=slope.per_step,
        fit=slope.r_squared,
        steps=slope.steps + 1,
        sites=tuple(
            Site(where=where or "an unknown place", bytes=size, blocks=0)
            for where, size in ordered[:MOST_SITES]
        ),
    )


def _of_snapshot(subject: Subject, snapshot: Snapshot) -> MemoryAnalysis:
    """A snapshot without history: who holds what at that moment, and what lies free."""
    sites: dict[str, list[int]] = {}
    for block in snapshot.blocks():
        if block.active:
            entry = sites.setdefault(block.where or "an unknown place", [0, 0])
            entry[0] += block.requested_bytes or block.size_bytes
            entry[1] += 1
    ordered = sorted(sites.items(), key=lambda item: (-item[1][0], item[0]))
    return MemoryAnalysis(
        name=subject.name,
        event_count=0,
        peak_bytes=sum(size for _, (size, _) in ordered),
        peak_event=-1,
        peak_phase="",
        composition={"where": _kept({where: size for where, (size, _) in ordered}, "where")},
        phase_peaks={},
        top_sites=tuple(Site(where=w, bytes=s, blocks=c) for w, (s, c) in ordered[:MOST_SITES]),
        fragmentation=Fragmentation(
            peak_reserved_bytes=snapshot.reserved_bytes,
            live_bytes=sum(size for _, (size, _) in ordered),
            largest_free_bytes=snapshot.largest_free_bytes,
            source="snapshot",
        ),
        capacity_bytes=subject.capacity_bytes,
        notes=("The snapshot has no history: this is the moment at which it was taken.",),
    )
