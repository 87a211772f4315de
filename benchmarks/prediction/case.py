"""A row that somebody measured, and what is run to predict it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prediction.engines import Prediction

SCRIPTS = Path(__file__).resolve().parent / "scripts"

Counter = Literal["reading", "requested", "allocated", "reserved", "device", "expected"]
"""What is compared: the figure that the script reads itself (see `scripts/reading.py`), one of the whole
run's three peaks, what nvidia-smi would show at the peak, or that with what libraries are expected to add."""


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """One file of rows.

    Args:
        name: of the file, without its ending.
        head: everything beside the rows: ``source``, ``repo``, ``commit``, ``counter`` …
        rows: the rows, in the file's order.
        traces: where recorded events are that rows speak of.
    """

    name: str
    head: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    traces: Path = Path("traces")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one row is rebuilt.

    Args:
        row: as it is in the file.
        name: what tables call it.
        excluded: why it is not predicted; then nothing below matters.
        script: a file of `scripts/`.
        words: its arguments.
        gpu: as ``memfit gpus`` lists them.
        counter: which figure of the run the row is held against.
        above: a second figure of the run that is taken off (``"context"``: the CUDA context; ``"bare
            context"``: without the kernels that are loaded while the script runs), or "".
        measured_above_bytes: what is taken off the row's own figure, as ``above`` is off the run's.
        environment: variables to set.
        world_size: processes in the job of which some are run.
        ranks: which; the fullest counts.
        portable: whether the script can be run by the portable engine too.
        note: what is known to differ from what was measured; shown beside the error.
        resolution_bytes: how finely the row's figure was printed.
        printed_in_gib: whether the row took GiB for GB of 10**9.
        remark: what else there is to compare, in words, from what the script left.
    """

    row: Mapping[str, Any]
    name: str
    excluded: str = ""
    script: str = ""
    words: tuple[str, ...] = ()
    gpu: str = ""
    counter: Counter = "reading"
    above: Literal["", "context", "bare context"] = ""
    measured_above_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    world_size: int | None = None
    ranks: tuple[int, ...] = (0,)
    portable: bool = False
    note: str = ""
    resolution_bytes: int = 1
    printed_in_gib: bool = False
    remark: Callable[[Prediction], str] | None = None

    @property
    def measured_bytes(self) -> int | None:
        """None where the row says that memory ran out."""
        if self.row.get("oom"):
            return None
        measured = int(self.row["measured_bytes"]) - self.measured_above_bytes
        return measured * (1 << 30) // 10**9 if self.printed_in_gib else measured


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one origin.

    Args:
        name: of its files, and for ``--source``.
        title: what its files say under ``source``.
        goal: in words, for the table.
        goal_percent: a row that is further off misses the goal.
        workloads: one case for each row of a file, in the same order.
    """

    name: str
    title: str
    goal: str
    goal_percent: float
    workloads: Callable[[RowsFile], Sequence[Case]]

    def has(self, file: RowsFile) -> bool:
        """Whether a file has rows of this origin."""
        return file.name == self.name or file.head.get("source") == self.title

    def cases(self, file: RowsFile) -> list[Case]:
        """`workloads`, of which none may be lost; a row without what they read is left out with a reason."""
        unread = {number: why for number, row in enumerate(file.rows) if (why := self._unread(file, row))}
        whole = [row for number, row in enumerate(file.rows) if number not in unread]
        cases = list(self.workloads(replace(file, rows=tuple(whole))))
        if [case.row for case in cases] != whole:
            raise AssertionError(f"{self.name} gave {len(cases)} cases for {len(whole)} rows, or others")
        rebuilt = iter(cases)
        return [
            Case(row=row, name=f"{file.name} {number + 1}", excluded=unread[number])
            if number in unread
            else next(rebuilt)
            for number, row in enumerate(file.rows)
        ]

    def _unread(self, file: RowsFile, row: Mapping[str, Any]) -> str:
        """Why a row cannot be rebuilt at all; "" where it can, or where its source says why not itself."""
        try:
            for case in self.workloads(replace(file, rows=(row,))):
                case.measured_bytes  # noqa: B018  (it is computed from the row)
        except KeyError as problem:
            return f"the row says nothing of {problem}, or names one that is not known"
        except (AttributeError, IndexError, StopIteration, TypeError, ValueError) as problem:
            return f"the row is not of this source's form ({type(problem).__name__}: {problem})"
        return ""


def left_out(file: RowsFile, reason: str) -> list[Case]:
    """Cases for rows that cannot be rebuilt."""
    return [
        Case(row=row, name=f"{file.name} {number}", excluded=reason)
        for number, row in enumerate(file.rows, 1)
    ]
