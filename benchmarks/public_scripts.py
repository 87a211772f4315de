"""Public training scripts, unmodified, under the dry run.

    python benchmarks/public_scripts.py CHECKOUTS [--only TEXT ...] [--gpu a100-80gb] [--table PAGE]

CHECKOUTS is a folder with a checkout of each repository of `public_scripts.json`, under its name (``nanoGPT``
…); nothing of them is part of this project. Missing data is made by `public_data.py`, beside what git tracks.
Each row tells the commit, the command, whether ``git diff`` is empty afterwards, and what the dry run said.
The exit code is 1 where a script was neither answered nor refused in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "dryrun_cases"))

from public_data import MAKERS
from table import short_notes, write_between

from memfit.core.units import format_bytes

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class PublicScript:
    """One line of the table.

    Args:
        repository: owner and name.
        words: the command, as its documentation has it.
        folder: where it is run, in the checkout.
        environment: variables to set.
        data: what to make first: a maker of `public_data.MAKERS` and a path in the checkout.
        older: needs transformers 4 and libraries of its time, which ``--older`` names.
    """

    repository: str
    words: str
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    older: bool = False

    @property
    def name(self) -> str:
        return self.repository.partition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a script: the dry run's object, or one line where there is none."""

    commit: str
    clean: bool
    result: dict[str, Any] | None
    line: str
    seconds: float

    @property
    def is_clear(self) -> bool:
        """A result, or a refusal without a traceback of memfit's own."""
        return self.clean and bool(self.result or self.line.startswith("memfit: error:"))


def run(script: PublicScript, checkouts: Path, gpu: str, steps: str, older: Path | None) -> Answer:
    """Makes the data, and dry-runs the script in its checkout; ``older`` is a folder of libraries for those
    that need them."""
    checkout = checkouts / script.name
    for made in script.data:
        maker, path = made.split()
        MAKERS[maker](checkout / path)
    commit = _git(checkout, "log", "-1", "--format=%h")
    libraries = {"PYTHONPATH": str(older)} if script.older and older else {}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dryrun", "--gpu", gpu, "--steps", steps, "--repeats", "0", "--json"]
        + ["--timeout", str(TIMEOUT_SECONDS), "--", *script.words.split()],
        cwd=checkout / script.folder,
        env={**os.environ, **script.environment, **libraries, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        result = json.loads(done.stdout)
    except json.JSONDecodeError:
        result = None
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("memfit:")
    ] or done.stderr.splitlines()
    clean = not _git(checkout, "diff", "HEAD")
    return Answer(
        commit=commit,
        clean=clean,
        result=result,
        line=lines[-1] if lines else "",
        seconds=time.monotonic() - begun,
    )


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _row(script: PublicScript, answer: Answer) -> str:
    where = f"`{script.words}`" + ("" if script.folder == "." else f" in {script.folder}")
    head = f"| {script.repository} {answer.commit} | {where} | {'empty' if answer.clean else '**not empty**'}"
    made = ", ".join(dict.fromkeys(made.split()[0] for made in script.data)) or "–"
    result = answer.result
    if result is None:
        return f"{head} | {made} | refused: {answer.line} | | | | |"
    error = result["error"]
    ended = f"{result['ended']}, {result['exit_code']}"
    if error:
        ended += f" ({error['type']}: {error['message'].splitlines()[0][:90] if error['message'] else ''})"
    peak = format_bytes(result["peak_reserved_bytes"])
    reads, notes = len(result["value_reads"]), short_notes(result["not_modelled"])
    return f"{head} | {made} | {ended} | {peak} | {reads or ''} | {notes} | {result['confidence']} |"


HEAD = (
    "| repository, commit | command | git diff | data made | ended, exit code | reserved peak "
    "| places of unknown values | not modelled | confidence |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--steps", default="3")
    parser.add_argument("--older", type=Path, help="a folder with transformers 4.46 and what it needs")
    parser.add_argument("--table", type=Path, help="write the rows to this page")
    options = parser.parse_args()
    scripts = [
        PublicScript(**{**line, "data": tuple(line.get("data", ()))})
        for line in json.loads((HERE / "public_scripts.json").read_text(encoding="utf-8"))
    ]
    chosen = [one for one in scripts if _is_named(one, options.only)]
    rows, unclear = [], 0
    for number, script in enumerate(chosen, 1):
        answer = run(script, options.checkouts, options.gpu, options.steps, options.older)
        unclear += not answer.is_clear
        rows.append(_row(script, answer))
        print(f"[{number}/{len(chosen)}] {answer.seconds:.0f} s {rows[-1]}", flush=True)
    if options.table:
        write_between(options.table, Path(__file__).name, "\n".join(["", HEAD, *rows, ""]))
    return int(unclear > 0)


def _is_named(script: PublicScript, texts: Sequence[str]) -> bool:
    whole = f"{script.repository} {script.folder} {script.words}"
    return not texts or any(text in whole for text in texts)


if __name__ == "__main__":
    sys.exit(main())
