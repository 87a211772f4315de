"""A setting of the allocator, or a size, on its own: whether PyTorch takes it, and what it means."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

from memfit.allocators.settings import KEYS, parse_settings
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.wording import where_of
from memfit.analysis.findings import Advice, Finding
from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, parse_bytes
from memfit.formats.messages import Message

MOST_LINES = 400
LONGEST = 400
_ASSIGNED = re.compile(
    r"\s{0,8}(?:export |set |setx |\$env:|env |ENV |-e )?\s{0,4}(PYTORCH_\w{0,10}ALLOC_CONF)"
    r"\s{0,4}[= ]\s{0,4}(.{0,300})",
    re.DOTALL,
)
_SETTING = re.compile(r"[\"']?[A-Za-z_]{3,40}\s{0,3}[:=]|[A-Za-z]:\\")
_SIZE = re.compile(r"\s{0,8}[-+]?[\d.,_]{1,30}\s{0,4}[A-Za-z%]{0,8}\s{0,8}")
_NAMES = {
    "value": "setting",
    "conf": "setting",
    "setting": "setting",
    "text": "size",
    "size": "size",
    "budget": "size",
}


def strings_in(text: str) -> list[tuple[str, str]] | None:
    """The settings and sizes that a text consists of, as ``(kind, value)``; None where it is another."""
    if len(text) > MOST_LINES * LONGEST:
        return None
    lines = text.splitlines() or [text]
    if len(lines) > MOST_LINES:
        return None
    found = list(_rows(lines)) if all(line.lstrip().startswith("{") for line in lines if line.strip()) else []
    if found:
        return found
    rows = [(_kind(line), line) for line in lines if line.strip()]
    if not rows or not all(kind for kind, _ in rows):
        return None
    return [(kind, _value(line)) for kind, line in rows]


def _rows(lines: list[str]) -> Iterator[tuple[str, str]]:
    """JSON lines with one text each."""
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            return
        for name, value in row.items() if isinstance(row, dict) else ():
            if name in _NAMES and isinstance(value, str) and len(value) <= LONGEST:
                yield _NAMES[name], value


def _kind(line: str) -> str:
    if len(line) > LONGEST:
        return ""
    if _ASSIGNED.match(line):
        return "setting"
    if _SIZE.fullmatch(line):
        return "size"
    plain = line.strip().strip("\"'")
    key = re.split(r"[:=]", plain, maxsplit=1)[0].strip()
    if _SETTING.match(line.strip()) and difflib.get_close_matches(key, KEYS, n=1, cutoff=0.7):
        return "setting"
    return "setting" if plain in KEYS else ""


def _value(line: str) -> str:
    found = _ASSIGNED.match(line)
    return line if found is None else found[2].strip()


def explain_strings(clues: Clues) -> list[Finding]:
    """A finding for each setting and each size."""
    return [
        _setting(value, where) if kind == "setting" else _size(value, where)
        for kind, value, where in clues.strings
    ]


def _setting(value: str, where: str | None) -> Finding:
    try:
        warnings = parse_settings(value).warnings
    except UsageError as error:
        reason = str(error).partition(": ")[2] or str(error)
        better = corrected(value)
        return Finding(
            rule="allocator_setting",
            verdict="not_memory",
            severity="error",
            confidence="high",
            summary=f"PyTorch rejects {value!r}",
            evidence=(reason,),
            where=where,
            advice=()
            if better is None
            else (
                Advice(
                    action="write it so",
                    typed=f"export PYTORCH_CUDA_ALLOC_CONF={better}",
                    kind="shell",
                ),
            ),
        )
    return Finding(
        rule="allocator_setting",
        verdict="unknown",
        severity="warning" if warnings else "info",
        confidence="high",
        summary=f"PyTorch accepts {value!r}" + (", but mind how" if warnings else ""),
        evidence=warnings or ("nothing in it is misread" if value.strip() else "empty: the defaults",),
        where=where,
    )


def corrected(value: str) -> str | None:
    """What was most likely meant, as PyTorch takes it; None where that is not plain."""
    plain = value.strip().strip("\"'").strip()
    plain = re.sub(r"^\w{0,20}ALLOC_CONF\s{0,3}=\s{0,3}", "", plain)
    parts = [part for part in re.split(r"[,;\s]+(?=[A-Za-z_]{4})", plain.strip(",; ")) if part]
    fixed = [_corrected_entry(part.strip(",; ")) for part in parts]
    if not fixed or not all(fixed):
        return None
    text = ",".join(str(entry) for entry in fixed)
    try:
        parse_settings(text)
    except UsageError:
        return None
    return text if text != value.strip() else None


def _corrected_entry(entry: str) -> str | None:
    found = re.fullmatch(r"([A-Za-z_]{3,40})\s{0,3}[:=]?\s{0,3}(.{0,200})", entry, re.DOTALL)
    if found is None:
        return None
    close = difflib.get_close_matches(found[1], KEYS, n=1, cutoff=0.7)
    if not close:
        return None
    value = found[2].strip()
    truth = {
        "true": "True",
        "1": "True",
        "on": "True",
        "yes": "True",
        "false": "False",
        "0": "False",
        "off": "False",
    }
    if close[0] in ("expandable_segments",):
        value = truth.get(value.lower(), value or "True")
    elif close[0] == "backend":
        value = {"cudamallocasync": "cudaMallocAsync", "native": "native"}.get(value.lower(), value)
    elif close[0] == "max_split_size_mb":
        value = _mebibytes(value)
    elif close[0] == "garbage_collection_threshold":
        share = re.fullmatch(r"(\d{1,2})\s?%", value)
        value = f"0.{share[1]:0>2}" if share else re.sub(r"^0,(\d)", r"0.\1", value)
    return f"{close[0]}:{value}" if value else None


def _mebibytes(value: str) -> str:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s?([MG])i?B?", value, re.IGNORECASE)
    if found is None:
        return value
    return str(round(float(found[1]) * (1024 if found[2].lower() == "g" else 1)))


def _size(text: str, where: str | None) -> Finding:
    try:
        size = parse_bytes(text)
    except UsageError as error:
        return Finding(
            rule="size",
            verdict="unknown",
            severity="error",
            confidence="high",
            summary=f"{text!r} is not read as a size",
            evidence=(str(error),),
            where=where,
        )
    return Finding(
        rule="size",
        verdict="unknown",
        severity="info",
        confidence="high",
        summary=f"{text.strip()!r} is {size:,} bytes ({format_bytes(size)})",
        evidence=("GB is 10^9 bytes and GiB 2^30; a bare G is GiB",),
        bytes=size,
        where=where,
    )


def explain_option(message: Message, clues: Clues) -> Finding:
    """PyTorch refused the variable's value at its start."""
    option = message.words.get("option", "")
    configured = [fact.words["value"] for fact in clues.facts("allocator-configuration")]
    if configured:
        return _setting(configured[-1], where_of(message))
    better = corrected(option) if option else None
    return Finding(
        rule="allocator_setting",
        verdict="not_memory",
        severity="error",
        confidence="high",
        summary=f"PyTorch does not know the allocator option {option!r}",
        evidence=(
            "entries are KEY:VALUE with a colon, one comma between them, no quotation marks and no path",
            f"keys are: {', '.join(sorted(KEYS)[:8])} …",
        ),
        where=where_of(message),
        advice=(
            Advice(
                action="write it so",
                typed=f"export PYTORCH_CUDA_ALLOC_CONF={better or 'expandable_segments:True'}",
                kind="shell",
            ),
        ),
    )


def explain_configured(clues: Clues) -> list[Finding]:
    """Settings that stand in a log and that PyTorch refuses or misreads."""
    findings = [
        _setting(value, None)
        for value in dict.fromkeys(f.words["value"] for f in clues.facts("allocator-configuration"))
    ]
    return [finding for finding in findings if finding.severity != "info"]
