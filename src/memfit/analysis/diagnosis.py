"""`memfit.diagnose`: every rule on whatever is at hand, and what following all the advice would save."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.analysis.chain import Chain, chain_of, with_simulated_savings
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import SEVERITIES, Finding, Severity, at_least
from memfit.analysis.rules import RULES, Found, Rule

SCHEMA_VERSION = 1

SUPERSEDES: dict[str, tuple[str, ...]] = {
    "LEAK_GRAPH_RETAINED": ("LEAK_MONOTONIC",),
    "LEAK_GC_CYCLES": ("LEAK_MONOTONIC",),
    "OPTIM_8BIT_NO_GAIN": ("OPTIM_STATE_HEAVY",),
    "CKPT_INEFFECTIVE": ("ACT_DOMINANT",),
    "KV_GROWTH": ("SHAPE_CHURN",),
    "EXPANDABLE_NOT_ACTIVE": (),
}
"""A finding of the first says all that one of the others would."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """What was found.

    Attributes:
        case: what was looked at.
        findings: the most severe first, then those that save most.
        chain: the advice followed one after another.
        looked: ids of the rules that had something to look at.
        skipped: ids of the others, with what each of them needs.
    """

    case: Evidence
    findings: tuple[Finding, ...]
    chain: Chain
    looked: tuple[str, ...]
    skipped: dict[str, tuple[Need, ...]]

    @property
    def total_saving_bytes(self) -> int:
        """What all the advice saves together, followed one after another."""
        return self.chain.total_saving_bytes

    def at_least(self, severity: Severity) -> list[Finding]:
        """The findings that are as severe, or more."""
        return at_least(self.findings, severity)

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes are whole numbers."""
        case = self.case
        return {
            "schema_version": SCHEMA_VERSION,
            "files": list(case.names),
            "peak_requested_bytes": case.peak_bytes,
            "peak_phase": case.peak_phase,
            "capacity_bytes": case.capacity_bytes,
            "peak_by_category": dict(case.by_category),
            "findings": [finding.to_json() for finding in self.findings],
            "chain": [step.to_json() for step in self.chain.steps],
            "chain_of": self.chain.of,
            "peak_before_bytes": self.chain.before_bytes,
            "peak_after_bytes": self.chain.after_bytes,
            "total_saving_bytes": self.total_saving_bytes,
            "rules_looked_at": list(self.looked),
            "rules_skipped": {name: list(needs) for name, needs in self.skipped.items()},
            "notes": list(case.recording.notes) if case.recording is not None else [],
        }


def diagnose(
    *files: str | os.PathLike[str],
    case: Evidence | None = None,
    live: bool = False,
    rules: Sequence[Rule] = RULES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """Look for what is wrong with a job's memory, and say what each change would save.

    Args:
        files: traces, memory snapshots, dry-run results, configurations, nvidia-smi's output, counters or
            logs of one job; several traces are taken to be its ranks.
        case: evidence that is at hand already, instead of files.
        live: also look at this process: its allocator, and tensors that are kept by mistake. Uses torch only
            if the process has loaded it.
        rules: the rules; `with_thresholds` changes their settings.
        progress: called with the rule that is looked for, how many are done, and of how many.

    Raises:
        InputError: a file is of no kind that is known, or damaged.
        UsageError: nothing to look at.

    Examples:
        >>> from memfit.analysis.evidence import Evidence, RankPeak
        >>> ranks = [RankPeak(name=f"rank {n}", peak_bytes=size << 30) for n, size in enumerate((30, 20, 20))]
        >>> diagnose(case=Evidence(ranks=ranks)).findings[0].rule
        'RANK_IMBALANCE'
    """
    if case is None:
        from memfit.analysis.inputs import read_evidence

        case = read_evidence(files, live=live)
    met = case.needs_met
    found: list[Found] = []
    looked = [rule for rule in rules if met & set(rule.needs)]
    for done, rule in enumerate(looked):
        if progress is not None:
            progress(rule.id, done, len(looked))
        found += rule.look(case)
    kept = _without_superseded(found)
    if progress is not None:
        progress("following the advice", len(looked), len(looked))
    chain = chain_of(case, kept, rules)
    kept = with_simulated_savings([*kept, *chain.exposed], chain)
    return Diagnosis(
        case=case,
        findings=tuple(sorted((one.finding for one in kept), key=_weight)),
        chain=chain,
        looked=tuple(rule.id for rule in looked),
        skipped={rule.id: rule.needs for rule in rules if rule not in looked},
    )


def _without_superseded(found: Sequence[Found]) -> list[Found]:
    there = {one.finding.rule for one in found}
    gone = {name for rule in there for name in SUPERSEDES.get(rule, ())}
    return [one for one in found if one.finding.rule not in gone]


def _weight(finding: Finding) -> tuple[int, int, str]:
    saving = finding.advice[0].saving_bytes if finding.advice else None
    return (-SEVERITIES.index(finding.severity), -(saving or 0), finding.rule)
