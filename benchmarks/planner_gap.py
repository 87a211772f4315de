"""How far plans of single operators lie above the certified bound: at ten peaks of each model of
`benchmarks/planner.py`, the recomputation that the program chooses, and what no schedule can be below there.

    python benchmarks/planner_gap.py gpt2-scaled resnet50

Both are on requested bytes of the step as captured in a dry run, in predicted time on the GPU; nothing of the
allocator is in it. The peaks lie evenly between 30 % and 95 % of what the plain step holds beyond what is
there before it. Takes some ten seconds for a model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from planner import MODELS

from memfit.capture.costs import op_seconds
from memfit.core.devices import find_gpu
from memfit.core.units import GIB
from memfit.planning.bound import lower_bound
from memfit.planning.drops import DropProgram
from memfit.planning.fit import workload_and_spec
from memfit.planning.oracle import open_oracle
from memfit.techniques.recomputed_steps import RecomputedStep

HEADER = (
    "| model | peak asked | peak | recomputation | cannot be below | gap | seconds to solve |\n"
    "|---|---|---|---|---|---|---|"
)


def rows(name: str, gpu: str, points: int) -> None:
    """Prints the lines of one model."""
    device = find_gpu(gpu)
    reference, spec = workload_and_spec(MODELS[name])
    with (
        tempfile.TemporaryDirectory() as folder,
        open_oracle(reference, spec, device, Path(folder), engine="dryrun") as oracle,
    ):
        blocks, graph = oracle.facts().blocks, oracle.graph(())
        seconds = [op_seconds(op, device) for op in graph.ops]
        program = DropProgram(RecomputedStep(graph, (*blocks, "")), seconds)
        program.learn(oracle.graph([{"technique": "rematerialization", "blocks": program.nothing_kept()}]))
    rest = graph.resting_bytes
    for point in range(points):
        share = 0.3 + 0.65 * point / max(points - 1, 1)
        asked = rest + int(share * (graph.peak_bytes - rest))
        started = time.process_time()
        found = program.solve(asked)
        spent = time.process_time() - started
        cells = [name, f"{asked / GIB:.2f} GiB"]
        if found is None:
            cells += ["none", "", "", "", f"{spent:.1f}"]
        else:
            lives = program.lives_in_python()
            bound = lower_bound(graph, seconds, found.peak_bytes, lives=lives, known_cost=found.seconds)
            chosen, least = (100 * cost / sum(seconds) for cost in (found.seconds, bound.cost))
            over = "" if found.peak_bytes <= asked else " (over)"
            cells += [f"{found.peak_bytes / GIB:.2f} GiB{over}", f"{chosen:.2f} %", f"{least:.2f} %"]
            cells += [f"{chosen - least:.2f}", f"{spent:.1f}"]
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--points", type=int, default=10)
    arguments = parser.parse_args()
    sys.stdout.write(HEADER + "\n")
    for name in arguments.models or MODELS:
        rows(name, arguments.gpu, arguments.points)


if __name__ == "__main__":
    main()
