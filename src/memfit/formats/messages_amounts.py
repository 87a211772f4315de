"""Amounts of memory as error texts write them, and the patterns that find them.

Programs print amounts rounded, in binary units that some of them call GB, with a decimal comma in some
locales, and as a wrapped negative number where they know none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

NUMBER = r"-?(?:\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,6})?|\d{1,20}(?:[.,]\d{1,9})?)"
UNIT = r"(?:bytes?|[KMGTPE]i?Bytes|[KMGTPE]i?B|[KMGTPE]i?|B)(?![A-Za-z])"
AMOUNT = rf"({NUMBER}\s?{UNIT})"
"""One group: a number and its unit, such as "10.84 GiB", "1900,00 MiB", "-1.05GiB", "6,291,456 bytes"."""

UNKNOWN_FROM_BYTES = 1 << 62
"""What is this large is no size: a driver's "not available" or a negative number, printed unsigned."""

_PARTS = re.compile(rf"\s{{0,4}}(?P<number>{NUMBER})\s?(?P<unit>{UNIT})\s{{0,4}}", re.IGNORECASE)
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3}){1,6}")
_POWERS: Mapping[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}


def read_amount(text: str, *, decimal: bool = False) -> int | None:
    """The bytes that an amount in a program's text means, rounded; None where it is not one.

    Args:
        text: such as ``"10.84 GiB"``.
        decimal: whether this program's "GB" is 10⁹ bytes; most mean 2³⁰.

    Examples:
        >>> read_amount("1.5 GiB"), read_amount("1900,00 MiB"), read_amount("6,291,456 bytes")
        (1610612736, 1992294400, 6291456)
    """
    match = _PARTS.fullmatch(text)
    if match is None:
        return None
    number, unit = match["number"], match["unit"].lower()
    whole = number.partition(".")[0]
    if _GROUPED.fullmatch(whole) and ("." in number or not unit.startswith(("k", "m", "g", "t", "p", "e"))):
        number = number.replace(",", "")
    prefix = "" if unit.startswith("b") else unit[0]
    base = 1000 if decimal and "i" not in unit else 1024
    scale: int = base ** _POWERS[prefix]
    return round(Fraction(number.replace(",", ".")) * scale)


def first_amount(pattern: re.Pattern[str], text: str, *, decimal: bool = False) -> int | None:
    """The amount in the first group of the first match."""
    match = pattern.search(text)
    return None if match is None else read_amount(match[1], decimal=decimal)


def sized(pattern: str) -> re.Pattern[str]:
    """A pattern in which "AMOUNT" stands for an amount."""
    return re.compile(pattern.replace("AMOUNT", AMOUNT), re.IGNORECASE)


def signed_bytes(value: int) -> int:
    """A size that wrapped around, as the negative number that it was."""
    return value - (1 << 64)
