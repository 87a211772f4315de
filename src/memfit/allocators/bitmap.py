"""A bitmap: one bit per cell of memory, set while the cell is free; the lowest run of set bits that fits."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.allocators.address_space import AddressSpaceAllocator, AddressSpaceConfig, SpaceConfig, Span
from memfit.core.errors import UsageError

MOST_CELLS = 1 << 18
"""Cells of a map whose cell size was not chosen: 32 KiB of bits."""


@dataclass(frozen=True, kw_only=True)
class BitmapConfig(AddressSpaceConfig):
    """A range in cells.

    Attributes:
        cell_bytes: a multiple of the alignment. Without it, the alignment, doubled until no more than
            `MOST_CELLS` cells cover the range: a request costs time in proportion to the number of cells.
    """

    cell_bytes: int | None = None


class BitmapAllocator(AddressSpaceAllocator):
    """First fit over a bitmap. Nothing is split or joined: neighbouring set bits are one free run."""

    def __init__(self, config: SpaceConfig | None = None) -> None:
        super().__init__(config)
        cell_bytes = getattr(config, "cell_bytes", None)
        if cell_bytes is not None and (cell_bytes < 1 or cell_bytes % self.alignment_bytes):
            raise UsageError(
                f"cell_bytes={cell_bytes}: it must be a multiple of the alignment, {self.alignment_bytes}"
            )
        self.cell_bytes: int = cell_bytes or self.alignment_bytes
        while cell_bytes is None and self.total_bytes // self.cell_bytes > MOST_CELLS:
            self.cell_bytes *= 2
        self._cells = self.total_bytes // self.cell_bytes
        # The last cell may be cut short: a range is not always a multiple of the cells.
        self._cells += self.total_bytes % self.cell_bytes > 0
        self._free = (1 << self._cells) - 1

    def _take(self, size_bytes: int) -> Span | None:
        cells = -(-size_bytes // self.cell_bytes)
        runs = self._run_starts(cells)
        if not runs:
            return None
        first = (runs & -runs).bit_length() - 1
        start, end = first * self.cell_bytes, (first + cells) * self.cell_bytes
        given = min(end, self.total_bytes) - start
        if given < size_bytes:  # the run ends in the cell that is cut short, and is the last there is
            return None
        self._free &= ~(((1 << cells) - 1) << first)
        return start, given

    def _run_starts(self, cells: int) -> int:
        """Bits where runs of ``cells`` free cells start; the length doubles with every step."""
        runs, length = self._free, 1
        while length < cells and runs:
            step = min(length, cells - length)
            runs &= runs >> step
            length += step
        return runs

    def _give_back(self, start: int, size_bytes: int) -> None:
        cells = -(-size_bytes // self.cell_bytes)
        self._free |= ((1 << cells) - 1) << (start // self.cell_bytes)

    def free_spans(self) -> list[Span]:
        spans: list[Span] = []
        bits, cell = self._free, 0
        while bits:
            used = (bits & -bits).bit_length() - 1
            bits >>= used
            run = (~bits & bits + 1).bit_length() - 1
            start = (cell + used) * self.cell_bytes
            spans.append((start, min(run * self.cell_bytes, self.total_bytes - start)))
            bits >>= run
            cell += used + run
        return spans
