"""How long blocks live, and how long they lie unused before they are freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis.blocks import Blocks
from memfit.analysis.results import Table, share_text
from memfit.capture.graph import StepGraph
from memfit.core.units import format_bytes

MOST_IDLE = 8


@dataclass(frozen=True, kw_only=True)
class LifetimeBin:
    """Blocks that lived for more than the bin before's events, and at most ``most_events``."""

    most_events: int
    blocks: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class IdleBlocks:
    """Memory that was held after its last use.

    Attributes:
        where: the module and operator that made it.
        bytes: how much.
        idle_ops: for how many operators it was held without being used.
    """

    where: str
    bytes: int
    idle_ops: int


@dataclass(frozen=True, kw_only=True)
class LifetimeStatistics:
    """Lifetimes of the blocks of a trace or a step, in events or operators.

    Attributes:
        unit: what lives are counted in: ``"events"`` or ``"operators"``.
        histogram: by powers of two.
        freed_blocks: how many were freed before the end.
        short_blocks, short_bytes: those that lived for at most 1 % of the whole: temporaries.
        long_blocks, long_bytes: those that were there for at least half of it, or never freed.
        median: of the freed ones.
        idle: what was held longest after its last use; only a captured step tells uses.
        idle_share: the share of all byte-operators that were held after the last use; None where unknown.
    """

    unit: str
    histogram: tuple[LifetimeBin, ...]
    freed_blocks: int
    short_blocks: int
    short_bytes: int
    long_blocks: int
    long_bytes: int
    median: float
    idle: tuple[IdleBlocks, ...] = ()
    idle_share: float | None = None

    def sentences(self) -> list[str]:
        """The statistics in a sentence or two."""
        said = [
            f"{self.short_blocks:,} of {self.total_blocks:,} blocks live for at most 1 % of the {self.unit}; "
            f"{format_bytes(self.long_bytes)} in {self.long_blocks:,} blocks stay for half of it or more."
        ]
        if self.idle_share is not None and self.idle:
            said.append(
                f"{100 * self.idle_share:.1f} % of all memory over the step is held after its last use, most "
                f"by {self.idle[0].where}."
            )
        return said

    @property
    def total_blocks(self) -> int:
        """How many blocks there are."""
        return sum(row.blocks for row in self.histogram)

    def tables(self) -> list[Table]:
        """The histogram, and what lies idle longest."""
        total = sum(row.bytes for row in self.histogram)
        tables = [
            Table(
                title=f"How long blocks live, in {self.unit}",
                heads=(">at most", ">blocks", ">bytes", ">share"),
                rows=tuple(
                    (
                        f"{row.most_events:,}",
                        f"{row.blocks:,}",
                        format_bytes(row.bytes),
                        share_text(row.bytes, total),
                    )
                    for row in self.histogram
                ),
            )
        ]
        if self.idle:
            rows = tuple((row.where, format_bytes(row.bytes), f"{row.idle_ops:,}") for row in self.idle)
            heads = ("made by", ">bytes", f">idle {self.unit}")
            tables.append(Table(title="Held longest after the last use", heads=heads, rows=rows))
        return tables

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def lifetimes_of_trace(blocks: Blocks) -> LifetimeStatistics | None:
    """Lives from allocation to free, in events; None for a trace without blocks."""
    count = len(blocks.trace)
    if not len(blocks):
        return None
    return _statistics(blocks.freed - blocks.born, blocks.freed >= count, blocks.size, count, "events")


def lifetimes_of_graph(graph: StepGraph) -> LifetimeStatistics | None:
    """Lives in operators of a captured step, and how long each lies idle between last use and free."""
    made = [storage for storage in graph.storages if storage.born >= 0]
    if not made:
        return None
    last_use = _last_uses(graph)
    count = len(graph.ops)
    size = np.array([storage.size_bytes for storage in made], dtype=np.int64)
    died = np.array([storage.died if storage.died >= 0 else count for storage in made], dtype=np.int64)
    born = np.array([storage.born for storage in made], dtype=np.int64)
    used = np.array([last_use.get(storage.id, storage.born) for storage in made], dtype=np.int64)
    # The operator at which a storage dies is the last that ran while it was alive: its last use, if not idle.
    idle = np.where(died < count, np.maximum(died - used, 0), 0)
    held = np.maximum(died - born, 1)
    weighed = size * idle
    order = np.argsort(-weighed, kind="stable")[:MOST_IDLE]
    rows = tuple(
        IdleBlocks(where=_maker(graph, made[place].born), bytes=int(size[place]), idle_ops=int(idle[place]))
        for place in order.tolist()
        if weighed[place] > 0
    )
    whole = float((size * held).sum())
    return _statistics(
        died - born, died >= count, size, count, "operators", idle=rows,
        idle_share=float(weighed.sum()) / whole if whole else 0.0,
    )  # fmt: skip


def _last_uses(graph: StepGraph) -> dict[int, int]:
    found: dict[int, int] = {}
    for op in graph.ops:
        for number in (*op.inputs, *op.mutates):
            found[number] = op.index
    return found


def _maker(graph: StepGraph, index: int) -> str:
    op = graph.ops[index]
    return " ".join(text for text in (op.module, op.name.removeprefix("aten.")) if text)


def _statistics(
    lives: npt.NDArray[np.int64],
    unfreed: npt.NDArray[np.bool_],
    size: npt.NDArray[np.int64],
    count: int,
    unit: str,
    *,
    idle: Sequence[IdleBlocks] = (),
    idle_share: float | None = None,
) -> LifetimeStatistics:
    short = ~unfreed & (lives <= max(count // 100, 1))
    long = unfreed | (lives * 2 >= count)
    powers = np.ceil(np.log2(np.maximum(lives, 1))).astype(np.int64)
    bins = [
        LifetimeBin(
            most_events=1 << power,
            blocks=int((powers == power).sum()),
            bytes=int(size[powers == power].sum()),
        )
        for power in range(int(powers.max()) + 1)
    ]
    freed = lives[~unfreed]
    return LifetimeStatistics(
        unit=unit,
        histogram=tuple(row for row in bins if row.blocks),
        freed_blocks=len(freed),
        short_blocks=int(short.sum()),
        short_bytes=int(size[short].sum()),
        long_blocks=int(long.sum()),
        long_bytes=int(size[long].sum()),
        median=float(np.median(freed)) if len(freed) else 0.0,
        idle=tuple(idle),
        idle_share=idle_share,
    )
