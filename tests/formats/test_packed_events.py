"""Histories that are packed while they are read: the same as read whole, in a fraction of the memory."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.formats import draining
from memfit.formats.packed_events import PackedEvents, Unusual
from memfit.formats.pickles import load_draining
from memfit.formats.snapshots import from_value

from .made import BASE, FRAMES, MIB, event, segment, snapshot


def history(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Events of all kinds with stacks of all kinds: shared, alike, of their own, none."""
    dice, live, events = random.Random(seed), [], []
    stacks = [[{"name": f"f{n}", "filename": f"/home/me/{n % 7}.py", "line": n}] for n in range(40)]
    while len(events) < count:
        frames = dice.choice((dice.choice(stacks), list(dice.choice(stacks)), [*FRAMES], []))
        more = {"frames": frames, "pool_id": dice.choice(((0, 0), (0, 3))), "stream": dice.choice((0, 77))}
        kind = dice.random()
        if kind < 0.02:
            events.append(event("snapshot", 0, 0, **more))
        elif kind < 0.03:
            oom = event("oom", 0, 5 * MIB, device_free=MIB, **more)
            del oom["addr"]
            events.append(oom)
        elif live and kind < 0.5:
            place, size = live.pop(dice.randrange(len(live)))
            events += [event(name, place, size, **more) for name in ("free_requested", "free_completed")]
        else:
            place, size = BASE + (1 << 40) + len(events) * MIB, dice.randrange(1, MIB)
            live.append((place, size))
            events.append(event("alloc", place, size, **more))
    return events


def made(count: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    return snapshot(
        [segment(BASE, 20 * MIB, blocks)], history(count // 3, seed=1), history(count, seed=2), []
    ) | {"segments": [segment(BASE, 20 * MIB, blocks) | {"device": 1}]}


def packed(path: Path) -> Any:
    """As the reading process does it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with open(path, "rb") as file:
            return load_draining(file, "made")
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_packed_is_the_same_as_whole(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "STEP_BYTES", 1 << 14)
    content = pickle.dumps(made(4000), protocol=protocol)
    (tmp_path / "s").write_bytes(content)
    value = packed(tmp_path / "s")
    assert [type(trace) for trace in value["device_traces"]] == [PackedEvents, PackedEvents, list]
    found = from_value(value, name="made", size_bytes=len(content))
    whole = from_value(pickle.loads(content), name="made", size_bytes=len(content))
    assert len(found.trace) > 2000 and found.total_bytes is not None
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == getattr(whole, field.name), field.name


@pytest.mark.parametrize("oddity", ["an event twice", "no whole number", "elsewhere"])
def test_unusual_files_are_read_whole(oddity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "STEP_BYTES", 1 << 14)
    value = made(3000)
    events = value["device_traces"][1]
    if oddity == "an event twice":
        events.append(events[3])
    elif oddity == "no whole number":
        events[2500]["size"] = 512.0
    else:
        value["other"] = events
        value["device_traces"] = [[], history(1500, seed=3)]
    path = tmp_path / "s"
    path.write_bytes(pickle.dumps(value, protocol=4))
    read = packed(path)
    assert all(type(trace) is list for trace in read["device_traces"])
    assert read == pickle.loads(path.read_bytes())


def test_an_event_is_taken_once() -> None:
    columns, one = PackedEvents(), event("alloc", BASE, 512)
    columns.take(one)
    assert next(iter(columns))["frames"] is FRAMES and len(columns) == 1 and not one
    with pytest.raises(Unusual):
        columns.take(one)


PEAKS = """
import resource, subprocess, sys
for request in sys.argv[1:]:
    subprocess.run([sys.executable, "-m", "memfit.formats.reader_process", request], check=True)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory of a child in KiB is Linux's")
def test_a_long_history_takes_a_small_multiple_of_its_size(tmp_path: Path) -> None:
    """Against the memory that the same process takes for a short one."""
    requests, sizes = [], []
    for count in (100, 60_000):
        shared = [dict(one, frames=FRAMES) for one in history(count, seed=5)]
        path, folder = tmp_path / f"{count}", tmp_path / f"read {count}"
        path.write_bytes(pickle.dumps(snapshot([], shared), protocol=4))
        folder.mkdir()
        sizes.append(path.stat().st_size)
        requests.append(json.dumps({"path": str(path), "name": path.name, "folder": str(folder)}))
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, *requests],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    short, long = map(int, done.stdout.split())
    assert long - short < 6 * (sizes[1] - sizes[0]), "as dictionaries they would take seven times it"
