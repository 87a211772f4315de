"""What offloading to disk costs a training on the CPU, and shared memory against pickled copies.

    python benchmarks/offload.py             both tables, as Markdown
    python benchmarks/offload.py --json      the figures
    python benchmarks/offload.py --folder F  where the file is (default: the system's folder for such)

Steps with and without offloading run in processes of their own; resident memory is what a forward pass adds
to the process, read by psutil. For shared memory, another process fills a batch and this one adds it up:
through a queue (a pickled copy), through torch's own sharing, and through `memfit.SharedTensors`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

import memfit

BATCHES = 20


def offload_row(folder: str | None) -> dict[str, Any]:
    """Seconds of a step and resident bytes between the passes, plain and with activations on disk.

    Each way in a process of its own: what a process has given back to its allocator stays resident.
    """
    row = {}
    for way in ("plain", "disk"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, resident = pool.apply(_offload_steps, (way, folder))
        row |= {f"{way}_seconds": seconds, f"{way}_resident_bytes": resident}
    return row


def _offload_steps(way: str, folder: str | None) -> tuple[float, int]:
    """The median step, and how much more is resident after its forward pass than before the first one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(12)]
    )
    x = torch.randn(16384, 512)
    if way == "disk":
        memfit.ActivationOffload(to="disk", folder=folder).apply(model)
    before = psutil.Process().memory_info().rss
    rows = []
    for _ in range(3):
        began = time.perf_counter()
        loss = model(x).square().mean()
        resident = psutil.Process().memory_info().rss - before
        loss.backward()
        rows.append((time.perf_counter() - began, resident))
    return statistics.median(row[0] for row in rows[1:]), int(rows[0][1])


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
    row = figures["offload"]
    lines = ["| activations | seconds a step | resident more between the passes, MB |", "|---|---|---|"]
    for way in ("plain", "disk"):
        lines.append(f"| {way} | {row[f'{way}_seconds']:.3f} | {row[f'{way}_resident_bytes'] / 1e6:,.0f} |")
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
    figures = {"schema_version": 1, "offload": offload_row(arguments.folder), "sharing": sharing_rows()}
    sys.stdout.write((json.dumps(figures, indent=1) if arguments.json else tables(figures)) + "\n")


if __name__ == "__main__":
    main()
