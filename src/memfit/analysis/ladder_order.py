"""Which techniques a ladder climbs, and in which order: as the user names them, or the exact ones first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.analysis.candidates import settings_to_try
from memfit.analysis.ladder_times import no_time_term
from memfit.core.errors import UsageError
from memfit.core.exactness import EXACTNESS_ORDER, Exactness, allowed
from memfit.planning.figures import Settings

Asked = str | Settings | Any
"""A technique as text (``"micro_batching:micro_batches=4"``), as JSON settings, or as the object itself."""

APPLIED_FIRST = (
    "partial_quantization",
    "pruning",
    "vocabulary_padding",
    "channels_last",
    "lora",
    "qlora",
    "parameter_offload",
    "attention_backend",
)
"""Techniques that others must find in place: those that make other layers or parameters, those whose blocks
must be plain, and what a recomputed block must choose again."""

FORMS = "write name or name:setting=value, like micro_batching:micro_batches=4"


def read_techniques(asked: str | Sequence[Asked]) -> tuple[Settings, ...]:
    """The settings behind what the user named, in that order; loads torch.

    Raises:
        UsageError: no such technique or setting, or a value that the technique refuses.
    """
    from memfit.techniques import TECHNIQUES, technique_from_settings

    if isinstance(asked, str):
        asked = [part.strip() for part in asked.split(",") if part.strip()]
    found: list[Settings] = []
    for each in asked:
        if hasattr(each, "to_settings"):
            found.append(each.to_settings())
            continue
        settings = _from_text(each) if isinstance(each, str) else each
        if not isinstance(settings, Mapping):
            raise UsageError(f"technique {each!r}: {FORMS}")
        if settings.get("technique") in TECHNIQUES and len(settings) == 1:
            settings = _defaults(TECHNIQUES[settings["technique"]])
        found.append(technique_from_settings(settings).to_settings())
    if not found:
        raise UsageError(f"no technique is named: {FORMS}")
    return tuple(found)


def default_techniques() -> tuple[Settings, ...]:
    """Every technique once, with the settings that it is tried with first; loads torch."""
    from memfit.techniques import TECHNIQUES

    return tuple(settings[0] for kind in TECHNIQUES.values() if (settings := settings_to_try(kind)))


def in_order(
    candidates: Sequence[Settings], grades: Sequence[Mapping[str, Any]], allow: Exactness
) -> tuple[list[Settings], list[str]]:
    """Candidates that may be climbed, the most exact first, those without a predicted time last of their
    grade; and a sentence about each that is left out."""
    rows = list(zip(candidates, grades, strict=True))
    left_out = [
        f"{settings['technique']} is left out: its results are {grade['exactness']}, beyond {allow}"
        for settings, grade in rows
        if grade["exactness"] is not None and not allowed(grade["exactness"], allow)
    ]
    kept = [row for row in rows if row[1]["exactness"] is None or allowed(row[1]["exactness"], allow)]
    kept.sort(key=lambda row: _place(*row))
    return [settings for settings, _ in kept], left_out


def in_order_of_application(chain: Sequence[Settings]) -> tuple[Settings, ...]:
    """The chain as it is applied: first what makes other parameters, then the rest in their order."""
    last = len(APPLIED_FIRST)
    places = {name: place for place, name in enumerate(APPLIED_FIRST)}
    return tuple(sorted(chain, key=lambda settings: places.get(str(settings["technique"]), last)))


def _place(settings: Settings, grade: Mapping[str, Any]) -> tuple[int, bool]:
    exactness = grade["exactness"]
    rank = len(EXACTNESS_ORDER) if exactness is None else EXACTNESS_ORDER.index(exactness)
    return rank, no_time_term(settings) is not None


def _defaults(kind: Any) -> Settings:
    tried = settings_to_try(kind)
    if not tried:
        raise UsageError(f"{kind.name} has no defaults: name its settings, {FORMS}")
    return tried[0]


def _from_text(text: str) -> Settings:
    name, *pairs = text.split(":")
    settings: dict[str, Any] = {"technique": name.strip()}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"technique {text!r}: {pair!r} is no setting; {FORMS}")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    """JSON where it is some, with Python's names of truth values; else the text."""
    known = {"True": True, "False": False, "None": None}
    if text in known:
        return known[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
