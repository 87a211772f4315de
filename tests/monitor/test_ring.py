"""Rings: bounded, safe to read while written, whole after a kill, fast for a million rows."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memfit.core.errors import InputError
from memfit.monitor.ring import HEAD_BYTES, RingLayout, RingWriter, last_row, read_ring

LAYOUT = RingLayout(columns=("a", "b"), capacity=10)


@contextlib.contextmanager
def writing(path: Path, layout: RingLayout = LAYOUT) -> Iterator[RingWriter]:
    with contextlib.closing(RingWriter(path, layout)) as ring:
        yield ring


def test_keeps_the_newest_rows_and_its_size(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    with writing(path) as ring:
        for number in range(25):
            ring.append(number, [number, None if number % 2 else -number])
    rows = read_ring(path)
    assert rows.number.tolist() == list(range(16, 26))
    assert rows.values["a"].tolist() == list(range(15, 25))
    assert [value for value in rows.values["b"] if not math.isnan(value)] == [-16, -18, -20, -22, -24]
    assert path.stat().st_size == HEAD_BYTES + 10 * LAYOUT.row.size
    assert last_row(path) == (24.0, {"a": 24.0, "b": -24.0})
    assert read_ring(path, after=22).number.tolist() == [23, 24, 25]
    assert read_ring(path, after=25).number.tolist() == []


def test_goes_on_after_the_writer_was_killed(tmp_path: Path) -> None:
    """Killed in the middle of its work, as an out-of-memory killer does."""
    path = tmp_path / "x.ring"
    code = (
        "import sys; from pathlib import Path\n"
        "from memfit.monitor.ring import RingLayout, RingWriter\n"
        "ring = RingWriter(Path(sys.argv[1]), RingLayout(columns=('a', 'b'), capacity=10))\n"
        "while True:\n"
        "    n = ring.append(0, [1, 2])\n"
        "    if n == 500: print('there', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = read_ring(path)
    assert len(before) >= 9 and int(before.number[-1]) >= 500
    with writing(path) as ring:
        assert ring.append(1.0, [7, 8]) == int(before.number[-1]) + 1
    assert read_ring(path).values["a"][-1] == 7


def test_leaves_out_a_row_that_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    with writing(path) as ring:
        for number in range(5):
            ring.append(number, [number, number])
    content = bytearray(path.read_bytes())
    end_of_fourth = LAYOUT.place(4) + LAYOUT.row.size - 8
    content[end_of_fourth : end_of_fourth + 8] = bytes(8)
    path.write_bytes(content)
    assert read_ring(path).number.tolist() == [1, 2, 3, 5]
    assert last_row(path) == (4.0, {"a": 4.0, "b": 4.0})
    with writing(path) as ring:
        assert ring.number == 5


def test_does_without_the_hint_of_the_newest_row(tmp_path: Path) -> None:
    """It is written after the row, and the power may fail before it is."""
    path = tmp_path / "x.ring"
    with writing(path) as ring:
        for number in range(13):
            ring.append(number, [number, number])
    for hint in (0, 12):
        content = bytearray(path.read_bytes())
        content[HEAD_BYTES - 8 : HEAD_BYTES] = hint.to_bytes(8, "little")
        path.write_bytes(content)
        with writing(path) as ring:
            assert ring.number == 13
    assert last_row(path) == (12.0, {"a": 12.0, "b": 12.0})


def test_rows_read_while_they_are_written_are_whole(tmp_path: Path) -> None:
    """Every row has twice the same value; a torn one would have two."""
    path = tmp_path / "x.ring"
    ring = RingWriter(path, RingLayout(columns=("a", "b"), capacity=50))
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            ring.append(number, [number, number])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            rows = read_ring(path)
            assert np.array_equal(rows.values["a"], rows.values["b"])
            assert np.array_equal(rows.values["a"], rows.number)
    finally:
        stop.set()
        writer.join()
        ring.close()


def test_a_million_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    layout = RingLayout(columns=("a",), capacity=1_000_000)
    rows = np.zeros(1_000_000, dtype=layout.dtype)
    rows["begin"] = rows["end"] = np.roll(np.arange(1, 1_000_001), 17)
    rows["values"][:, 0] = rows["begin"] * 3
    path.write_bytes(layout.head() + rows.tobytes())
    found = read_ring(path)
    assert np.array_equal(found.values["a"], 3.0 * np.arange(1, 1_000_001))


def test_other_columns_begin_anew_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    with writing(path) as ring:
        ring.append(0, [1, 2])
    with writing(path, RingLayout(columns=("c",), capacity=10)) as ring:
        assert ring.number == 0 and len(read_ring(path)) == 0
    for content in (b"", b"{}", b'{"format": "memfit-ring", "version": 1, "columns": [1], "capacity": 2}'):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not a ring"):
            read_ring(path)
        assert last_row(path) is None
