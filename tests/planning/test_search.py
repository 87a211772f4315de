"""The search against all schedules of a small model, run one by one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from imitation import MIB, Imitation, gpu, step

from memfit.capture.graph import StepGraph
from memfit.core.errors import WorkloadFailed
from memfit.core.exactness import Exactness
from memfit.planning.bench import Final, Peaks
from memfit.planning.search import Outcome, Search

BLOCKS = 5
CHOICES: tuple[tuple[str, ...] | None, ...] = (None, (), ("linear:0",))


def run(budget_bytes: int, oracle: Imitation | None = None) -> Outcome:
    return Search(oracle=oracle or Imitation(blocks=BLOCKS), gpu=gpu(), budget_bytes=budget_bytes).run()


def every_schedule() -> list[Final]:
    oracle = Imitation(blocks=BLOCKS)
    finals = []
    for choice in itertools.product(CHOICES, repeat=BLOCKS):
        blocks = {f"h.{i}": saves for i, saves in enumerate(choice) if saves is not None}
        techniques = [{"technique": "gradient_checkpointing", "blocks": blocks}] if blocks else []
        finals.append(oracle.final(techniques))
    return finals


@pytest.fixture(scope="module")
def everything() -> list[Final]:
    return every_schedule()


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75, 0.65, 0.55])
def test_it_finds_the_fastest_schedule_that_fits(share: float, everything: list[Final]) -> None:
    plain = everything[0].figures
    budget = int(plain.peak_reserved_bytes * share)
    fitting = [f.figures.step_seconds for f in everything if f.figures.peak_reserved_bytes <= budget]
    outcome = run(budget)
    if not fitting:
        assert outcome.chosen is None
        return
    assert outcome.chosen is not None
    assert outcome.chosen.final is not None
    figures = outcome.chosen.final.figures
    assert figures.peak_reserved_bytes <= budget
    assert figures.step_seconds <= min(fitting) * 1.005


def test_the_predicted_seconds_are_those_of_the_step_itself() -> None:
    outcome = run(int(step(BLOCKS, {}).peak_bytes * 0.7))
    assert outcome.chosen is not None
    assert outcome.chosen.final is not None
    assert outcome.chosen.seconds == pytest.approx(outcome.chosen.final.figures.step_seconds, rel=1e-9)


def test_a_plain_step_that_fits_is_left_alone() -> None:
    outcome = run(10**12)
    assert outcome.chosen is not None
    assert outcome.chosen.techniques == ()
    assert outcome.evaluations <= 2


def test_no_plan_is_slower_than_a_named_schedule_that_fits() -> None:
    plain = step(BLOCKS, {}).peak_bytes
    for share in (0.9, 0.8, 0.7, 0.6):
        outcome = run(int(plain * share))
        if outcome.chosen is None or outcome.best_named is None:
            continue
        assert outcome.chosen.seconds <= outcome.best_named.seconds


def test_when_nothing_fits_it_says_the_least_that_would() -> None:
    outcome = run(30 * MIB)
    everything = every_schedule()
    least = min(f.figures.peak_reserved_bytes for f in everything)
    assert outcome.chosen is None
    assert outcome.least is not None
    assert outcome.least.final is not None
    assert outcome.least.final.figures.peak_reserved_bytes == least


def test_a_fresh_process_has_the_last_word() -> None:
    """Where every plan reserves more in a process of its own, only plans that hold there are chosen."""
    budget = int(step(BLOCKS, {}).peak_bytes * 0.8)
    outcome = run(budget, Imitation(blocks=BLOCKS, surprise=4 * MIB))
    assert outcome.chosen is not None
    assert outcome.chosen.final is not None
    assert outcome.chosen.final.figures.peak_reserved_bytes <= budget


def test_the_same_question_has_the_same_answer() -> None:
    budget = int(step(BLOCKS, {}).peak_bytes * 0.66)
    first, second = run(budget), run(budget)
    assert first.chosen is not None
    assert second.chosen is not None
    assert first.chosen.techniques == second.chosen.techniques
    assert [t.key for t in first.tries] == [t.key for t in second.tries]


def test_a_model_without_blocks_is_measured_and_refused() -> None:
    oracle = Imitation(blocks=0)
    outcome = run(MIB, oracle)
    assert outcome.chosen is None
    assert outcome.least is not None


def test_a_model_that_cannot_be_recomputed_is_a_note_and_not_an_error() -> None:
    """A forward that changes between runs makes checkpointing fail, in the quick runs and in the captures."""

    class Stubborn(Imitation):
        def graph(self, techniques: Sequence[Mapping[str, Any]]) -> StepGraph:
            if techniques:
                raise WorkloadFailed("CheckpointError: 3 tensors were saved, 2 recomputed")
            return super().graph(techniques)

        def evaluate(self, techniques: Sequence[Mapping[str, Any]]) -> Peaks:
            if techniques:
                return Peaks(
                    requested_bytes=0, allocated_bytes=0, reserved_bytes=0, failure="CheckpointError"
                )
            return super().evaluate(techniques)

    outcome = run(int(step(BLOCKS, {}).peak_bytes * 0.8), Stubborn(blocks=BLOCKS))
    assert outcome.chosen is None
    assert outcome.least is not None
    assert outcome.least.techniques == ()
    assert outcome.notes
    assert all("gradient_checkpointing cannot be used on this model" in note for note in outcome.notes)


@pytest.mark.parametrize("allow", ["exact", "reordered"])
def test_a_model_without_blocks_is_searched_too(allow: Exactness) -> None:
    oracle = Imitation(blocks=0)
    plain = oracle.final([]).figures.peak_reserved_bytes
    outcome = Search(oracle=oracle, gpu=gpu(), budget_bytes=plain - 1, allow=allow).run()
    assert outcome.chosen is None
    assert outcome.least is not None
