"""A rule: what it looks for, on what evidence, and what it finds. A rule is its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from memfit.analysis.edits import Edit
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice, Confidence, Finding, Severity, Verdict
from memfit.core.units import MIB, format_bytes

Stage = Literal["mistake", "setting", "trade", "forecast"]
"""In which order advice is followed: mistakes cost nothing to correct, settings little, trades cost time or
precision; a forecast changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finding, and how the trace would look if its first advice were followed; ``None``: unchanged."""

    finding: Finding
    edit: Edit | None = None


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Base of the rules. Their fields are thresholds; `dataclasses.replace` gives a rule with others.

    Attributes:
        number: its place in the list.
        id: what it is called.
        title: what it finds, in one line.
        needs: what it looks at; one of them is enough.
        detection: how it tells, in words, with the names of its thresholds.
        saving: the formula of what its advice saves.
        source: where that is documented, or who reported it.
        stage: see `Stage`.
        peak_phases: the rule counts only where the peak is in one of these phases; empty: anywhere.
    """

    number: ClassVar[int]
    id: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]]
    detection: ClassVar[str]
    saving: ClassVar[str]
    source: ClassVar[str]
    stage: ClassVar[Stage] = "mistake"
    peak_phases: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def look(self, case: Evidence) -> Iterator[Found]:
        """What it finds in a case; called only where one of `needs` is met."""

    def settings(self) -> dict[str, Any]:
        """The thresholds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def found(
        self,
        summary: str,
        *,
        evidence: Sequence[str],
        advice: Sequence[Advice] = (),
        severity: Severity = "warning",
        confidence: Confidence = "medium",
        verdict: Verdict | None = None,
        size_bytes: int | None = None,
        where: str | None = None,
        edit: Edit | None = None,
    ) -> Found:
        """A finding of this rule."""
        finding = Finding(
            rule=self.id,
            summary=summary,
            severity=severity,
            confidence=confidence,
            verdict=verdict,
            evidence=tuple(evidence),
            bytes=size_bytes,
            where=where,
            advice=tuple(advice),
        )
        return Found(finding=finding, edit=edit)

    def to_json(self) -> dict[str, Any]:
        """What the rule is, as plain values."""
        return {
            "id": self.id,
            "number": self.number,
            "title": self.title,
            "needs": list(self.needs),
            "detection": self.detection,
            "saving": self.saving,
            "source": self.source,
            "stage": self.stage,
            "settings": self.settings(),
        }


def share(part: int | float, whole: int | float) -> str:
    """A share as text, ``"12.5 %"``."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def site_lines(sites: Sequence[tuple[str, int, int]]) -> list[str]:
    """A line of evidence per site."""
    return [
        f"{format_bytes(total)} in {count} block{'' if count == 1 else 's'} at {site}"
        for site, total, count in sites
    ]


LEAST_BYTES = 16 * MIB
"""Below this a saving is not worth a line, unless a rule says otherwise."""
