#!/usr/bin/env python3
"""Say where a job's memory goes and what is wrong with it, from whatever was recorded of it.

    python scripts/analyze.py run.memfit-trace nvidia-smi.txt --output analysis --gpu a100-80gb

`memfit analyze` (composition, fragmentation, leaks, bottlenecks) on recordings, `memfit diagnose` (rules,
with what each change saves) on everything. Other options are passed on to `memfit analyze`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memfit.cli import main as memfit

RECORDINGS = {".memfit-trace", ".pickle", ".pkl", ".jsonl"}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, help="traces, snapshots, profiles, configurations, logs"
    )
    parser.add_argument("--output", type=Path, default=Path("memfit-analysis"), help="folder of the pages")
    given, others = parser.parse_known_args(words)
    given.output.mkdir(parents=True, exist_ok=True)
    recordings = [str(path) for path in given.files if path.suffix in RECORDINGS or path.is_dir()]
    files = [str(path) for path in given.files if not path.is_dir()]
    codes = []
    if recordings:
        codes.append(
            memfit(["analyze", *recordings, "--report", str(given.output / "analysis.html"), *others])
        )
    if files:
        codes.append(memfit(["diagnose", *files, "--report", str(given.output / "diagnosis.html")]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
