"""What offloading to disk costs a training on the CPU, and shared memory against pickled copies.

    python benchmarks/offload.py             both tables, as Markdown
    python benchmarks/offload.py --json      the figures
    python benchmarks/offload.py --folder F  where the file is (default: the system's folder for such)

Steps with and without offloading run in processes of their own; memory is what a forward pass adds to the
process, or what a few steps of AdamW leave in it, read by psutil, without what is mapped from files (which
the system takes back when it needs it). *Raw* is the same keeper with a file of bytes alone, written and read
by offset, as a reference for the form of the file. For shared memory, another process fills a batch and this
one adds it up: through a queue (a pickled copy), through torch's own sharing, and through
`memfit.SharedTensors`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

import memfit

BATCHES = 20
STEPS = 3
ROUNDS = 2


class RawFile:
    """A file of bytes without a form, read into memory of its own: what the mapped file is held against."""

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def write(self, flat: Tensor) -> RawPlace:
        """As `SpillFile.write`."""
        free = self._free.get(flat.nbytes)
        if free:
            place = free.pop()
        else:
            place, self._end = self._end, self._end + flat.nbytes
        data, done = flat.view(torch.uint8).numpy().data, 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], place + done)
        return RawPlace(self, place, flat)

    def read(self, place: int, into: Tensor) -> None:
        """Fills a tensor of bytes."""
        data, done = into.numpy().data, 0
        while done < len(data):
            done += os.preadv(self._file.fileno(), [data[done:]], place + done)

    def give_back(self, place: int, size_bytes: int) -> None:
        """Takes a range back."""
        self._free.setdefault(size_bytes, []).append(place)


class RawPlace:
    """What was written."""

    def __init__(self, file: RawFile, place: int, flat: Tensor) -> None:
        self._file, self._place, self._like = file, place, (flat.nbytes, flat.dtype)

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        size_bytes, dtype = self._like
        data = torch.empty(size_bytes, dtype=torch.uint8)
        self._file.read(self._place, data)
        return data.view(dtype)

    def read_ahead(self) -> None:
        """Lets the system fetch it in the background."""
        os.posix_fadvise(self._file._file.fileno(), self._place, self._like[0], os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        self._file.give_back(self._place, self._like[0])


WAYS = ("plain", "raw", "disk", "state plain", "state on disk")


def offload_rows(folder: str | None) -> list[dict[str, Any]]:
    """Seconds of a step and bytes of memory, plain and with activations or the optimizer's state on disk.

    Each way in a process of its own: what a process has given back to its allocator stays resident. Of the
    rounds the fastest counts, as others may use the machine.
    """
    found: dict[str, tuple[float, int]] = {}
    for way in WAYS * ROUNDS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(_state_steps if "state" in way else _offload_steps, (way, folder))
        found[way] = min(row, found.get(way, row))
    return [{"way": way, "seconds": row[0], "memory_bytes": row[1]} for way, row in found.items()]


def _memory_bytes() -> int:
    """What this process has in memory that is in no file."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _net(width: int) -> nn.Sequential:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(12)]
    )


def _offload_steps(way: str, folder: str | None) -> tuple[float, int]:
    """The median step, and how much more is there after its forward pass than before the first one."""
    model, x = _net(512), torch.randn(16384, 512)
    if way != "plain":
        memfit.ActivationOffload(to="disk", folder=folder).apply(model)
    if way == "raw":
        vars(model[0])["forward"].keeper.file = RawFile(folder)
    before = _memory_bytes()
    rows = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        loss = model(x).square().mean()
        memory = _memory_bytes() - before
        loss.backward()
        rows.append((time.perf_counter() - began, memory))
    return statistics.median(row[0] for row in rows[1:]), int(rows[0][1])


def _state_steps(way: str, folder: str | None) -> tuple[float, int]:
    """The median step of AdamW alone, and how much more is there after the steps than before the first."""
    model = _net(1024)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if way == "state on disk":
        memfit.OffloadedOptimizerState(to="disk", folder=folder).apply(model, optimizer)
    model(torch.randn(64, 1024)).square().mean().backward()
    before = _memory_bytes()
    seconds = []
    for _ in range(3 * STEPS + 1):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]), _memory_bytes() - before


def _send_arrays(queue: Any, shape: tuple[int, ...]) -> None:
    batch = np.ones(shape, np.float32)
    for number in range(BATCHES):
        batch[0, 0] = number
        queue.put(batch)


def _send_tensors(queue: Any, shape: tuple[int, ...], done: Any) -> None:
    for number in range(BATCHES):
        batch = torch.ones(shape)
        batch[0, 0] = number
        queue.put(batch)
    done.wait()


def _fill_slots(shared: memfit.SharedTensors, free: Any, full: Any) -> None:
    for number in range(BATCHES):
        slot = free.get()
        shared["batch"][slot].fill_(1.0)
        shared["batch"][slot, 0, 0] = number
        full.put(slot)


def _received(take: Callable[[], float]) -> float:
    """Seconds for one batch; the first is not counted, since it waits for the process to start."""
    take()
    began = time.perf_counter()
    for _ in range(BATCHES - 1):
        take()
    return (time.perf_counter() - began) / (BATCHES - 1)


def sharing_rows() -> list[dict[str, Any]]:
    """One for each size of a batch."""
    rows = []
    fork = multiprocessing.get_context("fork")
    torch_fork = torch.multiprocessing.get_context("fork")
    for rows_count in (256, 4096, 32768):
        shape = (rows_count, 256)
        row: dict[str, Any] = {"batch_bytes": rows_count * 256 * 4}
        queue = fork.Queue(2)
        worker = fork.Process(target=_send_arrays, args=(queue, shape))
        worker.start()
        row["pickled_seconds"] = _received(lambda q=queue: float(q.get().sum()))
        worker.join()
        tensors, done = torch_fork.Queue(2), torch_fork.Event()
        worker = torch_fork.Process(target=_send_tensors, args=(tensors, shape, done))
        worker.start()
        row["torch_seconds"] = _received(lambda q=tensors: float(q.get().sum()))
        done.set()
        worker.join()
        shared = memfit.SharedTensors.empty({"batch": ((2, *shape), torch.float32)})
        free, full = fork.Queue(), fork.Queue()
        free.put(0), free.put(1)
        worker = fork.Process(target=_fill_slots, args=(shared, free, full))
        worker.start()

        def take(shared: Any = shared, free: Any = free, full: Any = full) -> float:
            slot = full.get()
            total = float(shared["batch"][slot].sum())
            free.put(slot)
            return total

        row["shared_seconds"] = _received(take)
        worker.join()
        rows.append(row)
    return rows


def tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| | seconds a step | to plain | memory more, MB |", "|---|---|---|---|"]
    plain = {row["way"]: row["seconds"] for row in figures["offload"] if "plain" in row["way"]}
    for row in figures["offload"]:
        share = row["seconds"] / plain["state plain" if "state" in row["way"] else "plain"]
        lines.append(
            f"| {row['way']} | {row['seconds']:.3f} | × {share:.2f} | {row['memory_bytes'] / 1e6:,.0f} |"
        )
    lines += ["", "| batch, MB | pickled, MB/s | torch's sharing | SharedTensors |", "|---|---|---|---|"]
    for row in figures["sharing"]:
        speeds = (row["batch_bytes"] / row[f"{way}_seconds"] / 1e6 for way in ("pickled", "torch", "shared"))
        lines.append(
            f"| {row['batch_bytes'] / 1e6:.1f} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    parser.add_argument("--folder", help="where the file of offloaded activations is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"schema_version": 2, "offload": offload_rows(arguments.folder), "sharing": sharing_rows()}
    sys.stdout.write((json.dumps(figures, indent=1) if arguments.json else tables(figures)) + "\n")


if __name__ == "__main__":
    main()
