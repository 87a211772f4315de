"""All that the inputs tell, brought together: messages, GPUs, processes, recordings, hints about the job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.core.recording import Recording
from memfit.core.units import format_bytes
from memfit.formats.messages import Message
from memfit.formats.messages_amounts import read_amount
from memfit.formats.messages_devices import Device, Process

MOST_HINTS = 200
_UNIT = re.compile(r"(?:^|[_ .(\[])(k|m|g|t)?(i?b)(?:ytes)?\)?\]?$|_bytes$|^bytes$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input, and what it was read as."""

    name: str
    kind: str
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "size_bytes": self.size_bytes}


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a small JSON file beside an error says of the job and its machine.

    Attributes:
        values: all of it, flat; sizes in bytes.
        words: every key and text in lower case, for a look at what is mentioned.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""

    def size(self, *marks: str, without: Sequence[str] = ()) -> int | None:
        """The first size whose name has every one of these marks."""
        for name, value in self.values.items():
            plain = name.lower()
            if not isinstance(value, int) or isinstance(value, bool) or not plain.endswith("_bytes"):
                continue
            if all(re.search(mark, plain) for mark in marks) and not any(mark in plain for mark in without):
                return value
        return None

    @property
    def gpu_total_bytes(self) -> int | None:
        """What the GPU has."""
        return self.size(
            r"gpu|device|card|vram", r"total|capacity|size|memory|vram", without=("used", "free")
        )

    @property
    def gpu_used_bytes(self) -> int | None:
        """What was in use before the job started."""
        return self.size(r"gpu|device|card|vram", r"used|busy|occupied")

    @property
    def host_total_bytes(self) -> int | None:
        """The host's RAM, or the container's limit."""
        return self.size(r"ram|host|system|cgroup|container", without=("used", "free", "gpu", "vram", "shm"))

    @property
    def shm_bytes(self) -> int | None:
        """The size of /dev/shm."""
        return self.size(r"shm|shared", without=("used", "free"))


@dataclass(frozen=True, kw_only=True)
class Clues:
    """What there is to reason from.

    Attributes:
        inputs: what was given.
        messages: failures, warnings and facts, in order.
        devices, processes: what nvidia-smi says.
        recordings: memory snapshots and traces, by name.
        dry_runs: results of memfit's dry run, by name.
        hints: from small JSON files.
    """

    inputs: tuple[Input, ...] = ()
    messages: tuple[Message, ...] = ()
    devices: tuple[Device, ...] = ()
    processes: tuple[Process, ...] = ()
    recordings: tuple[tuple[str, Recording], ...] = ()
    dry_runs: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    strings: tuple[tuple[str, str, str], ...] = ()
    hints: Hints = field(default_factory=Hints)

    def facts(self, kind: str) -> Iterator[Message]:
        """The messages of a kind."""
        return (message for message in self.messages if message.kind == kind)

    def fact_size(self, kind: str, name: str) -> int | None:
        """The last amount of that name in messages of that kind."""
        sizes = [message.sizes[name] for message in self.facts(kind) if name in message.sizes]
        return sizes[-1] if sizes else None

    def mentions(self, *words: str) -> bool:
        """Whether a hint names one of these."""
        return any(word in self.hints.words for word in words)

    def device(self, index: str | None) -> Device | None:
        """The GPU of that number, or the only one that is shown."""
        for device in self.devices:
            if device.index == index:
                return device
        return self.devices[0] if len(self.devices) == 1 and index in (None, "", "0") else None

    @property
    def torch_version(self) -> tuple[int, int] | None:
        """PyTorch's version, where a text or a hint says it."""
        texts = [message.words["version"] for message in self.facts("torch-version")]
        texts += [str(value) for name, value in self.hints.values.items() if "torch" in name.lower()]
        for text in texts:
            found = re.match(r"v?(\d{1,2})\.(\d{1,2})", text)
            if found is not None:
                return int(found[1]), int(found[2])
        return None

    @property
    def unified_memory(self) -> str:
        """The device that shares the host's memory, where one is named."""
        for message in self.facts("unified-memory"):
            return message.words["device"]
        for name in ("gfx1151", "gfx1103", "strix", "apu", "unified", "integrated", "gb10", "jetson"):
            if re.search(rf"\b{name}\b", self.hints.words):
                return name
        return ""


def read_hints(value: Any) -> Hints:
    """The hints of a parsed JSON file; names with a unit become bytes."""
    values: dict[str, Any] = {}
    words: list[str] = []
    for name, leaf in _leaves(value, ""):
        if len(values) >= MOST_HINTS:
            break
        words += [name.lower(), str(leaf).lower()[:400]]
        size = _size(name, leaf)
        if size is not None:
            values[_UNIT.sub("", name).rstrip("_") + "_bytes"] = size
        else:
            values[name] = leaf
    return Hints(values=values, words=" ".join(words))


def _leaves(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and depth < 8:
        for key, part in list(value.items())[:MOST_HINTS]:
            yield from _leaves(part, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and depth < 8:
        if all(isinstance(part, str | int | float) for part in value):
            yield name, ", ".join(map(str, value[:50]))
        else:
            for place, part in enumerate(value[:50]):
                yield from _leaves(part, f"{name}.{place}", depth + 1)
    else:
        yield name, value


def _size(name: str, leaf: Any) -> int | None:
    if isinstance(leaf, str):
        found = re.fullmatch(r"\s*\d[\d.,]{0,20}\s?[KMGT]i?B?\s*", leaf, re.IGNORECASE)
        return None if found is None else read_amount(leaf.strip())
    if isinstance(leaf, bool) or not isinstance(leaf, int | float) or not 0 <= leaf < 1 << 62:
        return None
    unit = _UNIT.search(name)
    if unit is None:
        return None
    prefix = (unit[1] or "").lower()
    decimal = prefix and "i" not in (unit[2] or "").lower()
    scale: int = (1000 if decimal else 1024) ** " kmgt".index(prefix or " ")
    return round(leaf * scale)


def hint_lines(hints: Hints, *names: str) -> list[str]:
    """Hints as lines of evidence."""
    lines = []
    for name, value in hints.values.items():
        if not names or any(mark in name.lower() for mark in names):
            shown = format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
            lines.append(f"given: {name.removesuffix('_bytes').replace('_', ' ')} = {shown}")
    return lines[:12]
