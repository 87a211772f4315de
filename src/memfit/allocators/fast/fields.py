"""Names of the numbers in the arrays: which column of a table, which place in the list of single numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NONE = -1

# A chunk (a row of `Arrays.chunks`).
SIZE, OFFSET, ORDER, REGION, HOME, STATE, PREV, NEXT = range(8)
REQUESTED, BORN, USE, PAGED = range(8, 12)
CHUNK_FIELDS = 12
LINK = BORN
"""Of a chunk that waits for other streams, and so is in no list: the next one that waits."""
NO_USE = -(1 << 63)
"""`USE` of a chunk that no other stream uses; otherwise the highest rank of such a stream."""

# The same row of `Arrays.nodes`: the chunk in the tree of free or of unmapped ones.
MAJOR, MINOR, LEFT, RIGHT = range(4)
NODE_FIELDS = 4

# A home: the chunks of one lane (a stream in a pool) and one size class. It has row 2 * lane + (1 if small)
# of the chunks, and the same node is the header of its tree of free chunks; that of unmapped ones is HOMES
# further.
STREAM, PRIVATE, SEARCHES, SEARCH_HOME, RELEASED = range(5)

# A region.
ADDRESS, REGION_SIZE, PAGE, FIRST, NEXT_REGION, PREVIOUS_REGION, BASE = range(7)
REGION_FIELDS = 7
NO_BASE = -(1 << 63)
"""`BASE` (the recorded address of a region's start) where it is not known yet."""

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
SPARE, SPARE_COUNT, FREE_COUNT, REGION_FIRST, REGION_LAST, HOMES = range(104, 110)

# The rules: limits of the device, the settings.
TOTAL, LIMIT, REJECTION, THROWS, COLLECT_ABOVE, COLLECTS, MAX_SPLIT = range(112, 119)
EXPANDABLE, NON_SPLIT_ROUNDING, LARGE_SEGMENT, PLAIN_ROUNDING, BY_CREATION, INSTANT = range(119, 125)
ROUNDUP = 128  # and 15 more

# The run: where it is, what it keeps.
EXACT, KEPT_AFTER, LEAST_BLOCK = range(144, 147)
CHANGES, PLACEMENTS, SAME, COMPARED, RESERVED_BEFORE, LAST_RESERVED = range(147, 153)
RECORDED_COUNT, KNOWN_COUNT = range(153, 155)
NUMBERS = 160
"""Behind them come the recorded segments: ``(size, address, next of this size)`` each, sorted by size, where
the third number counts in the first of each size; then the sorted addresses of segments that lie where they
lay."""

# What `events.advance` comes back with.
REACHED, NEEDS_ROOM, FAILED = range(3)

FREE, ALLOCATED, PENDING, UNMAPPED = range(4)


class Arrays(NamedTuple):
    """The state of an allocator. Few arrays: each costs something in every call.

    Attributes:
        chunks, nodes, regions: tables, a row each; columns as named above.
        numbers: single numbers, places as named above.
    """

    chunks: Ints
    nodes: Ints
    regions: Ints
    numbers: Ints


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
