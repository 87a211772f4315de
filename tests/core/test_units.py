"""Sizes as people write them: the verdicts of the published table of size strings, and more of each kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, format_seconds, parse_bytes

GB = 10**9
GIB = 2**30

READ = {
    # decimal and binary units are never confused
    "8GB": 8 * GB,
    "8 GiB": 8 * GIB,
    "8GiB": 8 * GIB,
    "24 MB": 24 * 10**6,
    "24 MiB": 24 * 2**20,
    "0.5TB": 500 * GB,
    "0.5TiB": 2**39,
    "1PB": 10**15,
    "3 kB": 3000,
    "3 KB": 3000,
    "3 KiB": 3072,
    # one documented meaning of the bare letter, in either case
    "8g": 8 * GIB,
    "8G": 8 * GIB,
    "7.6G": 8160437862,
    "100M": 100 * 2**20,
    "100m": 100 * 2**20,
    "16 Gi": 16 * GIB,
    "16gi": 16 * GIB,
    "2T": 2**41,
    "64k": 65536,
    # lower case is bytes where nothing suggests bits
    "80gb": 80 * GB,
    "80gib": 80 * GIB,
    "512mb": 512 * 10**6,
    "100b": 100,
    "100B": 100,
    "80 GIB": 80 * GIB,
    # blanks
    "512MB ": 512 * 10**6,
    " 24 GB": 24 * GB,
    "\t24\tGB\n": 24 * GB,
    "8\u00a0GB": 8 * GB,
    "8\u202fGiB": 8 * GIB,
    # numbers
    "1e9": GB,
    "12e9": 12 * GB,
    "1.5e3 MB": 1500 * 10**6,
    "1.500GB": 1500 * 10**6,
    "17179869184": 16 * GIB,
    "1_000_000": 10**6,
    "0": 0,
    "0GB": 0,
    "4096": 4096,
    ".5GB": GB // 2,
    "8.GB": 8 * GB,
    "0.3B": 0,
}

REFUSED = {
    "8Gb": "bits",
    "8Gib": "bits",
    "8Mb": "bits",
    "100Kb": "bits",
    "64000MiBGiB": "unit",
    "8GBs": "unit",
    "8 GB/s": "not a size",
    "8 gigs": "unit",
    "8iB": "unit",
    "8EB": "unit",
    "110": "no unit",
    "8": "no unit",
    "7.5": "no unit",
    "1,5GB": "not a size",
    "1,000": "not a size",
    "-1GB": "not a size",
    "+1GB": "not a size",
    "": "not a size",
    "   ": "not a size",
    "GB": "not a size",
    "nan GB": "not a size",
    "infGB": "not a size",
    "inf": "not a size",
    "1e400GB": "larger",
    "1e999999999GB": "not a size",
    "9" * 40: "larger",
    "9" * 400: "not a size",
    "8 G B": "not a size",
    "8 8GB": "not a size",
    "80%": "not a size",
    "８GB": "not a size",
    "٨GB": "not a size",
    "0x10": "not a size",
    "8GB extra": "not a size",
    "1__0GB": "not a size",
    "None": "not a size",
}


@pytest.mark.parametrize(("text", "count"), READ.items(), ids=repr)
def test_reads(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=[repr(text)[:24] for text in REFUSED])
def test_refuses_with_what_where_and_remedy(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_bytes(text, what="--budget")
    message = str(refusal.value)
    assert reason in message
    assert message.startswith("--budget ")
    assert repr(text)[:40].rstrip("'") in message
    assert "write" in message
    assert "\n" not in message and len(message) < 250


@pytest.mark.parametrize("count", [0, 1, 110, 8 * GIB, 1e9])
def test_numbers_are_bytes(count: float) -> None:
    assert parse_bytes(count) == count


@pytest.mark.parametrize("wrong", [-1, 1.5, float("nan"), float("inf"), True, None, 2**63, [8]])
def test_refuses_other_values(wrong: object) -> None:
    with pytest.raises(UsageError):
        parse_bytes(wrong)  # type: ignore[arg-type]


@given(st.text(max_size=80))
def test_any_text_gives_bytes_or_a_clear_refusal(text: str) -> None:
    try:
        count = parse_bytes(text)
    except UsageError as refusal:
        assert len(str(refusal)) < 400
    else:
        assert 0 <= count < 2**63


UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == parse_bytes(f" {number} {unit} ") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8519680, "8.12 MiB"),
        (13261262029, "12.35 GiB"),
        (GIB - 1, "1.00 GiB"),
        (-3 * 2**20, "-3.00 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_formats_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**62))
def test_what_is_shown_reads_back_within_its_rounding(count: int) -> None:
    # Two decimals are right to half of the last; a part of a byte is cut off in reading.
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.005 + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (0.00085, "850 µs"),
        (0.001, "1 ms"),
        (0.0234, "23.4 ms"),
        (0.9999, "1 s"),
        (1.25, "1.25 s"),
        (59.97, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7384, "2 h 03 min"),
        (-1.5, "-1.5 s"),
    ],
)
def test_formats_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
