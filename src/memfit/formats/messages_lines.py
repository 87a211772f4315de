"""A log as plain lines: colours, prefixes of ranks and loggers, line ends and encodings taken away.

Lines are read one by one, so that a log of any size takes bounded memory; a line beyond 16 KiB (a notebook,
JSON) is cut into pieces that overlap.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

LONGEST_LINE = 1 << 14
OVERLAP = 1 << 11
_PIECE_BYTES = 1 << 18
_ESCAPES = re.compile(
    r"\x1b\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|\x1b[@-_]"
)
_CONTROLS: dict[int, str | None] = {
    **dict.fromkeys((*range(0x00, 0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xFEFF)),
    **dict.fromkeys((0xA0, 0x202F, 0x2009), " "),
}
_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"

_RANK = re.compile(
    r"\[(?:rank|default)\s?(?P<torch>\d{1,6})\]\s?:?"
    r"|\((?:\w{0,40}?(?:worker|executor)\w{0,40}?)[^()]{0,40}?(?:rank=|_TP|_DP)(?P<worker>\d{1,6})[^()]{0,60}\)"
    r"|\[rank:\s?(?P<bracket>\d{1,6})\]"
    r"|\brank[ =:]{1,2}(?P<plain>\d{1,6})\b",
    re.IGNORECASE,
)
_PREFIXES = (
    re.compile(r"\s{0,8}\[(?:rank|default)\s?\d{1,6}\]\s?:?\s?", re.IGNORECASE),
    re.compile(r"\[\d{1,4}\]:\s?"),
    re.compile(r"\([A-Za-z_][\w :.=,@/-]{0,120}(?:pid|rank)=[\w :.=,@/-]{0,80}\)\s?"),
    re.compile(r"[\w./-]{1,60}\s{0,20}\| "),
    re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s?"),
    re.compile(r"(?:std(?:out|err) [FP] )"),
    re.compile(r"\[(?:Info|Error|Warn(?:ing)?|Debug|INFO|ERROR|WARNING)\]\s?"),
    re.compile(
        r"(?:INFO|ERROR|WARNING|DEBUG|CRITICAL)\b(?: \d\d-\d\d \d\d:\d\d:\d\d)?:?"
        r"(?: \[[\w.]{1,60}:\d{1,6}\])? "
    ),
    re.compile(r"(?:#|>{1,3}|//) "),
    re.compile(r"\d{1,4}: (?=Traceback|  File|\w{1,60}Error|torch\.|RuntimeError)"),
)


class Line(NamedTuple):
    """One line of a log.

    Attributes:
        number: from 1; pieces of one long line have the same.
        text: without colours and prefixes.
        rank: which rank printed it, where the line says so.
    """

    number: int
    text: str
    rank: int | None


RawLine = tuple[int, str]
"""The number of a line, and its text as it is."""


def read_blocks(stream: IO[bytes], lines: int = 256) -> Iterator[list[RawLine]]:
    """The lines of a log in blocks. Any bytes can be read: what is no text becomes replacement characters."""
    block: list[RawLine] = []
    for number, raw in enumerate(_raw_lines(stream), 1):
        if len(raw) <= LONGEST_LINE:
            block.append((number, raw))
        else:
            steps = range(0, len(raw) - OVERLAP, LONGEST_LINE - OVERLAP)
            block += [(number, raw[begin : begin + LONGEST_LINE]) for begin in steps]
        if len(block) >= lines:
            yield block
            block = []
    if block:
        yield block


def block_text(block: Sequence[RawLine]) -> str:
    """All lines as one text in lower case, for a search."""
    text = "\n".join([raw for _, raw in block])
    return (_ESCAPES.sub("", text) if "\x1b" in text else text).lower()


def clean_line(number: int, raw: str) -> Line:
    """One line without what a terminal, a launcher or a logger put into it."""
    text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
    text = text.translate(_CONTROLS).rstrip()
    found = _RANK.search(text[:240])
    rank = None if found is None else int(next(group for group in found.groups() if group is not None))
    return Line(number, _without_prefixes(text), rank)


def _without_prefixes(text: str) -> str:
    for _ in range(5):
        for prefix in _PREFIXES:
            match = prefix.match(text)
            if match is not None and match.end():
                text = text[match.end() :]
                break
        else:
            break
    return text


def _raw_lines(stream: IO[bytes]) -> Iterator[str]:
    """Split at every kind of line end; a line without an end comes in pieces of bounded length."""
    head = stream.read(_PIECE_BYTES)
    decoder = codecs.getincrementaldecoder(_encoding(head))("replace")
    rest = ""
    piece = head
    while piece:
        text = rest + decoder.decode(piece)
        hold = text[-1:] if text.endswith("\r") else ""  # its "\n" may come with the next piece
        lines = text[: len(text) - len(hold)].splitlines(keepends=True)
        rest = (lines.pop() if lines and lines[-1][-1:] not in _ENDS else "") + hold
        yield from lines
        if len(rest) > 4 * _PIECE_BYTES:
            yield rest[:-OVERLAP]
            rest = rest[-OVERLAP:]
        piece = stream.read(_PIECE_BYTES)
    rest += decoder.decode(b"", final=True)
    if rest:
        yield from rest.splitlines()


def _encoding(head: bytes) -> str:
    """UTF-16 is what PowerShell's ``>`` writes."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = head[:400:2], head[1:400:2]
    if len(odd) > 8 and odd.count(0) > 0.7 * len(odd) and even.count(0) < 0.2 * len(even):
        return "utf-16-le"
    return "utf-8"
