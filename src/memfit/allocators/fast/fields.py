"""Names of the numbers in the arrays: which column of a table, which place in the list of single numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NONE = -1

# A chunk (a row of `Arrays.chunks`). Two rows per home are the headers of its trees.
SIZE, OFFSET, ORDER, REGION, HOME, STATE, PREV, NEXT = range(8)
REQUESTED, BORN, USE, LEFT, RIGHT, PRIORITY, MAJOR, MINOR = range(8, 16)
CHUNK_FIELDS = 16
LINK = LEFT
"""A chunk that waits for other streams is in no tree: the next one that waits."""
NO_USE = -(1 << 63)
"""`USE` of a chunk that no other stream uses; otherwise the highest rank of such a stream, see `use_rank`."""

# A region.
ADDRESS, REGION_SIZE, PAGE, FIRST, NEXT_REGION, PREVIOUS_REGION, BASE, ALIVE = range(8)
REGION_FIELDS = 8
NO_BASE = -(1 << 63)
"""`BASE` (the recorded address of a region's start) where it is not known yet."""

# A home: the chunks of one lane (a stream in a pool) and one size class; row 2 * lane + (1 if small).
STREAM, FREE_TREE, UNMAPPED_TREE, PRIVATE, SEARCHES, SEARCH_HOME, RELEASED = range(7)
HOME_FIELDS = 7

# Single numbers: the counters of the small and of the large pool.
COUNTER_NAMES = (
    "count", "count_total", "bytes", "bytes_total", "requested", "requested_total", "pending_count",
    "pending_bytes", "reserved", "reserved_total", "segments", "segments_total", "split_count",
    "split_count_total", "split_bytes", "split_bytes_total",
)  # fmt: skip
COUNT, COUNT_TOTAL, BYTES, BYTES_TOTAL, ASKED, ASKED_TOTAL, WAITING, WAITING_BYTES = range(8)
HELD, HELD_TOTAL, SEGMENTS, SEGMENTS_TOTAL = range(8, 12)
SPLIT_COUNT, SPLIT_COUNT_TOTAL, SPLIT_BYTES, SPLIT_BYTES_TOTAL = range(12, 16)
LARGE, SMALL = 0, 16

# Peaks of the large pool, the small one, and both.
PEAK_NAMES = (
    "count", "bytes", "requested", "active_count", "active_bytes", "reserved", "segments", "split_count",
    "split_bytes",
)  # fmt: skip
(PEAK_COUNT, PEAK_BYTES, PEAK_ASKED, PEAK_ACTIVE, PEAK_ACTIVE_BYTES, PEAK_HELD, PEAK_SEGMENTS, PEAK_SPLIT,
 PEAK_SPLIT_BYTES) = range(9)  # fmt: skip
PEAKS_LARGE, PEAKS_SMALL, PEAKS_ALL = 32, 48, 64

# Gauges (current, peak, gained, freed), plain counts, the device, what is going on.
OVERSIZE_ALLOCATIONS, OVERSIZE_SEGMENTS = 80, 84
RETRIES, OOMS, REJECTIONS, SYNCS, DEVICE_ALLOCS, DEVICE_FREES = range(88, 94)
RESERVED, USED, PEAK_USED, TOP, RANGES, RISING = range(94, 100)
WAITING_FIRST, WAITING_LAST, WAITING_COUNT, DONE_COUNT = range(100, 104)
SPARE, SPARE_COUNT, FREE_COUNT, REGION_FIRST, REGION_LAST = range(104, 109)

# The rules: limits of the device, the settings.
TOTAL, LIMIT, REJECTION, THROWS, COLLECT_ABOVE, COLLECTS, MAX_SPLIT = range(112, 119)
EXPANDABLE, NON_SPLIT_ROUNDING, LARGE_SEGMENT, PLAIN_ROUNDING, BY_CREATION, INSTANT = range(119, 125)
ROUNDUP = 128  # and 15 more

# The run: where it is, what it keeps.
EXACT, KEPT_AFTER, LEAST_BLOCK = range(144, 147)
CHANGES, PLACEMENTS, SAME, COMPARED, RESERVED_BEFORE, LAST_RESERVED = range(147, 153)
NUMBERS = 160

# What `events.advance` comes back with.
REACHED, NEEDS_ROOM, FAILED = range(3)

FREE, ALLOCATED, PENDING, UNMAPPED = range(4)


class Arrays(NamedTuple):
    """The state of an allocator.

    Attributes:
        chunks, regions, homes: tables, a row each; columns as named above.
        numbers: single numbers, places as named above.
        recorded: segments to come as ``(size, address, next of this size)``, sorted by size; the third column
            counts in the first row of each size.
        known: sorted addresses of segments that lie where they lay in the run.
    """

    chunks: Ints
    regions: Ints
    homes: Ints
    numbers: Ints
    recorded: Ints
    known: Ints


class Columns(NamedTuple):
    """Events to run, and what comes of them.

    Attributes:
        action, block, size, stream, address: the events; ``address`` is empty
            where it does not matter.
        lane: the lane of each stream number.
        slots: the chunk of each block, by its number from the least one on; -1 where it is not allocated.
        placements: ``(region, offset)`` per allocation.
        changes: ``(event, reserved bytes)`` each time they changed.
        totals: live, allocated and reserved bytes after each event, or no rows.
    """

    action: npt.NDArray[np.uint8]
    block: Ints
    size: Ints
    stream: npt.NDArray[np.int32]
    address: Ints
    lane: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    placements: Ints
    changes: Ints
    totals: Ints


Table = npt.NDArray[Any]
