"""Amounts and sums as evidence shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from memfit.core.units import GIB, MIB, format_bytes
from memfit.formats.messages import Message
from memfit.formats.messages_devices import Process
from memfit.formats.messages_traceback import read_place


def total_of(*sizes: int) -> str:
    """A sum with its parts in one unit: "5.20 + 0.03 + 1.42 = 6.65 GiB"."""
    unit, scale = ("GiB", GIB) if sum(map(abs, sizes)) >= GIB else ("MiB", MIB)
    parts = " + ".join(f"{size / scale:.2f}" for size in sizes)
    return f"{parts} = {sum(sizes) / scale:.2f} {unit}"


def difference_of(whole: int, *parts: int) -> str:
    """A difference with its parts in one unit: "12.53 - 1.06 = 11.47 GiB"."""
    unit, scale = ("GiB", GIB) if abs(whole) >= GIB else ("MiB", MIB)
    terms = "".join(f" - {part / scale:.2f}" for part in parts)
    return f"{whole / scale:.2f}{terms} = {(whole - sum(parts)) / scale:.2f} {unit}"


def numbers(values: Iterable[int]) -> str:
    """ "0-3, 7"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def where_of(message: Message) -> str | None:
    """Rank, GPU and the user's own line, as far as they are known."""
    place = read_place(message.before)
    ranks = f"rank{'s' if len(message.ranks) > 1 else ''} {numbers(message.ranks)}" if message.ranks else ""
    gpu = f"GPU {message.words['gpu']}" if "gpu" in message.words else ""
    line = place.where or (f"line {message.line}" if message.line > 1 else "")
    name = (
        Path(message.input).name
        if message.input not in ("text", "stdin", "") and line.startswith("line ")
        else ""
    )
    return ", ".join(part for part in (ranks, gpu, f"{name} {line}".strip()) if part) or None


def process_list(processes: Sequence[Process], most: int = 6) -> str:
    """ "1111 (14.91 GiB), 2222 (29.07 GiB)"."""
    shown = [
        f"{process.pid if process.pid is not None else '?'} ("
        f"{'unknown' if process.used_bytes is None else format_bytes(process.used_bytes)})"
        for process in processes[:most]
    ]
    more = f" and {len(processes) - most} more" if len(processes) > most else ""
    return ", ".join(shown) + more
