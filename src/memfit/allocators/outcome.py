"""What one setting or policy made of a recording, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memfit.allocators.candidates import shell_line


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one setting or policy made of the recording.

    Attributes:
        name: the setting as PyTorch reads it (``"default"`` for none), or the policy.
        kind: ``"setting"`` of PyTorch's allocator, or ``"policy"``.
        start: ``"recorded"`` where it began from the recorded state; ``"empty"`` where what was there at the
            start was allocated first.
        peak_reserved_bytes: what it took from the device at most; of a policy, the height of its heap.
        reserved_bytes: what it holds at the end.
        out_of_memory_events: allocations that failed.
        retries: how often it gave its cache back to go on.
        device_calls: how often it asked the device for memory.
        risks: what to mind when using it.
    """

    name: str
    kind: Literal["setting", "policy"]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    out_of_memory_events: tuple[int, ...]
    start: Literal["recorded", "empty"] = "empty"
    retries: int = 0
    device_calls: int = 0
    risks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every allocation was served."""
        return not self.out_of_memory_events

    @property
    def line(self) -> str | None:
        """What to type to have it; ``None`` for policies, which PyTorch has not."""
        return shell_line(self.name) if self.kind == "setting" else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "start": self.start,
            "peak_requested_bytes": self.peak_requested_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "reserved_bytes": self.reserved_bytes,
            "num_ooms": len(self.out_of_memory_events),
            "oom_events": list(self.out_of_memory_events),
            "num_alloc_retries": self.retries,
            "num_device_alloc": self.device_calls,
            "fits": self.fits,
            "line": self.line,
            "risks": list(self.risks),
        }
