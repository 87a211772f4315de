"""`BottleneckDetector`: what limits a step, ranked, each with its figures and the evidence for it.

Limits of time are shares of the step (measured where torch.profiler's times are given, else predicted).
Limits of memory are shares of what the device has. A limit of memory comes first where it is the reason why
the step does not run, or hardly does; else the limits of time do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from memfit.analysis.memory import MemoryAnalysis, analyze_memory
from memfit.analysis.performance import INPUT_SHARE, PerformanceAnalysis, analyze_performance
from memfit.analysis.results import SCHEMA_VERSION, Result, Table
from memfit.analysis.subject import Subject
from memfit.core.devices import GPU
from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, format_seconds
from memfit.formats.operator_times import OperatorTimes

Kind = Literal[
    "memory_capacity",
    "fragmentation",
    "compute",
    "bandwidth",
    "launch_overhead",
    "input_pipeline",
    "communication",
    "optimizer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
FULL_SHARE = 0.95
"""From this share of the device on, memory is what limits a step: the next allocation may not be served."""
NOTABLE_SHARES = {"fragmentation": 0.2, "optimizer": 0.2, "communication": 0.1, "input_pipeline": 0.1}
"""Limits below these shares are no limits; the others are listed from `LEAST_SHARE` on."""
LEAST_SHARE = 0.05

REMEDIES = {
    "memory_capacity": "make the step smaller: memfit fit finds the fastest plan for a budget",
    "fragmentation": "PYTORCH_ALLOC_CONF=expandable_segments:True; memfit replay tries every setting",
    "compute": "use lower precision (bf16, tf32) or fewer FLOPs: the arithmetic itself is the limit",
    "bandwidth": "fuse memory-bound operators (torch.compile, fused kernels), or store less",
    "launch_overhead": "larger batches, torch.compile, or CUDA graphs: kernels are shorter than their launch",
    "input_pipeline": "more DataLoader workers, prefetching, pinned memory: the device waits for data",
    "communication": "overlap collectives with the backward pass, or communicate less often",
    "optimizer": "a fused optimizer, or fewer steps over more micro-batches",
}


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """One limit.

    Attributes:
        kind: one of `KINDS`.
        share: of the step's time, or of the device's memory; 1.0 is all of it, more does not fit.
        seconds: of the step; None for a limit of memory.
        bytes: that it is about; None for a limit of time.
        measured: whether it was measured, rather than predicted.
        evidence: the facts it rests on, with figures.
        remedy: what helps against it.
    """

    kind: Kind
    share: float
    seconds: float | None = None
    bytes: int | None = None
    measured: bool = False
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def figure_text(self) -> str:
        """Its seconds or bytes, as text."""
        if self.seconds is not None:
            return format_seconds(self.seconds)
        return "" if self.bytes is None else format_bytes(self.bytes)


@dataclass(frozen=True, kw_only=True)
class Bottlenecks(Result):
    """The limits of a step, the worst first. ``print(bottlenecks)`` shows them.

    Attributes:
        name: of what.
        found: the limits; empty where nothing stands out.
        looked_at: which kinds the sources could tell of.
    """

    title: ClassVar[str] = "What limits the step"

    name: str
    found: tuple[Bottleneck, ...]
    looked_at: tuple[Kind, ...]

    @property
    def limit(self) -> Bottleneck | None:
        """What limits the step most; None where nothing stands out."""
        return self.found[0] if self.found else None

    def sentences(self) -> Sequence[str]:
        if self.limit is None:
            return (f"Nothing stands out among {', '.join(_words(kind) for kind in self.looked_at)}.",)
        first = self.limit
        how = "measured" if first.measured else "predicted" if first.seconds is not None else "seen"
        said = [f"The limit is {_words(first.kind)} ({100 * first.share:.0f} %, {how}): {first.remedy}."]
        unseen = [_words(kind) for kind in KINDS if kind not in self.looked_at]
        if unseen:
            said.append(f"Not looked at, as the sources do not tell: {', '.join(unseen)}.")
        return said

    def tables(self) -> Sequence[Table]:
        rows = tuple(
            (_words(row.kind), f"{100 * row.share:.1f} %", row.figure_text, "; ".join(row.evidence))
            for row in self.found
        )
        return (
            Table(
                title="Limits, the worst first", heads=("limit", ">share", ">of it", "evidence"), rows=rows
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "limit": None if self.limit is None else self.limit.kind,
            "bottlenecks": [asdict(row) for row in self.found],
            "looked_at": list(self.looked_at),
        }


def _words(kind: str) -> str:
    return kind.replace("_", " ")


class BottleneckDetector:
    """Names what limits a step, from any of a trace, profile, step, workload and torch.profiler's trace.

    Args:
        sources: see `Subject.of`; the more there are, the more kinds of limits are looked at.
        gpu: the GPU, or its name: for predicted times, and for what memory there is.
        budget: what PyTorch may reserve, as bytes or text; default: what the GPU has.

    Examples:
        >>> from memfit.core.trace import TraceBuilder
        >>> builder = TraceBuilder()
        >>> held = builder.alloc(12 << 30)
        >>> BottleneckDetector(builder.build(), gpu="rtx3060-12gb").detect().limit.kind
        'memory_capacity'
    """

    def __init__(self, *sources: Any, gpu: GPU | str | None = None, budget: int | str | None = None) -> None:
        self.subject = Subject.of(*sources, gpu=gpu, budget=budget)

    def detect(self) -> Bottlenecks:
        """Look at everything that the sources tell.

        Raises:
            UsageError: they tell nothing.
        """
        return detect_bottlenecks(self.subject)


def detect_bottlenecks(
    subject: Subject,
    *,
    memory: MemoryAnalysis | None = None,
    performance: PerformanceAnalysis | None = None,
) -> Bottlenecks:
    """The limits of a subject; analyses of it that are at hand are not made again."""
    subject = subject.with_graph()
    if not subject.kinds():
        raise UsageError("nothing to look at: give a trace, a profile, a step or torch.profiler's trace")
    if memory is None and subject.trace is not None:
        memory = analyze_memory(subject)
    if performance is None and subject.graph is not None and subject.gpu is not None:
        performance = analyze_performance(subject.graph, subject.gpu, subject.times, name=subject.name)
    looks: list[tuple[tuple[Kind, ...], Callable[[], Iterator[Bottleneck]]]] = []
    if memory is not None:
        known = ("memory_capacity",) if memory.capacity_bytes else ()
        fragments = ("fragmentation",) if memory.fragmentation is not None else ()
        kinds: tuple[Kind, ...] = (*known, *fragments)
        looks.append((kinds, lambda: _of_memory(memory)))
    if performance is not None:
        looks.append(
            (("compute", "bandwidth", "launch_overhead", "optimizer"), lambda: _of_time(performance))
        )
    if subject.times is not None:
        times = subject.times
        looks.append(
            (("input_pipeline", "communication", "launch_overhead", "optimizer"), lambda: _measured(times))
        )
    found: dict[Kind, Bottleneck] = {}
    for _, look in looks:
        for row in look():
            if row.kind not in found or row.measured:  # what was measured counts for more
                found[row.kind] = row
    seen = {kind for kinds, _ in looks for kind in kinds}
    notable = [row for row in found.values() if row.share >= NOTABLE_SHARES.get(row.kind, LEAST_SHARE)]
    return Bottlenecks(
        name=subject.name,
        found=tuple(sorted(notable, key=_rank)),
        looked_at=tuple(kind for kind in KINDS if kind in seen),
    )


def _rank(row: Bottleneck) -> tuple[int, float, int]:
    """Memory that is full comes first, then time by its share, then memory that has room."""
    if row.kind == "memory_capacity" and row.share >= FULL_SHARE:
        group = 0
    elif row.kind == "input_pipeline" and row.share >= INPUT_SHARE:
        group = 1  # while the device waits, nothing else limits it
    else:
        group = 2 if row.seconds is not None else 3
    return group, -row.share, KINDS.index(row.kind)


def _of_memory(memory: MemoryAnalysis) -> Iterator[Bottleneck]:
    fragmentation = memory.fragmentation
    reserved = memory.peak_bytes if fragmentation is None else fragmentation.peak_reserved_bytes
    if memory.capacity_bytes:
        share = reserved / memory.capacity_bytes
        largest = next(iter(memory.composition.get("category", {})), "")
        text = f"{format_bytes(reserved)} reserved of {format_bytes(memory.capacity_bytes)}"
        evidence = [text, f"{format_bytes(memory.peak_bytes)} live at the peak"]
        evidence += [f"the most of it {_words(largest)}"] if largest not in ("", "other") else []
        yield Bottleneck(
            kind="memory_capacity", share=share, bytes=reserved, evidence=tuple(evidence),
            remedy=REMEDIES["memory_capacity"],
        )  # fmt: skip
    if fragmentation is not None:
        spare = fragmentation.peak_reserved_bytes - fragmentation.live_bytes
        if spare >= 32 << 20:  # below this it is segments that are not full yet
            yield Bottleneck(
                kind="fragmentation",
                share=fragmentation.ratio,
                bytes=spare,
                evidence=(
                    f"{format_bytes(spare)} of {format_bytes(fragmentation.peak_reserved_bytes)} reserved "
                    "are not live",
                    f"the largest free block is {format_bytes(fragmentation.largest_free_bytes)}",
                ),
                remedy=REMEDIES["fragmentation"],
            )


def _of_time(performance: PerformanceAnalysis) -> Iterator[Bottleneck]:
    whole = performance.seconds or 1.0
    kinds: tuple[tuple[str, Kind], ...] = (
        ("compute", "compute"), ("bandwidth", "bandwidth"), ("overhead", "launch_overhead"),
    )  # fmt: skip
    for bound, kind in kinds:
        seconds = performance.seconds_by_bound[bound]
        slowest = [cost for cost in performance.classes if cost.bound == bound][:2]
        named = ", ".join(f"{cost.name} {format_seconds(cost.seconds)}" for cost in slowest)
        evidence = (f"{format_seconds(seconds)} of {format_seconds(whole)} predicted on {performance.gpu}",)
        yield Bottleneck(
            kind=kind, share=seconds / whole, seconds=seconds, remedy=REMEDIES[kind],
            evidence=(*evidence, named) if named else evidence,
        )  # fmt: skip
    for cost in performance.phases:
        if cost.name == "optimizer":
            yield Bottleneck(
                kind="optimizer",
                share=cost.seconds / whole,
                seconds=cost.seconds,
                evidence=(f"{cost.calls:,} operators, {format_bytes(cost.bytes_moved)} moved",),
                remedy=REMEDIES["optimizer"],
            )


def _measured(times: OperatorTimes) -> Iterator[Bottleneck]:
    whole, steps = times.wall_seconds or 1.0, times.step_count
    rows: list[tuple[Kind, float, str]] = [
        ("input_pipeline", times.loader_seconds, "waiting for the DataLoader"),
        ("communication", times.communication_seconds, "in collectives"),
        ("optimizer", times.optimizer_seconds, "in Optimizer.step"),
    ]
    if times.on_device:
        idle = max(whole - times.device_busy_seconds - times.loader_seconds, 0.0)
        average = times.device_busy_seconds / times.kernel_count
        text = f"the device idle between {times.kernel_count:,} kernels of {format_seconds(average)} each"
        rows.append(("launch_overhead", idle, text))
    for kind, seconds, what in rows:
        evidence = f"{format_seconds(seconds / steps)} of a step of {format_seconds(whole / steps)} {what}"
        yield Bottleneck(
            kind=kind, share=seconds / whole, seconds=seconds / steps, measured=True, evidence=(evidence,),
            remedy=REMEDIES[kind],
        )  # fmt: skip
