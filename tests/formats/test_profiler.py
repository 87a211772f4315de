"""Chrome traces of torch.profiler, and tables of its memory events."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import Action
from memfit.formats import read_trace

MIB = 1 << 20


def memory(ts: float, change: int, address: int = 0, total: int | None = None, **more: Any) -> dict[str, Any]:
    values = {"Bytes": change, "Device Type": 1, "Device Id": 0, **more}
    if address:
        values["Addr"] = address
    if total is not None:
        values |= {"Total Allocated": total, "Total Reserved": 100 * MIB}
    return {"ph": "i", "name": "[memory]", "ts": ts, "pid": 0, "args": values}


def read(value: Any) -> Recording:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_trace(io.BytesIO(content))


KERNEL = {"ph": "X", "name": "aten::mm", "ts": 1, "dur": 3, "args": {"deep": [{"[memory]": 1}]}}


def chrome(*events: Any) -> dict[str, Any]:
    head = {"schemaVersion": 1, "deviceProperties": [{"name": "V100", "traceEvents": [1]}]}
    return {**head, "traceEvents": [KERNEL, *events, KERNEL], "traceName": "x"}


def test_levels_from_totals() -> None:
    """A was there before; B comes; A goes; of 50 MiB more nothing is known but the total."""
    a, b = 0x1000, 0x2000
    recording = read(
        chrome(
            memory(30, -8 * MIB, a, 54 * MIB),
            memory(20, 4 * MIB, b, 62 * MIB),
        )
    )
    assert recording.kind == "profiler-trace"
    assert [Action(x).name for x in recording.trace.action] == ["ALLOC", "ALLOC", "FREE"]
    assert recording.held_bytes == 50 * MIB
    assert recording.allocated_bytes is not None and recording.reserved_bytes is not None
    live = Timeline.of(recording.trace).live_bytes + recording.held_bytes
    assert live[1:].tolist() == recording.allocated_bytes[1:].tolist() == [62 * MIB, 54 * MIB]
    assert recording.recorded_peak_reserved_bytes == 100 * MIB


def test_a_bare_array_of_events() -> None:
    assert len(read([KERNEL, memory(1, 512, 1)]).trace) == 1


def test_without_addresses_the_youngest_of_a_size_goes() -> None:
    recording = read(chrome(memory(1, 512), memory(2, 512), memory(3, -512), memory(4, -1024)))
    assert recording.trace.block.tolist() == [2, 0, 1, 1, 2]
    assert any("youngest" in note for note in recording.notes)


def test_events_are_put_in_order_of_time() -> None:
    recording = read(chrome(memory(5, 2, 9), memory(1, 1, 8), memory(5, 3, 7)))
    assert recording.trace.size_bytes.tolist() == [1, 2, 3]


def test_the_gpu_with_most_events_is_read() -> None:
    cpu = [memory(i, 64, 50 + i, **{"Device Type": 0, "Device Id": -1}) for i in range(9)]
    recording = read(chrome(*cpu, memory(1, 512, 1), memory(2, 512, 2, **{"Device Id": 1}), memory(3, 1, 3)))
    assert recording.trace.size_bytes.tolist() == [512, 1]
    assert any("Only the events of GPU 0" in note for note in recording.notes)


def test_a_table_of_events() -> None:
    value = {"fields": ["ts_us", "bytes"], "events": [[1, 512], [2, -512]], "steps": []}
    recording = read(value)
    assert recording.trace.block.tolist() == [0, 0]


def test_times_as_text() -> None:
    assert len(read(chrome({**memory(1, 5, 1), "ts": "12.5"})).trace) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (chrome(), "no memory events.*profile_memory=True"),
        ({"traceEvents": []}, "no memory events"),
        ({"other": 1}, "without memory events"),
        (b'{"traceEvents": [{"ph": "X"}', "ends in the middle"),
        (b'{"traceEvents": [{"ph": "X"},, ]}', "broken JSON at line 1"),
        (b'{"a" 1}', "no key and colon"),
        (b"{", "ends in the middle"),
        (b'{"a": ' + b"[" * 100_000, "cannot be read near character"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read near character"),
        (chrome(memory(1, "x")), r"traceEvents\[1\]: Bytes is 'x'"),
        (chrome({"name": "[memory]"}), "has no 'args'"),
        (chrome({**memory(1, 5), "ts": None}), "ts is None, not a time"),
        (chrome(memory(1, 5, -1)), "Addr is -1"),
        (chrome(memory(1, 1 << 63)), "out of range"),
        ({"fields": ["bytes"], "events": [[1, 2]]}, r"events\[0\] is a list of 2, not a list of 1"),
        ({"fields": ["ts_us"], "events": [[1]]}, "has no 'bytes'"),
    ],
)
def test_wrong_traces_are_named(value: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(value)
