"""Alert rules as data: what is watched, beyond which limit, for how long, and how often it is told."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from memfit.core.errors import InputError, UsageError
from memfit.core.units import format_bytes, format_seconds, parse_bytes
from memfit.monitor.quantities import QUANTITIES

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One thing to be told of.

    Args:
        name: of the alert.
        quantity: a name of `memfit.monitor.quantities.QUANTITIES`.
        above: it fires over this limit.
        below: it fires under this limit; exactly one of the two is given.
        clear: it is over when the quantity is back at this value (hysteresis); the limit unless given.
        for_seconds: it must be beyond the limit for so long before it fires.
        cooldown_seconds: after it was told it is not told again for so long, however often it comes and goes.
        severity: how bad it is.
        summary: what it means, in one line.

    Raises:
        UsageError: an unknown quantity, no limit or two, a value on the wrong side.

    Examples:
        >>> AlertRule(name="nearly-full", quantity="device_used_ratio", above=0.9, clear=0.85).limit
        0.9
    """

    name: str
    quantity: str
    above: float | None = None
    below: float | None = None
    clear: float | None = None
    for_seconds: float = 0.0
    cooldown_seconds: float = 600.0
    severity: Severity = "warning"
    summary: str = ""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise UsageError(f"alert rule {self.name!r}: {problem}")

    @property
    def limit(self) -> float:
        """The value beyond which it fires."""
        limit = self.above if self.above is not None else self.below
        assert limit is not None
        return limit

    def beyond(self, value: float) -> bool:
        """Whether ``value`` is beyond the limit."""
        return value > self.limit if self.above is not None else value < self.limit

    def back(self, value: float) -> bool:
        """Whether ``value`` is so far back that the alert is over."""
        clear = self.limit if self.clear is None else self.clear
        return value <= clear if self.above is not None else value >= clear


def _problem(rule: AlertRule) -> str | None:
    if rule.quantity not in QUANTITIES:
        close = difflib.get_close_matches(rule.quantity, QUANTITIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown quantity {rule.quantity!r}{hint} (valid: {', '.join(QUANTITIES)})"
    if (rule.above is None) == (rule.below is None):
        return "give exactly one of above and below"
    if rule.severity not in get_args(Severity):
        return f"severity {rule.severity!r} is none of {', '.join(get_args(Severity))}"
    if rule.clear is not None and rule.beyond(rule.clear):
        return f"clear {rule.clear:g} is beyond the limit {rule.limit:g}, so it would never be over"
    numbers = (rule.limit, rule.for_seconds, rule.cooldown_seconds)
    if any(math.isnan(number) for number in numbers) or min(numbers[1:]) < 0:
        return "times must be 0 or more, and numbers must be numbers"
    return None


RULES: tuple[AlertRule, ...] = (
    AlertRule(
        name="out-of-memory", quantity="ooms_per_minute", above=0, severity="error", cooldown_seconds=60,
        summary="PyTorch ran out of memory",
    ),
    AlertRule(
        name="time-to-oom", quantity="time_to_oom_seconds", below=7200, clear=14400, for_seconds=30,
        severity="error", summary="memory grows, and will be full",
    ),
    AlertRule(
        name="leak", quantity="growth_bytes_per_step", above=64 << 10, for_seconds=60,
        summary="what is held at the end of a step grows with every step",
    ),
    AlertRule(
        name="alloc-retries", quantity="alloc_retries_per_minute", above=0,
        summary="PyTorch had to empty its cache to serve requests: the next may fail",
    ),
    AlertRule(
        name="fragmentation", quantity="stranded_ratio", above=0.5, clear=0.4, for_seconds=60,
        summary="most of the free memory lies in pieces that large requests cannot use",
    ),
    AlertRule(
        name="nearly-full", quantity="device_used_ratio", above=0.97, clear=0.95, for_seconds=300,
        severity="info", summary="the device is nearly full (normal for servers that take all memory ahead)",
    ),
    AlertRule(
        name="untracked-growth", quantity="untracked_growth_bytes", above=float(1 << 30), for_seconds=30,
        summary="memory outside PyTorch's allocator grew: another process, NCCL, or a library",
    ),
    AlertRule(
        name="rank-imbalance", quantity="rank_imbalance_ratio", above=0.15, clear=0.1, for_seconds=900,
        summary="one rank holds far more than the others",
    ),
    AlertRule(
        name="shm-full", quantity="shm_used_ratio", above=0.9, clear=0.8, for_seconds=10, severity="error",
        summary="/dev/shm is nearly full: data loader workers will be killed with a bus error",
    ),
    AlertRule(
        name="host-memory", quantity="host_used_ratio", above=0.95, clear=0.9, for_seconds=30,
        summary="main memory is nearly full: the system may kill the job",
    ),
)  # fmt: skip
"""The rules that are used unless others are given."""

_NAMES = tuple(one.name for one in fields(AlertRule))


def read_rules(path: Path) -> tuple[AlertRule, ...]:
    """Rules from a YAML or JSON file: a list of mappings with the fields of `AlertRule`.

    A rule that has the name of a shipped one replaces it; ``defaults: false`` beside ``rules:`` leaves the
    shipped ones out. Byte limits may be written as sizes (``above: 2GiB``).

    Raises:
        InputError: the file cannot be read.
        UsageError: a rule cannot be meant; the message names the rule, the key and the valid ones.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    told = content if isinstance(content, Mapping) else {"rules": content}
    rows = told.get("rules")
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a list of rules, or a mapping with `rules:`")
    rules = tuple(_rule(row, f"{path}, rule {place + 1}") for place, row in enumerate(rows))
    return with_defaults(rules) if told.get("defaults", True) else rules


def with_defaults(rules: Sequence[AlertRule]) -> tuple[AlertRule, ...]:
    """The shipped rules, those of the same name replaced, and the rest of ``rules`` behind them."""
    by_name = {rule.name: rule for rule in RULES} | {rule.name: rule for rule in rules}
    return tuple(by_name.values())


def _rule(row: Any, where: str) -> AlertRule:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: {row!r} is not a mapping with {', '.join(_NAMES)}")
    for key in row:
        if key not in _NAMES:
            close = difflib.get_close_matches(str(key), _NAMES, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{where}: unknown key {key!r}{hint} (valid: {', '.join(_NAMES)})")
    if "name" not in row or "quantity" not in row:
        raise UsageError(f"{where}: a rule needs `name` and `quantity`")
    values = {key: _value(key, value, row, where) for key, value in row.items()}
    return AlertRule(**values)


def _value(key: str, value: Any, row: Mapping[str, Any], where: str) -> Any:
    if key in ("name", "quantity", "summary", "severity"):
        return str(value)
    if isinstance(value, str) and "bytes" in str(row.get("quantity")):
        return float(parse_bytes(value, what=f"{where}, {key}"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {key} is {value!r}, not a number")
    return float(value)


def show_value(quantity: str, value: float) -> str:
    """A quantity as people read it."""
    if "bytes" in quantity:
        unit = quantity.rpartition("_per_")[2] if "_per_" in quantity else ""
        return f"{format_bytes(value)}{' a ' + unit if unit else ''}"
    if quantity.endswith("_seconds"):
        return "never" if math.isinf(value) else format_seconds(value)
    return f"{100 * value:.1f} %" if quantity.endswith("_ratio") else f"{value:g}"
