"""The bound against the true optimum of tiny steps, found by searching through all schedules."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import pytest
from chains import chain_step, random_step

from memfit.capture.graph import Op, StepGraph, Storage
from memfit.planning.bound import lower_bound


def cheapest_schedule(
    graph: StepGraph, peak_bytes: int, lives: Mapping[int, int] | None = None
) -> float | None:
    """FLOPs of forward operators run again in the best schedule of ``graph`` under ``peak_bytes``, by
    Dijkstra.

    A state is what is held and how many operators of the traced order are done; an operator may run when what
    it reads is held, forward operators any number of times, and anything may be dropped at any time, but for
    what ``lives`` holds until an operator has run.
    """
    lives = lives or {}
    order = list(graph.ops)
    resting = frozenset(s.id for s in graph.storages if s.born < 0)
    size = {s.id: s.size_bytes for s in graph.storages}
    final = frozenset(s.id for s in graph.storages if s.died < 0 and s.born >= 0)
    start = (frozenset[int](), 0)
    queue: list[tuple[float, int, tuple[frozenset[int], int]]] = [(0.0, 0, start)]
    seen: dict[tuple[frozenset[int], int], float] = {start: 0.0}
    ticket = 0
    base = sum(size[s] for s in resting)
    while queue:
        cost, _, (held, done) = heapq.heappop(queue)
        if seen[(held, done)] < cost:
            continue
        if done == len(order) and final <= held:
            return cost
        steps: list[tuple[float, frozenset[int], int]] = [
            (0.0, held - {s}, done) for s in held if lives.get(s, -1) < done
        ]
        runnable = [(order[done], True)] if done < len(order) else []
        runnable += [(op, False) for op in order[:done] if op.phase == "forward"]
        for op, is_next in runnable:
            after = held | set(op.outputs)
            if (
                all(s in held or s in resting for s in op.inputs)
                and base + sum(size[s] for s in after) <= peak_bytes
            ):
                steps.append((0.0 if is_next else float(op.flops), after, done + is_next))
        for extra, nxt, position in steps:
            state = (nxt, position)
            if cost + extra < seen.get(state, float("inf")):
                seen[state] = cost + extra
                ticket += 1
                heapq.heappush(queue, (cost + extra, ticket, state))
    return None


@pytest.mark.parametrize("seed", range(10))
def test_it_never_exceeds_the_true_optimum(seed: int) -> None:
    graph = random_step(seed)
    costs = [op.flops for op in graph.ops]
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        peak = int(graph.peak_bytes * share)
        truth, bound = cheapest_schedule(graph, peak), lower_bound(graph, costs, peak)
        if truth is None:
            continue
        assert bound.feasible
        assert bound.cost <= truth + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_moments_taken_together_never_exceed_the_true_optimum(seed: int) -> None:
    """Nor do they certify less than one by one; with results that Python holds as well."""
    graph = random_step(seed)
    costs = [op.flops for op in graph.ops]
    held = {}
    if seed % 2:
        held = {s.id: min(s.born + 1 + seed % 3, 4) for s in graph.storages if 0 <= s.born < 3}
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        peak = int(graph.peak_bytes * share)
        truth = cheapest_schedule(graph, peak, held)
        alone = lower_bound(graph, costs, peak)
        bound = lower_bound(graph, costs, peak, lives=held, known_cost=float("inf"))
        if truth is not None:
            assert bound.feasible
            assert alone.cost <= bound.cost <= truth + 1e-6


def test_what_is_made_again_twice_costs_twice() -> None:
    """A long chain where little fits: single moments certify a part of what moments together do."""
    graph = chain_step(6)
    costs = [op.flops for op in graph.ops]
    peak = 3 * 2**20
    truth = cheapest_schedule(graph, peak)
    assert truth == 10.0
    assert lower_bound(graph, costs, peak).cost == pytest.approx(4.0, rel=1e-4)
    assert lower_bound(graph, costs, peak, known_cost=truth).cost == pytest.approx(truth, rel=1e-4)


def test_it_is_tight_on_a_chain_that_must_run_a_part_again() -> None:
    """Three equal activations, two of them made from the first, room for two: the cheaper is made again."""
    mib = 2**20
    storages = (
        Storage(id=0, size_bytes=0, category="input", born=-1),
        Storage(id=1, size_bytes=4 * mib, category="activation", born=0, died=5, saved=True),
        Storage(id=2, size_bytes=4 * mib, category="activation", born=1, died=4, saved=True),
        Storage(id=3, size_bytes=4 * mib, category="activation", born=2, died=3, saved=True),
        Storage(id=4, size_bytes=0, category="gradient", born=3, died=4),
        Storage(id=5, size_bytes=0, category="gradient", born=4, died=5),
        Storage(id=6, size_bytes=0, category="gradient", born=5, died=-1),
    )
    ops = (
        Op(index=0, name="a", inputs=(0,), outputs=(1,), flops=7),
        Op(index=1, name="b", inputs=(1,), outputs=(2,), flops=2),
        Op(index=2, name="c", inputs=(1,), outputs=(3,), flops=5),
        Op(index=3, name="c'", phase="backward", inputs=(3,), outputs=(4,)),
        Op(index=4, name="b'", phase="backward", inputs=(2, 4), outputs=(5,)),
        Op(index=5, name="a'", phase="backward", inputs=(1, 5), outputs=(6,)),
    )
    graph = StepGraph(ops=ops, storages=storages)
    costs = [op.flops for op in ops]
    assert lower_bound(graph, costs, 12 * mib).cost == 0.0
    assert lower_bound(graph, costs, 8 * mib).cost == pytest.approx(2.0, rel=1e-4)
    assert cheapest_schedule(graph, 8 * mib) == 2.0


def test_a_peak_under_what_is_always_there_is_infeasible() -> None:
    graph = random_step(2)
    assert not lower_bound(graph, [op.flops for op in graph.ops], graph.resting_bytes).feasible


def test_some_bounds_are_above_zero() -> None:
    """Not vacuous: over the random steps a fair part of the true optimum is certified."""
    certified = optimum = 0.0
    for seed in range(10):
        graph = random_step(seed)
        costs = [op.flops for op in graph.ops]
        peak = int(graph.peak_bytes * 0.7)
        truth = cheapest_schedule(graph, peak)
        if truth is not None:
            optimum += truth
            certified += lower_bound(graph, costs, peak).cost
    assert optimum > 0
    assert certified > 0.5 * optimum
