"""Reading operations and replaying them, from JSON lines and from memfit's own traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.allocators.caching import CachingConfig
from memfit.allocators.replay import Step, parse_operations, read_operations, replay
from memfit.core.errors import InputError
from memfit.core.trace import TraceBuilder

MIB = 1 << 20
LINES = [
    '{"op":"config","total_bytes":1073741824,"fraction":0.5}',
    '{"op":"alloc","id":7,"size":31457280}',
    '{"op":"free","id":7}',
    '{"op":"alloc","id":8,"size":20971520,"stream":0}',
    '{"op":"alloc","id":9,"size":1073741824}',
    '{"op":"free","id":9}',
]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES))
    result = replay(path)
    assert result.placements.tolist() == [[0, 0], [0, 0], [-1, 0]]
    assert result.reserved.tolist() == [[0, 30 * MIB]]
    assert result.ooms == (3,)
    assert (result.event_count, result.peak_reserved_bytes, result.peak_requested_bytes) == (
        5,
        30 * MIB,
        30 * MIB,
    )


def test_config_line_is_taken_and_can_be_overruled() -> None:
    listed = parse_operations(LINES)
    assert (listed.total_bytes, listed.fraction) == (1 << 30, 0.5)
    assert replay(listed, CachingConfig()).ooms == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not an operation"),
        ('{"op":"explode"}', "unknown op 'explode'"),
        ('{"op":"alloc","id":1}', "no 'size'"),
        ('{"op":"alloc","id":1,"size":-5}', "negative"),
        ('{"op":"alloc","id":1,"size":null}', "not an operation"),
        ("[1]", "not an operation"),
        ('{"op":"config"}', "first line"),
    ],
)
def test_bad_line_is_named(line: str, reason: str) -> None:
    with pytest.raises(InputError, match=r"trace:3: ") as failure:
        parse_operations(['{"op":"config","total_bytes":1}', '{"op":"sync"}', line])
    assert reason in str(failure.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl"):
        read_operations(tmp_path / "nothing.jsonl")


def test_every_step_is_read() -> None:
    names = ["record_stream", "sync", "empty_cache", "reset_peak"]
    listed = parse_operations([f'{{"op":"{name}","id":1,"stream":2}}' for name in names])
    assert [Step(operation.step).name.lower() for operation in listed.operations] == names


def test_memfits_own_trace() -> None:
    builder = TraceBuilder()
    first = builder.alloc(30 * MIB, category="activation")
    builder.free(first)
    builder.alloc(25 * MIB, category="temporary")
    builder.alloc(4096, stream=1)
    result = replay(builder.build())
    assert result.placements.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert result.peak_reserved_bytes == 32 * MIB
    assert [segment.stream for segment in result.segments] == [0, 1]
