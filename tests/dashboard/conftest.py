"""Traces to show, and servers that end with their test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memfit.core.recording import Recording
from memfit.core.trace import Trace, TraceBuilder
from memfit.dashboard.feeds import Feed, make_feed
from memfit.dashboard.server import Dashboard
from memfit.monitor import AlertRule
from memfit.monitor.engine import Monitor
from memfit.monitor.opening import Opened
from memfit.monitor.playback import TracePlayback
from memfit.monitor.samples import Source

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

MIB = 1 << 20
Serve = Callable[..., Dashboard]


def a_trace(
    steps: int = 5, name: str = "train.py:7 step", module: str = "layers.0", leak_bytes: int = MIB
) -> Trace:
    """Parameters for good; per step an activation, and a block that is never freed."""
    builder = TraceBuilder()
    builder.alloc(100 * MIB, category="parameter", phase="init", where="model.py:3 init")
    for _ in range(steps):
        activation = builder.alloc(
            50 * MIB, category="activation", phase="forward", where=name, module=module
        )
        builder.alloc(leak_bytes, phase="forward", where="loop.py:1 keep")
        builder.free(activation, phase="backward")
        builder.free(builder.alloc(512, category="temporary", phase="optimizer"), phase="optimizer")
    return builder.build()


@functools.cache
def a_long_trace(events: int, seed: int = 1) -> tuple[Trace, int]:
    """Pairs of blocks of three categories; one of them, at a random place, far above all. Also its event."""
    draw = np.random.default_rng(seed)
    pairs = events // 2
    action = np.tile(np.array([0, 1], dtype=np.uint8), pairs)
    block = np.repeat(np.arange(pairs), 2)
    size = np.repeat(draw.integers(1, 100 * MIB, pairs), 2)
    peak = int(draw.integers(pairs))
    size[2 * peak : 2 * peak + 2] = 900 * MIB
    strings = ("", "activation", "temporary", "other", "forward", "a.py:1 f")
    category = np.repeat(draw.integers(1, 4, pairs), 2)
    zero = np.zeros(events, dtype=np.int64)
    columns = {"stream": zero, "address": zero, "module": zero, "op": zero}
    trace = Trace(
        action=action, block=block, size_bytes=size, category=category, phase=zero + 4, where=zero + 5,
        strings=strings, **columns,
    )  # fmt: skip
    return trace, 2 * peak


def trace_feed(trace: Trace, *, findings: Any = None, speed: float = float("inf")) -> Feed:
    recording = Recording(trace=trace, total_bytes=1 << 30)
    playback = TracePlayback(recording, speed=speed, job="t")
    opened = Opened(
        kind="trace",
        title="t.memfit-trace",
        sources=(playback,),
        recording=recording,
        whole=speed == float("inf"),
    )
    return make_feed(opened, Monitor(opened.sources, rules=()), findings=findings)


def live_feed(*sources: Source, rules: tuple[AlertRule, ...] = (), **more: Any) -> Feed:
    opened = Opened(kind="machine", title="node17", sources=sources)
    return make_feed(opened, Monitor(sources, rules=rules), **more)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves feeds until the test ends."""
    served: list[Dashboard] = []

    def start(feed: Feed, **settings: Any) -> Dashboard:
        served.append(Dashboard(feed, **settings).start())
        return served[-1]

    yield start
    for one in served:
        one.close()
