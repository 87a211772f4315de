"""What `memfit.watch()` costs a training, and what a scrape of `memfit export` costs.

    python benchmarks/monitor_overhead.py                    steps on the CPU, with and without, in turns
    memfit dryrun --gpu a100 --steps all -- benchmarks/monitor_overhead.py     over PyTorch's CUDA allocator
    python benchmarks/monitor_overhead.py --json

Steps with and without watching run in turns in one process, so that whatever else the machine does falls on
both; the ratio of each pair is taken, and the median of them. Where other jobs share the machine they move
these ratios by far more than watching does; the processor time of the readings themselves is the steady
figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.monitor.engine import Monitor
from memfit.monitor.exporter import Exporter
from memfit.monitor.opening import open_source
from memfit.monitor.watching import Watcher


def training(device: str, steps_kept: int = 2000) -> Callable[[], None]:
    """One step of a small model; ``steps_kept`` blocks stay allocated, as a real model's would."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, 256, device=device)
    kept = [torch.empty(1000 + 500 * n, device=device) for n in range(steps_kept)]

    def step() -> None:
        assert kept
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass
class Took:
    """What some steps took: by the clock, and in processor time of all threads of this process."""

    wall_seconds: float
    cpu_seconds: float


def run(step: Callable[[], None], count: int, watcher: Watcher | None) -> Took:
    """``count`` steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
        if watcher is not None:
            watcher.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


@contextlib.contextmanager
def readings_timed() -> Iterator[list[float]]:
    """Processor seconds of every reading, as the watching thread takes them between the training's steps."""
    spent: list[float] = []
    original = Watcher._read

    def timed(watcher: Watcher) -> None:
        began = time.thread_time()
        original(watcher)
        if threading.current_thread() is not threading.main_thread():
            spent.append(time.thread_time() - began)

    Watcher._read = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Watcher._read = original  # type: ignore[method-assign]


def scrape_seconds(run_folder: Path, scrapes: int) -> list[float]:
    """Seconds of each scrape over HTTP, connection included."""
    exporter = Exporter(Monitor(open_source(run_folder).sources), port=0).start()
    took = []
    for _ in range(scrapes):
        began = time.perf_counter()
        with urllib.request.urlopen(f"{exporter.url}/metrics") as answer:
            answer.read()
        took.append(time.perf_counter() - began)
    exporter.close()
    return sorted(took)


def measure(pairs: int, block_seconds: float, interval: float) -> dict[str, Any]:
    """The whole comparison."""
    torch.set_num_threads(1)
    step = training("cuda" if torch.cuda.is_available() else "cpu")
    run(step, 20, None)
    count = max(1, int(block_seconds / (run(step, 20, None).wall_seconds / 20)))
    wall, cpu, first = [], [], []
    with tempfile.TemporaryDirectory() as folder, readings_timed() as readings:
        for pair in range(pairs):
            plain = run(step, count, None) if pair % 2 == 0 else None
            watcher = memfit.watch(folder=Path(folder) / str(pair), interval=interval)
            began = time.process_time()
            watcher.step()
            watcher.sample()  # the first reading makes the files of the records; it is told apart
            first.append(time.process_time() - began)
            watched = run(step, count, watcher)
            watcher.stop()
            plain = plain or run(step, count, None)
            wall.append(watched.wall_seconds / plain.wall_seconds)
            cpu.append(watched.cpu_seconds / plain.cpu_seconds)
        with memfit.watch(folder=Path(folder) / "last", interval=3600) as watcher:
            began = time.perf_counter()
            for _ in range(2000):
                watcher.step()
            step_call = (time.perf_counter() - began) / 2000
        scrapes = scrape_seconds(Path(folder) / "last", 200)
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "interval_seconds": interval,
        "pairs": pairs,
        "steps_per_block": count,
        "wall_ratio": statistics.median(wall),
        "cpu_ratio": statistics.median(cpu),
        "wall_ratios": sorted(wall),
        "cpu_ratios": sorted(cpu),
        "first_reading_cpu_seconds": statistics.median(first),
        "readings": len(readings),
        "reading_cpu_seconds": statistics.mean(readings),
        "reading_share": statistics.mean(readings) / interval,
        "step_call_seconds": step_call,
        "scrape_seconds": statistics.median(scrapes),
        "scrape_seconds_95": scrapes[int(0.95 * len(scrapes))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--block-seconds", type=float, default=2.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.pairs, arguments.block_seconds, arguments.interval)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"steps on {found['device']}, a reading every {found['interval_seconds']:g} s")
    pairs = found["pairs"]
    print(f"  watched / plain, median of {pairs} pairs: {found['cpu_ratio']:.4f} of processor time, "
          f"{found['wall_ratio']:.4f} by the clock")  # fmt: skip
    print(f"  the first reading: {found['first_reading_cpu_seconds'] * 1e3:.1f} ms, once")
    print(f"  one reading: {found['reading_cpu_seconds'] * 1e3:.2f} ms of a processor, "
          f"{found['reading_share']:.2%} of the time")  # fmt: skip
    print(f"  watcher.step(): {found['step_call_seconds'] * 1e6:.1f} µs")
    print(f"  a scrape of memfit export: {found['scrape_seconds'] * 1e3:.2f} ms, "
          f"95 % under {found['scrape_seconds_95'] * 1e3:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
