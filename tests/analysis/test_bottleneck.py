"""Each kind of limit, from a source that has that limit and no other."""

from __future__ import annotations

import doctest
import json

import pytest

from memfit import BottleneckDetector, UsageError
from memfit.analysis import bottleneck as bottleneck_module
from memfit.analysis.bottleneck import KINDS
from memfit.capture.graph import Op, StepGraph, Storage
from memfit.core.trace import TraceBuilder
from memfit.formats.operator_times import OperatorTime, OperatorTimes

GIB, MIB = 1 << 30, 1 << 20


def trace(size=GIB):
    builder = TraceBuilder()
    builder.alloc(size, category="activation", phase="forward")
    return builder.build()


def fragmented():
    """120 MiB blocks with every second one freed: no hole serves a larger one."""
    builder = TraceBuilder()
    blocks = [builder.alloc(120 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        builder.free(block)
    for _ in range(2):
        builder.alloc(140 * MIB)
    return builder.build()


def graph(*ops):
    storage = Storage(id=0, size_bytes=MIB, category="parameter", born=-1)
    return StepGraph(
        ops=tuple(Op(index=i, **op) for i, op in enumerate(ops)), storages=(storage,), name="made"
    )


PRODUCT = {"name": "aten.mm.default", "flops": 2 * 8192**3, "bytes_moved": 12 * 8192**2}
ADDITION = {"name": "aten.add.Tensor", "bytes_moved": 4 * GIB}
TINY = {"name": "aten.add.Tensor", "bytes_moved": 4096}
UPDATE = {"name": "aten._fused_adamw_.default", "bytes_moved": 4 * GIB, "phase": "optimizer"}


def times(**seconds):
    return OperatorTimes(
        operators=(OperatorTime(name="aten::mm", calls=1, host_seconds=0.1),),
        wall_seconds=2.0, steps=2, kernel_count=1000, **{"device_busy_seconds": 1.9, **seconds},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "kind", "share"),
    [
        (trace(12 * GIB), "memory_capacity", 12 / 11.32),
        (fragmented(), "fragmentation", 480 / (960 + 280)),
        (graph(PRODUCT), "compute", 1.0),
        (graph(ADDITION), "bandwidth", 1.0),
        (graph(*[TINY] * 9), "launch_overhead", 1.0),
        (graph(UPDATE), "bandwidth", 1.0),
        (times(loader_seconds=0.9), "input_pipeline", 0.45),
        (times(communication_seconds=0.8), "communication", 0.4),
        (times(device_busy_seconds=0.4), "launch_overhead", 0.8),
        (times(optimizer_seconds=1.0), "optimizer", 0.5),
    ],
)
def test_the_limit(source, kind, share):
    found = BottleneckDetector(source, gpu="rtx3060-12gb").detect()
    assert found.limit.kind == kind
    assert found.limit.share == pytest.approx(share, rel=0.01)
    assert found.limit.evidence and found.limit.remedy
    assert kind.replace("_", " ") in str(found)


def test_an_optimizer_step_is_named_beside_what_bounds_it():
    found = BottleneckDetector(graph(UPDATE, UPDATE, UPDATE, PRODUCT), gpu="rtx3060-12gb").detect()
    assert {row.kind for row in found.found} == {"compute", "bandwidth", "optimizer"}


def test_full_memory_comes_before_everything_and_room_after_it():
    full = BottleneckDetector(trace(12 * GIB), times(loader_seconds=1.5), gpu="rtx3060-12gb").detect()
    assert [row.kind for row in full.found][:2] == ["memory_capacity", "input_pipeline"]
    roomy = BottleneckDetector(trace(4 * GIB), graph(PRODUCT), gpu="rtx3060-12gb").detect()
    assert [row.kind for row in roomy.found] == ["compute", "memory_capacity"]


def test_what_was_measured_counts_for_more_than_what_was_predicted():
    both = BottleneckDetector(graph(*[TINY] * 9), times(device_busy_seconds=1.98), gpu="a100").detect()
    assert not any(row.kind == "launch_overhead" for row in both.found)  # measured: 1 %


def test_what_the_sources_cannot_tell_is_said():
    found = BottleneckDetector(trace(MIB)).detect()
    assert found.limit is None and found.looked_at == ("fragmentation",)
    assert "Nothing stands out among fragmentation" in str(found)
    assert "Not looked at" in str(BottleneckDetector(trace(12 * GIB), gpu="3060").detect())
    assert set(found.looked_at) <= set(KINDS)
    json.dumps(found.to_json())
    with pytest.raises(UsageError, match="nothing to look at"):
        BottleneckDetector().detect()


def test_the_budget_is_the_limit_where_one_is_given():
    found = BottleneckDetector(trace(2 * GIB), gpu="a100", budget="2GiB").detect()
    assert (found.limit.kind, found.limit.share) == ("memory_capacity", 1.0)


def test_the_docstring():
    assert doctest.testmod(bottleneck_module).attempted
