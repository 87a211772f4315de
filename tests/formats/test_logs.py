"""JSON lines, RMM logs, memfit's own traces; what a file is, by its content; compression and pipes."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.trace import Action, Trace, TraceBuilder
from memfit.formats import FORMATS, read_trace

LINES = """{"op":"config","total_bytes":1073741824,"fraction":0.5}

{"op":"alloc","id":7,"size":512}
{"op":"record_stream","id":7,"stream":3}
{"op":"free","id":7}
{"op":"free","id":7}
{"op":"alloc","id":7,"size":0,"stream":2}
{"op":"sync"}
{"op":"empty_cache"}
{"op":"reset_peak"}
"""
RMM = """Thread,Time,Action,Pointer,Size,Stream
1,10:11:12.1,free,0x9000,4096,0x0
1,10:11:12.2,allocate,0x1000,512,0x0
1,10:11:12.3,allocate,0x2000,0,0x55
1,10:11:12.4,allocate failure,0x0,99,0x0
1,10:11:12.5,free,0x2000,0,0x55
1,10:11:12.6,free,0x1000,512,0x0
"""


def read(content: str | bytes) -> Recording:
    return read_trace(io.BytesIO(content.encode() if isinstance(content, str) else content))


def names(trace: Trace) -> list[str]:
    return [Action(action).name for action in trace.action]


def test_json_lines() -> None:
    recording = read(LINES)
    assert (recording.kind, recording.total_bytes, recording.memory_fraction) == ("json-lines", 1 << 30, 0.5)
    assert names(recording.trace) == [
        "ALLOC", "RECORD_STREAM", "FREE", "FREE", "ALLOC", "SYNC", "EMPTY_CACHE", "RESET_PEAK",
    ]  # fmt: skip
    assert recording.trace.block.tolist() == [0, 0, 0, -1, 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not an operation"),
        ('{"op":"explode"}', "unknown op 'explode'; it is one of alloc, free"),
        ('{"op":["alloc"]}', "unknown op"),
        ('{"op":"alloc","id":1}', "has no 'size'"),
        ('{"op":"alloc","size":1}', "has no 'id'"),
        ('{"op":"alloc","id":1,"size":-5}', "size is -5"),
        ('{"op":"alloc","id":1,"size":1.5}', "size is 1.5, not a whole number"),
        ('{"op":"alloc","id":1,"size":1,"stream":3000000000}', "stream is 3000000000"),
        ('{"op":"record_stream","id":1}', "has no 'stream'"),
        ("[1]", "not a dictionary"),
        ("[" * 100_000, "nested too deep"),
        ('{"op":"config"}', "first line"),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"the input:2:? .*{reason}"):
        read('{"op":"sync"}\n' + line)


@pytest.mark.parametrize("head", ['"total_bytes":0', '"total_bytes":"8G"', '"fraction":2', '"fraction":"x"'])
def test_a_bad_config_is_named(head: str) -> None:
    with pytest.raises(InputError, match="the input:1: "):
        read('{"op":"config",' + head + "}")


def test_rmm_log() -> None:
    recording = read(RMM)
    assert recording.kind == "rmm-log"
    assert names(recording.trace) == ["ALLOC", "FREE", "ALLOC", "ALLOC", "OOM", "FREE", "FREE"]
    assert recording.trace.block.tolist() == [0, 0, 1, 2, -1, 2, 1]
    assert recording.trace.stream.tolist() == [0, 0, 0, 1, 0, 1, 0]
    assert "1 blocks were there before" in recording.notes[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1,2,allocate,0x1", "a row of 4 columns"),
        ("1,2,explode,0x1,5,0", "unknown action 'explode'"),
        ("1,2,allocate,zz,5,0", "pointer is 'zz', not a number"),
        ("1,2,allocate,0x1,-5,0", "size is '-5', which is out of range"),
        (f"1,2,allocate,0x{'f' * 20},5,0", "pointer is .* out of range"),
    ],
)
def test_a_bad_row_is_named(row: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"the input:2: {reason}"):
        read("Thread,Time,Action,Pointer,Size,Stream\n" + row)


def test_memfits_own_trace(tmp_path: Path) -> None:
    builder = TraceBuilder(meta={"gpu": "h100-80gb"})
    builder.alloc(512, category="activation")
    builder.append(Action.FREE, size_bytes=8)
    path = tmp_path / "t.memfit-trace"
    builder.build().save(path)
    recording = read_trace(path)
    assert recording.trace == Trace.load(path)
    assert recording.total_bytes is not None and 70 << 30 < recording.total_bytes < 80 << 30
    assert "1 frees are of blocks from before" in recording.notes[0]
    with pytest.raises(InputError, match="the input is not a whole memfit trace"):
        read(path.read_bytes()[:200])


def test_names_do_not_matter_and_gzip_is_unpacked(tmp_path: Path) -> None:
    for content, kind in ((LINES, "json-lines"), (RMM, "rmm-log"), ("\ufeff" + RMM, "rmm-log")):
        path = tmp_path / "file.pickle"
        path.write_bytes(gzip.compress(content.encode()))
        assert read_trace(path).kind == kind


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(LINES))
    writer.start()
    assert len(read_trace(pipe).trace) == 8
    writer.join()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xff\xd8\xff\xe0 a picture", "is none of the files that memfit reads: memfit's trace, a PyTorch"),
        (b"import torch\n", "is none of the files"),
        (gzip.compress(b"abc", mtime=0)[:-6], "damaged gzip"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b'{"op": "sync"}\n\xff\xfe', "not UTF-8"),
    ],
)
def test_other_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=f"the input .*{reason}|the input {reason}"):
        read(content)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nothing: No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(InputError, match="it is a folder"):
        read_trace(tmp_path)


def test_a_compressed_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.formats.content.ALWAYS_ALLOWED_BYTES", 1 << 20)
    with pytest.raises(InputError, match="unpacks to more than"):
        read(gzip.compress(bytes(32 << 20)))


NO_PICKLE = st.binary(max_size=300).filter(lambda content: not FORMATS["memory-snapshot"].looks_like(content))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NO_PICKLE)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        read(content)
    except InputError as error:
        assert "\n" not in str(error)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([LINES, RMM, '{"traceEvents": [{"name": "[memory]", "ts": 1, "args": {"Bytes": 8}}]}']),
    st.data(),
)
def test_damaged_texts_are_read_or_refused(text: str, data: st.DataObject) -> None:
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
        if not content:
            break
    if FORMATS["memory-snapshot"].looks_like(bytes(content)):
        return
    try:
        read(bytes(content))
    except InputError as error:
        assert len(str(error)) < 1000
