"""The numbers of one out of memory on a device, brought into one form, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memfit.analysis.explanations.clues import Clues
from memfit.formats.messages import Message
from memfit.formats.messages_devices import Process

CONTEXT_BYTES = 1 << 30
"""What a CUDA context, torch's kernels and library handles take at the most on common GPUs: up to 1 GiB of
what is outside the allocator is this process's own."""
LIKELY_OWN_BYTES = 1536 << 20
"""By how much a process may hold more than its allocator reserved: its context, libraries, NCCL."""
DRIVER_BYTES = 512 << 20
"""What driver and desktop take of a GPU beside all processes."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a device held when a request failed; None where it is not known.

    Attributes:
        requested_bytes: what was asked for.
        total_bytes, free_bytes: of the device.
        allocated_bytes: live tensors of this process.
        unallocated_bytes: what its allocator reserved beyond that.
        allowed_bytes: the limit that was set for the process.
        others: other processes on the device.
        own: this process in that list.
        sources: where a number is from, if not from the message.
    """

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    allowed_bytes: int | None = None
    private_pool_bytes: int | None = None
    this_process_bytes: int | None = None
    others: tuple[Process, ...] = ()
    own: Process | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int | None:
        """All that the allocator took from the device."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def outside_bytes(self) -> int | None:
        """What of the device is neither free nor this allocator's: CUDA context, libraries, others."""
        held = self.reserved_bytes if self.reserved_bytes is not None else self.allocated_bytes
        if self.total_bytes is None or self.free_bytes is None or held is None:
            return None
        return max(self.total_bytes - self.free_bytes - held, 0)

    @property
    def others_bytes(self) -> int | None:
        """What named other processes hold."""
        known = [process.used_bytes for process in self.others if process.used_bytes is not None]
        return sum(known) if known else None

    @property
    def foreign_bytes(self) -> int:
        """What others hold: as named, or else what is outside beyond one context."""
        if self.others_bytes is not None:
            return self.others_bytes
        if self.this_process_bytes is not None and self.total_bytes is not None:
            rest = self.total_bytes - (self.free_bytes or 0) - self.this_process_bytes
            return max(rest - DRIVER_BYTES, 0)
        return max((self.outside_bytes or 0) - CONTEXT_BYTES, 0)

    @property
    def needed_bytes(self) -> int | None:
        """Live tensors and the request together: what it takes if nothing lies between them."""
        if self.requested_bytes is None or self.allocated_bytes is None:
            return None
        return self.allocated_bytes + self.requested_bytes

    @property
    def unallocated_share(self) -> float:
        """The part of the reserved memory that no tensor uses."""
        reserved = self.reserved_bytes
        return (self.unallocated_bytes or 0) / reserved if reserved else 0.0

    def to_json(self) -> dict[str, int | None]:
        """Every known number, and what follows."""
        names = (
            "requested_bytes", "total_bytes", "free_bytes", "allocated_bytes", "unallocated_bytes",
            "reserved_bytes", "allowed_bytes", "private_pool_bytes", "this_process_bytes", "outside_bytes",
            "others_bytes", "needed_bytes",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def situation_of(message: Message, clues: Clues) -> Situation:
    """The numbers of a message, with what companions add to it."""
    sizes = message.sizes
    allocated, reserved = sizes.get("allocated"), sizes.get("reserved")
    unallocated = sizes.get("unallocated")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(reserved - allocated, 0)
    found = Situation(
        requested_bytes=sizes.get("requested"),
        total_bytes=sizes.get("total"),
        free_bytes=sizes.get("free"),
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        allowed_bytes=sizes.get("allowed"),
        private_pool_bytes=sizes.get("private_pools"),
        this_process_bytes=sizes.get("this_process"),
    )
    found = _with_companions(found, message, clues)
    return _with_processes(found, message, clues)


def _with_companions(found: Situation, message: Message, clues: Clues) -> Situation:
    """Fill what the message leaves open from memory_summary(), nvidia-smi and hints."""
    sources: dict[str, str] = {}
    values: dict[str, int] = {}

    def fill(name: str, value: int | None, source: str) -> None:
        if getattr(found, name) is None and name not in values and value is not None:
            values[name] = value
            sources[name] = source

    summary = next(clues.facts("memory-summary"), None)
    if summary is not None and found.allocated_bytes is None:
        allocated = summary.sizes.get("allocated")
        reserved = summary.sizes.get("reserved")
        fill("allocated_bytes", allocated, "memory_summary()")
        if allocated is not None and reserved is not None:
            fill("unallocated_bytes", max(reserved - allocated, 0), "memory_summary()")
    device = clues.device(message.words.get("gpu"))
    if device is not None and not device.mig and found.total_bytes is None:
        fill("total_bytes", device.total_bytes, "nvidia-smi")
    fill("total_bytes", clues.hints.gpu_total_bytes, "given")
    fill("total_bytes", clues.fact_size("device-total", "total"), "the log")
    return replace(found, **values, sources=sources)  # type: ignore[arg-type]


def _with_processes(found: Situation, message: Message, clues: Clues) -> Situation:
    """Which of the named processes is this one, and which are others."""
    processes = message.processes
    if not processes:
        gpu = message.words.get("gpu", "0")
        processes = tuple(process for process in clues.processes if process.gpu in (gpu, ""))
        if not message.sizes:  # a bare message does not tell which process it is
            return found
    if not processes:
        return found
    if found.this_process_bytes is not None and message.processes:
        return replace(found, others=processes)
    held = found.reserved_bytes or found.allocated_bytes or 0
    likely = [
        process
        for process in processes
        if process.used_bytes is not None and 0 <= process.used_bytes - held + (16 << 20) <= LIKELY_OWN_BYTES
    ]
    own = min(likely, key=lambda process: abs((process.used_bytes or 0) - held), default=None)
    if own is None and message.processes:
        return replace(found, others=() if len(processes) == 1 else processes)
    return replace(found, own=own, others=tuple(p for p in processes if p is not own))
