"""Outcomes as Markdown: one line per source, and one per row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memfit.core.units import format_bytes
from prediction.case import Source
from prediction.engines import Prediction
from prediction.outcomes import Outcome, relative_error

SUMMARY = (
    "| source | rows | compared | equal | median error | largest error | under-predicted | seconds each "
    "| goal |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
ROWS = "| row | measured | dry run | error | portable engine | why |\n|---|---|---|---|---|---|"


def summary(name: str, outcomes: Sequence[Outcome], source: Source | None) -> Iterator[str]:
    """The source's line, and one for each estimator whose results its rows have."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    runs = [run for outcome in outcomes if (run := outcome.dryrun or outcome.portable) is not None]
    seconds = f"{statistics.fmean(run.seconds for run in runs):.1f}" if runs else "–"
    equal = str(sum(outcome.rounded for outcome in outcomes)) if errors else "–"
    yield _line(
        name, len(outcomes), len(errors), equal, *_errors(errors), seconds, source.goal if source else ""
    )
    for estimator, theirs in _published(outcomes).items():
        yield _line(f"{name}: {estimator}", len(outcomes), len(theirs), "", *_errors(theirs), "", "published")


def verdicts(outcomes: Iterable[Outcome]) -> str:
    """How often what fits and what does not was told apart, where rows ran out of memory."""
    judged = [(outcome, outcome.dryrun) for outcome in outcomes if outcome.dryrun is not None]
    judged = [(outcome, run) for outcome, run in judged if not run.error]
    gone = [run for outcome, run in judged if outcome.case.measured_bytes is None]
    if not gone:
        return ""
    fitted = [run for outcome, run in judged if outcome.case.measured_bytes is not None]
    return (
        f"Out of memory when measured: {len(gone)} rows run, {sum(run.fits for run in gone)} of them called "
        f"a fit. Fitted: {len(fitted)} rows run, {sum(not run.fits for run in fitted)} called out of memory."
    )


def rows(outcomes: Iterable[Outcome], source: Source | None) -> Iterator[str]:
    """A line for each row that was run."""
    for outcome in outcomes:
        if outcome.dryrun is None and outcome.portable is None:
            continue
        measured = outcome.case.measured_bytes
        shown = "out of memory" if measured is None else format_bytes(measured)
        yield _line(
            outcome.case.name,
            shown,
            _figure(outcome.dryrun),
            _apart(relative_error(outcome.case, outcome.dryrun), outcome),
            _beside(outcome),
            _why(outcome, source),
        )


def left_out(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Why rows were not run, with how many."""
    reasons = Counter(outcome.case.excluded for outcome in outcomes if outcome.case.excluded)
    for reason, count in reasons.items():
        yield f"- {count} left out: {reason}"


def misses(outcome: Outcome, source: Source | None) -> bool:
    """Whether the row is further off than its source's goal."""
    if source is None or outcome.error is None or outcome.rounded:
        return False
    return abs(outcome.error) * 100 > source.goal_percent


def _published(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Each estimator's errors on the rows that have its estimate."""
    errors: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, estimate in outcome.case.row.get("published_estimates", {}).items():
            found = errors.setdefault(name, [])
            if estimate is not None and outcome.case.measured_bytes:
                found.append(estimate / outcome.case.measured_bytes - 1)
    return errors


def _errors(errors: Sequence[float]) -> tuple[str, str, str]:
    """Median and largest size, and how many are below what was measured."""
    if not errors:
        return "–", "–", "–"
    sizes = [abs(error) for error in errors]
    under = sum(error < 0 for error in errors)
    share = f"{under} ({100 * under / len(errors):.0f} %)"
    return f"{100 * statistics.median(sizes):.3g} %", f"{100 * max(sizes):.3g} %", share


def _figure(run: Prediction | None) -> str:
    if run is None:
        return "–"
    if run.predicted_bytes is None:
        return "failed" if run.error else "out of memory"
    return format_bytes(run.predicted_bytes) if run.fits else f"{format_bytes(run.predicted_bytes)} (no fit)"


def _apart(error: float | None, outcome: Outcome) -> str:
    if error is None:
        return "–"
    measured = outcome.case.measured_bytes
    assert measured is not None
    if outcome.dryrun is not None and outcome.dryrun.predicted_bytes == measured:
        return "0 B"
    return "as printed" if outcome.rounded else f"{100 * error:+.3g} %"


def _beside(outcome: Outcome) -> str:
    """The portable engine's figure beside the dry run's."""
    run, other = outcome.portable, outcome.dryrun
    if run is None or run.predicted_bytes is None:
        return _figure(run)
    if other is None or other.predicted_bytes is None:
        return _figure(run)
    apart = run.predicted_bytes - other.predicted_bytes
    return "the same" if apart == 0 else f"{100 * apart / other.predicted_bytes:+.3g} % ({apart:+,} B)"


def _why(outcome: Outcome, source: Source | None) -> str:
    failures = [run.error for run in (outcome.dryrun, outcome.portable) if run is not None and run.error]
    remark, run = outcome.case.remark, outcome.dryrun
    words = [outcome.case.note, *failures]
    if remark is not None and run is not None and run.details:
        words.insert(0, remark(run))
    if misses(outcome, source) and not outcome.case.note:
        words.append("not explained")
    return "; ".join(word.replace("|", "/").replace("\n", " ") for word in words if word)


def _line(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
