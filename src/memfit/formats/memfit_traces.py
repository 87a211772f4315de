"""memfit's own traces: of a dry run, or of a workload that was measured."""

from __future__ import annotations

from memfit.core.devices import find_gpu
from memfit.core.errors import InputError, UsageError
from memfit.core.recording import Recording
from memfit.core.trace import NO_BLOCK, Action, Trace
from memfit.formats.content import Content

KIND = "memfit-trace"


def looks_like(head: bytes) -> bool:
    """Whether it begins as a zip archive."""
    return head[:4] == b"PK\x03\x04"


def read(content: Content) -> Recording:
    """Read a trace; the GPU that it names gives the capacity.

    Raises:
        InputError: it is none, or broken.
    """
    try:
        trace = Trace.load(content.path)
    except InputError as error:
        raise InputError(str(error).replace(str(content.path), content.name)) from error
    notes = []
    unknown = int(((trace.action == Action.FREE) & (trace.block == NO_BLOCK)).sum())
    if unknown:
        notes.append(f"{unknown} frees are of blocks from before the trace begins; they are left out.")
    return Recording(
        trace=trace, total_bytes=_capacity(trace), settings=_settings(trace), kind=KIND, notes=tuple(notes)
    )


def _settings(trace: Trace) -> str:
    """The allocator's settings, where the trace says them; mapped pages tell of expandable segments."""
    text = trace.meta.get("allocator_settings")
    if isinstance(text, str):
        return text[:1000]
    return "expandable_segments:True" if bool((trace.action == Action.SEGMENT_MAP).any()) else ""


def _capacity(trace: Trace) -> int | None:
    """What PyTorch can have of the GPU that the trace names: its memory without the CUDA context."""
    name = trace.meta.get("gpu")
    if not isinstance(name, str):
        return None
    try:
        gpu = find_gpu(name)
    except UsageError:
        return None
    return gpu.runtime_total_bytes - gpu.context_bytes
