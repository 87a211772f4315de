"""Snapshots, traces and dry runs beside a message: replayed, they show the holes and who is in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.allocators.lab import Replay, replay
from memfit.analysis.findings import Advice, Finding, Verdict
from memfit.core.recording import Recording
from memfit.core.units import format_bytes

MOST_COMPARED = 20_000
MOST_PINNED = 3


def explain_recording(name: str, recording: Recording) -> Finding:
    """What a replay of the recording says."""
    result = replay(recording, policies=("caching",), compare=len(recording.trace) <= MOST_COMPARED)
    if result.shortages:
        return _shortage(name, result)
    return _held(name, recording, result)


def _shortage(name: str, result: Replay) -> Finding:
    shortage = result.shortages[0]
    failure = shortage.failure
    verdict: Verdict = "fragmentation" if shortage.is_layout else "device_full"
    if failure.requested_bytes > failure.limit_bytes:
        verdict = "request_exceeds_device"
    blocks = [
        f"{format_bytes(pin.free_bytes)} of a segment of {format_bytes(pin.size_bytes)} is kept by "
        f"{pin.block_count} blocks, the largest {format_bytes(pin.blocks[0][0])}"
        + (f" from {pin.blocks[0][1]}" if pin.blocks[0][1] else "")
        for pin in shortage.pinned[:MOST_PINNED]
        if pin.blocks
    ]
    summary = {
        "fragmentation": f"the recording ran out of memory by its layout: the largest hole has "
        f"{format_bytes(shortage.largest_hole_bytes)}, {format_bytes(failure.requested_bytes)} were asked "
        f"for",
        "device_full": f"the recording ran out of memory by amount: {format_bytes(shortage.missing_bytes)} "
        f"are missing",
        "request_exceeds_device": "the recording asks for more at once than the device has",
    }[verdict]
    return Finding(
        rule="recording",
        verdict=verdict,
        severity="error",
        confidence="high",
        summary=summary,
        evidence=(*shortage.sentences(), *blocks),
        bytes=failure.requested_bytes,
        where=f"{name}, event {failure.event}",
        advice=tuple(_advice(result)),
    )


def _advice(result: Replay) -> list[Advice]:
    found = result.advice
    advice = []
    if found.line is not None:
        advice.append(
            Advice(
                action="use the setting that the replay found to be best",
                typed=found.line,
                kind="shell",
                saving_bytes=max(found.gain_bytes, 0) or None,
                risks=" ".join(found.risks) or None,
                source="replay of this recording",
            )
        )
    return advice + [Advice(action=sentence) for sentence in found.sentences]


def _held(name: str, recording: Recording, result: Replay) -> Finding:
    """Nothing failed in it: what it holds."""
    end = recording.end if recording.end is not None else recording.start
    evidence = [
        f"reserved at most {format_bytes(result.peak_reserved_bytes)}, live at most "
        f"{format_bytes(result.peak_requested_bytes)}"
    ]
    if end is not None:
        evidence.append(
            f"at its end: {format_bytes(end.reserved_bytes)} reserved, {format_bytes(end.allocated_bytes)} "
            f"allocated, "
            f"{format_bytes(end.free_bytes)} free in the cache, the largest piece "
            f"{format_bytes(end.largest_free_bytes)}"
        )
    wasted = result.fragmentation > 0.2 and result.peak_reserved_bytes - result.peak_requested_bytes > 1 << 28
    return Finding(
        rule="recording",
        verdict="fragmentation" if wasted else "unknown",
        severity="warning" if wasted else "info",
        confidence="high",
        summary=f"memory did not run out in this recording; {result.fragmentation:.0%} of the reserved "
        f"peak was not live",
        evidence=tuple(evidence),
        bytes=result.peak_reserved_bytes - result.peak_requested_bytes,
        where=name,
        advice=tuple(_advice(result)),
    )


def explain_dry_run(name: str, value: Mapping[str, Any]) -> Finding:
    """What a dry run's JSON says."""
    total, capacity = value.get("device_total_bytes"), value.get("nvml_total_bytes")
    oom = value.get("oom")
    evidence = [
        f"peak reserved {format_bytes(value.get('peak_reserved_bytes', 0))} on {value.get('gpu', 'the GPU')}"
    ]
    evidence += category_lines(value)
    if isinstance(oom, Mapping):
        place = f"{oom.get('file')}:{oom.get('line')}" if oom.get("file") else "an unknown place"
        evidence.append(
            f"out of memory in {oom.get('phase', '?')} at {place}: "
            f"{format_bytes(oom.get('asked_bytes', 0))} asked for, "
            f"{format_bytes(oom.get('free_bytes', 0))} free"
        )
    fits = bool(value.get("fits"))
    return Finding(
        rule="dry_run",
        verdict="unknown" if fits else "device_full",
        severity="info" if fits else "error",
        confidence="high",
        summary="the dry run fits" if fits else "the dry run does not fit this GPU",
        evidence=tuple(evidence),
        bytes=max(total - capacity, 0) if isinstance(total, int) and isinstance(capacity, int) else None,
        where=name,
        advice=()
        if fits
        else (
            Advice(
                action="let memfit find the cheapest plan that fits",
                typed=f"memfit fit train.py:workload --gpu {value.get('gpu', 'GPU')}",
                kind="shell",
            ),
        ),
    )


def category_lines(value: Mapping[str, Any]) -> list[str]:
    """Who is live at a dry run's peak."""
    parts = value.get("peak_by_category")
    if not isinstance(parts, Mapping) or not parts:
        return []
    largest = sorted(
        ((str(name), size) for name, size in parts.items() if isinstance(size, int)), key=lambda p: -p[1]
    )
    shown = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest[:4])
    return [f"live at the dry run's peak: {shown}"]
