"""The program's answers against all choices, tried one by one."""

from __future__ import annotations

import ctypes
import itertools

import pytest
from chains import random_problem

from memfit.planning.problem import BlockClass, Option, Problem, pareto_options
from memfit.planning.solve import solve


def best_by_trying(problem: Problem, budget_bytes: int) -> float | None:
    """Least seconds over every choice whose predicted peak fits."""
    table = problem.option_table()
    fitting = [
        problem.recompute_seconds(choice)
        for choice in itertools.product(*(range(len(options)) for options in table))
        if problem.peak_bytes(choice) <= budget_bytes
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_trying_everything_finds(seed: int) -> None:
    problem = random_problem(seed)
    plain_peak = problem.peak_bytes([0] * len(problem.blocks))
    for share in (1.0, 0.85, 0.7, 0.55, 0.4, 0.2):
        budget = int(plain_peak * share)
        expected, found = best_by_trying(problem, budget), solve(problem, budget)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert problem.peak_bytes(found.choice) == found.peak_bytes <= budget
        assert found.recompute_seconds <= expected * 1.006 + 1e-9


def test_plain_is_chosen_where_it_fits() -> None:
    problem = random_problem(3)
    plain_peak = problem.peak_bytes([0] * len(problem.blocks))
    solution = solve(problem, plain_peak)
    assert solution is not None
    assert solution.recompute_seconds == 0.0


def test_the_same_problem_has_the_same_answer() -> None:
    problem = random_problem(5, classes=1, blocks_per_class=20, options=6)
    budget = int(problem.peak_bytes([0] * 20) * 0.6)
    assert solve(problem, budget) == solve(problem, budget)


def test_a_chain_longer_than_the_groups_stays_within_the_budget() -> None:
    problem = random_problem(7, classes=1, blocks_per_class=90, options=5)
    plain_peak = problem.peak_bytes([0] * 90)
    solution = solve(problem, plain_peak // 2)
    assert solution is not None
    assert solution.peak_bytes <= plain_peak // 2
    assert len(solution.choice) == 90


def test_the_optimizer_step_can_make_a_budget_impossible() -> None:
    problem = random_problem(1)
    assert solve(problem, problem.optimizer_bytes - 1) is None


def test_equal_blocks_keep_less_first() -> None:
    options = (
        Option(saves=None, saved_bytes=10 * 2**20, working_bytes=10 * 2**20, recompute_seconds=0.0),
        Option(saves=(), saved_bytes=2**20, working_bytes=10 * 2**20, recompute_seconds=1.0),
    )
    problem = Problem(
        blocks=tuple("abcdef"),
        classes=(BlockClass(name="all", positions=tuple(range(6)), options=options),),
        position_bytes=(0,) * 6,
        forward_end_bytes=0,
    )
    solution = solve(problem, 35 * 2**20)
    assert solution is not None
    assert solution.choice == (1, 1, 1, 0, 0, 0)


def test_the_solver_leaves_standard_output_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Its C code prints what it likes; what we print before and after stays in order."""
    from memfit.core.standard_output import standard_output_aside

    print("before")
    with standard_output_aside():
        ctypes.CDLL(None).puts(b"chatter")
    print("after")
    assert capfd.readouterr().out.split() == ["before", "after"]


def test_pareto_keeps_the_ends_and_drops_what_is_beaten() -> None:
    def option(kept: int, seconds: float) -> Option:
        return Option(saves=(str(kept),), saved_bytes=kept, working_bytes=0, recompute_seconds=seconds)

    front = pareto_options(
        [option(100, 0.0), option(50, 1.0), option(60, 2.0), option(10, 5.0), option(30, 3.0)], limit=3
    )
    assert [(o.saved_bytes, o.recompute_seconds) for o in front] == [(10, 5.0), (50, 1.0), (100, 0.0)]


def test_without_blocks_there_is_one_choice_which_fits_or_does_not() -> None:
    problem = Problem(blocks=(), classes=(), position_bytes=(), forward_end_bytes=100, optimizer_bytes=80)
    found = solve(problem, 100)
    assert found is not None
    assert (found.choice, found.recompute_seconds, found.peak_bytes) == ((), 0.0, 100)
    assert solve(problem, 99) is None
