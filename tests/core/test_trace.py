"""Traces: what is appended comes back, contradictions and broken files are refused with what is wrong."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.core.errors import InputError, UsageError
from memfit.core.trace import CATEGORIES, COLUMNS, NO_BLOCK, PHASES, Action, Trace, TraceBuilder

texts = st.text(max_size=12)


@st.composite
def builders(draw: st.DrawFn) -> TraceBuilder:
    """Any lawful sequence of events."""
    builder = TraceBuilder(meta=draw(st.dictionaries(texts, st.integers() | texts | st.none(), max_size=3)))
    live: list[int] = []
    for _ in range(draw(st.integers(0, 30))):
        columns: dict[str, Any] = {
            "stream": draw(st.integers(-1, 5)),
            "address": draw(st.integers(0, 2**64 - 1)),
            "category": draw(st.sampled_from(CATEGORIES)),
            "phase": draw(st.sampled_from(PHASES)),
            "module": draw(texts),
            "op": draw(texts),
            "where": draw(texts),
        }
        action = draw(st.sampled_from(Action))
        if action is Action.ALLOC:
            live.append(builder.alloc(draw(st.integers(0, 2**62)), **columns))
        elif action is Action.FREE:
            block = live.pop(draw(st.integers(0, len(live) - 1))) if live else NO_BLOCK
            builder.free(block, **columns)
        else:
            builder.append(action, size_bytes=draw(st.integers(0, 2**62)), **columns)
    return builder


def _example() -> Trace:
    builder = TraceBuilder(meta={"of": "an example", "steps": 2})
    first = builder.alloc(4096, category="activation", phase="forward", module="h.0", op="aten.mm.default")
    builder.append(Action.SEGMENT_ALLOC, size_bytes=2 << 20, address=1 << 44)
    second = builder.alloc(100, category="temporary", phase="backward", where="train.py:12 main")
    builder.free(first, phase="backward")
    builder.append(Action.OOM, size_bytes=1 << 40)
    builder.free(second)
    return builder.build()


@given(builders())
@settings(max_examples=60, deadline=None)
def test_saved_is_loaded_again(tmp_path_factory: pytest.TempPathFactory, builder: TraceBuilder) -> None:
    trace = builder.build()
    path = tmp_path_factory.mktemp("traces") / "a.memfit-trace"
    trace.save(path)
    loaded = Trace.load(path)
    assert loaded == trace
    assert list(loaded) == list(trace)
    assert loaded.meta == builder.meta


def test_events_read_as_they_were_written() -> None:
    trace = _example()
    assert len(trace) == 6
    assert trace[0] == (Action.ALLOC, 0, 4096, 0, 0, "activation", "forward", "h.0", "aten.mm.default", "")
    assert trace[1] == (Action.SEGMENT_ALLOC, NO_BLOCK, 2 << 20, 0, 1 << 44, "other", "other", "", "", "")
    assert trace[3].size_bytes == 4096, "a free has the size of its allocation"
    assert trace.texts("where")[2] == "train.py:12 main"
    assert trace.alloc_index().tolist() == [0, -1, 2, 0, -1, 2]


def test_builder_goes_on_after_build() -> None:
    builder = TraceBuilder()
    block = builder.alloc(1)
    before = builder.build()
    builder.free(block)
    assert (len(before), len(builder.build())) == (1, 2)


def test_is_immutable() -> None:
    trace = _example()
    with pytest.raises(ValueError, match="read-only"):
        trace.size_bytes[0] = 1
    with pytest.raises(AttributeError):
        trace.strings = ()  # type: ignore[misc]


def test_making_a_trace_leaves_the_given_arrays_as_they_were() -> None:
    columns: dict[str, Any] = {name: np.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}
    Trace(**columns, strings=())
    assert all(column.flags.writeable for column in columns.values())


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda b: (b.alloc(1, block=3), b.alloc(1, block=3)), "block 3 is allocated twice"),
        (lambda b: (b.alloc(1, block=3), b.free(3), b.free(3)), "block 3 is freed twice"),
        (lambda b: b.free(7), "block 7 is freed before it is allocated"),
        (lambda b: (b.free(0), b.alloc(1, block=0)), "block 0 is freed before it is allocated"),
        (lambda b: b.alloc(1, block=-2), "an ALLOC has block -2"),
        (lambda b: b.alloc(-1), "a size is negative"),
        (lambda b: b.alloc(1, category="weights"), "unknown category 'weights'"),
        (lambda b: b.alloc(1, phase="warmup"), "unknown phase 'warmup'"),
        (lambda b: b.append(99), "unknown action 99"),
    ],
)
def test_contradictions_are_named(write: Any, problem: str) -> None:
    builder = TraceBuilder()
    write(builder)
    with pytest.raises(ValueError, match=problem):
        builder.build()


def test_a_million_events_take_tens_of_megabytes() -> None:
    bytes_per_event = sum(dtype.itemsize for dtype in COLUMNS.values())
    assert bytes_per_event <= 64


def _parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _head(parts: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    return {**parts, "trace.json": json.dumps({**json.loads(parts["trace.json"]), **changes}).encode()}


def _array(values: Any, dtype: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype=dtype), allow_pickle=True)
    return buffer.getvalue()


FOREIGN: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "no member": (lambda p: {k: v for k, v in p.items() if k != "block.npy"}, "block.npy is missing"),
    "no head": (lambda p: {k: v for k, v in p.items() if k != "trace.json"}, "trace.json is missing"),
    "head of something else": (lambda p: {**p, "trace.json": b"[1]"}, "does not name itself one"),
    "head not JSON": (lambda p: {**p, "trace.json": b"{"}, "not a whole memfit trace"),
    "other schema": (lambda p: _head(p, schema="other"), "does not name itself one"),
    "newer schema": (lambda p: _head(p, schema_version=99), "schema version is 99, this memfit reads 1"),
    "strings not texts": (lambda p: _head(p, strings=[1]), "strings are not texts"),
    "count not a number": (lambda p: _head(p, event_count="6"), "event_count"),
    "count negative": (lambda p: _head(p, event_count=-1), "event_count"),
    "strings too few": (lambda p: _head(p, strings=[]), "points outside its strings"),
    "count too small": (lambda p: _head(p, event_count=2), "not"),
    "objects": (lambda p: {**p, "block.npy": _array([{}] * 6, object)}, "not a whole memfit trace"),
    "other type": (lambda p: {**p, "block.npy": _array([0.0] * 6, "<f4")}, "column block has float32"),
    "other length": (lambda p: {**p, "block.npy": _array([0] * 5, "<i8")}, r"column block has int64 \(5,\)"),
    "other shape": (lambda p: {**p, "block.npy": _array([[0] * 6], "<i8")}, "column block has"),
    "not npy": (lambda p: {**p, "block.npy": b"hello"}, "not a whole memfit trace"),
    "unlawful events": (lambda p: {**p, "block.npy": _array([4] * 6, "<i8")}, "block 4 is allocated twice"),
    "bomb": (lambda p: {**p, "block.npy": bytes(1 << 22)}, "too large"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused(tmp_path: Path, case: str) -> None:
    change, problem = FOREIGN[case]
    path = tmp_path / "a.memfit-trace"
    _example().save(path)
    parts = change(_parts(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(InputError, match=problem) as refusal:
        Trace.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_truncated_or_altered_files_never_pass_as_another_trace(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("broken") / "a.memfit-trace"
    _example().save(path)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[position:]
    else:
        content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = Trace.load(path)
    except InputError as refusal:
        assert str(path) in str(refusal)
    else:
        assert loaded == _example(), "a byte that carries nothing (a date, a flag) was altered"


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04N.", b"not a trace\n" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a whole memfit trace"):
        Trace.load(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read .*none: No such file"):
        Trace.load(tmp_path / "none")
    with pytest.raises(InputError, match="cannot read"):
        Trace.load(tmp_path)


def test_saving_replaces_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.memfit-trace"
    path.write_text("old")
    _example().save(path)
    assert Trace.load(path) == _example()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.memfit-trace"]


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write .*choose another place"):
        _example().save(tmp_path / "file" / "a.memfit-trace")
    with pytest.raises(UsageError, match="cannot write"):
        _example().save(tmp_path)
