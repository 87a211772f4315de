"""The predictions held against what others measured on real GPUs.

    python benchmarks/prediction ROWS… [--source NAME] [--engine dryrun|portable|both] [--json FILE]

ROWS are files, or folders of files, of the form ``{"source": …, "rows": [{…, "measured_bytes": …}, …]}``.
Each row that can be rebuilt from its public configuration (`prediction/sources`, `prediction/scripts`) is run
in a process of its own; the others are listed with the reason. With ``--json`` predictions are kept in a file
and not made again while the script stays the same: give another file after memfit, PyTorch or what scripts
share changed.
Needs what the dry run needs, and no GPU. The exit code is 1 where a run failed, and 3 where a row misses its
goal without a reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memfit.core.errors import MemfitError
from prediction import tables
from prediction.case import Case, Source
from prediction.engines import predict
from prediction.outcomes import Kept, Outcome
from prediction.rows import cases_of, read_files
from prediction.sources import SOURCES

BY_NAME = {source.name: source for source in SOURCES}
ENGINES = {"dryrun": ("dryrun",), "portable": ("portable",), "both": ("dryrun", "portable")}


def main(words: Sequence[str] | None = None) -> int:
    """Runs what is asked for and prints the tables."""
    options = _options(words)
    try:
        outcomes = _run_all(options)
    except MemfitError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    _print_tables(outcomes)
    runs = [run for outcome in outcomes for run in (outcome.dryrun, outcome.portable) if run is not None]
    if any(run.error for run in runs):
        return 1
    unexplained = [
        outcome
        for outcome in outcomes
        if tables.misses(outcome, BY_NAME.get(outcome.source)) and not outcome.case.note
    ]
    return 3 if unexplained else 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="+", type=Path, help="files of rows, or folders of them")
    parser.add_argument(
        "--source", action="append", choices=sorted(BY_NAME), help="may be given several times"
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), default="dryrun")
    parser.add_argument("--json", type=Path, help="keep predictions here, and do not make them again")
    parser.add_argument("--limit", type=int, help="so many rows of each file at most")
    return parser.parse_args(words)


def _run_all(options: argparse.Namespace) -> list[Outcome]:
    kept, outcomes = Kept(options.json), []
    for file in read_files(options.rows):
        name, cases = cases_of(file, SOURCES)
        if options.source and name not in options.source:
            continue
        for case in cases[: options.limit]:
            outcomes.append(_outcome(name, case, ENGINES[options.engine], kept))
    return outcomes


def _outcome(source: str, case: Case, engines: Sequence[str], kept: Kept) -> Outcome:
    outcome = Outcome(source=source, case=case)
    for engine in engines if not case.excluded else ():
        if engine == "portable" and not case.portable:
            continue
        run = kept.find(case, engine)
        if run is None:
            run = predict(case, engine)
            kept.add(source, case, run)
        outcome = replace(outcome, **{engine: run})
        print(
            f"{source} {engine}: {case.name}: {run.predicted_bytes} {run.error}", file=sys.stderr, flush=True
        )
    return outcome


def _print_tables(outcomes: Sequence[Outcome]) -> None:
    names = list(dict.fromkeys(outcome.source for outcome in outcomes))
    groups = {name: [outcome for outcome in outcomes if outcome.source == name] for name in names}
    print(tables.SUMMARY)
    for name, group in groups.items():
        for line in tables.summary(name, group, BY_NAME.get(name)):
            print(line)
    for name, group in groups.items():
        _print_source(name, group, BY_NAME.get(name))


def _print_source(name: str, group: Sequence[Outcome], source: Source | None) -> None:
    print(f"\n### {name}\n")
    lines = list(tables.rows(group, source))
    if lines:
        print(tables.ROWS, *lines, sep="\n")
    for note in (tables.verdicts(group), *tables.left_out(group)):
        if note:
            print(f"\n{note}")
