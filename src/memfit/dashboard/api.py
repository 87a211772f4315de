"""The page's questions and their answers: plain functions from a feed to JSON values.

Everything is a question: nothing here changes what is monitored, what alerts do, or any file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from memfit.core.errors import UsageError
from memfit.dashboard.feeds import Feed
from memfit.dashboard.look import paints_json

DEFAULT_POINTS = 1200

Parameters = Mapping[str, str]


def state(feed: Feed, parameters: Parameters) -> dict[str, Any]:
    """Everything that is known now."""
    return feed.state


def timeline(feed: Feed, parameters: Parameters) -> dict[str, Any]:
    """Memory over time. Parameters: ``subject``, ``begin``, ``end``, ``points``."""
    begin = number(parameters, "begin", -math.inf)
    end = number(parameters, "end", math.inf)
    return feed.timeline(parameters.get("subject", ""), begin, end, _points(parameters))


def steps(feed: Feed, parameters: Parameters) -> dict[str, Any]:
    """Peaks by step. Parameters: ``subject``, ``points``."""
    return feed.steps(parameters.get("subject", ""), _points(parameters))


def moment(feed: Feed, parameters: Parameters) -> dict[str, Any]:
    """Who held memory at one moment. Parameters: ``subject``, ``at``."""
    return feed.moment(parameters.get("subject", ""), number(parameters, "at", 0.0))


def look(feed: Feed, parameters: Parameters) -> dict[str, Any]:
    """Names and colours of categories and parts."""
    return {"paints": paints_json()}


QUESTIONS: Mapping[str, Callable[[Feed, Parameters], dict[str, Any]]] = {
    "state": state,
    "timeline": timeline,
    "steps": steps,
    "moment": moment,
    "look": look,
}
"""Everything that can be asked, below ``/api/``."""


def number(parameters: Parameters, name: str, default: float) -> float:
    """A parameter as a number; raises UsageError where it is none."""
    text = parameters.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"{name}={text[:40]!r} is no number")
    return value


def _points(parameters: Parameters) -> int:
    return int(min(max(number(parameters, "points", DEFAULT_POINTS), 3), 1e6))
