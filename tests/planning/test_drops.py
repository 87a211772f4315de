"""The choice operator by operator against all choices of small steps, played one by one, and run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from memfit.capture import capture_step
from memfit.core.devices import find_gpu
from memfit.core.workload import Workload
from memfit.planning import drops
from memfit.planning.bench import Bench, Peaks
from memfit.planning.bound import lower_bound
from memfit.planning.drop_search import DropSearch, first_round
from memfit.planning.drops import DropProgram, Drops
from memfit.planning.figures import Settings
from memfit.planning.schedules import NO_LEVER
from memfit.techniques import Rematerialization
from memfit.techniques.recomputed_steps import RecomputedStep

WIDE = 4096


class Residual(nn.Module):
    """Products, a norm and pointwise operators of unlike sizes and costs."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, inner), nn.Linear(inner, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.norm(self.convolution(x.unsqueeze(1))))
        return x + y.mean(1)


def _model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    last = Convolved() if kind == "convolved" else Residual(96)
    return nn.Sequential(Residual(64), last)


def _workload(kind: str, technique: Rematerialization | None = None) -> Workload:
    return Workload(
        name=kind,
        model=lambda: _model(kind) if technique is None else technique.apply(_model(kind)),
        batch=lambda: torch.randn(WIDE, 32),
        loss=lambda model, batch: model(batch).square().mean(),
    )


@pytest.fixture(scope="module", params=["residual", "convolved"])
def program(request: pytest.FixtureRequest) -> DropProgram:
    graph = capture_step(_workload(request.param), device="cpu")
    costs = [float(op.flops + op.bytes_moved) for op in graph.ops]
    return DropProgram(RecomputedStep(graph, ("0", "1", "")), costs)


@pytest.fixture(scope="module")
def every_choice(program: DropProgram) -> list[Drops]:
    makers = program.makers
    assert len(makers) <= 12
    chosen = itertools.product((False, True), repeat=len(makers))
    return [program.play(frozenset(itertools.compress(makers, kept))) for kept in chosen]


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75, 0.65])
def test_it_finds_the_cheapest_choice(program: DropProgram, every_choice: list[Drops], share: float) -> None:
    budget = int(program.step.graph.peak_bytes * share)
    fitting = [choice.seconds for choice in every_choice if choice.peak_bytes <= budget]
    found = program.solve(budget)
    if not fitting:
        assert found is None or found.peak_bytes > budget
        return
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.seconds <= min(fitting) * (1 + 2 * drops.RELATIVE_GAP) + 1e-9


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_no_choice_is_below_the_bound(program: DropProgram, every_choice: list[Drops], share: float) -> None:
    graph = program.step.graph
    budget = int(graph.peak_bytes * share)
    least = min((c.seconds for c in every_choice if c.peak_bytes <= budget), default=float("inf"))
    bound = lower_bound(graph, program.seconds, budget)
    assert not bound.feasible or bound.cost <= least + 1e-6


def test_the_choice_runs_as_it_is_played(program: DropProgram) -> None:
    found = program.solve(int(program.step.graph.peak_bytes * 0.8))
    assert found is not None
    technique = Rematerialization(blocks=program.keeps(found.kept))
    real = capture_step(_workload(program.step.graph.name, technique), device="cpu")
    assert real.peak_bytes == found.peak_bytes
    again = [op.name for op in real.ops if op.phase == "recompute" and not op.is_view]
    assert sorted(again) == sorted(program.step.graph.ops[op].name for op in found.played.run_again)


class InFrames(nn.Module):
    """Python holds what it is called with until it is done, though only its first operator reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
        self.outer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x) * self.inner(x)


def test_what_python_holds_is_learned_from_a_step_that_drops_everything() -> None:
    def workload(technique: Rematerialization | None = None) -> Workload:
        def model() -> nn.Module:
            torch.manual_seed(0)
            made = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), InFrames())
            return made if technique is None else technique.apply(made)

        return Workload(
            name="frames",
            model=model,
            batch=lambda: torch.randn(WIDE, 32),
            loss=lambda model, batch: model(batch).square().mean(),
        )

    graph = capture_step(workload(), device="cpu")
    program = DropProgram(RecomputedStep(graph, ("2", "")), [float(op.bytes_moved) for op in graph.ops])
    nothing = Rematerialization(blocks=program.nothing_kept())
    dropped = capture_step(workload(nothing), device="cpu")
    unaware = program.play(frozenset()).played.live_bytes
    program.learn(dropped)
    aware = program.play(frozenset()).played.live_bytes
    turn = max(op.index for op in graph.ops if op.phase == "forward")
    assert program.lives_in_python()
    assert max(unaware[: turn + 1]) < max(aware[: turn + 1]) == dropped.phase_peaks()["forward"]


def test_a_micro_batch_is_the_first_round_of_a_step() -> None:
    workload = _workload("residual")
    whole, cut = (capture_step(workload, device="cpu", micro_batches=n) for n in (1, 2))
    one = first_round(cut)
    assert first_round(whole) is whole
    in_blocks = [[op.name for op in g.ops if op.phase == "forward" and op.module] for g in (one, whole)]
    assert in_blocks[0] == in_blocks[1]
    assert one.peak_bytes < whole.peak_bytes


class Jumpy:
    """An oracle whose allocator wastes a large block under the very leanest plans."""

    def __init__(self, program: DropProgram, from_bytes: int) -> None:
        self.program, self.from_bytes = program, from_bytes

    def evaluate(self, techniques: Sequence[Settings]) -> Peaks:
        step = self.program.step
        peak = step.graph.peak_bytes
        for settings in techniques:
            peak = step.play(step.kept_by(settings["blocks"])).peak_bytes
        wasted = peak // 4 if peak < self.from_bytes else 0
        return Peaks(requested_bytes=peak, allocated_bytes=peak, reserved_bytes=peak + wasted)


def test_the_least_reserved_peak_is_sought_among_lean_plans(program: DropProgram) -> None:
    leanest, plain = program.leanest().peak_bytes, program.step.graph.peak_bytes
    oracle = Jumpy(program, leanest + (plain - leanest) // 20)
    bench = Bench(oracle, find_gpu("a100-80gb"), ("0", "1"))  # type: ignore[arg-type]
    plain_try = bench.evaluate("plain", NO_LEVER, (None, None), 1.0)
    search = DropSearch(bench, plain_try, 1.0, program, lambda techniques: None)
    search.budget_bytes = 1
    reserved = [tried.peaks.reserved_bytes for tried in search.least()]
    assert reserved[0] == leanest + leanest // 4
    assert min(reserved) < reserved[0]
    search.budget_bytes = min(reserved)
    assert search.least()[-1].peaks.reserved_bytes <= search.budget_bytes


def test_an_operator_in_place_may_have_readers_before_it() -> None:
    """As in a softmax by hand: the largest value is read before it is subtracted in place."""

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shifted = x @ x.T
                shifted.sub_(shifted.amax(-1, keepdim=True))
            return x * shifted.exp().sum(-1, keepdim=True)

    work = Workload(
        name="shifted",
        model=lambda: nn.Sequential(nn.Linear(32, 32), Shifted()),
        batch=lambda: torch.randn(8, 32),
        loss=lambda model, x: model(x).sum(),
    )
    graph = capture_step(work, device="cpu")
    step = RecomputedStep(graph, ("",))
    needed = [step.needed_until(storage) for storage in step.consumers]
    assert max(needed) < len(graph.ops)
