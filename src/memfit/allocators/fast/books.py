"""Peaks and counts, as `memfit.allocators.statistics` keeps them."""

# ruff: noqa: PLR1730  -- a comparison is what numba compiles best

from __future__ import annotations

from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import Ints
from memfit.allocators.fast.jit import compiled


@compiled
def _raise(numbers: Ints, peak: int, value: int) -> None:
    if value > numbers[peak]:
        numbers[peak] = value


@compiled
def note_peaks(numbers: Ints) -> None:
    """Note counts and bytes of blocks; to be called before any of them falls."""
    numbers[f.RISING] = 0
    for shift in (0, 16):
        peaks = f.PEAKS_LARGE + shift
        count, size = numbers[shift + f.COUNT], numbers[shift + f.BYTES]
        _raise(numbers, peaks + f.PEAK_COUNT, count)
        _raise(numbers, peaks + f.PEAK_BYTES, size)
        _raise(numbers, peaks + f.PEAK_ASKED, numbers[shift + f.ASKED])
        _raise(numbers, peaks + f.PEAK_ACTIVE, count + numbers[shift + f.WAITING])
        _raise(numbers, peaks + f.PEAK_ACTIVE_BYTES, size + numbers[shift + f.WAITING_BYTES])
    count = numbers[f.LARGE + f.COUNT] + numbers[f.SMALL + f.COUNT]
    size = numbers[f.LARGE + f.BYTES] + numbers[f.SMALL + f.BYTES]
    waiting = numbers[f.LARGE + f.WAITING] + numbers[f.SMALL + f.WAITING]
    waiting_bytes = numbers[f.LARGE + f.WAITING_BYTES] + numbers[f.SMALL + f.WAITING_BYTES]
    _raise(numbers, f.PEAKS_ALL + f.PEAK_COUNT, count)
    _raise(numbers, f.PEAKS_ALL + f.PEAK_BYTES, size)
    _raise(numbers, f.PEAKS_ALL + f.PEAK_ASKED, numbers[f.LARGE + f.ASKED] + numbers[f.SMALL + f.ASKED])
    _raise(numbers, f.PEAKS_ALL + f.PEAK_ACTIVE, count + waiting)
    _raise(numbers, f.PEAKS_ALL + f.PEAK_ACTIVE_BYTES, size + waiting_bytes)


@compiled
def _note_pair(numbers: Ints, shift: int, counter: int, peak: int) -> None:
    """A peak of one pool, and of both together."""
    _raise(numbers, f.PEAKS_LARGE + shift + peak, numbers[shift + counter])
    _raise(numbers, f.PEAKS_ALL + peak, numbers[f.LARGE + counter] + numbers[f.SMALL + counter])


@compiled
def note_split(numbers: Ints, shift: int) -> None:
    """Note the free parts of split segments, after a rise in one pool."""
    _note_pair(numbers, shift, f.SPLIT_BYTES, f.PEAK_SPLIT_BYTES)
    _note_pair(numbers, shift, f.SPLIT_COUNT, f.PEAK_SPLIT)


@compiled
def count_segment(numbers: Ints, shift: int) -> None:
    """One segment more."""
    numbers[shift + f.SEGMENTS] += 1
    numbers[shift + f.SEGMENTS_TOTAL] += 1
    _note_pair(numbers, shift, f.SEGMENTS, f.PEAK_SEGMENTS)


@compiled
def count_reserved(numbers: Ints, shift: int, size: int) -> None:
    """Account for device memory; negative: given back."""
    numbers[f.RESERVED] += size
    numbers[shift + f.HELD] += size
    if size > 0:
        numbers[shift + f.HELD_TOTAL] += size
        _raise(numbers, f.PEAKS_LARGE + shift + f.PEAK_HELD, numbers[shift + f.HELD])
        _raise(numbers, f.PEAKS_ALL + f.PEAK_HELD, numbers[f.RESERVED])


@compiled
def count_oversize(numbers: Ints, gauge: int, change: int) -> None:
    """Move a gauge by one."""
    numbers[gauge] += change
    _raise(numbers, gauge + 1, numbers[gauge])
    if change > 0:
        numbers[gauge + 2] += change
    else:
        numbers[gauge + 3] -= change


@compiled
def reset_peaks(numbers: Ints) -> None:
    """Peaks start again from the current values."""
    for scope in (f.PEAKS_LARGE, f.PEAKS_SMALL, f.PEAKS_ALL):
        numbers[scope : scope + 9] = 0
    note_peaks(numbers)
    for shift in (f.LARGE, f.SMALL):
        note_split(numbers, shift)
        _note_pair(numbers, shift, f.SEGMENTS, f.PEAK_SEGMENTS)
        _raise(numbers, f.PEAKS_LARGE + shift + f.PEAK_HELD, numbers[shift + f.HELD])
        _raise(numbers, f.PEAKS_ALL + f.PEAK_HELD, numbers[f.RESERVED])
    for gauge in (f.OVERSIZE_ALLOCATIONS, f.OVERSIZE_SEGMENTS):
        numbers[gauge + 1] = numbers[gauge]
