"""PyTorch's events become a trace: hand-made histories with known answers."""

from __future__ import annotations

from typing import Any

from memfit.dryrun.history import Mark, Observations, PhaseChange, Position, read_history

A, B, C = 0x1000, 0x2000, 0x3000


def event(
    action: str, address: int = 0, size: int = 0, label: str = "", stream: int = 0, *lines: str
) -> dict[str, Any]:
    frames = [
        {"filename": line.split(":")[0], "line": int(line.split(":")[1]), "name": "f"} for line in lines
    ]
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "user_metadata": label,
        "frames": frames,
    }


def alloc(address: int, size: int, label: str = "forward | aten.mm | layer", *lines: str) -> dict[str, Any]:
    return event("alloc", address, size, label, 0, *lines)


def free(address: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


def read(events: list[dict[str, Any]], **observed: Any) -> Any:
    return read_history(
        events,
        Observations(**observed),
        is_user_file=lambda name: name.startswith("my"),
        meta={"of": "a test"},
    )


def test_blocks_are_paired_although_addresses_come_back() -> None:
    history = read([alloc(A, 100), *free(A, 100), alloc(A, 300), alloc(B, 50), *free(A, 300)])
    assert history.trace.block.tolist() == [0, 0, 1, 2, 1]
    assert history.live_bytes().tolist() == [100, 0, 300, 350, 50]


def test_a_mark_means_the_block_that_was_there_then() -> None:
    events = [alloc(A, 100), *free(A, 100), alloc(A, 300), alloc(B, 7)]
    marks = [
        Mark(position=Position(1, 0), address=A, category="input"),
        Mark(position=Position(3, 1), address=A, category="gradient"),
        Mark(position=Position(3, 1), address=A, category="parameter"),
        Mark(position=Position(3, 1), address=C, category="buffer"),
    ]
    history = read(events, marks=marks)
    assert history.trace.texts("category") == ["input", "input", "parameter", "activation"]
    assert history.at_peak("category") == {"parameter": 300, "activation": 7}


def test_what_outlives_the_forward_is_an_activation() -> None:
    events = [
        alloc(A, 100),
        alloc(B, 200),
        *free(B, 200),
        alloc(C, 50, "backward | aten.mm | "),
        *free(A, 100),
    ]
    history = read(events, phases=[PhaseChange(position=Position(2, 1), phase="backward")])
    kept = {event.size_bytes: event.category for event in history.trace}
    assert kept == {100: "activation", 200: "temporary", 50: "temporary"}


def test_a_workspace_is_known_by_its_size_and_its_life() -> None:
    events = [alloc(A, 8_519_680), alloc(B, 8_519_680), *free(B, 8_519_680)]
    assert read(events).trace.texts("category") == ["workspace", "activation", "activation"]


def test_labels_places_and_streams() -> None:
    events = [
        alloc(A, 1, "recompute | aten.mm | h.0", "torch/x.py:1", "my.py:12", "my.py:99"),
        event("alloc", B, 2, "no label", 77),
        event("segment_alloc", C, 2 << 20),
        event("oom", 0, 500),
        event("snapshot"),
    ]
    trace = read(events, phases=[PhaseChange(position=Position(1, 0), phase="optimizer")]).trace
    assert (trace[0].phase, trace[0].op, trace[0].module) == ("recompute", "aten.mm", "h.0")
    assert trace[0].where == "my.py:12 f"
    assert (trace[1].phase, trace[1].op, trace[1].stream) == ("optimizer", "", 1)
    assert [trace[2].size_bytes, trace[3].size_bytes, len(trace)] == [2 << 20, 500, 4]


def test_step_peaks_are_those_of_each_span() -> None:
    events = [alloc(A, 100), *free(A, 100), alloc(B, 40), alloc(C, 2), *free(B, 40)]
    history = read(events, step_ends=[Position(1, 1), Position(3, 1), Position(3, 2)])
    assert history.step_ends == (2, 4, 5)
    assert history.step_peaks() == (100, 42, 2)


def test_a_history_whose_beginning_was_dropped() -> None:
    """Frees of blocks from before are kept without a block, and marks still find theirs."""
    events = [*free(C, 9), alloc(A, 100)]
    marks = [Mark(position=Position(11, 6), address=A, category="parameter")]
    trace = read(events, start=Position(10, 5), marks=marks).trace
    assert trace.block.tolist() == [-1, 0]
    assert trace[1].category == "parameter"
