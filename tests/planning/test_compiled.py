"""Compiled plans: which cuts are run, how memfit's is tightened, and what is said where nothing compiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from imitation import MIB, Imitation, gpu

from memfit.capture.costs import op_class
from memfit.capture.graph import Op
from memfit.core.errors import CannotRunHere
from memfit.core.exactness import Exactness
from memfit.planning.bench import Bench, Peaks, Try
from memfit.planning.compiled import CompiledExplorer
from memfit.planning.fused_seconds import fused_seconds, unfused_seconds
from memfit.planning.schedules import NO_LEVER
from memfit.planning.search import Search
from memfit.techniques.joint_replay import BEFORE, JointStep, replay

WHOLE = 100 * MIB
BUDGETS = {
    1.0: (90, 0.0),
    0.9: (80, 1.0),
    0.75: (70, 2.0),
    0.5: (60, 3.0),
    0.4: (75, 4.0),
    0.25: (85, 9.0),
    0.1: (95, 12.0),
}
"""PyTorch's cuts here: their peak in MiB, and milliseconds that run again. The peak is not monotone."""


@dataclass
class Compiling(Imitation):
    """An oracle whose session answers by formula, and whose runs reserve 20 MiB over the peak in thought."""

    engine: str = "dryrun"
    graphs: int = 1
    problem: str = ""
    peaks: list[float] = field(default_factory=list)

    @contextmanager
    def open(self, cls: str, **arguments: Any) -> Iterator[Compiling]:
        if self.problem:
            raise CannotRunHere(self.problem)
        yield self

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        if method == "whole":
            return self._figures(WHOLE, 0.0)
        if method == "budget":
            peak, milliseconds = BUDGETS[arguments["budget"]]
            return self._figures(peak * MIB, milliseconds)
        self.peaks.append(arguments["peak"])
        return self._figures(int(arguments["peak"] * WHOLE), 10 * (1 - arguments["peak"]))

    def _figures(self, peak_bytes: int, milliseconds: float) -> dict[str, Any]:
        return {
            "graphs": self.graphs,
            "reached": True,
            "peak_bytes": peak_bytes,
            "recompute_seconds": milliseconds / 1e3,
            "fused_seconds": 0.05 + milliseconds / 1e4,
            "unfused_seconds": 0.1,
        }

    def evaluate(self, techniques: Sequence[Mapping[str, Any]]) -> Peaks:
        for settings in techniques:
            if settings["technique"] == "compiled_partition":
                self.asked.append(techniques)
                share = settings.get("peak")
                peak = int(share * WHOLE) if share else BUDGETS[settings["budget"]][0] * MIB
                extra = 4 * MIB if share and share > 0.62 else 0  # fragmentation jumps
                return Peaks(
                    requested_bytes=peak, allocated_bytes=peak, reserved_bytes=peak + 20 * MIB + extra
                )
        return super().evaluate(techniques)


def explore(oracle: Compiling, budget_bytes: int, allow: Exactness = "exact") -> tuple[list[Try], list[str]]:
    bench = Bench(oracle, gpu(), oracle.facts().blocks)
    plain = bench.evaluate("plain", NO_LEVER, (None,) * oracle.blocks, 1.0)
    notes: list[str] = []
    explorer = CompiledExplorer(
        bench=bench, plain=plain, allow=allow, progress=lambda stage, done, total: None, notes=notes
    )
    return explorer.explore(budget_bytes), notes


def test_pytorchs_fastest_cut_that_fits_and_a_tight_one_of_ours() -> None:
    budget = 86 * MIB
    tried, notes = explore(Compiling(), budget)
    fitting = [t for t in tried if t.peaks.reserved_bytes <= budget]
    theirs = [t for t in fitting if "budget" in t.techniques[0]]
    assert [t.techniques[0]["budget"] for t in theirs] == [0.5]
    ours = min((t for t in fitting if "peak" in t.techniques[0]), key=lambda t: t.seconds)
    assert ours.peaks.reserved_bytes >= 0.95 * budget
    assert ours.seconds == pytest.approx(1.0 + 0.01 * (1 - ours.techniques[0]["peak"]))
    assert {t.lever.exactness for t in tried} == {"exact"}
    assert notes == []


def test_where_the_compiled_step_fits_as_it_is_nothing_more_is_run() -> None:
    oracle = Compiling()
    tried, _ = explore(oracle, 120 * MIB)
    assert [t.techniques[0]["budget"] for t in tried] == [1.0]


def test_fused_code_is_tried_where_rounding_otherwise_is_allowed() -> None:
    tried, _ = explore(Compiling(), 86 * MIB, "reordered")
    fused = [t for t in tried if t.techniques[0]["backend"] == "inductor"]
    assert {t.lever.exactness for t in fused} == {"reordered"}
    assert all(t.seconds < 1.0 for t in fused)  # groups of operators, 0.05 s in place of 0.1 s


def test_what_does_not_compile_is_a_note_and_the_plans_stay() -> None:
    oracle = Compiling(problem="torch.compile cannot compile this Model: Unsupported: a long story")
    outcome = Search(oracle=oracle, gpu=gpu(), budget_bytes=140 * MIB, compiled=True).run()
    assert outcome.chosen is not None
    assert outcome.notes == (f"no compiled plan (aot_eager): {oracle.problem}",)
    asked = len(oracle.asked)
    assert asked == len(_without_compiling(140 * MIB))


def _without_compiling(budget_bytes: int) -> list[Any]:
    oracle = Compiling()
    Search(oracle=oracle, gpu=gpu(), budget_bytes=budget_bytes).run()
    assert not any(s["technique"] == "compiled_partition" for techniques in oracle.asked for s in techniques)
    return oracle.asked


def test_a_group_of_fused_operators_reads_and_writes_what_leaves_it() -> None:
    """Two pointwise operators, a product, and a pointwise one that reads across it: two groups."""
    size = 64 * MIB
    names = ("aten.relu.default", "aten.exp.default", "aten.mm.default", "aten.mul.Tensor")
    reads = ((0,), (1,), (2,), (1, 3))
    ops = tuple(
        Op(index=n, name=name, inputs=reads[n], outputs=(n + 1,), bytes_moved=size * (len(reads[n]) + 1))
        for n, name in enumerate(names)
    )
    step = JointStep(ops=ops, sizes_bytes=(size,) * 5, born=(BEFORE, 0, 1, 2, 3), outputs=frozenset({4}))
    bandwidth = gpu().bandwidth_bytes_per_second * 0.8
    product = 2 * size / (gpu().bandwidth_bytes_per_second * op_class("aten.mm.default").bandwidth_share)
    # The first group reads 0 and writes 1 (for the last operator) and 2; the second reads 1 and 3, writes 4.
    expected = (3 * size + 3 * size) / bandwidth + product
    assert fused_seconds(step, replay(step, ()), gpu()) == pytest.approx(expected)
    assert unfused_seconds(step, replay(step, ()), gpu()) > expected
