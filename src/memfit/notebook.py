"""``%load_ext memfit``: the cell magic ``%%memfit``, and results that a cell shows as reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

COLUMNS = 100


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext memfit`` calls, in IPython and Jupyter.

    Adds the cell magic ``%%memfit``, which runs its cell under a `memfit.MemoryProfiler`, shows what memory
    was used for, and leaves the profile as ``memfit_profile``. With ``--every N`` one of N steps is noted in
    detail (an optimizer's ``step()`` ends a step); ``--save FOLDER`` also writes the profile.

    A cell that ends in the result of `memfit.dry_run`, `memfit.plan`, `memfit.explain`, `memfit.diagnose`,
    `memfit.compare` or `memfit.replay` shows the text that the command of that name prints.
    """
    from memfit.profiling.notebook import add_magic

    add_magic(shell)
    formatter = shell.display_formatter.formatters["text/plain"]
    for result, text in SHOWN.items():
        formatter.for_type_by_name(*result.rsplit(".", 1), _printer(text))


def _printer(text: Callable[[Any], Any]) -> Callable[[Any, Any, bool], None]:
    def print_result(result: Any, printer: Any, cycle: bool) -> None:
        from memfit.reports.text import to_text

        printer.text(to_text(text(result), width=COLUMNS).rstrip("\n"))

    return print_result


def _dry_run(result: Any) -> Any:
    from memfit.reports.dryrun import dry_run_text

    return dry_run_text(result)


def _fit(result: Any) -> Any:
    from memfit.reports.report import FitReport
    from memfit.reports.text import fit_text

    return fit_text(FitReport.of(result))


def _explanation(explanation: Any) -> Any:
    from memfit.reports.findings import findings_text

    return findings_text(explanation.findings)


def _diagnosis(diagnosis: Any) -> Any:
    from memfit.reports.diagnosis import diagnosis_text

    return diagnosis_text(diagnosis)


def _difference(difference: Any) -> Any:
    from memfit.reports.diagnosis import difference_text

    return difference_text(difference)


def _replay(result: Any) -> Any:
    from memfit.reports.replay import replay_text

    return replay_text(result, name="trace")


SHOWN: Mapping[str, Callable[[Any], Any]] = {
    "memfit.dryrun.result.DryRunResult": _dry_run,
    "memfit.planning.plan.FitResult": _fit,
    "memfit.analysis.explanations.Explanation": _explanation,
    "memfit.analysis.diagnosis.Diagnosis": _diagnosis,
    "memfit.analysis.difference.Difference": _difference,
    "memfit.allocators.lab.Replay": _replay,
}
"""The results that are shown as reports, by the full names of their classes (which loads none), and how."""
