#!/usr/bin/env python3
"""Find the fastest way to train a workload within a memory budget; keep the plan, the report and its figures.

    python scripts/optimize.py hf:gpt2,batch=8,seq=1024 --gpu rtx3060-12gb --budget 8GiB --output optimized

`memfit fit`, with a folder for all that it can write. What is not given is taken from the `planning` section
of --config; other options are passed on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memfit.cli import main as memfit
from memfit.config import load_configuration
from memfit.core.errors import MemfitError


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", help="file.py:function, or like hf:gpt2,batch=8,seq=1024")
    parser.add_argument("--gpu", help="a name of `memfit gpus`, or like 24GiB,sm89")
    parser.add_argument("--budget", help="how much PyTorch may reserve, like 8GiB")
    parser.add_argument("--config", action="append", default=[], help="a YAML file, or a folder of them")
    parser.add_argument(
        "--output", type=Path, default=Path("memfit-optimized"), help="folder of what is written"
    )
    given, others = parser.parse_known_args(words)
    try:
        asked = load_configuration(*given.config).settings.planning
    except MemfitError as problem:
        sys.stderr.write(f"memfit: error: {problem}\n")
        return problem.exit_code
    workload, gpu = given.workload or asked.workload, given.gpu or asked.gpu
    if workload is None or gpu is None:
        parser.error("say what to train and --gpu, or --config with planning.workload and planning.gpu")
    budget = given.budget or asked.memory_budget
    limit = [] if budget is None else ["--budget", str(budget)]
    given.output.mkdir(parents=True, exist_ok=True)
    written = ["--plan", str(given.output / "plan.json"), "--report", str(given.output / "report.html")]
    return memfit(["fit", workload, "--gpu", gpu, *limit, *written, *others])


if __name__ == "__main__":
    sys.exit(main())
