"""Cuts of the compiled step: PyTorch's activation_memory_budget and memfit's cut for a peak, in thought and
by dry run.

    python benchmarks/planner_compiled.py --quick              # scaled GPT-2 in thought, and three dry runs
    python benchmarks/planner_compiled.py gpt2 resnet50 --dry-run --json compiled.json

For each model the compiler traces the step once. Each budget's cut (1 to 0, as `torch.compile` makes it,
random results kept) is replayed in thought: its peak of live bytes (activations, gradients and temporaries
of the compiled graph, without parameters and optimizer), and what runs again, in FLOPs and in predicted
time. Then memfit's cut is asked for the same peak: the rows pair. With ``--dry-run`` every cut also runs on
the made-up GPU, and the second optimizer step is measured: what PyTorch's allocator allocated and reserved
at most.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planner import MODELS

from memfit.core.devices import GPU, find_gpu
from memfit.core.units import GIB
from memfit.planning.fit import workload_and_spec
from memfit.planning.oracle import StepOracle, open_oracle

BUDGETS = (1.0, 0.9, 0.75, 0.5, 0.4, 0.25, 0.1, 0.0)
QUICK = (1.0, 0.5)
SESSION = "memfit.planning.evaluate_compiled:CompiledSession"
HEADER = (
    "| model | cut | peak in thought | run again: FLOPs | time | allocated | reserved |\n"
    "|---|---|---|---|---|---|---|"
)


def rows_of(
    oracle: StepOracle, gpu: GPU, budgets: tuple[float, ...], *, backend: str, dry_run: bool
) -> Iterator[dict[str, Any]]:
    """For each budget PyTorch's cut and memfit's for the same peak."""
    with oracle.open(SESSION, backend=backend, budgets=list(budgets)) as session:
        whole = session.call("whole")
        plain_seconds = whole["unfused_seconds"]
        yield _row("nothing runs again", {}, whole, plain_seconds)
        for budget in budgets:
            theirs = session.call("budget", budget=budget)
            share = min(math.ceil(1e4 * theirs["peak_bytes"] / whole["peak_bytes"]) / 1e4, 1.0)
            ours = session.call("peak", peak=share)
            for name, setting, figures in (
                (f"budget {budget:g}", {"budget": budget}, theirs),
                (f"memfit, peak {share:.3f}", {"peak": share}, ours),
            ):
                row = _row(name, setting, figures, plain_seconds)
                if dry_run:
                    technique = {"technique": "compiled_partition", "backend": backend, "gpu": gpu.key}
                    peaks = oracle.evaluate(({**technique, **setting},))
                    row |= {
                        "allocated_bytes": peaks.allocated_bytes,
                        "reserved_bytes": peaks.reserved_bytes,
                        "failure": peaks.failure,
                    }
                yield row


def _row(
    name: str, setting: Mapping[str, float], figures: Mapping[str, Any], plain_seconds: float
) -> dict[str, Any]:
    return {
        "cut": name,
        **setting,
        "reached": figures["reached"],
        "graphs": figures["graphs"],
        "peak_bytes": figures["peak_bytes"],
        "recompute_flops_percent": 100 * figures["recompute_flops"] / figures["flops"],
        "recompute_time_percent": 100 * figures["recompute_seconds"] / plain_seconds,
    }


def line(model: str, row: Mapping[str, Any]) -> str:
    """One line of the table."""
    ran = [
        f"{row[key] / GIB:.2f} GiB" if row.get(key) else "" for key in ("allocated_bytes", "reserved_bytes")
    ]
    cut = row["cut"] if row["reached"] else f"{row['cut']}: leanest found"
    cells = [
        model, cut, f"{row['peak_bytes'] / GIB:.3f} GiB",
        f"{row['recompute_flops_percent']:.1f} %", f"{row['recompute_time_percent']:.1f} %", *ran,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=f"{', '.join(MODELS)}, or any workload's text")
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--backend", default="aot_eager", help="aot_eager, aot_eager_decomp_partition")
    parser.add_argument("--dry-run", action="store_true", help="run every cut on the made-up GPU too")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--quick", action="store_true", help="gpt2-scaled, 2 budgets, with dry runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    names = arguments.models or (("gpt2-scaled",) if arguments.quick else tuple(MODELS))
    device = find_gpu(arguments.gpu)
    found: list[dict[str, Any]] = []
    sys.stdout.write(HEADER + "\n")
    for name in names:
        reference, spec = workload_and_spec(MODELS.get(name, name))
        started = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            open_oracle(reference, spec, device, Path(folder), engine="dryrun") as oracle,
        ):
            for row in rows_of(
                oracle,
                device,
                QUICK if arguments.quick else tuple(arguments.budgets),
                backend=arguments.backend,
                dry_run=arguments.dry_run or arguments.quick,
            ):
                found.append({"model": name, **row})
                sys.stdout.write(line(name, row) + "\n")
                sys.stdout.flush()
        sys.stderr.write(f"{name}: {time.perf_counter() - started:.0f} s\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
