"""What planning takes: `memfit fit` as a command, for GPT-2 small and for an 8B Llama with 32 layers.

    python benchmarks/planning_time.py                       # all four, a few minutes
    python benchmarks/planning_time.py gpt2

Each line: seconds of planning as the result tells them (search and bounds), seconds of the whole command
(starts of processes, torch's import, verification and report with it), and its processor time, that of its
child processes included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

MEMFIT = "import sys; from memfit.cli import main; sys.exit(main(sys.argv[1:]))"
LLAMA_8B = f"{Path(__file__).with_name('llama8b_workload.py')}:llama_8b"
CASES = {
    "gpt2": ("hf:gpt2,batch=4,seq=512", "rtx3060-12gb", "4GiB"),
    "llama-8b-78": (LLAMA_8B, "h100-80gb", "78GiB"),
    "llama-8b-72": (LLAMA_8B, "h100-80gb", "72GiB"),
    "llama-8b-68": (LLAMA_8B, "h100-80gb", "68GiB"),
}
HEADER = (
    "| case | budget | plan | verified | planning | whole command | processor time |\n" + "|---" * 7 + "|"
)


def row(name: str) -> str:
    """Runs one case; a line of the table."""
    workload, gpu, budget = CASES[name]
    before, started = _processor_seconds(), time.perf_counter()
    command = [sys.executable, "-c", MEMFIT, "fit", workload, "--gpu", gpu, "--budget", budget, "--json"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall, processor = time.perf_counter() - started, _processor_seconds() - before
    if not run.stdout:
        sys.exit(f"{name}: memfit fit ended with status {run.returncode} and no result")
    result = json.loads(run.stdout)
    plan = f"{result['recompute_percent']:.1f} % slower" if result["fits"] else "none fits"
    verified = result["verified"] or {}
    scale = f"{verified.get('passed')}, {verified.get('scale') or verified.get('reason')}"
    cells = [
        name, budget, f"{result['plan_name']}: {plan}", scale,
        f"{result['planning_seconds']:.1f} s", f"{wall:.1f} s", f"{processor:.1f} s",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    names = parser.parse_args().cases or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}: use any of {', '.join(CASES)}")
    sys.stdout.write(HEADER + "\n")
    for name in names:
        sys.stdout.write(row(name) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
