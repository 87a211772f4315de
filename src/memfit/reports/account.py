"""The account of a GPU's memory: rows of bytes that add up to what nvidia-smi would show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from memfit.reports.palette import PAINTS, in_order


class Peaks(Protocol):
    """What the account is drawn from; dry-run results and planning's figures both have it."""

    @property
    def peak_requested_bytes(self) -> int: ...
    @property
    def peak_allocated_bytes(self) -> int: ...
    @property
    def peak_reserved_bytes(self) -> int: ...
    @property
    def peak_by_category(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One part of the device's memory: a key of `PAINTS`, and its bytes."""

    key: str
    size_bytes: int

    @property
    def label(self) -> str:
        return PAINTS[self.key].label


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the device's memory goes: context + libraries + all that PyTorch reserves, part by part.

    The categories are those alive when the *requested* bytes peak. What PyTorch holds beyond them when the
    allocated and the reserved bytes peak, maybe at another moment, is shown as rounding and as reserved but
    not in use.

    Attributes:
        rows: the parts, from the context upwards; their sum is ``total_bytes``.
        total_bytes: what nvidia-smi would show for the process at its highest.
        capacity_bytes: all that the device has; ``None`` where no device was named.
    """

    rows: tuple[AccountRow, ...]
    total_bytes: int
    capacity_bytes: int | None = None

    @classmethod
    def of(
        cls,
        peaks: Peaks,
        *,
        context_bytes: int,
        device_total_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> Account:
        """The account of one run.

        Args:
            peaks: the three peaks, and the categories at the requested one.
            context_bytes: what the CUDA context takes before the first tensor.
            device_total_bytes: what the whole process takes at its highest; ``None``: context + reserved.
            capacity_bytes: all that the device has.
        """
        categories = in_order(peaks.peak_by_category)
        unnamed = peaks.peak_requested_bytes - sum(categories.values())
        if unnamed > 0:
            categories["other"] = categories.get("other", 0) + unnamed
        total = device_total_bytes or context_bytes + peaks.peak_reserved_bytes
        sizes = {
            "context": context_bytes,
            "libraries": total - context_bytes - peaks.peak_reserved_bytes,
            **categories,
            "rounding": peaks.peak_allocated_bytes - peaks.peak_requested_bytes,
            "cached": peaks.peak_reserved_bytes - peaks.peak_allocated_bytes,
        }
        rows = tuple(AccountRow(key=key, size_bytes=size) for key, size in sizes.items() if size > 0)
        return cls(rows=rows, total_bytes=total, capacity_bytes=capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """What the device would have left; 0 where it is full or its size is not known."""
        return max(0, (self.capacity_bytes or 0) - self.total_bytes)
