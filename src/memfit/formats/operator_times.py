"""What torch.profiler measured, from its Chrome trace: seconds by operator, the device's work, and its waits.

Self times of CPU operators are their durations without those of the operators inside them. Kernels are put
down to the operator that launched them by the ``External id`` that both have.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError

_MICROSECOND = 1e-6
_LOADER = "enumerate(DataLoader)"
_STEP = "ProfilerStep#"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("nccl", "c10d::", "gloo:")


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator: how often it ran, its own seconds on the host, and those of its kernels."""

    name: str
    calls: int
    host_seconds: float
    device_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OperatorTimes:
    """All that a profile of torch.profiler says of time.

    Attributes:
        operators: the slowest first.
        wall_seconds: from the first event to the last, or the sum of the steps where steps were marked.
        steps: how many steps were marked (``profiler.step()``); 0 where none were.
        device_busy_seconds: in which at least one kernel or copy ran; 0 in a profile of the CPU alone.
        kernel_count: kernels and copies.
        copy_seconds: of copies between host and device.
        communication_seconds: of collectives, on the device or else on the host.
        loader_seconds: in which the program waited for a ``DataLoader``.
        optimizer_seconds: in ``Optimizer.step``.
    """

    operators: tuple[OperatorTime, ...]
    wall_seconds: float
    steps: int = 0
    device_busy_seconds: float = 0.0
    kernel_count: int = 0
    copy_seconds: float = 0.0
    communication_seconds: float = 0.0
    loader_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    by_name: Mapping[str, OperatorTime] = field(default_factory=dict, repr=False)

    @property
    def on_device(self) -> bool:
        """Whether kernels of a GPU were recorded."""
        return self.kernel_count > 0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; of the whole recording where no steps were marked."""
        return self.wall_seconds / self.steps if self.steps else self.wall_seconds

    @property
    def step_count(self) -> int:
        """Over how many steps the operators' times are sums."""
        return self.steps or 1


def read_operator_times(source: str | os.PathLike[str]) -> OperatorTimes:
    """Read a Chrome trace of torch.profiler (``export_chrome_trace``), plain or gzip.

    Raises:
        InputError: it cannot be read, is no such trace, or has no operator in it.
    """
    path = Path(source)
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        data = json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is not the JSON of a profiler: {error}") from error
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{path} has no traceEvents: it is no Chrome trace of torch.profiler")
    return times_of(events, str(path))


def times_of(events: Iterable[Any], name: str) -> OperatorTimes:
    """The times of a list of trace events.

    Raises:
        InputError: no operator among them.
    """
    spans = [span for span in map(_span, events) if span is not None]
    operators = [span for span in spans if span.category == "cpu_op"]
    if not operators:
        raise InputError(f"{name} has no operators; record it with torch.profiler.profile()")
    kernels = [span for span in spans if span.category in _KERNELS]
    steps = [span for span in spans if span.name.startswith(_STEP) and span.category == "user_annotation"]
    marked = sum(step.seconds for step in steps)
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    rows = _rows(operators, kernels)
    return OperatorTimes(
        operators=rows,
        wall_seconds=marked or whole,
        steps=len(steps),
        device_busy_seconds=_union_seconds(kernels),
        kernel_count=len(kernels),
        copy_seconds=sum(span.seconds for span in kernels if "HtoD" in span.name or "DtoH" in span.name),
        communication_seconds=_communication(spans, kernels),
        loader_seconds=_union_seconds([span for span in spans if span.name.startswith(_LOADER)]),
        optimizer_seconds=_union_seconds([span for span in spans if span.name.startswith("Optimizer.step#")]),
        by_name={row.name: row for row in rows},
    )


@dataclass(frozen=True)
class _Span:
    name: str
    category: str
    begin: float
    end: float
    thread: tuple[Any, Any]
    external: Any

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def _span(event: Any) -> _Span | None:
    """An event with a duration; None for every other one."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    try:
        begin, took = float(event["ts"]) * _MICROSECOND, float(event.get("dur", 0.0)) * _MICROSECOND
    except (KeyError, TypeError, ValueError):
        return None
    arguments = event.get("args")
    external = arguments.get("External id") if isinstance(arguments, dict) else None
    thread = (str(event.get("pid")), str(event.get("tid")))
    return _Span(
        str(event.get("name", "")), str(event.get("cat", "")).lower(), begin, begin + took, thread, external
    )


def _rows(operators: list[_Span], kernels: list[_Span]) -> tuple[OperatorTime, ...]:
    own = _self_seconds(operators)
    launcher = {span.external: span.name for span in operators if span.external is not None}
    device: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        device[launcher.get(kernel.external, kernel.name)] += kernel.seconds
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    for span, seconds in zip(operators, own, strict=True):
        calls[span.name] += 1
        host[span.name] += seconds
    rows = [
        OperatorTime(
            name=name, calls=calls[name], host_seconds=host[name], device_seconds=device.get(name, 0.0)
        )
        for name in {**calls, **device}
    ]
    busy = bool(kernels)
    return tuple(sorted(rows, key=lambda r: (-(r.device_seconds if busy else r.host_seconds), r.name)))


def _self_seconds(spans: list[_Span]) -> list[float]:
    """Each span's duration without those of the spans directly inside it, in the same thread."""
    own = [span.seconds for span in spans]
    threads: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        threads[span.thread].append(place)
    for places in threads.values():
        places.sort(key=lambda place: (spans[place].begin, -spans[place].end))
        open_spans: list[int] = []
        for place in places:
            while open_spans and spans[open_spans[-1]].end <= spans[place].begin:
                open_spans.pop()
            if open_spans:
                own[open_spans[-1]] -= spans[place].seconds
            open_spans.append(place)
    return [max(seconds, 0.0) for seconds in own]


def _union_seconds(spans: list[_Span]) -> float:
    """Time that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(span.end - max(span.begin, reached), 0.0)
        reached = max(reached, span.end)
    return total


def _communication(spans: list[_Span], kernels: list[_Span]) -> float:
    on_device = [span for span in kernels if "nccl" in span.name.lower()]
    if on_device:
        return _union_seconds(on_device)
    host = [
        span
        for span in spans
        if span.category in ("cpu_op", "user_annotation") and span.name.lower().startswith(_COMMUNICATION)
    ]
    return _union_seconds(host)
