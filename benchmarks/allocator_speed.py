"""Events a second of the caching allocator: replayed over objects, over arrays, and PyTorch's own.

    python benchmarks/allocator_speed.py [--events 100000 1000000 10000000] [--live 2000] [--no-real]

All in one run and on the same traces: tensors of sizes that recur, as a model's do, of which at most
``--live`` live at once; the newest is the next to go as often as any other. PyTorch's allocator is the
compiled one, on the made-up GPU of the dry run; its time is that of a loop in Python that calls it. Arrays:
the best of three, the others once; processor time. Every placement and statistic is compared, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.replay import Operation, events_of, replay_events, replay_operations
from memfit.core.devices import find_gpu
from memfit.core.trace import COLUMNS, Action, Trace
from memfit.dryrun.worker import Worker

TOTAL_BYTES = 1 << 40
MOST_FOR_OBJECTS = 1_000_000
SETTINGS = ("", "expandable_segments:True")


def made_trace(count: int, live: int) -> Trace:
    """A trace of ``count`` events from a seed."""
    chance = np.random.default_rng(0)
    sizes = np.concatenate([chance.integers(1, 1 << 20, 40), chance.integers(1 << 20, 64 << 20, 20)])
    picked = chance.integers(0, len(sizes), count).tolist()
    newest, grows = (chance.random(count) < 0.5).tolist(), (chance.random(count) < 0.55).tolist()
    at = chance.random(count).tolist()
    action, block, size = np.zeros(count, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64)
    out: list[int] = []
    made = 0
    for index in range(count):
        if not out or (len(out) < live and grows[index]):
            block[index], size[index] = made, sizes[picked[index]]
            out.append(made)
            made += 1
            continue
        if not newest[index]:
            other = int(at[index] * len(out))
            out[other], out[-1] = out[-1], out[other]
        action[index], block[index] = int(Action.FREE), out.pop()
    columns: dict[str, Any] = {name: np.zeros(count, dtype=dtype) for name, dtype in COLUMNS.items()}
    columns |= {"action": action, "block": block, "size_bytes": size}
    return Trace(**columns, strings=("other",))


def seconds_of_arrays(trace: Trace, settings: str) -> tuple[float, Any]:
    """The best of three, and what came of it."""
    best, result = float("inf"), None
    for _ in range(3):
        began = time.process_time()
        allocator = CachingAllocator(CachingConfig(total_bytes=TOTAL_BYTES, settings=settings))
        result = replay_events(events_of(trace), allocator)
        best = min(best, time.process_time() - began)
    return best, result


def seconds_of_objects(trace: Trace, settings: str) -> tuple[float, Any]:
    """Once: it is slow."""
    rows = zip(trace.action.tolist(), trace.block.tolist(), trace.size_bytes.tolist(), strict=True)
    operations = [Operation(action, block, size) for action, block, size in rows]
    began = time.process_time()
    allocator = CachingAllocator(CachingConfig(total_bytes=TOTAL_BYTES, settings=settings))
    return_value = replay_operations(operations, allocator)
    return time.process_time() - began, return_value


def seconds_of_real(trace: Trace, settings: str, folder: Path) -> tuple[float, int]:
    """In a fork of a worker with the made-up GPU; the time is taken there."""
    gpu = replace(find_gpu("a100-80gb"), runtime_total_bytes=TOTAL_BYTES, context_bytes=0)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    path = folder / "events.npy"
    np.save(path, np.array([trace.action, trace.block, trace.size_bytes], dtype=np.int64))
    with Worker(gpu) as worker:
        found: tuple[float, int] = worker.call(
            "allocator_speed:run_real",
            gpu=gpu,
            timeout_seconds=600.0,
            path=str(path),
            settings=settings,
        )
    return found[0], found[1]


def run_real(path: str, settings: str) -> tuple[float, int]:
    """In the fork: the same events through PyTorch's allocator; seconds and the peak of reserved bytes."""
    os.environ["PYTORCH_ALLOC_CONF"] = settings
    import torch

    torch.cuda.init()
    allocate, free = (
        torch._C._cuda_cudaCachingAllocator_raw_alloc,
        torch._C._cuda_cudaCachingAllocator_raw_delete,
    )
    stream = torch.cuda.current_stream().cuda_stream
    rows = np.load(path).T.tolist()
    live = {}
    began = time.process_time()
    for kind, number, wanted in rows:
        if kind == 0:
            live[number] = allocate(wanted, stream)
        else:
            free(live.pop(number))
    seconds = time.process_time() - began
    return seconds, torch.cuda.memory_stats()["reserved_bytes.all.peak"]


def compare(count: int, live: int, *, real: bool) -> None:
    """One size, every way."""
    trace = made_trace(count, live)
    for settings in SETTINGS:
        fast, result = seconds_of_arrays(trace, settings)
        parts = [f"arrays {count / fast / 1e6:6.2f} M/s"]
        if count <= MOST_FOR_OBJECTS:
            slow, other = seconds_of_objects(trace, settings)
            same = np.array_equal(result.placements, other.placements) and result.stats == other.stats
            parts.append(
                f"objects {count / slow / 1e6:5.2f} M/s ({slow / fast:4.1f} times slower, same: {same})"
            )
            if real:
                with tempfile.TemporaryDirectory() as folder:
                    true, peak = seconds_of_real(trace, settings, Path(folder))
                parts.append(
                    f"PyTorch {count / true / 1e6:5.2f} M/s ({true / fast:4.1f} times slower than arrays, "
                    f"same reserved peak: {peak == result.peak_reserved_bytes})"
                )
        print(f"{count:>10,} events, {settings or 'default':25}: {'; '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--live", type=int, default=2000)
    parser.add_argument("--no-real", action="store_true")
    asked = parser.parse_args()
    began = time.perf_counter()
    seconds_of_arrays(made_trace(1000, 10), "")
    print(f"Loading (or compiling) the arrays' code: {time.perf_counter() - began:.1f} s")
    for count in asked.events:
        compare(count, asked.live, real=not asked.no_real)
    print(f"Most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
