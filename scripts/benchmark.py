#!/usr/bin/env python3
"""Measure what techniques, one after another, do to the memory, step time and quality of several workloads.

    python scripts/benchmark.py hf:gpt2,batch=8,seq=1024 tv:resnet50,batch=32 --output benchmark

`memfit ladder` for each workload, with a page of its own; other options are passed on. The benchmarks of
memfit itself are in benchmarks/.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from memfit.cli import main as memfit


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="+", help="file.py:function, or like hf:gpt2,batch=8,seq=1024")
    parser.add_argument("--output", type=Path, default=Path("memfit-benchmark"), help="folder of the pages")
    given, others = parser.parse_known_args(words)
    given.output.mkdir(parents=True, exist_ok=True)
    codes = []
    for workload in given.workloads:
        page = given.output / (re.sub(r"[^\w.=-]+", "-", workload) + ".html")
        codes.append(memfit(["ladder", workload, "--report", str(page), *others]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
