"""Snapshots made by hand, in the form in which PyTorch writes them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20
BASE = 0x7F0000000000
FRAMES = [
    {"name": "empty", "filename": "/usr/lib/python3/site-packages/torch/_ops.py", "line": 9},
    {"name": "step", "filename": "/home/me/train.py", "line": 12},
    {"name": "<module>", "filename": "/home/me/main.py", "line": 3},
]


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": FRAMES, **more,
    }  # fmt: skip


def freed(address: int, size: int, **more: Any) -> list[dict[str, Any]]:
    return [event("free_requested", address, size, **more), event("free_completed", address, size, **more)]


def block(
    address: int, size: int, requested: int | None = None, state: str = "active_allocated"
) -> dict[str, Any]:
    requested = size if requested is None else requested
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": FRAMES}


def segment(address: int, size: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large",
        "is_expandable": False, "segment_pool_id": (0, 0), "blocks": blocks, **more,
    }  # fmt: skip


def snapshot(segments: list[Any], *traces: list[Any], **settings: Any) -> dict[str, Any]:
    return {
        "segments": segments,
        "device_traces": list(traces),
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, **settings},
        "external_annotations": [],
    }


def simple() -> dict[str, Any]:
    """From nothing: two blocks in one segment, one of them freed."""
    history = [
        event("segment_alloc", BASE, 20 * MIB),
        event("alloc", BASE, 4 * MIB),
        event("alloc", BASE + 4 * MIB, 2 * MIB),
        *freed(BASE, 4 * MIB),
    ]
    blocks = [
        block(BASE, 4 * MIB, state="inactive"),
        block(BASE + 4 * MIB, 2 * MIB),
        block(BASE + 6 * MIB, 14 * MIB, state="inactive"),
    ]
    return snapshot([segment(BASE, 20 * MIB, blocks)], history)


def dumped(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path
