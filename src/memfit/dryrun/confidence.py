"""How far a dry run's peaks can be trusted: a level, by rule, and the reasons that it is no better.

| level | when |
|---|---|
| ``exact`` | nothing was left to a rule, and no value that is not known steers the script |
| ``high`` | what is not known changes the reserved peak by less than 1 %, as far as it was tried |
| ``medium`` | by less than 10 %; or workspaces of cuDNN, buffers of NCCL, or answers that were not tried |
| ``low`` | by more; or the run did not come to its end; or calls to the GPU's libraries did nothing |

Workspaces of convolutions are in no peak: they are judged by the share of the device's memory that they
leave open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.core.units import format_bytes
from memfit.dryrun.device_memory import WORKSPACES, with_device_memory
from memfit.dryrun.libraries import BESIDE_THE_PEAKS
from memfit.dryrun.result import Confidence, DryRunResult

_LEVELS: tuple[Confidence, ...] = ("exact", "high", "medium", "low")

Reason = tuple[Confidence, str]
"""The best level that a fact allows, and the fact."""

SMALL_SHARE, LARGE_SHARE = 0.01, 0.1

NOT_COMPUTED = "the values of"
KEPT = "kept:"
_PROFILING = "cupti"  # these calls would only have told about the run
NO_EFFECT = ("the beginning of the run in the trace", NOT_COMPUTED, KEPT, "nothing was uploaded")
"""Notes that say nothing about memory."""

TAKEN_AS_EXPECTED = "sizes that depend on unknown values: taken as expected (see value_reads)"
"""What the interval says better."""


def with_confidence(result: DryRunResult) -> DryRunResult:
    """``result`` with its level of confidence and the reasons for it, the gravest first; and with the
    device's memory as low, expected and high."""
    result = with_device_memory(result)
    reasons = sorted(_reasons(result), key=lambda reason: -_LEVELS.index(reason[0]))
    level = reasons[0][0] if reasons else "exact"
    texts = tuple(text for _, text in reasons)
    return replace(result, confidence=level, confidence_reasons=texts)


def _reasons(result: DryRunResult) -> Iterator[Reason]:
    if result.ended in ("interrupted", "timeout"):
        yield "low", "the run was ended early, and its peak may come later"
    elif result.ended == "error" or result.exit_code and result.ended != "out_of_memory":
        yield "low", "the script failed, and its peak may come later"
    yield from _estimates(result)
    yield from _interval(result)
    for note in result.not_modelled:
        level = level_of_note(note)
        if level is not None:
            yield level, note


def level_of_note(note: str) -> Confidence | None:
    """The best level that something not modelled allows; None: it says nothing about the peak."""
    if note.startswith("CUDA library calls"):
        calls = note.partition(": ")[2].split(", ")
        return None if all(call.startswith(_PROFILING) for call in calls) else "low"
    return None if note.startswith(NO_EFFECT) or note == TAKEN_AS_EXPECTED else "medium"


def _estimates(result: DryRunResult) -> Iterator[Reason]:
    if not result.estimates:
        return
    named = ", ".join(
        f"{name} {format_bytes(size) if size else 'not in the peaks'}"
        for name, size in result.estimates.items()
    )
    inside = sum(size for name, size in result.estimates.items() if name != BESIDE_THE_PEAKS)
    level = max(_by_share(inside, result), _of_workspaces(result), key=_LEVELS.index)
    yield level, f"sizes by a rule, not by the library itself: {named}"


def _of_workspaces(result: DryRunResult) -> Confidence:
    """By half the width of their part, the error to either side, as a share of all that is expected.

    On a small model the largest workspace may be half of the reserved peak, and still little on the device.
    """
    memory = result.device_memory
    parts = [part for part in memory.parts if part.name == WORKSPACES] if memory is not None else []
    if not parts:
        return "high"
    assert memory is not None
    width = sum(part.high_bytes - part.low_bytes for part in parts)
    share = width / 2 / max(1, memory.expected_bytes)
    return "medium" if share < LARGE_SHARE else "low"


def _interval(result: DryRunResult) -> Iterator[Reason]:
    steering = {read.site for read in result.value_reads if read.steers == "yes"}
    interval = result.interval
    if interval is None:
        places = {(read.file, read.line) for read in result.value_reads if read.steers != "no"}
        if places:
            level: Confidence = "medium" if steering else "high"
            yield level, f"{len(places)} places read values that are not known; no other answer was tried"
        return
    width = interval.reserved.high_bytes - interval.reserved.low_bytes
    if steering:
        yield "high", f"{len(steering)} places read values that are not known and steer the script"
    if width:
        yield _by_share(width, result), f"other answers change the reserved peak by {format_bytes(width)}"
    if interval.may_run_out and result.oom is None:
        yield "low", "with another answer the memory runs out"
    tried = [read for read in result.value_reads if read.other_answer is not None]
    failed = {read.site for read in tried if read.peak_change_bytes is None}
    if failed:
        yield "high", f"{len(failed)} places have another answer with which the script does not go on"
    untried = {read.site for read in result.value_reads if read.steers == "yes" and read.other_answer is None}
    if untried:
        yield "medium", f"{len(untried)} places that steer the script were not tried with another answer"
    perhaps = {
        read.site for read in result.value_reads if read.steers == "perhaps" and read.other_answer is None
    }
    if perhaps:
        yield "high", f"{len(perhaps)} places read values that may steer the script"


def _by_share(size_bytes: int, result: DryRunResult) -> Confidence:
    share = size_bytes / max(1, result.peak_reserved_bytes)
    return "high" if share < SMALL_SHARE else "medium" if share < LARGE_SHARE else "low"
