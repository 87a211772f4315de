"""Reading what is given: texts, logs, outputs of tools, snapshots, JSON, exceptions; by content, not name."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from memfit.analysis.explanations.clues import Clues, Hints, Input, read_hints
from memfit.analysis.explanations.strings import strings_in
from memfit.core.errors import InputError
from memfit.formats import FORMATS, memfit_traces, pickles, read_trace, rmm
from memfit.formats.content import Content, plain_content
from memfit.formats.messages import Message, read_messages
from memfit.formats.messages_nvidia_smi import read_output

Source = str | Path | bytes | BaseException | IO[bytes]

WHOLE_TEXT_BYTES = 8 << 20
WHOLE_JSON_BYTES = 64 << 20
_RECORDING_KEYS = ("segments", "device_traces", "traceEvents", "events")
_TOO_LITTLE_TEXT = 0.3


def read_inputs(sources: Sequence[Source]) -> Clues:
    """Everything that the sources tell.

    Raises:
        InputError: one of them is missing, empty, or nothing that can be read.
    """
    clues = Clues()
    for source in sources:
        clues = _joined(clues, _read(source))
    return clues


def _read(source: Source) -> Clues:
    if isinstance(source, BaseException):
        text = "".join(traceback.format_exception(source))
        return _text(io.BytesIO(text.encode("utf-8", "replace")), "exception", "exception")
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        with plain_content(source) as content:
            return _content(content)
    if isinstance(source, str):
        source = source.encode("utf-8", "replace")
    if isinstance(source, bytes):
        if not source.strip():
            raise InputError("the text is empty")
        return _stream(io.BytesIO(source), "text")
    return _stream(source, str(getattr(source, "name", "stdin")))


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > 1024 or "\0" in text or not text.strip():
        return False
    try:
        return Path(text).exists()
    except OSError:
        return False


def _stream(stream: IO[bytes], name: str) -> Clues:
    with plain_content(stream) as content:
        return _content(replace(content, name="stdin" if name in ("<stdin>", "0") else name))


def _content(content: Content) -> Clues:
    if _is_recording(content.head):
        return _recording(content)
    head = content.head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head[:1] in (b"{", b"["):
        found = _json(content)
        if found is not None:
            return found
    _check_text(content)
    with open(content.path, "rb") as stream:
        return _text(stream, content.name, "text", content)


def _is_recording(head: bytes) -> bool:
    """Binary snapshots and traces; a text that begins like an old pickle, "(l…", stays a text."""
    if memfit_traces.looks_like(head) or rmm.looks_like(head):
        return True
    return pickles.looks_like(head) and (
        head[:1] == b"\x80" or b"\x00" in head[:400] or head[2:3] in b"p0qrsS."
    )


def _recording(content: Content) -> Clues:
    recording = read_trace(content.path)
    return Clues(
        inputs=(Input(name=content.name, kind=recording.kind, size_bytes=content.size_bytes),),
        recordings=((content.name, recording),),
    )


def _json(content: Content) -> Clues | None:
    """A snapshot, a trace, a dry run's result, or hints; None where it is no JSON."""
    large = content.size_bytes > WHOLE_JSON_BYTES
    if FORMATS["json-lines"].looks_like(content.head) or (large and _names_events(content.head)):
        return _recording(content)
    if large:
        return None
    try:
        value = json.loads(content.path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if _is_recorded(value):
        return _recording(content)
    entry = Input(name=content.name, kind="json", size_bytes=content.size_bytes)
    if isinstance(value, Mapping) and "peak_reserved_bytes" in value and "engine" in value:
        return _dry_run(value, replace(entry, kind="dry-run"))
    return _document(value, entry, content) if isinstance(value, Mapping | list) and value else None


def _names_events(head: bytes) -> bool:
    return any(f'"{key}"'.encode() in head for key in _RECORDING_KEYS)


def _document(value: Any, entry: Input, content: Content) -> Clues:
    """Hints about a job, or any document with texts in it, such as a notebook."""
    texts = "\n".join(_texts(value))
    found = _text(io.BytesIO(texts.encode("utf-8", "replace")), content.name, "json")
    rows = strings_in(content.path.read_text("utf-8", "replace"))
    if rows is not None and not found.messages:
        return replace(_strings(rows, content.name), inputs=(entry,))
    return replace(found, inputs=(entry,), hints=read_hints(value))


def _is_recorded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(key in value for key in _RECORDING_KEYS)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("blocks" in first or "ph" in first)


def _dry_run(value: Mapping[str, Any], entry: Input) -> Clues:
    oom = value.get("oom")
    text = str(oom.get("message", "")) if isinstance(oom, Mapping) else ""
    messages: tuple[Message, ...] = ()
    if text:
        found = read_messages(io.BytesIO(text.encode("utf-8", "replace")))
        messages = tuple(replace(message, input=entry.name) for message in found)
    return Clues(inputs=(entry,), messages=messages, dry_runs=((entry.name, value),))


def _texts(value: Any, depth: int = 0) -> list[str]:
    """The texts in a document, such as the outputs of a notebook's cells."""
    if isinstance(value, str):
        return [value]
    if depth > 12:
        return []
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return ["".join(value) if all(part.endswith("\n") for part in value[:-1]) else "\n".join(value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part, depth + 1)]


def _check_text(content: Content) -> None:
    """Raises InputError where the head is no text of any encoding."""
    head = content.head[:4096]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[1:64:2].count(0) > 16:
        return
    text = head.decode("utf-8", "replace")
    odd = sum(char == "\ufffd" or (char < " " and char not in "\t\r\n\x1b\x08\x07") for char in text)
    if odd > _TOO_LITTLE_TEXT * len(text):
        raise InputError(
            f"{content.name} is neither a text nor a file that memfit reads "
            "(a log, an error, nvidia-smi's output, a memory snapshot, a trace, JSON)"
        )


def _text(stream: IO[bytes], name: str, kind: str, content: Content | None = None) -> Clues:
    messages = tuple(replace(message, input=name) for message in read_messages(stream))
    size = content.size_bytes if content is not None else stream.tell()
    entry = Input(name=name, kind=kind, size_bytes=size)
    readings = [message.reading for message in messages if message.reading is not None]
    found = Clues(
        inputs=(entry,),
        messages=messages,
        devices=tuple(device for reading in readings for device in reading.devices),
        processes=tuple(process for reading in readings for process in reading.processes),
    )
    if content is None or size > WHOLE_TEXT_BYTES or any(message.role != "fact" for message in messages):
        return found
    text = content.path.read_bytes().decode("utf-8", "replace")
    reading = read_output(text)
    if reading is not None and (reading.devices or reading.processes):
        return replace(
            found,
            inputs=(replace(entry, kind="nvidia-smi"),),
            devices=reading.devices,
            processes=reading.processes,
        )
    rows = strings_in(text)
    return found if rows is None else replace(_strings(rows, name), inputs=(replace(entry, kind="settings"),))


def _strings(rows: Sequence[tuple[str, str]], name: str) -> Clues:
    several = len(rows) > 1
    return Clues(
        strings=tuple(
            (kind, value, f"{name}:{place}" if several else name)
            for place, (kind, value) in enumerate(rows, 1)
        )
    )


def _joined(one: Clues, other: Clues) -> Clues:
    return Clues(
        inputs=(*one.inputs, *other.inputs),
        messages=(*one.messages, *other.messages),
        devices=(*one.devices, *other.devices),
        processes=(*one.processes, *other.processes),
        recordings=(*one.recordings, *other.recordings),
        dry_runs=(*one.dry_runs, *other.dry_runs),
        strings=(*one.strings, *other.strings),
        hints=Hints(
            values={**one.hints.values, **other.hints.values},
            words=f"{one.hints.words} {other.hints.words}".strip(),
        ),
    )
