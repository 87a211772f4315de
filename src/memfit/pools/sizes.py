"""The sizes that a pool is made with, as people write them and as they are used."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes

DEFAULT_CHUNK_BYTES = 64 << 20
"""What a pool that begins empty grows by."""


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Sizes of a pool in bytes: at first, of a chunk, at most (None: no limit)."""

    first_bytes: int
    chunk_bytes: int
    max_bytes: int | None

    @classmethod
    def read(
        cls,
        pool_size: str | int,
        chunk_size: str | int | None,
        max_size: str | int | None,
        *,
        alignment_bytes: int,
    ) -> PoolSizes:
        """Sizes from what the user gave, in whole units of alignment.

        Raises:
            UsageError: not sizes, or sizes that exclude each other.
        """
        first = _rounded_up(parse_bytes(pool_size, what="pool_size"), alignment_bytes)
        most = None if max_size is None else parse_bytes(max_size, what="max_size")
        if most is not None and first > most:
            raise UsageError(
                f"pool_size {pool_size!r} is more than max_size {max_size!r}: lower one or raise the other"
            )
        if chunk_size is None:
            return cls(first_bytes=first, chunk_bytes=first or DEFAULT_CHUNK_BYTES, max_bytes=most)
        chunk = _rounded_up(parse_bytes(chunk_size, what="chunk_size"), alignment_bytes)
        if not chunk:
            raise UsageError(f"chunk_size {chunk_size!r} is nothing: give at least {alignment_bytes} bytes")
        return cls(first_bytes=first, chunk_bytes=chunk, max_bytes=most)


def _rounded_up(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
