"""PyTorch ran out of a device's memory, and the message has numbers: what they say.

The order of the questions matters. Numbers that cannot be sizes come first, then limits, then what cannot fit
in any way, then whether it would fit if the reserved memory were in one piece, then whether others hold what
is missing; what is left is a device that this process filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.full import advice_for_phase, phase_line
from memfit.analysis.explanations.misreport import impossible_size, misreported
from memfit.analysis.explanations.situation import CONTEXT_BYTES, Situation, situation_of
from memfit.analysis.explanations.wording import difference_of, process_list, total_of, where_of
from memfit.analysis.findings import Advice, Confidence, Finding, Verdict
from memfit.core.units import GIB, MIB, format_bytes
from memfit.formats.messages import Message

RULE = "oom_message"
NEAR_BYTES = 256 * MIB
LEAST_SHARE = 0.10
LARGE_SHARE = 0.25
MOST_SHARE = 0.4
POOL_SHARE = 0.15
LEAST_OTHERS_BYTES = 512 * MIB
STRAY_BYTES = range(150 * MIB, 1600 * MIB)
QUADRATIC_BYTES = 8 * GIB


@dataclass(frozen=True, kw_only=True)
class Case:
    """A message, its numbers, and all else that is known."""

    message: Message
    clues: Clues
    at: Situation

    def finding(
        self,
        verdict: Verdict,
        summary: str,
        evidence: Sequence[str],
        advice: Sequence[Advice],
        *,
        confidence: Confidence = "high",
        size: int | None = None,
    ) -> Finding:
        """A finding of this case."""
        return Finding(
            rule=RULE,
            verdict=verdict,
            severity="error",
            confidence=confidence,
            summary=summary,
            evidence=(*evidence, *_pool_lines(self.at), *_slice_lines(self.clues), *_sources(self.at)),
            bytes=self.at.requested_bytes if size is None else size,
            where=where_of(self.message),
            advice=tuple(advice),
        )


def explain_device(message: Message, clues: Clues) -> Finding:
    """The finding for a message of a device's allocator."""
    case = Case(message=message, clues=clues, at=situation_of(message, clues))
    for judge in JUDGES:
        finding = judge(case)
        if finding is not None:
            return finding
    return _cut_short(case)


def _pool_lines(at: Situation) -> list[str]:
    """Memory that CUDA graphs keep for themselves."""
    pools, reserved = at.private_pool_bytes or 0, at.reserved_bytes or 0
    if pools < POOL_SHARE * reserved or not reserved:
        return []
    return [
        f"{format_bytes(pools)} of it are in private pools (CUDA graphs), which nothing else can use: every "
        "recorded shape keeps its own (torch.compile(dynamic=True), or record fewer shapes)"
    ]


def _slice_lines(clues: Clues) -> list[str]:
    if not any(device.mig for device in clues.devices):
        return []
    return ["the GPU is partitioned (MIG): the total is that of the job's slice, not of the card"]


def _sources(at: Situation) -> list[str]:
    named = {"nvidia-smi": "nvidia-smi", "given": "what was given beside the message", "the log": "the log"}
    return [
        f"{name.removesuffix('_bytes').replace('_', ' ')} is from {named.get(source, source)}, not from "
        f"the message"
        for name, source in at.sources.items()
    ]


def _limited(case: Case) -> Finding | None:
    """The process stands at a limit of its own."""
    at = case.at
    if at.allowed_bytes is None or at.requested_bytes is None:
        return None
    if at.total_bytes is not None and at.allowed_bytes >= 0.995 * at.total_bytes:
        return None
    held = at.reserved_bytes if at.reserved_bytes is not None else at.allocated_bytes or 0
    evidence = [f"the message states the limit: {format_bytes(at.allowed_bytes)} allowed for this process"]
    if at.unallocated_bytes is not None and at.allocated_bytes is not None:
        parts = f"{format_bytes(at.allocated_bytes)} + {format_bytes(at.unallocated_bytes)}"
        evidence.append(f"{parts} = {held / GIB:.3f} GiB reserved: the process stands at its own limit")
    asked = f"{format_bytes(at.requested_bytes)} more would be {(held + at.requested_bytes) / GIB:.3f} GiB"
    evidence.append(f"{asked} against {at.allowed_bytes / GIB:.2f} GiB allowed")
    if at.free_bytes is not None:
        evidence.append(f"the device itself has {format_bytes(at.free_bytes)} free")
    over = at.total_bytes is not None and at.requested_bytes > at.total_bytes
    if held + at.requested_bytes < 0.97 * at.allowed_bytes and not over:
        return None
    return case.finding(
        "process_limit",
        f"this process may use {format_bytes(at.allowed_bytes)} of the GPU, and stands there: "
        "a per-process memory fraction is in force",
        evidence,
        (remedies.raise_fraction(case.message), remedies.find_fraction()),
    )


def _rejected(case: Case) -> Finding | None:
    """PyTorch refused before asking the device."""
    if case.message.kind != "torch-limit":
        return None
    asked = case.at.requested_bytes
    size = "" if asked is None else f" of {format_bytes(asked)}"
    return case.finding(
        "process_limit",
        f"a request{size} would exceed the per-process memory fraction, so PyTorch did not try it",
        ["the message names the limit itself; the device may have room"],
        (remedies.raise_fraction(case.message), remedies.find_fraction()),
    )


def _exceeds(case: Case) -> Finding | None:
    """One request that is larger than the whole device."""
    at = case.at
    if at.total_bytes is None or at.requested_bytes is None or at.requested_bytes <= at.total_bytes:
        return None
    evidence = [
        f"{format_bytes(at.requested_bytes)} > {format_bytes(at.total_bytes)}: it cannot succeed on this "
        f"device, "
        "whatever is freed and however the allocator is set"
    ]
    evidence.append(
        "a request of this size usually is an attention score matrix, or an intermediate over the whole "
        "sequence or image: it grows with the square of the length"
    )
    evidence += _own_line(at) + _spill_lines(at) + phase_line(case.message)
    return case.finding(
        "request_exceeds_device",
        f"a single request of {format_bytes(at.requested_bytes)} is larger than the whole device "
        f"({format_bytes(at.total_bytes)})",
        evidence,
        (remedies.attention(), remedies.shorter_sequence(), remedies.split_the_request()),
    )


def _own_line(at: Situation) -> list[str]:
    if at.own is None or at.own.used_bytes is None or not at.others:
        return []
    held = total_of(at.allocated_bytes or 0, at.unallocated_bytes or 0)
    return [
        f"this process is most likely {at.own.pid}, the {format_bytes(at.own.used_bytes)} one ({held} "
        f"reserved, "
        "plus its CUDA context)"
    ]


def _spill_lines(at: Situation) -> list[str]:
    if at.total_bytes is None or at.allocated_bytes is None or at.allocated_bytes <= at.total_bytes:
        return []
    return [
        f"live tensors are {format_bytes(at.allocated_bytes)} already, more than the card has: the driver "
        f"spills "
        "into the host's memory (Windows, WSL: sysmem fallback), which is many times slower"
    ]


def _spilled(case: Case) -> Finding | None:
    """Live tensors exceed the card, so that only their amount can be the reason."""
    at = case.at
    lines = _spill_lines(at)
    if not lines or at.requested_bytes is None:
        return None
    return case.finding(
        "device_full",
        f"live tensors alone ({format_bytes(at.allocated_bytes or 0)}) exceed the card "
        f"({format_bytes(at.total_bytes or 0)})",
        [*lines, *phase_line(case.message)],
        advice_for_phase(case.message, case.clues),
    )


def _unexplained(case: Case) -> Finding | None:
    """The device has far more free than was asked for, and refused."""
    at = case.at
    if at.free_bytes is None or at.requested_bytes is None:
        return None
    near = max(NEAR_BYTES, int(0.03 * (at.total_bytes or 0)))
    if at.requested_bytes > at.free_bytes - near:
        return None
    evidence = [
        f"{format_bytes(at.requested_bytes)} were asked for and {format_bytes(at.free_bytes)} of the "
        f"device are "
        "free: these numbers do not explain the failure",
        "the free memory is read after the failure; another program may have held it for that moment",
        "other reasons: a limit of the system on address space or mappings (ulimit -v, vm.max_map_count, a "
        "cgroup), Windows' commit limit, WSL's limit on pinned memory, the driver",
    ]
    if at.allocated_bytes is not None:
        evidence.insert(1, f"live tensors of this process are only {format_bytes(at.allocated_bytes)}")
    return case.finding(
        "unknown",
        f"the device had {format_bytes(at.free_bytes)} free and still refused "
        f"{format_bytes(at.requested_bytes)}",
        evidence,
        (
            Advice(
                action="look for limits of the system, and watch the GPU while the program starts",
                typed="ulimit -v; sysctl vm.max_map_count; nvidia-smi --query-gpu=memory.used --format=csv "
                "-l 1",
                kind="shell",
            ),
            remedies.find_processes(case.message),
            remedies.snapshot(),
        ),
        confidence="medium",
    )


def _in_pieces(case: Case) -> Finding | None:
    """It would fit if the reserved memory were in one piece."""
    at = case.at
    if at.free_bytes is None or at.requested_bytes is None or not at.unallocated_bytes:
        return None
    reserved = at.reserved_bytes or 0
    if at.requested_bytes > at.free_bytes + at.unallocated_bytes:
        return None
    if at.total_bytes is not None and (at.needed_bytes or 0) > at.total_bytes:
        return None
    if at.foreign_bytes > max(reserved, MOST_SHARE * (at.total_bytes or 0)):
        return None  # most of the device is somebody else's: that comes first
    if at.unallocated_bytes < LEAST_SHARE * reserved and at.unallocated_bytes < max(GIB, 0.04 * reserved):
        return None
    allocated = at.allocated_bytes or 0
    hole = f"no hole in it reaches {format_bytes(at.requested_bytes)}"
    evidence = [
        f"live tensors are only {format_bytes(allocated)}; with the request "
        f"{total_of(allocated, at.requested_bytes)} "
        f"would be needed without fragmentation, and {format_bytes(at.free_bytes + reserved)} are there: "
        f"the request "
        "would fit if the reserved memory were in one piece",
        f"{difference_of(reserved, allocated)} is reserved but unallocated, split so that {hole}",
        "empty_cache() cannot help: wholly free segments were already given back before the error was raised",
    ]
    if at.outside_bytes is not None and at.total_bytes is not None:
        rest = difference_of(at.total_bytes, at.free_bytes, reserved)
        evidence.append(
            f"{rest} is outside this allocator (CUDA context, libraries, others): not what is missing"
        )
    evidence += phase_line(case.message)
    saving = min(at.unallocated_bytes, at.requested_bytes)
    sure: Confidence = "high" if at.unallocated_share >= LARGE_SHARE else "medium"
    return case.finding(
        "fragmentation",
        f"{format_bytes(at.unallocated_bytes)} of PyTorch's own memory is free but in pieces too small for "
        f"{format_bytes(at.requested_bytes)}",
        evidence,
        _layout_advice(case, saving),
        confidence=sure,
        size=at.unallocated_bytes,
    )


def _layout_advice(case: Case, saving_bytes: int) -> list[Advice]:
    if any(
        "expandable_segments:True" in fact.words["value"]
        for fact in case.clues.facts("allocator-configuration")
    ):
        return [remedies.is_it_active(), remedies.keep_the_big_tensor(), remedies.split_the_request()]
    grow = remedies.expandable_segments(case.message, case.clues, saving_bytes)
    keep_whole = remedies.max_split_size(case.message, case.clues, case.at.requested_bytes)
    first = [keep_whole] if remedies.is_windows(case.message) else [grow, keep_whole]
    if remedies.too_old_for_expandable(case.message, case.clues):
        first = [keep_whole, grow]
    if case.message.form.startswith(("1.0", "1.4")):  # before max_split_size_mb, as a rule
        first = [grow, keep_whole]
    return [*first, remedies.keep_the_big_tensor(), remedies.split_the_request()]


def _held_by_others(case: Case) -> Finding | None:
    """Other processes hold what is missing."""
    at = case.at
    if at.free_bytes is None or at.requested_bytes is None:
        return None
    missing = max(at.requested_bytes - at.free_bytes, 0)
    foreign = at.foreign_bytes
    strays = _stray_contexts(at)
    enough = max(missing, LEAST_OTHERS_BYTES, int(LEAST_SHARE * (at.total_bytes or 0)))
    if foreign < (missing if strays else enough) or foreign == 0:
        return None
    evidence = _others_lines(at, foreign)
    if strays:
        evidence.append(
            f"{len(at.others)} of them hold about the same ({format_bytes(at.others[0].used_bytes or 0)}): "
            f"CUDA "
            "contexts of other ranks of this job, as a rule, that touched this GPU"
        )
    evidence.append(f"{format_bytes(missing)} are missing for this request; without the others it fits")
    evidence += phase_line(case.message)
    named = at.others_bytes is not None
    sure: Confidence = (
        "high" if not strays and (named or foreign > LARGE_SHARE * (at.total_bytes or 0)) else "medium"
    )
    pids = tuple(process.pid for process in at.others if process.pid is not None)
    first = (remedies.load_on_cpu(),) if strays else ()
    return case.finding(
        "other_process",
        f"{format_bytes(foreign)} of this GPU is held outside this process, more than the request lacks",
        evidence,
        (
            *first,
            *(() if named else (remedies.find_processes(case.message),)),
            remedies.free_processes(pids, foreign),
            remedies.another_gpu(),
        ),
        confidence=sure,
        size=foreign,
    )


def _others_lines(at: Situation, foreign: int) -> list[str]:
    lines = []
    if at.others:
        lines.append(f"other processes on this GPU: {process_list(at.others)}")
    reserved = at.reserved_bytes if at.reserved_bytes is not None else at.allocated_bytes
    if at.total_bytes is not None and at.free_bytes is not None and reserved is not None:
        rest = difference_of(at.total_bytes, at.free_bytes, reserved)
        own = f"; a CUDA context takes up to {format_bytes(CONTEXT_BYTES)} of that" if not at.others else ""
        lines.append(f"{rest} of the device is neither free nor PyTorch's in this process{own}")
        lines.append(f"this process has only {format_bytes(reserved)} reserved")
    return [*lines, *_own_line(at)]


def _stray_contexts(at: Situation) -> bool:
    sizes = [process.used_bytes for process in at.others if process.used_bytes is not None]
    return len(sizes) >= 2 and all(size in STRAY_BYTES for size in sizes) and max(sizes) <= 1.1 * min(sizes)


def _full(case: Case) -> Finding | None:
    """This process filled the device."""
    at = case.at
    if at.requested_bytes is None or (at.free_bytes is None and at.total_bytes is None):
        return None
    if at.free_bytes is None and (at.allocated_bytes is None or at.total_bytes is None):
        return None
    evidence = _full_lines(at)
    evidence += phase_line(case.message)
    if at.free_bytes is None and (at.needed_bytes or 0) <= (at.total_bytes or 0):
        return None
    reserved = at.reserved_bytes or at.allocated_bytes or 0
    over = (at.needed_bytes or 0) + min(at.outside_bytes or 0, CONTEXT_BYTES) > (at.total_bytes or 0)
    held = at.this_process_bytes or reserved
    summary = (
        f"this process holds {format_bytes(held)} of the GPU's {format_bytes(at.total_bytes or 0)}, and "
        f"{format_bytes(at.requested_bytes)} more do not fit"
    )
    return case.finding(
        "device_full",
        summary,
        evidence,
        advice_for_phase(case.message, case.clues),
        confidence="high" if over and at.allocated_bytes is not None else "medium",
    )


def _full_lines(at: Situation) -> list[str]:
    lines = []
    if at.allocated_bytes is not None and at.requested_bytes is not None:
        needed = total_of(at.allocated_bytes, at.requested_bytes)
        whole = "" if at.total_bytes is None else f" on a device of {format_bytes(at.total_bytes)}"
        lines.append(f"live tensors and the request are {needed}{whole}")
    if at.free_bytes is not None and at.requested_bytes is not None:
        missing = at.requested_bytes - at.free_bytes
        less = (
            f"{format_bytes(missing)} less than was asked for"
            if missing > 0
            else "about what was asked for; the driver keeps a little for itself"
        )
        lines.append(f"{format_bytes(at.free_bytes)} are free, {less}")
    if at.unallocated_bytes is not None:
        lines.append(
            f"only {format_bytes(at.unallocated_bytes)} of the reserved memory is unused: how the "
            f"allocator lays "
            "blocks out is not the reason"
            if at.unallocated_share < LEAST_SHARE
            else f"{format_bytes(at.unallocated_bytes)} of the reserved memory is unused; all of it in one "
            f"piece "
            "would not be enough either"
        )
    if at.total_bytes is not None and at.free_bytes is not None and at.reserved_bytes is not None:
        rest = difference_of(at.total_bytes, at.free_bytes, at.reserved_bytes)
        lines.append(f"{rest} is outside this allocator: CUDA context, libraries, the desktop, others")
    if at.others:
        lines.append(f"other processes on this GPU: {process_list(at.others)}")
    return lines + _own_line(at)


def _block_too_large(case: Case) -> Finding | None:
    """Intel's driver gives no block of 4 GiB or more unless told to."""
    at = case.at
    if case.message.framework != "pytorch (XPU)" or at.requested_bytes is None:
        return None
    limit = at.allowed_bytes if case.message.kind == "xpu-block-limit" else 4 * GIB
    if limit is None or at.requested_bytes < 4 * GIB or at.requested_bytes > (at.total_bytes or 1 << 60):
        return None
    used = at.allocated_bytes or 0
    if at.total_bytes is not None and used + at.requested_bytes > at.total_bytes:
        return None
    return case.finding(
        "process_limit",
        f"one block of {format_bytes(at.requested_bytes)}: Intel's driver gives none of 4 GiB or more by "
        f"default",
        [
            f"live tensors are {format_bytes(used)}"
            + ("" if at.total_bytes is None else f" of {format_bytes(at.total_bytes)}")
            + ": the device is not full",
        ],
        (
            Advice(
                action="allow large blocks before the program starts",
                typed="export UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1",
                kind="shell",
            ),
            remedies.split_the_request(),
        ),
        confidence="high" if case.message.kind == "xpu-block-limit" else "medium",
    )


def _cut_short(case: Case) -> Finding:
    """There are too few numbers to tell."""
    at = case.at
    known = [
        f"{name.removesuffix('_bytes')}: {format_bytes(size)}" for name, size in at.to_json().items() if size
    ]
    return case.finding(
        "unknown",
        "PyTorch ran out of the GPU's memory; the text is cut short, so that what filled it is not in it",
        [f"known: {', '.join(known)}" if known else "no amount can be read", *phase_line(case.message)],
        (
            Advice(action="give the whole message: it has what was allocated, reserved and free"),
            remedies.find_processes(case.message),
            remedies.snapshot(),
        ),
        confidence="medium",
    )


def _impossible(case: Case) -> Finding | None:
    found = impossible_size(case.message)
    return None if found is None else case.finding(*found[:4], confidence=found[4])


def _misreported(case: Case) -> Finding | None:
    found = misreported(case.message, case.clues, case.at)
    return None if found is None else case.finding(*found[:4], confidence=found[4])


JUDGES: tuple[Callable[[Case], Finding | None], ...] = (
    _impossible,
    _misreported,
    _rejected,
    _limited,
    _block_too_large,
    _exceeds,
    _spilled,
    _unexplained,
    _in_pieces,
    _held_by_others,
    _full,
)
"""The questions, in the order in which they are asked."""
