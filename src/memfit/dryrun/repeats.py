"""Repeating a run with other answers where the script read values that nobody knows: the peak as an interval.

Each repeat answers one place otherwise, the places that decide sizes first. A place whose value is only shown
or kept is not tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memfit.core.errors import MemfitError
from memfit.dryrun.questions import OTHER_ANSWERS, SHOWN
from memfit.dryrun.result import DryRunResult, Interval, Range, ValueRead

FEW = 4
"""Repeats unless the user asks for another number."""

_ORDER = ("routing", "size", "overflow", "check", "boolean", "number", "whole", "copy")
_FAILED = ("error", "exit")

RunAgain = Callable[[Mapping[str, str]], DryRunResult]
"""``run_again({site: answer})``: the same run with another answer at one place."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One repeat: where another answer was given, and what came of it.

    Args:
        result: None where the run could not be brought to an end; ``why`` then says how it ended.
    """

    site: str
    answer: str
    result: DryRunResult | None
    why: str = ""


@dataclass(kw_only=True)
class _Budget:
    """How many repeats are left, and what they have taken."""

    most: int
    seconds: float = 0.0
    trials: list[Trial] = field(default_factory=list)


def with_other_answers(
    first: DryRunResult, run_again: RunAgain, *, most: int | None, seconds: float | None = None
) -> DryRunResult:
    """``first`` with its interval, and with what each other answer changed.

    Args:
        run_again: runs the script once more; raises a `MemfitError` where it leaves no result.
        most: repeats at most; None: `FEW`, and only for places that certainly steer the script.
        seconds: begin no repeat after so long.
    """
    sites = _sites(first.value_reads, perhaps=most is not None)
    plan = list(_plan(sites))
    budget = _Budget(most=FEW if most is None else most)
    begun = time.monotonic()
    if first.ended in ("interrupted", "timeout", "error"):
        budget.most = 0
    for read, answer in plan[: budget.most]:
        if seconds is not None and time.monotonic() - begun > seconds:
            break
        trial = _try(read, answer, first, run_again)
        if trial.result is not None and trial.result.ended == "interrupted":
            break  # the user has enough
        budget.trials.append(trial)
    budget.seconds = time.monotonic() - begun
    return _put_together(first, budget, planned=[read.site for read, _ in plan])


def _sites(reads: Sequence[ValueRead], *, perhaps: bool) -> list[ValueRead]:
    """One read of each place that may steer the script, the most influential first."""
    tried = ("yes", "perhaps") if perhaps else ("yes",)
    sites = {read.site: read for read in reversed(reads) if read.site and read.steers in tried}
    return sorted(sites.values(), key=lambda read: (tried.index(read.steers), _ORDER.index(read.kind)))


def _plan(sites: Sequence[ValueRead]) -> Iterator[tuple[ValueRead, str]]:
    """Every other answer of every place: first one of each, then the next of each."""
    for turn in range(max(map(len, OTHER_ANSWERS.values()))):
        for read in sites:
            answers = OTHER_ANSWERS[read.kind]
            if turn < len(answers):
                yield read, answers[turn]


def _try(read: ValueRead, answer: str, first: DryRunResult, run_again: RunAgain) -> Trial:
    try:
        result = run_again({read.site: answer})
    except MemfitError as error:
        return Trial(site=read.site, answer=answer, result=None, why=f"the run with it ended badly: {error}")
    why = ""
    if result.ended in _FAILED and result.exit_code:
        kind = result.error.type if result.error is not None else f"exit code {result.exit_code}"
        why = f"the script ends with it ({kind})"
    elif result.ended in ("interrupted", "timeout"):
        why = "the run with it did not end in time"
    elif result.steps_done < first.steps_done and result.oom is None and read.kind != "overflow":
        why = f"the script ends earlier with it, after {result.steps_done} of {first.steps_done} steps"
    return Trial(site=read.site, answer=answer, result=result, why=why)


def _put_together(first: DryRunResult, budget: _Budget, *, planned: Sequence[str]) -> DryRunResult:
    done = [trial.result for trial in budget.trials if trial.result is not None and not trial.why]
    higher = [trial.result for trial in budget.trials if trial.result is not None]
    tried = [trial.site for trial in budget.trials]
    left_out = {site for site in planned if planned.count(site) > tried.count(site)}

    def spread(name: str) -> Range:
        own = getattr(first, name)
        return Range(
            low_bytes=min([own, *(getattr(result, name) for result in done)]),
            high_bytes=max([own, *(getattr(result, name) for result in higher)]),
        )

    interval = Interval(
        requested=spread("peak_requested_bytes"),
        allocated=spread("peak_allocated_bytes"),
        reserved=spread("peak_reserved_bytes"),
        repeats=len(budget.trials),
        seconds=budget.seconds,
        left_out=len(left_out),
        may_run_out=any(result.oom is not None for result in higher),
    )
    reads = tuple(_with_trials(read, first, budget.trials) for read in first.value_reads)
    return replace(first, interval=interval, value_reads=reads)


def _with_trials(read: ValueRead, first: DryRunResult, trials: Sequence[Trial]) -> ValueRead:
    own = [trial for trial in trials if trial.site == read.site]
    if not own:
        return replace(read, why=_not_tried(read))
    changes = {
        trial.answer: trial.result.peak_requested_bytes - first.peak_requested_bytes
        for trial in own
        if trial.result is not None and not trial.why
    }
    most = max(changes.values(), key=abs, default=None)
    shown = [SHOWN[answer] for answer, change in changes.items() if change == most] or [
        SHOWN[trial.answer] for trial in own
    ]
    problems = "; ".join(f"{SHOWN[trial.answer]}: {trial.why}" for trial in own if trial.why)
    return replace(read, other_answer=", ".join(shown), peak_change_bytes=most, why=problems)


def _not_tried(read: ValueRead) -> str:
    if read.steers == "no":
        return "not tried: the value is only shown or kept"
    if read.steers == "perhaps":
        return "not tried: the value is handed on, and not seen to decide anything"
    return "not tried: there were other places to try first (see --repeats)"
