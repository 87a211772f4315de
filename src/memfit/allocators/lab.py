"""The replay lab: one recording through PyTorch's allocator, under every setting, and through every policy.

Examples:
    >>> from memfit.core.trace import TraceBuilder
    >>> builder = TraceBuilder()
    >>> blocks = [builder.alloc(7 << 20) for _ in range(4)]
    >>> report = replay(builder.build(), compare=False)
    >>> report.peak_requested_bytes >> 20, report.peak_reserved_bytes >> 20
    (28, 40)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from memfit.allocators import ALLOCATORS
from memfit.allocators.advice import Advice, advise
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.candidates import CANDIDATES, Candidate, risks_of
from memfit.allocators.outcome import Outcome
from memfit.allocators.packing_bound import Bound, bound_of
from memfit.allocators.running import Layout, Program, Run, run_caching
from memfit.allocators.settings import parse_settings
from memfit.allocators.shortage import Pinned, Shortage, explain, growing_buffers, pinned_segments
from memfit.allocators.textbook import policy_outcome
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.trace import Trace

SCHEMA_VERSION = 1
UNLIMITED_BYTES = 1 << 42
"""The device of a replay without a capacity: 4 TiB."""
MOST_COMPARED_EVENTS = 300_000
"""Beyond this the textbook policies are run only where they are named: they would take minutes."""
CACHING = "caching"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """All that a replay says.

    Attributes:
        recording: what was replayed.
        settings: of the main run, as PyTorch reads them; empty for the defaults.
        warnings: what PyTorch would misread in them.
        capacity_bytes: memory of the device; ``None`` where the replay had no limit.
        main: the main run, in detail.
        peak: what was held when most was reserved.
        shortages: the first out of memory, explained (later ones follow from it).
        pinned: segments kept by blocks in use, at the out of memory, or else when most was reserved.
        outcomes: every setting and policy that was tried, the main one first.
        bound: the best possible packing.
        advice: the setting to use, and why.
        growth: final sizes of buffers that grew step by step, and the number of steps.
        selected: the outcome and the run of the one policy that was asked for, if one was.
    """

    recording: Recording
    settings: str
    warnings: tuple[str, ...]
    capacity_bytes: int | None
    main: Run
    peak: Layout
    shortages: tuple[Shortage, ...]
    pinned: tuple[Pinned, ...]
    outcomes: tuple[Outcome, ...]
    bound: Bound | None
    advice: Advice
    growth: tuple[Sequence[int], int]
    selected: tuple[Outcome, Run] | None = None

    @property
    def peak_requested_bytes(self) -> int:
        """The most bytes of live blocks as they were asked for."""
        return self.main.total("requested_bytes", 1)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes of blocks in use."""
        return self.main.total("allocated_bytes", 1)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes taken from the device."""
        return self.main.total("reserved_bytes", 1)

    @property
    def fits(self) -> bool:
        """Whether every allocation was served (by the one policy that was asked for, if one was)."""
        return not self.main.failures if self.selected is None else self.selected[0].fits

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that live blocks never needed: 1 − live peak / reserved peak."""
        reserved = self.peak_reserved_bytes
        return 1 - self.peak_requested_bytes / reserved if reserved else 0.0

    def layout_at(self, event: int) -> Layout | None:
        """What was held after an event, where that was kept."""
        return self.main.layouts.get(event)

    def to_json(self, *, placements: bool = False, points: int = 200) -> dict[str, Any]:
        """Everything as plain values; bytes are whole numbers."""
        result: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "recording": self.recording.to_json(),
            "policy": CACHING,
            "settings": self.settings,
            "warnings": list(self.warnings),
            "capacity_bytes": self.capacity_bytes,
            "event_count": len(self.recording.trace),
            "last_event": self.main.last_event,
            "peak_requested_bytes": self.peak_requested_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "requested_bytes": self.main.total("requested_bytes", 0),
            "allocated_bytes": self.main.total("allocated_bytes", 0),
            "reserved_bytes": self.main.total("reserved_bytes", 0),
            "num_alloc_retries": int(self.main.stats["num_alloc_retries"]),
            "num_ooms": int(self.main.stats["num_ooms"]),
            "oom_events": [failure.event for failure in self.main.failures],
            "fits": self.fits,
            "fragmentation_ratio": round(self.fragmentation, 6),
            "same_places": self.main.same_places,
            "compared_places": self.main.compared_places,
            "out_of_memory": [shortage.to_json() for shortage in self.shortages],
            "pinned_segments": [pin.to_json() for pin in self.pinned[:20]],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "bound": None if self.bound is None else self.bound.to_json(),
            "advice": self.advice.to_json(),
            "over_time": self._series(points),
        }
        result |= self._placements() if placements else {}
        return result | (self._of_selected(placements) if self.selected is not None else {})

    def _of_selected(self, placements: bool) -> dict[str, Any]:
        """The head's numbers for the one policy that was asked for."""
        assert self.selected is not None
        outcome, run = self.selected
        numbers: dict[str, Any] = {
            "policy": outcome.name,
            "peak_requested_bytes": outcome.peak_requested_bytes,
            "peak_allocated_bytes": outcome.peak_allocated_bytes,
            "peak_reserved_bytes": outcome.peak_reserved_bytes,
            "requested_bytes": run.total("requested_bytes", 0),
            "allocated_bytes": run.total("allocated_bytes", 0),
            "reserved_bytes": outcome.reserved_bytes,
            "num_alloc_retries": 0,
            "num_ooms": len(outcome.out_of_memory_events),
            "oom_events": list(outcome.out_of_memory_events),
        }
        if placements:
            numbers["placements"] = run.placements.ravel().tolist()
        return numbers

    def _series(self, points: int) -> dict[str, list[int]]:
        """Totals at about so many events, those with the most live and the most reserved among them."""
        main = self.main
        index = chosen_events(main, points)
        return {
            "event": index.tolist(),
            "requested_bytes": main.live_bytes[index].tolist(),
            "allocated_bytes": main.allocated_bytes[index].tolist(),
            "reserved_bytes": main.reserved_bytes[index].tolist(),
        }

    def _placements(self) -> dict[str, Any]:
        """Where each allocation landed, and all that tells two allocators apart, as the goldens have it."""
        last = self.main.layouts[self.main.last_event]
        return {
            "placements": self.main.placements.ravel().tolist(),
            "reserved": self.main.reserved_changes.tolist(),
            "ooms": [failure.event for failure in self.main.failures],
            "stats": dict(self.main.stats),
            "segments": layout_json(last),
        }


def layout_json(layout: Layout) -> list[dict[str, Any]]:
    """Segments with their blocks: ``[offset, size, requested, state]`` each."""
    return [
        {
            "range": segment.region,
            "offset": segment.offset_bytes,
            "size": segment.size_bytes,
            "pool": segment.pool,
            "stream": segment.stream,
            "expandable": segment.expandable,
            "allocated": segment.allocated_bytes,
            "active": segment.active_bytes,
            "requested": segment.requested_bytes,
            **({"private_pool": segment.private_pool} if segment.private_pool else {}),
            "blocks": [
                [block.offset_bytes, block.size_bytes, block.requested_bytes, block.state]
                for block in segment.blocks
            ],
        }
        for segment in layout.segments
    ]


def chosen_events(run: Run, points: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Events to draw: of each stretch the highest live and the highest reserved, and both ends."""
    count = len(run.live_bytes)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, max(points // 2, 1), endpoint=False).astype(np.int64)
    chosen = [0, count - 1]
    for begin, end in zip(edges, [*edges[1:], count], strict=True):
        chosen.append(int(begin + np.argmax(run.live_bytes[begin:end])))
        chosen.append(int(begin + np.argmax(run.reserved_bytes[begin:end])))
    return np.unique(np.array(chosen, dtype=np.int64))


def replay(
    recording: Recording | Trace,
    *,
    settings: str | None = None,
    capacity_bytes: int | None = None,
    policies: Iterable[str] = ("all",),
    compare: bool = True,
    stop: bool = True,
    layouts_at: Iterable[int] = (),
    progress: Progress | None = None,
) -> Replay:
    """Replay a recording through PyTorch's allocator, and compare settings, policies and the best packing.

    Args:
        recording: what ``memfit.read_trace`` gives, or a trace.
        settings: a value of ``PYTORCH_ALLOC_CONF``; ``None`` takes what the recording was made with.
        capacity_bytes: memory of the device; ``None`` takes what the recording says, or no limit.
        policies: names of the ``ALLOCATORS`` to compare with, or ``"all"``.
        compare: also run the other settings and policies, and look for the best packing.
        stop: end a run where memory runs out, as a program does that does not catch it; otherwise leave out
            what fails and go on.
        layouts_at: events after which to keep what is held, for pictures.
        progress: called with what is being run, how many runs are done, and of how many.

    Raises:
        UsageError: PyTorch would refuse the settings, a policy is unknown, or the capacity is smaller than
            what the recording starts with.
    """
    if isinstance(recording, Trace):
        recording = Recording(trace=recording)
    lab = _Lab(recording, settings, capacity_bytes, stop=stop, progress=progress)
    return lab.report(policies, compare, layouts_at)


class _Lab:
    def __init__(
        self,
        recording: Recording,
        settings: str | None,
        capacity: int | None,
        *,
        stop: bool,
        progress: Progress | None,
    ) -> None:
        self._stop = stop
        self._tie_break: Literal["creation", "address"] = "creation"
        self._recording = recording
        self._program = Program.of(recording)
        self._capacity = recording.total_bytes if capacity is None else capacity
        self._settings, self._warnings = self._usable(settings)
        self._exact_settings = self._settings == recording.settings.strip()
        self._exact = self._begins_exactly()
        self._progress = progress or (lambda text, done, total: None)

    def _usable(self, settings: str | None) -> tuple[str, tuple[str, ...]]:
        """The settings of the main run: those given, or the recorded ones if this model has them."""
        if settings is not None:
            return settings.strip(), parse_settings(settings).warnings
        try:
            found = parse_settings(self._recording.settings)
        except UsageError as error:
            return "", (f"The recorded settings are not used: {error}",)
        if found.settings.backend != "native":
            return "", ("The run used backend:cudaMallocAsync; it is replayed with PyTorch's own allocator.",)
        return self._recording.settings.strip(), found.warnings

    def _begins_exactly(self) -> bool:
        """Whether the main run can start from the recorded state: same settings, and room for it."""
        start = self._recording.start
        if start is None or self._limit() < start.reserved_bytes:
            return False
        return self._exact_settings

    def report(self, policies: Iterable[str], compare: bool, layouts_at: Iterable[int]) -> Replay:
        wanted = tuple(policies)
        names = list(_policy_names(wanted))
        if wanted == ("all",) and len(self._program) > MOST_COMPARED_EVENTS:
            names = []
            self._warnings += (
                f"With more than {MOST_COMPARED_EVENTS:,} events the textbook policies are left out; "
                "name one to run it.",
            )
        selected = None
        chosen = [candidate for candidate in CANDIDATES if self._tried(candidate)] if compare else []
        total = 2 + len(chosen) + len(names)
        self._progress("replaying as recorded", 0, total)
        main, peak = self._main(frozenset(layouts_at))
        if not self._exact_settings:  # places of a run under other settings say nothing
            main = replace(main, same_places=0, compared_places=0)
        outcomes = [self._outcome(self._settings or "default", main, exact=self._exact)]
        done = 1
        for text in self._others(chosen):
            self._progress(text, done, total)
            outcomes.append(self._outcome(text, self._run(text)))
            done += 1
        for name in names if compare or wanted == tuple(names) else ():
            self._progress(name, done, total)
            outcome, run = policy_outcome(name, self._program, self._capacity, stop=self._stop)
            outcomes.append(outcome)
            selected = (outcome, run) if wanted == (name,) else None
            done += 1
        self._progress("the best packing", done, total)
        bound = bound_of(self._program) if compare else None
        shortages = self._shortages(main)
        growth = growing_buffers(self._recording.trace)
        layout = main.layouts[shortages[0].failure.event] if shortages else peak
        return Replay(
            recording=self._recording,
            settings=self._settings,
            warnings=self._warnings,
            capacity_bytes=self._capacity,
            main=main,
            peak=peak,
            shortages=shortages,
            pinned=pinned_segments(layout, self._recording.trace),
            outcomes=tuple(outcomes),
            bound=bound,
            advice=advise(
                outcomes, shortages=shortages, growth=growth, recording=self._recording, bound=bound
            ),
            growth=growth,
            selected=selected,
        )

    def _tried(self, candidate: Candidate) -> bool:
        has_limit = self._capacity is not None
        return candidate.text != self._settings and (has_limit or not candidate.needs_limit)

    def _others(self, chosen: Sequence[Candidate]) -> list[str]:
        """The other settings; where the state at the start was recorded, also the main one from nothing."""
        first = [self._settings or "default"] if self._exact else []
        default = ["default"] if self._settings else []
        return [*first, *default, *(candidate.text for candidate in chosen)]

    def _limit(self) -> int:
        return UNLIMITED_BYTES if self._capacity is None else self._capacity

    def _allocator(self, settings: str) -> CachingAllocator:
        return CachingAllocator(
            CachingConfig(
                total_bytes=self._limit(),
                settings="" if settings == "default" else settings,
                memory_fraction=self._recording.memory_fraction,
                events="manual",
                tie_break=self._tie_break,
            )
        )

    def _run(self, settings: str) -> Run:
        """A run from nothing: what was there at the start is allocated first."""
        return run_caching(self._program, self._allocator(settings), exact_start=False, stop=self._stop)

    def _main(self, layouts_at: frozenset[int]) -> tuple[Run, Layout]:
        """The main run, and again up to where most is reserved (and most of it free), which only it tells."""
        first = self._detailed(layouts_at)
        if first.same_places < first.compared_places and self._exact_settings:
            first = self._with_older_order(first, layouts_at)
        if not len(first.reserved_bytes):
            return first, first.layouts[-1]
        highest = np.flatnonzero(first.reserved_bytes == first.reserved_bytes.max())
        peak = int(highest[np.argmax(first.allocated_bytes[highest])])
        if peak in first.layouts:
            return first, first.layouts[peak]
        again = self._detailed(frozenset({peak}), until=peak, totals=False)
        return replace(first, layouts={**first.layouts, peak: again.layouts[peak]}), again.layouts[peak]

    def _with_older_order(self, first: Run, layouts_at: frozenset[int]) -> Run:
        """Before 2.14 PyTorch told blocks of one size apart by address alone: if that explains more, it is
        what was recorded."""
        self._tie_break = "address"
        older = self._detailed(layouts_at)
        if older.same_places > first.same_places:
            return older
        self._tie_break = "creation"
        return first

    def _detailed(self, layouts_at: frozenset[int], *, until: int | None = None, totals: bool = True) -> Run:
        return run_caching(
            self._program,
            self._allocator(self._settings),
            exact_start=self._exact_settings and (self._exact or self._recording.start is None),
            detailed=totals,
            stop=self._stop,
            layouts_at=layouts_at,
            until=until,
        )

    def _shortages(self, main: Run) -> tuple[Shortage, ...]:
        if not main.failures:
            return ()
        failure = main.failures[0]
        return (explain(failure, main.layouts[failure.event], self._recording.trace),)

    def _outcome(self, name: str, run: Run, *, exact: bool = False) -> Outcome:
        return Outcome(
            name=name,
            kind="setting",
            start="recorded" if exact else "empty",
            peak_requested_bytes=run.total("requested_bytes", 1),
            peak_allocated_bytes=run.total("allocated_bytes", 1),
            peak_reserved_bytes=run.total("reserved_bytes", 1),
            reserved_bytes=run.total("reserved_bytes", 0),
            out_of_memory_events=tuple(failure.event for failure in run.failures),
            retries=int(run.stats["num_alloc_retries"]),
            device_calls=int(run.stats["num_device_alloc"]),
            risks=() if name == "default" else risks_of(name),
        )


def _policy_names(policies: Iterable[str]) -> Iterable[str]:
    """The policies to compare with, without PyTorch's own, which runs in any case."""
    others: Mapping[str, Any] = {name: row for name, row in ALLOCATORS.items() if name != CACHING}
    for name in policies:
        if name == "all":
            yield from others
        elif name in others:
            yield name
        elif name != CACHING:
            raise UsageError(f"unknown policy {name!r}; it is one of all, {', '.join(ALLOCATORS)}")
