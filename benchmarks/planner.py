"""memfit's plans against other planners' on the same work and the same meter: the dry run's reserved peak,
optimizer included, and predicted time.

    python benchmarks/planner.py --quick                     # 2 models, 3 budgets, a few minutes
    python benchmarks/planner.py gpt2 t5 --points 10 --json planner.json

For each model the front is drawn once (`memfit.planning.sweep`). Peers are run in the same session with the
same allocator: no recomputation, full, every k-th block, the first half, save matmuls (with attention, with
random operators), torchtitan's (every other matmul), save convolutions, and the plans of Rotor's dynamic
program and of `torch.distributed._tools.sac_ilp`'s published choice for each budget. Those two have no
applier for modules: their choice of blocks, on memfit's own figures for each block, is applied by
memfit's checkpointing, and so are their recomputations counted.

Rotor (Herrmann et al., 2019) is the optimal choice of whole blocks to recompute for a chain; what is here is
its dynamic program over blocks without nesting. sac_ilp decides for each block what part of its activations
to recompute, evenly spread; here the share is rounded to the nearest set that the block has.

`torch.compile` with ``activation_memory_budget`` is not in the table: see docs/benchmarks.md for its
figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from memfit.core.devices import find_gpu
from memfit.core.units import GIB
from memfit.planning.bench import Try, by_seconds
from memfit.planning.bound import Bound, lower_bound
from memfit.planning.explore import OPTIONS_PER_BLOCK
from memfit.planning.figures import Candidate
from memfit.planning.fit import workload_and_spec
from memfit.planning.layout import Layout
from memfit.planning.oracle import open_oracle
from memfit.planning.problem import Option, Problem
from memfit.planning.problems import make_problem, row_of_blocks, schedule_of
from memfit.planning.schedules import NO_LEVER, Lever
from memfit.planning.sweep import FrontSearch, SweepPoint

LLAMA_1B = (
    "hf:llama,hidden_size=2048,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,"
    "intermediate_size=8192,vocab_size=128256,batch=2,seq=2048,dtype=bf16"
)
MODELS = {
    "gpt2": "hf:gpt2,batch=4,seq=512",
    "gpt2-scaled": "hf:gpt2,n_embd=384,n_head=6,vocab_size=4096,batch=2,seq=512",
    "resnet50": "tv:resnet50,batch=16",
    "llama-1b": LLAMA_1B,
    "unet": f"{Path(__file__).with_name('unet_workload.py')}:unet",
    "t5": "hf:t5,batch=16,seq=512",
}
QUICK = ("gpt2-scaled", "resnet50")
EXPANDABLE = Lever(
    name="expandable segments",
    settings=({"technique": "allocator_settings", "expandable_segments": True},),
)


class Contest(FrontSearch):
    """A front whose session also runs the peers that plan for a budget."""

    def peers_for(self, budgets: Sequence[int]) -> dict[str, list[Try]]:
        """Rotor's and sac_ilp's plans for each budget, run with the default allocator and with expandable
        segments."""
        problem, overhead = self._problem()
        planners = {"Rotor": rotor, "sac_ilp": sac_ilp}
        tried: dict[str, list[Try]] = {name: [] for name in planners}
        for name, planner in planners.items():
            for budget in budgets:
                choice = planner(problem, budget - overhead)
                if choice is None:
                    continue
                seconds = self.plain.seconds + problem.recompute_seconds(choice)
                for lever in (NO_LEVER, EXPANDABLE):
                    schedule = schedule_of(problem, choice)
                    tried[name].append(self.bench.evaluate(name, lever, schedule, seconds))
        return tried

    def _problem(self) -> tuple[Problem, int]:
        graph = self.explorer.graph
        layout = Layout(graph=graph, blocks=self.bench.blocks)
        row = row_of_blocks(layout, self.bench.seconds(graph))
        problem = make_problem(row, layout, self.explorer.measured(row, limit=OPTIONS_PER_BLOCK))
        plain_sum = problem.peak_bytes([0] * len(problem.blocks))
        return problem, max(self.plain.peaks.reserved_bytes - plain_sum, 0)


def rotor(problem: Problem, budget_bytes: int) -> list[int] | None:
    """Which blocks to recompute as a whole: the least time within the budget, by dynamic programming over
    blocks and kept bytes (in 200 steps)."""
    table = problem.option_table()
    full = [next((n for n, o in enumerate(options) if o.saves == ()), 0) for options in table]
    room = budget_bytes - problem.forward_end_bytes
    step = max(room // 200, 1)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for position, options in enumerate(table):
        reached: dict[int, tuple[float, list[int]]] = {}
        for kept, (seconds, choice) in best.items():
            for number in dict.fromkeys((0, full[position])):
                option = options[number]
                there = kept * step + problem.position_bytes[position] + option.working_bytes
                after = kept + -(-option.saved_bytes // step)
                if there > budget_bytes or after * step > room:
                    continue
                now = (seconds + option.recompute_seconds, [*choice, number])
                if after not in reached or now[0] < reached[after][0]:
                    reached[after] = now
        best = reached
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def sac_ilp(problem: Problem, budget_bytes: int) -> list[int] | None:
    """One share of recomputation for all blocks, as even as the blocks' sets allow: the smallest that fits
    (its program trades shares between blocks of unlike cost; equal blocks get equal shares)."""
    table = problem.option_table()
    for share in range(0, 101, 5):
        choice = [_nearest(options, share / 100) for options in table]
        if problem.peak_bytes(choice) <= budget_bytes:
            return choice
    return None


def _nearest(options: Sequence[Option], share: float) -> int:
    """The option that drops at least this share of what the plain block keeps, and of those costs least."""
    plain = options[0].saved_bytes
    least = min(option.saved_bytes for option in options)
    wanted = plain - share * (plain - least)
    enough = [n for n, o in enumerate(options) if o.saved_bytes <= wanted + 1]
    return min(enough, key=lambda n: (options[n].recompute_seconds, options[n].saved_bytes))


def compare(name: str, gpu: str, points: int) -> list[dict[str, object]]:
    """The rows of one model: a budget, memfit's plan, the best peer of each kind, the bound, the verdict."""
    reference, spec = workload_and_spec(MODELS[name])
    device = find_gpu(gpu)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_oracle(reference, spec, device, Path(folder), engine="dryrun") as oracle,
    ):
        oracle.facts()
        started = time.perf_counter()
        contest = Contest(
            oracle=oracle, gpu=device, points=points + 1, host_budget_bytes=0
        )  # peers do not offload, and the bound is of schedules that only recompute
        found = contest.run()[:-1]  # at the last the plain step fits
        planning_seconds = time.perf_counter() - started
        planned = contest.peers_for([point.budget_bytes for point in found])
        named = [t for t in contest.bench.tries.values() if t.named and not t.lever.step_settings]
        graph = contest.explorer.graph
        seconds = contest.bench.seconds(graph)
        own = [own_bound(contest, point) for point in found]
        rows: list[dict[str, object]] = []
        for point, bound in zip(found, own, strict=True):
            peers = {"named": named, **planned}
            row: dict[str, object] = {
                "model": name,
                "budget_gib": point.budget_bytes / GIB,
                "plain_gib": contest.plain.peaks.reserved_bytes / GIB,
                "memfit": None if point.plan is None else point.plan.recompute_percent,
                "bound": point.lower_bound_percent,
                "bound_at_its_peak": 100 * bound.cost / sum(seconds) if bound.feasible else None,
                "planning_seconds": planning_seconds,
            }
            for kind, tries in peers.items():
                within = [
                    t for t in tries
                    if t.peaks.failure is None and t.peaks.reserved_bytes <= point.budget_bytes
                ]  # fmt: skip
                best = min(within, key=by_seconds, default=None)
                row[kind] = None if best is None else 100 * (best.seconds / contest.plain.seconds - 1)
                row[f"{kind}_name"] = None if best is None else best.name
            row["gap"] = gap(row)
            row["dominated_by"] = dominating(point.plan, peers)
            rows.append(row)
        return rows


def own_bound(contest: Contest, point: SweepPoint) -> Bound:
    """What is certified at the peak of a point's own plan."""
    graph = contest.explorer.graph
    seconds = contest.bench.seconds(graph)
    if point.plan is None:
        return lower_bound(graph, seconds, point.budget_bytes - graph.beside_bytes)
    known = point.plan.figures.step_seconds - sum(seconds)
    peak = point.plan.figures.peak_requested_bytes - graph.beside_bytes
    return lower_bound(graph, seconds, peak, lives=contest.explorer.lives, known_cost=known)


def gap(row: dict[str, object]) -> float | None:
    """Points of the plain step's time between the plan and what is certified at the plan's own peak."""
    plan, bound = row["memfit"], row["bound_at_its_peak"]
    if not isinstance(plan, float) or not isinstance(bound, float):
        return None
    return max(plan, 0.0) - bound


def dominating(plan: Candidate | None, peers: dict[str, list[Try]]) -> str | None:
    """The name of a peer that reserves no more than the plan and is faster, or as fast and leaner."""
    if plan is None:
        return None
    figures = plan.figures
    for tried in (tried for tries in peers.values() for tried in tries if tried.peaks.failure is None):
        less = tried.peaks.reserved_bytes - figures.peak_reserved_bytes
        faster = figures.step_seconds - tried.seconds
        if (
            less <= 0
            and faster >= -1e-9
            and (less < 0 or faster > 1e-9)
            and (faster > 1e-9 or less < -(2 << 20))
        ):
            return tried.name
    return None


HEADER = (
    "| model (plain reserves) | budget | memfit | best known schedule | Rotor's DP | sac_ilp's choice "
    "| cannot be below (at the plan's own peak) | gap | dominated by a peer? |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, object]) -> str:
    """One line of the table."""
    named = f"{percent(row['named'])} {row['named_name'] or ''}".strip()
    cells = [
        f"{row['model']} ({row['plain_gib']:.2f} GiB)", f"{row['budget_gib']:.2f} GiB",
        percent(row["memfit"]), named, percent(row["Rotor"]), percent(row["sac_ilp"]),
        f"{percent(row['bound'])} ({percent(row['bound_at_its_peak'])})",
        "–" if row["gap"] is None else f"{row['gap']:.1f}", str(row["dominated_by"] or "no"),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def percent(value: object) -> str:
    """A percentage, or what stands for nothing."""
    return f"{max(value, 0.0):.1f} %" if isinstance(value, int | float) else "none fits"


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--points", type=int, default=10, help="budgets for each model")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)}, 3 budgets")
    parser.add_argument(
        "--json", type=Path, help="keep the rows here; models that are there are not run again"
    )
    arguments = parser.parse_args()
    names = arguments.models or (QUICK if arguments.quick else tuple(MODELS))
    known = (
        json.loads(arguments.json.read_text("utf-8")) if arguments.json and arguments.json.exists() else []
    )
    sys.stdout.write(HEADER + "\n")
    for name in names:
        if name not in MODELS:
            sys.exit(f"unknown model {name!r}: use any of {', '.join(MODELS)}")
        rows = [row for row in known if row["model"] == name]
        if not rows:
            rows = compare(name, arguments.gpu, 3 if arguments.quick else arguments.points)
            known += rows
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(known, indent=1), encoding="utf-8")
        sys.stdout.write("".join(line(row) + "\n" for row in rows))
        sys.stdout.flush()
        sys.stderr.write(f"{name}: the front took {rows[-1]['planning_seconds']:.0f} s\n")


if __name__ == "__main__":
    main()
