"""Sizes and times as people write them, and back.

`GB` is 10⁹ bytes and `GiB` is 2³⁰ bytes, always. A bare `K`, `M`, `G` or `T` (either case) and `Ki`, `Mi`,
`Gi`, `Ti` mean the binary unit: ``8g`` = ``8G`` = ``8 GiB``. A lower-case ``b`` after a capital (``8Gb``) may
mean bits, so it is refused. A bare number is a number of bytes, and a small one is refused for want of a
unit.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from memfit.core.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_PREFIXES = "kmgtp"
_LARGEST_BYTES = (1 << 63) - 1
_LONGEST_TEXT = 64
_FEWEST_BARE_BYTES = 1024
_NO_BREAK_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
_SIZE = re.compile(
    r"(?P<number>(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"[ \t]*(?P<unit>[A-Za-z]*)"
)
_UNIT = re.compile(r"(?P<prefix>[kmgtpKMGTP]?)(?P<binary>[iI]?)(?P<byte>[bB]?)")
_ACCEPTED = "write it like 8GiB (2^30 bytes), 8GB (10^9 bytes), 512MiB, or in bytes"


def parse_bytes(text: str | int | float, *, what: str = "size") -> int:
    """The number of bytes that ``text`` means, rounded down to a whole byte.

    Args:
        text: ``"8GiB"``, ``"7.5 GB"``, ``"8g"`` (= 8 GiB), ``"1e9"`` (bytes), or a whole number of bytes.
        what: what is being read, for the message (``"--budget"``).

    Raises:
        UsageError: the text names no size, or may be read in two ways (``"8Gb"``, ``"1,5GB"``, ``"110"``).

    Examples:
        >>> parse_bytes("8GiB"), parse_bytes("8g"), parse_bytes("8 GB")
        (8589934592, 8589934592, 8000000000)
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UsageError(f"{what} {text!r} is not a size: {_ACCEPTED}")
    if isinstance(text, int | float):
        return _whole_bytes(text, what)
    return _checked(_bytes_of_text(text, what), text, what)


def format_bytes(count: int | float) -> str:
    """``count`` bytes in the binary unit that suits: ``"12.35 GiB"``, ``"512 B"``, ``"-3.00 MiB"``."""
    sign, rest = ("-", -count) if count < 0 else ("", count)
    for unit, scale in (("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        shown = f"{rest:.0f}" if scale == 1 else f"{rest / scale:.2f}"
        if float(shown) < KIB:
            return f"{sign}{shown} {unit}"
    return f"{sign}{rest / (GIB << 10):.2f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that suits: ``"850 µs"``, ``"23.4 ms"``, ``"1.25 s"``, ``"3 min 05 s"``."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _bytes_of_text(text: str, what: str) -> Fraction:
    trimmed = text.translate(_NO_BREAK_SPACES).strip(" \t\r\n")
    match = _SIZE.fullmatch(trimmed) if len(trimmed) <= _LONGEST_TEXT else None
    if match is None:
        raise UsageError(f"{what} {_shown(text)} is not a size: {_ACCEPTED}")
    number = Fraction(match["number"].replace("_", ""))
    if match["unit"]:
        return number * _unit_bytes(match["unit"], text, what)
    if number.denominator != 1 or 0 < number < _FEWEST_BARE_BYTES:
        bare = match["number"]
        raise UsageError(
            f"{what} {_shown(text)} has no unit: write {bare}GiB, {bare}GB, {bare}MiB or {bare}B"
        )
    return number


def _unit_bytes(unit: str, text: str, what: str) -> int:
    match = _UNIT.fullmatch(unit)
    if match is None or (match["binary"] and not match["prefix"]):
        raise UsageError(f"{what} {_shown(text)} has an unknown unit {_shown(unit)}: {_ACCEPTED}")
    if match["byte"] == "b" and unit != unit.lower():
        raise UsageError(f"{what} {_shown(text)}: {unit!r} may mean bits; write {unit[:-1]}B for bytes")
    power = _PREFIXES.index(match["prefix"].lower()) + 1 if match["prefix"] else 0
    decimal = match["byte"] and not match["binary"]
    return int(1000**power if decimal else 1024**power)


def _whole_bytes(number: int | float, what: str) -> int:
    if isinstance(number, float) and (not math.isfinite(number) or not number.is_integer()):
        raise UsageError(f"{what} {number!r} is not a whole number of bytes: {_ACCEPTED}")
    return _checked(Fraction(number), number, what)


def _checked(count: Fraction, given: object, what: str) -> int:
    if count < 0:
        raise UsageError(f"{what} {given!r} is negative: {_ACCEPTED}")
    if count > _LARGEST_BYTES:
        raise UsageError(f"{what} {_shown(given)} is larger than any memory: {_ACCEPTED}")
    return math.floor(count)


def _shown(given: object) -> str:
    shown = repr(given)
    return shown if len(shown) <= _LONGEST_TEXT else shown[:_LONGEST_TEXT] + "…'"
