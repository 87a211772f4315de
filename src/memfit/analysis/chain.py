"""Savings one after another: each advice is followed on what the ones before it left, for the peak moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.lab import UNLIMITED_BYTES
from memfit.allocators.replay import Operation, ReplayResult, operations_of, replay_operations
from memfit.analysis.edits import Edit, edited, with_last_requests_served
from memfit.analysis.evidence import MOST_REPLAYED_EVENTS, Evidence
from memfit.analysis.rules.base import Found, Rule
from memfit.core.errors import UsageError
from memfit.core.timeline import Timeline
from memfit.core.trace import Trace

ORDER = ("mistake", "setting", "trade")
MOST_SEARCHED_EVENTS = 50_000
"""Where a run ended without memory, the least memory with which it goes through is searched; beyond this many
events the replay has no limit instead."""
SEARCH_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class ChainStep:
    """One advice followed after those before it.

    Attributes:
        rule: whose.
        saving_bytes: by how much it lowers the peak then; 0 where it was left out because it does not.
        alone_bytes: by how much it would lower the peak by itself.
        peak_bytes: the peak after it.
        exposed: it counts only since the steps before it moved the peak.
    """

    rule: str
    saving_bytes: int
    alone_bytes: int
    peak_bytes: int
    exposed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rule": self.rule,
            "saving_bytes": self.saving_bytes,
            "alone_bytes": self.alone_bytes,
            "peak_bytes": self.peak_bytes,
            "exposed": self.exposed,
        }


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What following all the advice would save.

    Attributes:
        steps: in the order in which they were followed.
        of: what the bytes are: ``"reserved"`` (the allocator replayed without a limit), ``"needed"`` (the
            least memory with which a run that ended without memory goes through), or ``"requested"`` (live
            bytes).
        before_bytes, after_bytes: the peak, without and with all steps.
        exposed: findings that only the steps before them brought to light.
    """

    steps: tuple[ChainStep, ...] = ()
    of: str = "requested"
    before_bytes: int = 0
    after_bytes: int = 0
    exposed: tuple[Found, ...] = ()

    @property
    def total_saving_bytes(self) -> int:
        """What all steps save together."""
        return self.before_bytes - self.after_bytes


def chain_of(case: Evidence, found: Sequence[Found], rules: Iterable[Rule]) -> Chain:
    """Follow the findings' advice one after another.

    Args:
        case: what they were found in.
        found: what was found, in any order: mistakes are corrected first, then settings, then trades.
        rules: all that were looked for; those that depend on the phase of the peak are looked for again.
    """
    by_id = {rule.id: rule for rule in rules}
    usable = [one for one in found if one.edit is not None and by_id[one.finding.rule].stage in ORDER]
    usable.sort(key=lambda one: ORDER.index(by_id[one.finding.rule].stage))
    if case.trace is None or not len(case.trace):
        return _by_category(case, usable)
    return _Simulation(case, by_id).follow(usable)


class _Simulation:
    """The trace as it is after the steps so far."""

    def __init__(self, case: Evidence, rules: dict[str, Rule]) -> None:
        assert case.trace is not None
        self._original = case
        self._case = case
        self._base = with_last_requests_served(case.trace)
        self._trace: Trace = self._base
        self._rules = rules
        self._settings = _usable(case.settings)
        self._of = "reserved" if len(self._trace) <= MOST_REPLAYED_EVENTS else "requested"
        if self._base is not case.trace and len(self._trace) <= MOST_SEARCHED_EVENTS:
            self._of = "needed"
        self._steps: list[ChainStep] = []
        self._exposed: list[Found] = []

    def follow(self, found: list[Found]) -> Chain:
        start = self._peak(self._trace, self._settings)
        peak = start
        queue = list(found)
        while queue:
            one = queue.pop(0)
            peak = self._step(one, peak, start)
            if not queue:
                queue += self._newly_exposed(found)
        return Chain(
            steps=tuple(self._steps),
            of=self._of,
            before_bytes=start,
            after_bytes=peak,
            exposed=tuple(self._exposed),
        )

    def _step(self, one: Found, peak: int, start: int) -> int:
        edit, exposed = one.edit, one in self._exposed
        assert edit is not None
        trace, settings = self._after(self._trace, self._settings, edit)
        after = self._peak(trace, settings)
        base = self._original
        alone = 0 if exposed else start - self._peak(*self._after(self._base, _usable(base.settings), edit))
        if after < peak:
            self._trace, self._settings = trace, settings
            self._case = base.with_trace(trace)
        kept = min(after, peak)
        self._steps.append(
            ChainStep(
                rule=one.finding.rule,
                saving_bytes=peak - kept,
                alone_bytes=max(alone, 0),
                peak_bytes=kept,
                exposed=exposed,
            )
        )
        return kept

    def _after(self, trace: Trace, settings: str, edit: Edit) -> tuple[Trace, str]:
        changes = bool(edit.windows) or edit.warm_up is not None
        return (edited(trace, edit) if changes else trace), (
            settings if edit.settings is None else _usable(edit.settings)
        )

    def _newly_exposed(self, found: Sequence[Found]) -> list[Found]:
        """Rules that depend on the phase of the peak, looked for again where it has moved."""
        if self._case.peak_phase == self._original.peak_phase:
            return []
        known = {one.finding.rule for one in (*found, *self._exposed)}
        new = [
            one
            for rule in self._rules.values()
            if rule.id not in known and self._case.peak_phase in rule.peak_phases
            for one in rule.look(self._case)
            if one.edit is not None
        ]
        self._exposed += new
        return new

    def _peak(self, trace: Trace, settings: str) -> int:
        if self._of == "requested":
            return Timeline.of(trace).peak_bytes
        operations = operations_of(trace).operations
        highest = _replayed(operations, settings, UNLIMITED_BYTES)
        if self._of == "reserved":
            return highest.peak_reserved_bytes
        low, high = highest.peak_allocated_bytes, highest.peak_reserved_bytes
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            low, high = (middle, high) if _replayed(operations, settings, middle).ooms else (low, middle)
        return high


def _replayed(operations: Sequence[Operation], settings: str, total_bytes: int) -> ReplayResult:
    config = CachingConfig(total_bytes=total_bytes, settings=settings)
    return replay_operations(operations, CachingAllocator(config))


def _usable(settings: str) -> str:
    """The settings, where this allocator has them; else none."""
    try:
        resolved = CachingConfig(settings=settings).resolved()
    except UsageError:
        return ""
    return settings if resolved.backend == "native" else ""


def _by_category(case: Evidence, found: Sequence[Found]) -> Chain:
    """Without a trace: what each takes of its categories, never more than there is."""
    left = dict(case.by_category)
    peak = before = case.peak_bytes
    steps = []
    for one in found:
        assert one.edit is not None
        alone = saved = 0
        for name, size in one.edit.by_category.items():
            alone += min(size, int(case.by_category.get(name, 0)))
            taken = min(size, int(left.get(name, 0)))
            left[name] = int(left.get(name, 0)) - taken
            saved += taken
        peak -= saved
        steps.append(ChainStep(rule=one.finding.rule, saving_bytes=saved, alone_bytes=alone, peak_bytes=peak))
    return Chain(steps=tuple(steps), before_bytes=before, after_bytes=peak)


def with_simulated_savings(found: Sequence[Found], chain: Chain) -> list[Found]:
    """The findings with what their first advice was found to save by itself, instead of the estimate."""
    alone: dict[str, list[ChainStep]] = {}
    for step in chain.steps:
        alone.setdefault(step.rule, []).append(step)
    result = []
    for one in found:
        steps = alone.get(one.finding.rule)
        if one.edit is None or not steps or not one.finding.advice:
            result.append(one)
            continue
        step = steps.pop(0)
        first, *others = one.finding.advice
        saving = step.saving_bytes if step.exposed else step.alone_bytes
        # Other ways to the same effect were estimated alike.
        same = first.saving_bytes
        alike = [replace(one, saving_bytes=saving) if one.saving_bytes == same else one for one in others]
        advice = (replace(first, saving_bytes=saving), *(alike if same else others))
        result.append(replace(one, finding=replace(one.finding, advice=advice)))
    return result
