"""Which alerts are on: hysteresis, how long, and how often one is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memfit.monitor.quantities import Quantity
from memfit.monitor.rules import AlertRule, show_value


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule that is broken, or was.

    Args:
        rule: which.
        subject: of which device or process.
        value: the quantity: when it fired, and from then on its newest value.
        since_seconds: Unix time at which it was first beyond the limit.
        fired_seconds: at which it had been so for long enough.
        ended_seconds: at which it was over; None while it lasts.
    """

    rule: AlertRule
    subject: str
    value: float
    since_seconds: float
    fired_seconds: float
    ended_seconds: float | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        shown, limit = (
            show_value(self.rule.quantity, self.value),
            show_value(self.rule.quantity, self.rule.limit),
        )
        side = "over" if self.rule.above is not None else "under"
        return f"{self.subject}: {self.rule.summary or self.rule.name} ({shown}, {side} {limit})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for commands, webhooks and pages."""
        return {
            "alert": self.rule.name,
            "severity": self.rule.severity,
            "state": "firing" if self.ended_seconds is None else "ended",
            "subject": self.subject,
            "quantity": self.rule.quantity,
            "value": self.value,
            "limit": self.rule.limit,
            "text": self.text,
            "since_seconds": self.since_seconds,
            "fired_seconds": self.fired_seconds,
            "ended_seconds": self.ended_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """An alert that began or ended; ``told`` is false where it came again within its cooldown."""

    kind: Literal["fired", "ended"]
    alert: Alert
    told: bool


@dataclass
class _State:
    since: float
    fired: Alert | None = None


class AlertBook:
    """Judges quantities by rules, one state per rule and subject."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self.rules = tuple(rules)
        self._states: dict[tuple[str, str], _State] = {}
        self._told: dict[tuple[str, str], float] = {}
        self.fired_count: dict[str, int] = {rule.name: 0 for rule in rules}

    @property
    def firing(self) -> list[Alert]:
        """The alerts that are on, the worst and oldest first."""
        order = {"error": 0, "warning": 1, "info": 2}
        alerts = [state.fired for state in self._states.values() if state.fired is not None]
        return sorted(alerts, key=lambda one: (order[one.rule.severity], one.fired_seconds, one.rule.name))

    def judge(self, found: Iterable[Quantity], now_seconds: float) -> list[Change]:
        """What began and what ended with these quantities. A subject that is gone ends its alerts."""
        values = {(one.name, one.subject): one.value for one in found}
        changes = []
        for rule in self.rules:
            known = {subject for name, subject in values if name == rule.quantity}
            lasting = {subject for name, subject in self._states if name == rule.name}
            for subject in sorted(known | lasting):
                value = values.get((rule.quantity, subject))
                change = self._judge_one(rule, subject, value, now_seconds)
                if change is not None:
                    changes.append(change)
        return changes

    def _judge_one(self, rule: AlertRule, subject: str, value: float | None, now: float) -> Change | None:
        key = (rule.name, subject)
        state = self._states.get(key)
        if state is None:
            if value is None or not rule.beyond(value):
                return None
            state = self._states[key] = _State(since=now)
        if state.fired is not None:
            return self._go_on(key, state.fired, value, now)
        if value is None or not rule.beyond(value):
            del self._states[key]
            return None
        if now - state.since < rule.for_seconds:
            return None
        state.fired = Alert(
            rule=rule, subject=subject, value=value, since_seconds=state.since, fired_seconds=now
        )
        self.fired_count[rule.name] += 1
        told = now - self._told.get(key, float("-inf")) >= rule.cooldown_seconds
        if told:
            self._told[key] = now
        return Change(kind="fired", alert=state.fired, told=told)

    def _go_on(self, key: tuple[str, str], alert: Alert, value: float | None, now: float) -> Change | None:
        shown = alert.value if value is None else value
        over = value is None or alert.rule.back(value)
        newest = Alert(
            rule=alert.rule,
            subject=alert.subject,
            value=shown,
            since_seconds=alert.since_seconds,
            fired_seconds=alert.fired_seconds,
            ended_seconds=now if over else None,
        )
        if not over:
            self._states[key].fired = newest
            return None
        del self._states[key]
        return Change(kind="ended", alert=newest, told=self._told.get(key) == alert.fired_seconds)
