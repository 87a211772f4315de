"""A size that is not known exactly, as the sum of parts that each say how far they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part of a sum. A part that only shifts another one may be negative.

    Args:
        name: in a word or two.
        low_bytes, expected_bytes, high_bytes: the spread.
        why: where it is from.
    """

    name: str
    low_bytes: int
    expected_bytes: int
    high_bytes: int
    why: str = ""

    @property
    def exact(self) -> bool:
        """Nothing but one value is possible."""
        return self.low_bytes == self.high_bytes


@dataclass(frozen=True, kw_only=True)
class Uncertain:
    """The sum of its ``parts``, end by end: all low, all as expected, all high.

    Args:
        low_bytes, expected_bytes, high_bytes: the sums.
        parts: what adds up to them.
        calibration: which measurements on such a GPU narrowed it; "" where there were none.
    """

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    parts: tuple[Part, ...] = ()
    calibration: str = ""

    @classmethod
    def of(cls, parts: tuple[Part, ...], *, calibration: str = "") -> Uncertain:
        """The sum of ``parts``."""
        return cls(
            low_bytes=sum(part.low_bytes for part in parts),
            expected_bytes=sum(part.expected_bytes for part in parts),
            high_bytes=sum(part.high_bytes for part in parts),
            parts=parts,
            calibration=calibration,
        )

    @property
    def loose_parts(self) -> tuple[Part, ...]:
        """The parts that are not exact, the widest first."""
        loose = (part for part in self.parts if not part.exact)
        return tuple(sorted(loose, key=lambda part: part.low_bytes - part.high_bytes))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Uncertain:
        """The value that `dataclasses.asdict` made."""
        return cls(**{**value, "parts": tuple(Part(**part) for part in value["parts"])})
