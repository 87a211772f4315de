"""Memory that operators take beside their results and give back before they end, as PyTorch's allocator has
it: workspaces of convolutions above all."""

from __future__ import annotations

from typing import Any

import torch


class TemporaryMemory:
    """Reads CUDA's allocator around operators. It resets the allocator's peaks, so it is for processes whose
    peaks nobody else reads.

    Examples:
        >>> TemporaryMemory("cpu").after(TemporaryMemory("cpu").before(), 1024)  # nobody counts there
        0
    """

    def __init__(self, device_type: str) -> None:
        self._is_counted = device_type == "cuda"

    def now(self) -> int:
        """Requested bytes now."""
        return int(self._requested()["current"]) if self._is_counted else 0

    def before(self) -> int:
        """Requested bytes now; to be given to `after`."""
        if not self._is_counted:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return int(self._requested()["current"])

    def after(self, before_bytes: int, made_bytes: int) -> int:
        """How far the operator that ran meanwhile rose over what was there and what it made (bytes)."""
        if not self._is_counted:
            return 0
        return max(int(self._requested()["peak"]) - before_bytes - made_bytes, 0)

    @staticmethod
    def _requested() -> dict[str, Any]:
        counters: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"]
        return counters
