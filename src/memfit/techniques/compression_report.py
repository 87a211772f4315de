"""What compression did: bytes before and after, by codec, held against the ratio that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class CodecTotal:
    """What went through one codec (``"raw"``: what none made smaller)."""

    tensors: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """Totals of all that was compressed since the settings were made or the report was reset.

    Attributes:
        target_ratio: the ``compression_ratio`` that was asked for.
        by_codec: totals of each codec, the largest first.
        largest_error: the largest relative error measured on a sample; 0 when only lossless codecs were used.
    """

    target_ratio: float
    by_codec: Mapping[str, CodecTotal]
    largest_error: float = 0.0

    @property
    def bytes_before(self) -> int:
        """Of everything that was given."""
        return sum(total.bytes_before for total in self.by_codec.values())

    @property
    def bytes_after(self) -> int:
        """Of everything, compressed."""
        return sum(total.bytes_after for total in self.by_codec.values())

    @property
    def ratio(self) -> float:
        """Bytes after / bytes before; 1 when nothing was compressed."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0

    @property
    def reached(self) -> bool:
        """Whether the ratio is at most the target."""
        return self.ratio <= self.target_ratio

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema_version": 1,
            "target_ratio": self.target_ratio,
            "ratio": self.ratio,
            "reached": self.reached,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "largest_error": self.largest_error,
            "by_codec": {name: asdict(total) for name, total in self.by_codec.items()},
        }

    def __str__(self) -> str:
        if not self.bytes_before:
            return "nothing was compressed yet"
        verb = "reached" if self.reached else "missed"
        lines = [
            f"{format_bytes(self.bytes_before)} → {format_bytes(self.bytes_after)}: ratio {self.ratio:.3f}, "
            f"target {self.target_ratio:g} {verb}, largest error {self.largest_error:.2%}"
        ]
        for name, total in self.by_codec.items():
            before, after = format_bytes(total.bytes_before), format_bytes(total.bytes_after)
            lines.append(f"  {name:<15} {total.tensors:>6} tensors  {before:>11} → {after:>11}")
        return "\n".join(lines)


class Ledger:
    """Adds up what is compressed; the backward pass has a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, list[int]] = {}
        self._error = 0.0

    def __reduce__(self) -> tuple[type[Ledger], tuple[()]]:
        return Ledger, ()  # a copy of a model starts its own account

    def add(self, codec: str, before: int, after: int, error: float = 0.0) -> None:
        """One tensor of ``before`` bytes became ``after``."""
        with self._lock:
            total = self._totals.setdefault(codec, [0, 0, 0])
            total[0] += 1
            total[1] += before
            total[2] += after
            self._error = max(self._error, error)

    def report(self, target_ratio: float) -> CompressionReport:
        """The totals of this moment."""
        with self._lock:
            rows = sorted(self._totals.items(), key=lambda row: -row[1][1])
            by_codec = {
                name: CodecTotal(tensors=count, bytes_before=before, bytes_after=after)
                for name, (count, before, after) in rows
            }
            return CompressionReport(target_ratio=target_ratio, by_codec=by_codec, largest_error=self._error)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._totals.clear()
            self._error = 0.0
