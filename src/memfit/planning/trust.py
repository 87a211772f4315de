"""How far a plan's figures can be trusted: what its step reads that is not known, and its peak with other
answers."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.core.devices import GPU
from memfit.core.errors import ToolFailure
from memfit.core.units import format_bytes
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.device_memory import imitated_device_memory
from memfit.dryrun.repeats import with_other_answers
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.uncertainty import Uncertain
from memfit.planning.bench import Final, Oracle
from memfit.planning.figures import Settings


def judged(oracle: Oracle, techniques: tuple[Settings, ...], final: Final) -> DryRunResult | None:
    """What the dry run of a plan found out, with its interval and confidence; None for another engine.

    Where the step reads values that are not known and that steer it, the plan is measured a few times more,
    each time with another answer.
    """
    if final.dry_run is None:
        return None

    def run_again(answers: Mapping[str, str]) -> DryRunResult:
        result = oracle.final(techniques, answers=answers).dry_run
        if result is None:
            raise ToolFailure("the dry run cannot be had any more")
        return result

    return with_confidence(with_other_answers(final.dry_run, run_again, most=None))


def device_memory(dry: DryRunResult | None, gpu: GPU, final: Final) -> Uncertain | None:
    """The device's memory of a plan as low, expected and high, by either engine."""
    if dry is not None:
        return dry.device_memory
    return imitated_device_memory(
        gpu,
        torch=final.torch or "",
        allocated_bytes=final.figures.peak_allocated_bytes,
        reserved_bytes=final.figures.peak_reserved_bytes,
        not_modelled=tuple(final.not_modelled),
    )


def other_answers_note(result: DryRunResult | None, budget_bytes: int) -> tuple[str, ...]:
    """A line where the plan's step needs more than its budget with another answer."""
    if result is None or result.interval is None:
        return ()
    highest = result.interval.reserved.high_bytes
    if highest <= max(budget_bytes, result.peak_reserved_bytes):
        return ()
    return (
        f"Values that only a real GPU knows steer this step: with other answers to them it reserves up to "
        f"{format_bytes(highest)}, more than the budget of {format_bytes(budget_bytes)}",
    )
