"""A block that lies over several ranks: who has which rows, and how rows move to other owners."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from memfit.core.errors import UsageError
from memfit.distributed.groups import rank, world_size

Split = Literal["even", "by_free"] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ShardedBlock:
    """A block of memory that is cut by rows over ranks.

    Attributes:
        id: of the block, the same on all ranks.
        name: for messages.
        shape: of the whole; dimension 0 is cut.
        dtype: of its elements.
        rows: how many rows each rank has.
        row_bytes: of one row.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, ...]
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Of the whole block."""
        return sum(self.rows) * self.row_bytes

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Of each rank's shard."""
        return tuple(rows * self.row_bytes for rows in self.rows)

    def shard_shape(self, number: int) -> tuple[int, ...]:
        """Of a rank's tensor."""
        return (self.rows[number], *self.shape[1:])

    def first_row(self, number: int) -> int:
        """Where a rank's shard begins in the whole."""
        return sum(self.rows[:number])


def row_bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one row of a tensor of this shape."""
    return math.prod(shape[1:]) * dtype.itemsize


def even_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """As ``torch.chunk`` and DTensor cut: all shards as large as the first, the last ones smaller or
    empty."""
    chunk = -(-rows // ranks)
    return tuple(max(0, min(chunk, rows - chunk * number)) for number in range(ranks))


def proportional_rows(rows: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Rows in proportion to ``weights``, whole, adding up; remainders go to the largest fractions."""
    total = sum(weights)
    if not total:
        return even_rows(rows, len(weights))
    exact = [rows * weight / total for weight in weights]
    given = [math.floor(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: (given[i] - exact[i], i))
    for index in itertools.islice(itertools.cycle(order), rows - sum(given)):
        given[index] += 1
    return tuple(given)


def rows_of(split: Split, rows: int, free_bytes: Sequence[int]) -> tuple[int, ...]:
    """How many rows each rank gets. Raises UsageError for a split that is none."""
    if split == "even":
        return even_rows(rows, len(free_bytes))
    if split == "by_free":
        return proportional_rows(rows, free_bytes)
    given = () if isinstance(split, str) else tuple(split)
    whole = all(isinstance(part, int) and part >= 0 for part in given)
    if len(given) != len(free_bytes) or not whole or sum(given) != rows:
        raise UsageError(
            f"split must be 'even', 'by_free', or {len(free_bytes)} numbers of rows that add up to {rows}, "
            f"not {split!r}"
        )
    return given


def moved(shard: torch.Tensor, before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
    """This rank's rows after the whole was cut anew; every rank must call this.

    Args:
        shard: the rows that this rank has.
        before: rows of each rank now.
        after: rows of each rank then; they add up to the same.
    """
    mine = rank()
    result = shard.new_empty((after[mine], *shard.shape[1:]))
    if world_size() == 1:
        return result.copy_(shard)
    sent = [_overlap(before, mine, after, other) for other in range(len(after))]
    received = [_overlap(before, other, after, mine) for other in range(len(after))]
    dist.all_to_all_single(result, shard.contiguous(), received, sent)
    return result


def _overlap(before: Sequence[int], source: int, after: Sequence[int], target: int) -> int:
    first = max(sum(before[:source]), sum(after[:target]))
    end = min(sum(before[: source + 1]), sum(after[: target + 1]))
    return max(0, end - first)
