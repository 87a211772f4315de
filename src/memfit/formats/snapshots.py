"""PyTorch's memory snapshots (``torch.cuda.memory._dump_snapshot``) as values, once their container is read.

A snapshot has what the allocator holds at its end (``segments``) and, where it was recorded, the history that
led there (``device_traces``); older ones are the bare list of segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.formats.fields import LARGEST_ADDRESS, Streams, listed, member, whole
from memfit.formats.history import History, read_history
from memfit.formats.packed_events import PackedEvents
from memfit.formats.places import Places
from memfit.formats.starting import Held, starting_state

KIND = "memory-snapshot"
FEWEST_BYTES_OF_A_BLOCK = 8
"""No file says a block in less; one that refers to the same blocks again and again is refused by this."""

_STATES: Mapping[str, Literal["allocated", "pending_free", "inactive"]] = {
    "active_allocated": "allocated",
    "active_pending_free": "pending_free",
    "active_awaiting_free": "pending_free",
    "inactive": "inactive",
}


def from_value(value: Any, *, name: str, size_bytes: int) -> Recording:
    """The recording of the device that holds the most.

    Args:
        value: the dictionary, or the older list of segments.
        name: of the file, for messages.
        size_bytes: of the file; what is far larger than it is not read.

    Raises:
        InputError: it is no memory snapshot, or contradicts itself.
    """
    if isinstance(value, list):
        value = {"segments": value}
    if not isinstance(value, Mapping) or not ("segments" in value or "device_traces" in value):
        raise InputError(f"{name} is not a memory snapshot: it has neither segments nor device_traces")
    reader = _Reader(name, size_bytes)
    segments = reader.segments(value.get("segments", []))
    traces = listed(value.get("device_traces", []), f"{name}: device_traces")
    if not segments and not any(traces):
        raise InputError(
            f"{name} is an empty memory snapshot: it has no segments and no events "
            "(taken before the first CUDA tensor, or in another process?)"
        )
    device = _busiest(segments, traces, name, reader.notes)
    events = _events(traces[device], f"{name}: device_traces[{device}]") if device < len(traces) else []
    own = tuple(segment for of, segment in segments if of == device)
    return reader.recording(own, events, device, value.get("allocator_settings"))


def _events(trace: Any, place: str) -> list[Any] | PackedEvents:
    return trace if isinstance(trace, PackedEvents) else listed(trace, place)


def _busiest(
    segments: Sequence[tuple[int, Segment]], traces: Sequence[Any], name: str, notes: list[str]
) -> int:
    """The device with the most reserved bytes, or else with the most events."""
    held: dict[int, int] = {}
    for device, segment in segments:
        held[device] = held.get(device, 0) + segment.size_bytes
    counts = {
        device: len(_events(trace, f"{name}: device_traces[{device}]")) for device, trace in enumerate(traces)
    }
    candidates = {device for device in {*held, *counts} if held.get(device) or counts.get(device)}
    if not candidates:
        return 0
    chosen = max(candidates, key=lambda device: (held.get(device, 0), counts.get(device, 0), -device))
    if len(candidates) > 1:
        notes.append(f"Only GPU {chosen} is read, which holds the most; the file has {len(candidates)} GPUs.")
    return chosen


class _Reader:
    """One snapshot being read: its streams are numbered once for segments and history."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._name = name
        self._most_blocks = size_bytes // FEWEST_BYTES_OF_A_BLOCK
        self._streams = Streams()
        self._places = Places()
        self.notes: list[str] = []

    def segments(self, rows: Any) -> list[tuple[int, Segment]]:
        """All segments with the device of each, in order of address."""
        found = [
            self._segment(row, f"{self._name}: segments[{index}]")
            for index, row in enumerate(listed(rows, f"{self._name}: segments"))
        ]
        return sorted(found, key=lambda pair: pair[1].address)

    def _segment(self, row: Any, place: str) -> tuple[int, Segment]:
        address = whole(member(row, "address", place), f"{place}: address", most=LARGEST_ADDRESS)
        rows = listed(member(row, "blocks", place), f"{place}: blocks")
        self._most_blocks -= len(rows)
        if self._most_blocks < 0:
            raise InputError(
                f"{self._name} refers to the same blocks over and over: it has more than it can hold"
            )
        size = whole(member(row, "total_size", place), f"{place}: total_size")
        blocks = _tiled(self._blocks(rows, address, place), address, size)
        try:
            segment = Segment(
                address=address,
                size_bytes=size,
                stream=self._stream(row, place),
                pool="small" if row.get("segment_type") == "small" else "large",
                blocks=blocks,
                expandable=bool(row.get("is_expandable", False)),
            )
            Snapshot(segments=(segment,))  # checks that the blocks tile it
        except ValueError as error:
            raise InputError(f"{place}: {error}") from error
        return whole(row.get("device", 0), f"{place}: device", most=1 << 16), segment

    def _stream(self, row: Mapping[str, Any], place: str) -> int:
        handle = whole(row.get("stream", 0), f"{place}: stream", most=LARGEST_ADDRESS)
        return self._streams.number(handle, private_pool(row.get("segment_pool_id")))

    def _blocks(self, rows: Sequence[Any], address: int, place: str) -> list[SnapshotBlock]:
        blocks = []
        for index, row in enumerate(rows):
            if isinstance(row, list) and len(row) == 4:  # the rows of a compact table
                row = dict(zip(("address", "size", "requested_size", "state"), row, strict=True))
            block = self._block(row, address, f"{place}: blocks[{index}]")
            address = block.address + block.size_bytes
            blocks.append(block)
        return blocks

    def _block(self, row: Any, address: int, place: str) -> SnapshotBlock:
        state = member(row, "state", place)
        if not isinstance(state, str) or state not in _STATES:
            raise InputError(f"{place}: state is {str(state)[:40]!r}, not one of {', '.join(_STATES)}")
        size = whole(member(row, "size", place), f"{place}: size")
        inactive = _STATES[state] == "inactive"
        return SnapshotBlock(
            address=whole(row.get("address", address), f"{place}: address", most=LARGEST_ADDRESS),
            size_bytes=size,
            requested_bytes=0
            if inactive
            else whole(row.get("requested_size", size), f"{place}: requested_size"),
            state=_STATES[state],
            where=self._places.of(row.get("frames") or _history_frames(row)),
        )

    def recording(
        self, segments: tuple[Segment, ...], events: list[Any] | PackedEvents, device: int, settings: Any
    ) -> Recording:
        place = f"{self._name}: device_traces[{device}]"
        history = read_history(events, place=place, streams=self._streams, places=self._places)
        settings = settings if isinstance(settings, Mapping) else {}
        end = Snapshot(segments=segments, settings=_plain(settings), trace=history.trace)
        start = self._start(segments, history)
        if self._streams.has_private_pools:
            self.notes.append(
                "There are private pools (CUDA graphs, MemPool): their memory stays with them until they are "
                "let go, which a snapshot does not tell."
            )
        return Recording(
            trace=history.trace,
            start=start,
            end=end,
            total_bytes=self._total_bytes(start, history),
            settings=settings_text(settings),
            kind=KIND,
            notes=(*self.notes, *history.notes),
            private_streams=self._streams.private(),
        )

    def _start(self, segments: tuple[Segment, ...], history: History) -> Snapshot | None:
        if not len(history.trace):
            return Snapshot(segments=segments) if segments else None
        found = starting_state(segments, history.steps)
        if found.contradictions:
            self.notes.append(
                f"{found.contradictions} events contradict the segments at the end (events were lost, or "
                "recording stopped earlier); the state at the beginning is approximate."
            )
        return found.snapshot if found.snapshot.segments else None

    def _total_bytes(self, start: Snapshot | None, history: History) -> int | None:
        """What was reserved and what the device still had free when it ran out of memory, if it did."""
        if history.free_at_oom is None:
            return None
        index, free = history.free_at_oom
        reserved = Held.over(start, history.steps, index)
        self.notes.append(
            "The capacity is what was reserved and free when memory ran out "
            "(without the CUDA context and other processes)."
        )
        return reserved + free


def _tiled(blocks: list[SnapshotBlock], begin: int, size: int) -> tuple[SnapshotBlock, ...]:
    """Blocks in order of address; what lies between and behind them is free (older versions left it out)."""
    filled: list[SnapshotBlock] = []
    at = begin
    for block in sorted(blocks, key=lambda block: block.address):
        if block.address > at:
            filled.append(free_block(at, block.address - at))
        filled.append(block)
        at = max(at, block.address + block.size_bytes)
    if at < begin + size:
        filled.append(free_block(at, begin + size - at))
    return tuple(filled)


def free_block(address: int, size: int) -> SnapshotBlock:
    """A free block."""
    return SnapshotBlock(address=address, size_bytes=size, requested_bytes=0, state="inactive")


def private_pool(value: Any) -> tuple[int, ...] | None:
    """The id of a private pool; ``None`` for the common one."""
    if not isinstance(value, list | tuple) or not any(value):
        return None
    return tuple(part for part in value[:2] if isinstance(part, int))


def _history_frames(row: Mapping[str, Any]) -> Any:
    """Versions before 2.1 kept the frames of a block in its history."""
    history = row.get("history")
    first = history[0] if isinstance(history, list) and history else None
    return first.get("frames") if isinstance(first, Mapping) else None


def _plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name)[:100]: value
        for name, value in list(settings.items())[:100]
        if isinstance(value, str | int | float | bool) and len(str(value)[:1001]) <= 1000
    }


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings as ``PYTORCH_ALLOC_CONF`` writes them: as given, or else as they were in force."""
    given = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("last_allocator_settings") or ""
    if isinstance(given, str) and given:
        return given[:1000]
    parts = []
    limit = settings.get("max_split_size")
    if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit < 1 << 62:
        parts.append(f"max_split_size_mb:{limit >> 20}")
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 < threshold < 1:
        parts.append(f"garbage_collection_threshold:{threshold:g}")
    if settings.get("expandable_segments") is True:
        parts.append("expandable_segments:True")
    return ",".join(parts)
