"""One row of Liger-Kernel's benchmark, in plain PyTorch: ``liger_rows.py '{"kernel": "rope", "x": 512, …}'``.

Their scripts build the tensors of an operation, run it ten times, and take the median of ten peaks of
allocated bytes, each counted from just before its run. All sizes of a row's kind run in one process, where
its speed was measured before, and gradients of leaves stay from one run to the next: so there is a run on
other tensors before.
"""

from __future__ import annotations

import json
import statistics
import sys

import liger_heads
import liger_layers
import liger_operators
import torch
from liger_bench import Bench, Row
from reading import tell

OPERATIONS = {**liger_operators.OPERATIONS, **liger_heads.OPERATIONS, **liger_layers.OPERATIONS}
RUNS = 10


def main() -> None:
    row = Row(**json.loads(sys.argv[1]))
    operation = OPERATIONS[row.kernel]
    operation(row).full()
    tell(int(statistics.median(peaks(operation(row), row.mode))))


def peaks(bench: Bench, mode: str) -> list[int]:
    """Of each of the runs."""
    step = bench.full
    if mode != "full" and not bench.only_full:
        step = bench.only_forward if mode == "forward" else bench.only_backward()
    found = []
    for _ in range(RUNS):
        torch.cuda.reset_peak_memory_stats()
        step()
        found.append(torch.cuda.max_memory_allocated())
    return found


if __name__ == "__main__":
    main()
