"""A recording as files, from the process that reads hostile files to the one that asked for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.recording import Recording
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.core.trace import COLUMNS, Trace

COLUMNS_FILE = "columns.npz"
HEAD_FILE = "recording.json"
REASON_FILE = "reason.txt"


def save(recording: Recording, folder: Path) -> None:
    """Write a recording that was read from a snapshot."""
    trace = recording.trace
    np.savez(folder / COLUMNS_FILE, **{name: getattr(trace, name) for name in COLUMNS})
    head = {
        "strings": trace.strings,
        "meta": dict(trace.meta),
        "start": _segments(recording.start),
        "end": _segments(recording.end),
        "settings_of_end": {} if recording.end is None else dict(recording.end.settings),
        "total_bytes": recording.total_bytes,
        "settings": recording.settings,
        "kind": recording.kind,
        "notes": recording.notes,
    }
    (folder / HEAD_FILE).write_text(json.dumps(head, allow_nan=True), encoding="utf-8")


def load(folder: Path) -> Recording:
    """Read what `save` wrote."""
    head = json.loads((folder / HEAD_FILE).read_text(encoding="utf-8"))
    with np.load(folder / COLUMNS_FILE, allow_pickle=False) as columns:
        trace = Trace(
            **{name: columns[name] for name in COLUMNS}, strings=tuple(head["strings"]), meta=head["meta"]
        )
    return Recording(
        trace=trace,
        start=_snapshot(head["start"]),
        end=_snapshot(head["end"], settings=head["settings_of_end"], trace=trace),
        total_bytes=head["total_bytes"],
        settings=head["settings"],
        kind=head["kind"],
        notes=tuple(head["notes"]),
    )


def _segments(snapshot: Snapshot | None) -> list[Any] | None:
    if snapshot is None:
        return None
    return [
        [
            *(segment.address, segment.size_bytes, segment.stream, segment.pool, segment.expandable),
            [
                [block.address, block.size_bytes, block.requested_bytes, block.state, block.where]
                for block in segment.blocks
            ],
        ]
        for segment in snapshot.segments
    ]


def _snapshot(rows: list[Any] | None, **more: Any) -> Snapshot | None:
    if rows is None:
        return None
    return Snapshot(segments=tuple(_segment(*row) for row in rows), **more)


def _segment(address: int, size: int, stream: int, pool: Any, expandable: bool, blocks: list[Any]) -> Segment:
    return Segment(
        address=address,
        size_bytes=size,
        stream=stream,
        pool=pool,
        expandable=expandable,
        blocks=tuple(
            SnapshotBlock(address=at, size_bytes=length, requested_bytes=asked, state=state, where=where)
            for at, length, asked, state, where in blocks
        ),
    )
