"""A finding: what was seen, on what evidence, and advice with its saving and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
Severity = Literal["error", "warning", "info"]
Verdict = Literal[
    "fragmentation",
    "device_full",
    "other_process",
    "process_limit",
    "request_exceeds_device",
    "preallocated",
    "budget_too_small",
    "host_memory",
    "shared_memory",
    "misreported_capacity",
    "not_memory",
    "unknown",
]
AdviceKind = Literal["shell", "python", "diff", "text"]

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""From the least to the most severe."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change.

    Attributes:
        action: What to do, in one line.
        typed: Exactly what is typed: a shell line, code or a diff. None where `action` says all.
        kind: What `typed` is.
        saving_bytes: What it saves, at the peak. None where that cannot be known from the input.
        cost: What it costs, in time or otherwise, in words.
        risks: What may go wrong with it.
        source: Where that is documented or was measured.
    """

    action: str
    typed: str | None = None
    kind: AdviceKind = "text"
    saving_bytes: int | None = None
    cost: str | None = None
    risks: str | None = None
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "typed": self.typed,
            "kind": self.kind,
            "saving_bytes": self.saving_bytes,
            "cost": self.cost,
            "risks": self.risks,
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found, how sure that is, why, and what to do about it.

    Attributes:
        rule: The rule or reader that found it, e.g. "fragmentation_split" or "oom_message".
        summary: What happened, in one line.
        severity: "error" where the job failed or will fail, "warning" where memory is wasted, else "info".
        confidence: How sure the finding is.
        verdict: The kind of failure; None for a finding that is not about a failure.
        evidence: The facts it rests on, one line each, with figures.
        bytes: The bytes that it is about, at the peak; None where unknown.
        where: The file, site, module or device it was found in; None where unknown.
        advice: What to change, the best first.
    """

    rule: str
    summary: str
    severity: Severity = "warning"
    confidence: Confidence = "medium"
    verdict: Verdict | None = None
    evidence: Sequence[str] = ()
    bytes: int | None = None
    where: str | None = None
    advice: Sequence[Advice] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "severity": self.severity,
            "confidence": self.confidence,
            "summary": self.summary,
            "evidence": list(self.evidence),
            "bytes": self.bytes,
            "where": self.where,
            "advice": [advice.to_json() for advice in self.advice],
        }


def at_least(findings: Sequence[Finding], severity: Severity) -> list[Finding]:
    """The findings that are as severe as `severity`, or more."""
    lowest = SEVERITIES.index(severity)
    return [finding for finding in findings if SEVERITIES.index(finding.severity) >= lowest]
