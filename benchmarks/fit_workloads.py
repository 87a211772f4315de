"""Plans for six workloads at three budgets each: what `memfit.plan` finds, beside the best named schedule
that fits.

    python benchmarks/fit_workloads.py                         # all, on an A100 80 GB, exact plans
    python benchmarks/fit_workloads.py gpt2 resnet50 --allow reordered --json results.jsonl

Prints a Markdown table, a row as soon as it is known. Nothing is asserted, nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from memfit.planning import FitResult, plan

WORKLOADS = {
    "gpt2": "hf:gpt2,batch=8,seq=1024",
    "bert": "hf:bert,batch=16,seq=512",
    "llama": (
        "hf:llama,hidden_size=2048,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,"
        "intermediate_size=8192,vocab_size=128256,batch=2,seq=2048,dtype=bf16"
    ),
    "vit": "hf:vit,batch=64",
    "resnet50": "tv:resnet50,batch=64",
    "t5": "hf:t5,batch=16,seq=512",
}
SHARES = (0.85, 0.65, 0.5)
GIB = 2**30
HEADER = (
    "| workload | budget | plain reserved | planned reserved | requested | slower by | FLOPs more "
    "| cannot be below | best named that fits | verified | tries | planning |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def rows(name: str, arguments: argparse.Namespace) -> Iterator[FitResult]:
    """The plain step, then a plan for each share of what it reserves."""
    spec = WORKLOADS[name]
    settings = {"gpu": arguments.gpu, "allow": arguments.allow, "engine": arguments.engine}
    plain = plan(spec, verify=False, **settings)
    for share in arguments.shares:
        budget = int(plain.plain.peak_reserved_bytes * share)
        yield plan(spec, budget=budget, verify=not arguments.no_verify, **settings)


def row(name: str, result: FitResult) -> str:
    """One line of the table."""
    cells = [name, gib(result.budget_bytes), gib(result.plain.peak_reserved_bytes)]
    if result.planned is None:
        least = result.least_budget_bytes
        cells += [f"none fits; least {gib(least)}" if least else "none fits", *["–"] * 6]
    else:
        flops = 100.0 * (result.planned.flops / result.plain.flops - 1.0)
        cells += [
            gib(result.planned.peak_reserved_bytes),
            gib(result.planned.peak_requested_bytes),
            percent(result.recompute_percent),
            percent(flops),
            f"{percent(result.lower_bound_percent)} "
            f"({percent(result.lower_bound_at_peak_percent)} at its peak)",
            best_named(result),
            verified(result),
        ]
    cells += [str(result.evaluations), f"{result.planning_seconds:.0f} s"]
    return "| " + " | ".join(cells) + " |"


def best_named(result: FitResult) -> str:
    """The fastest named schedule that fits, with its cost."""
    for candidate in result.candidates:
        if candidate.name == result.best_named:
            return f"{candidate.name}: {percent(candidate.recompute_percent)}"
    return "none"


def verified(result: FitResult) -> str:
    """How the plan was verified, in a word."""
    if result.verified is None or result.verified.passed is None:
        return "no" if result.verified is None else f"no: {result.verified.reason}"
    if not result.verified.passed:
        return "FAILED"
    return "bitwise" if result.verified.bitwise else f"within {result.verified.max_relative_error:.0e}"


def show(line: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.2f}"


def percent(value: float | None) -> str:
    """A percentage, or a dash."""
    return "–" if value is None else f"{value:.1f} %"


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--allow", default="exact", choices=("exact", "reordered", "approximate"))
    parser.add_argument("--engine", default="auto", choices=("auto", "dryrun", "portable"))
    parser.add_argument(
        "--shares", nargs="+", type=float, default=SHARES, help="of the plain step's reserved peak"
    )
    parser.add_argument("--json", type=Path, help="append whole results here, one object a line")
    parser.add_argument("--no-verify", action="store_true")
    arguments = parser.parse_args()
    show(HEADER)
    for name in arguments.workloads:
        if name not in WORKLOADS:
            sys.exit(f"unknown workload {name!r}: use any of {', '.join(WORKLOADS)}")
        for result in rows(name, arguments):
            show(row(name, result))
            if arguments.json is not None:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result.to_json()) + "\n")


if __name__ == "__main__":
    main()
