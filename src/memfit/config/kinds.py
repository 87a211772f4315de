"""What a setting may be: how its text is read, and what is said when it cannot be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes

FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML 1.1's words for true and false."""

_WHOLE = re.compile(r"[+]?(0|[1-9][0-9_]*)")
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_BASE_60 = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_COMMA = re.compile(r"[0-9]+(,[0-9]+)+")
_EXPONENT = re.compile(r"([-+]?[0-9]+)([eE][-+]?[0-9]+)")


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        valid: what may be written, in words, for error messages and documentation.
        read: from the text as written to the value; raises ValueError that says what is wrong.
    """

    valid: str
    read: Callable[[str], Any]


def slip(text: str) -> str | None:
    """Why a plain YAML scalar is read differently by different programs, and how to write it; None if it is
    not."""
    if _LEADING_ZERO.fullmatch(text):
        return (
            f"a leading zero means octal to some YAML readers: write {text.lstrip('+-0_') or '0'} or quote it"
        )
    if _BASE_60.fullmatch(text):
        return "YAML 1.1 reads colons as base 60: quote it, or write one number"
    if _COMMA.fullmatch(text):
        return "a comma makes no list and no decimal: write a list as [0, 1], a decimal with a point"
    exponent = _EXPONENT.fullmatch(text)
    if exponent:
        return f"YAML 1.1 reads it as text, not as a number: write {exponent[1]}.0{exponent[2]}"
    return None


def _refuse_slip(text: str) -> None:
    why = slip(text)
    if why is not None and not _EXPONENT.fullmatch(text):
        raise ValueError(why)


def _size(text: str) -> int:
    plain = text.replace("_", "")
    try:
        count = parse_bytes(plain if plain.isdigit() else text)
    except UsageError as problem:
        raise ValueError(str(problem)) from None
    if count <= 0:
        raise ValueError("it must be above 0")
    return count


def _flag(text: str) -> bool:
    try:
        return FLAGS[text.lower()]
    except KeyError:
        raise ValueError("it is neither true nor false") from None


def whole(least: int) -> Kind:
    """A whole number of at least ``least``."""

    def read(text: str) -> int:
        _refuse_slip(text)
        if not _WHOLE.fullmatch(text):
            raise ValueError("it is no whole number")
        number = int(text.replace("_", ""))
        if number < least:
            raise ValueError(f"it is less than {least}")
        return number

    return Kind(f"a whole number, {least} or more", read)


def _number(text: str) -> float:
    _refuse_slip(text)
    if not _NUMBER.fullmatch(text):
        raise ValueError("it is no number")
    return float(text.replace("_", ""))


def share() -> Kind:
    """A number above 0, up to 1."""

    def read(text: str) -> float:
        if text.endswith("%"):
            raise ValueError(f"write it as a share of 1, like {_number(text[:-1]) / 100:g}")
        number = _number(text)
        if not 0 < number <= 1:
            raise ValueError("it is not above 0 and at most 1")
        return number

    return Kind("a number above 0 and at most 1", read)


def choice(*names: str) -> Kind:
    """One of some names."""

    def read(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        near = difflib.get_close_matches(text.lower(), names, n=1)
        raise ValueError(f"there is no such choice{f'; did you mean {near[0]}?' if near else ''}")

    return Kind(" or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}", read)


def whole_or(*names: str) -> Kind:
    """A whole number from 0 on, or one of some names."""
    words, number = choice(*names), whole(0)

    def read(text: str) -> str | int:
        return int(number.read(text)) if text[:1].isdigit() else str(words.read(text))

    return Kind(f"{', '.join(names)} or a whole number of 0 or more", read)


def _folder(text: str) -> str | bool:
    return FLAGS.get(text.lower(), text)


def _scaling(text: str) -> str | float:
    if text.lower() in ("dynamic", "true", "yes", "on"):
        return "dynamic"
    if text.lower() in FLAGS:
        raise ValueError(
            "fp16 without loss scaling loses small gradients: use precision: bf16, which needs none"
        )
    number = _number(text)
    if number <= 0:
        raise ValueError("a scale is above 0")
    return number


SIZE = Kind('a size like "8GB" (10^9 bytes), "8GiB" (2^30 bytes) or a number of bytes', _size)
FLAG = Kind("true or false", _flag)
TEXT = Kind("text", str)
FOLDER = Kind("a folder, or true for memfit-profiles, or false", _folder)
LOSS_SCALING = Kind("dynamic, or the first scale as a number above 0", _scaling)
