"""What the script asks of values that are not known: where, how it was answered, what else it could be.

A question belongs to a place in the script. In the first run every question gets the expected answer; the run
can be repeated with another answer at one place, to see whether the peak depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from memfit.dryrun import frames
from memfit.dryrun.result import ValueRead
from memfit.dryrun.steering import does_it_steer

Kind = Literal["boolean", "check", "overflow", "number", "whole", "copy", "size", "routing"]

EXPECTED = "expected"

OTHER_ANSWERS: Mapping[str, tuple[str, ...]] = {
    "boolean": ("opposite",),
    "check": ("opposite",),
    "overflow": ("opposite",),
    "number": ("falling", "nan", "huge"),
    "whole": ("zero", "large"),
    "copy": ("other",),
    "size": ("all", "none"),
    "routing": ("one",),
}
"""What else each kind of question could be answered with, the likeliest to matter first."""

SHOWN: Mapping[str, str] = {
    "opposite": "the opposite",
    "nan": "not a number",
    "falling": "lower at each read",
    "huge": "1e30",
    "zero": "0",
    "large": "1024",
    "other": "zeros, or true",
    "all": "all elements",
    "none": "no element",
    "one": "all rows to the same",
}
"""The answers in words."""

HUGE = 1e30
LARGE = 1024
_MOST_OVERFLOWS = 2  # else a run of so many optimizer steps would never end
_MOST_ANSWERS = 4  # of one place, that are listed each by itself


class Question:
    """One place that asks, and how it is answered in this run.

    Args:
        site: names the place; the same in every run of the script.
        choice: the answer to give: `EXPECTED`, or one of `OTHER_ANSWERS`.
    """

    def __init__(self, site: str, kind: Kind, choice: str) -> None:
        self.site = site
        self.kind = kind
        self.choice = choice
        self.answers: Counter[str] = Counter()
        self._asked = 0

    @property
    def is_expected(self) -> bool:
        """Whether the expected answer is to be given."""
        return self.choice == EXPECTED

    def told(self, answer: str) -> None:
        """The script has read ``answer``."""
        if self.kind == "routing":  # whatever was read follows from how the rows were spread
            answer = "evenly spread" if self.is_expected else SHOWN["one"]
        few = len(self.answers) < _MOST_ANSWERS or answer in self.answers
        self.answers[answer if few else "other values"] += 1

    def boolean(self, expected: bool) -> bool:
        """``expected``, or its opposite; gradients overflow a few times only."""
        self._asked += 1
        few = self.kind != "overflow" or self._asked <= _MOST_OVERFLOWS
        return expected if self.is_expected or not few else not expected

    def number(self) -> float:
        """A float that nobody knows: finite and positive, unless another answer is tried."""
        if self.choice == "falling":
            return 1.0 / (1 + self.answers.total())
        return {"nan": float("nan"), "huge": HUGE}.get(self.choice, 1.0)

    def whole(self) -> int:
        """An integer that nobody knows."""
        return {"zero": 0, "large": LARGE}.get(self.choice, 1)

    def size(self, *, expected: int, most: int, least: int = 0) -> int:
        """How many elements there are, of at most ``most``."""
        return {"all": most, "none": least}.get(self.choice, expected)


class Questions:
    """All questions of a run.

    Args:
        answers: by site, the answer to give there instead of the expected one.
    """

    def __init__(self, answers: Mapping[str, str] | None = None) -> None:
        self._answers = dict(answers or {})
        self._asked: dict[tuple[frames.Place, frames.Place, str], Question] = {}
        self._stacks: dict[str, tuple[frames.Place, ...]] = {}

    def ask(self, op: str, kind: Kind) -> Question:
        """The question that the running line asks by ``op``."""
        place, reader = frames.current_places()
        key = (place, reader, op)
        question = self._asked.get(key)
        if question is None:
            via = "" if reader == place else f"{reader.file}:{reader.line}"
            site = f"{place.file}:{place.line}:{op}:{via}"
            question = Question(site, kind, self._answers.get(site, EXPECTED))
            self._asked[key] = question
            self._stacks[site] = frames.current_stack()
        return question

    def reads(self) -> tuple[ValueRead, ...]:
        """Every answer that the script was told, with its place."""
        return tuple(
            ValueRead(
                file=place.file,
                line=place.line,
                function=place.function,
                op=op,
                answer=answer,
                count=count,
                kind=question.kind,
                site=question.site,
                steers=does_it_steer(question.kind, self._stacks[question.site]),
            )
            for (place, _, op), question in list(self._asked.items())
            for answer, count in list(question.answers.items())
        )


def op_text(op: Any) -> str:
    """``"aten.mm"``: the operation without its overload."""
    packet = getattr(op, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(op, "__name__", str(op))
