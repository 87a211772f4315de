"""The grammar of workload texts, ``kind:name,key=value,…``, and the words that all kinds share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from memfit.core.errors import UsageError
from memfit.core.workload import Precision

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SpecText:
    """A workload text taken apart: ``hf:gpt2,batch=8`` is kind ``hf``, name ``gpt2`` and one setting."""

    text: str
    kind: str
    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a ``dtype=`` word means: the dtype of the weights, and the autocast around the forward pass."""

    weights: torch.dtype
    precision: Precision


NUMERICS: Mapping[str, Numerics] = {
    "fp32": Numerics(weights=torch.float32, precision="fp32"),
    "bf16": Numerics(weights=torch.bfloat16, precision="fp32"),
    "bf16-autocast": Numerics(weights=torch.float32, precision="bf16-autocast"),
    "fp16-autocast": Numerics(weights=torch.float32, precision="fp16-autocast"),
}

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "adamw-for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def parse_spec(text: str) -> SpecText:
    """Takes ``kind:name,key=value,…`` apart. Raises UsageError for what is not of that form."""
    kind, _, rest = text.partition(":")
    name, *parts = rest.split(",")
    if not name.strip():
        raise UsageError(f"workload {text!r} names no model: write {kind}:NAME,batch=8")
    settings: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key or not value.strip():
            raise UsageError(f"{part!r} in workload {text!r} is not key=value")
        if key in settings:
            raise UsageError(f"{key!r} is given twice in workload {text!r}")
        settings[key] = value.strip()
    return SpecText(text=text, kind=kind, name=name.strip(), settings=settings)


def choice(value: str, among: Mapping[str, T], what: str) -> T:
    """``among[value]``. Raises UsageError with the close matches, or all choices, when there is none."""
    if value not in among:
        raise UsageError(f"{what} {value!r} is not known{suggestion(value, among)}")
    return among[value]


def suggestion(value: str, among: Iterable[str]) -> str:
    """``"; did you mean …?"`` with the words closest to ``value``, or the choices if they are few."""
    words = list(among)
    close = (
        difflib.get_close_matches(value, words, n=4, cutoff=0.55)
        or [w for w in words if value and value in w][:4]
    )
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; use one of {', '.join(words)}" if len(words) <= 30 else ""


def positive_int(settings: Mapping[str, str], key: str, default: int) -> int:
    """The whole number at ``key``. Raises UsageError when it is not a whole number of 1 or more."""
    text = settings.get(key)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key}={text} in the workload: use a whole number of 1 or more")
    return int(text)


def literal(text: str) -> Any:
    """The value that a setting's text means: a number, true/false/none, or the text itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
