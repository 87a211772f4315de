"""Reading what people have: memory snapshots, profiler traces, logs. What a file is, its content tells.

Examples:
    >>> import io
    >>> recording = read_trace(io.BytesIO(b'{"op": "alloc", "id": 1, "size": 4096}'))
    >>> recording.kind, len(recording.trace)
    ('json-lines', 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.formats import documents, json_lines, memfit_traces, pickles, rmm
from memfit.formats.content import Content, Source, plain_content


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        title: what people call it.
        looks_like: whether the first 64 KiB look like it.
        read: reads it; raises InputError where it is not what it looked like.
    """

    title: str
    looks_like: Callable[[bytes], bool]
    read: Callable[[Content], Recording]


FORMATS: Mapping[str, Format] = {
    "memfit-trace": Format("memfit's trace", memfit_traces.looks_like, memfit_traces.read),
    "memory-snapshot": Format("a PyTorch memory snapshot (pickle)", pickles.looks_like, pickles.read),
    "rmm-log": Format("an RMM log (CSV)", rmm.looks_like, rmm.read),
    "json-lines": Format("JSON lines of operations", json_lines.looks_like, json_lines.read),
    "json": Format("a torch.profiler trace or a snapshot as JSON", documents.looks_like, documents.read),
}
"""Every kind of file that can be read, in the order in which they are tried."""


def read_trace(source: Source) -> Recording:
    """Read a file of allocator events, whatever kind it is; gzip is unpacked, names do not matter.

    Args:
        source: a path, or an open binary file (such as ``sys.stdin.buffer``).

    Raises:
        InputError: it is of no kind that is known, damaged, or made to do harm. Nothing in it is executed.
    """
    with plain_content(source) as content:
        for row in FORMATS.values():
            if row.looks_like(content.head):
                return row.read(content)
        known = ", ".join(row.title for row in FORMATS.values())
        raise InputError(f"{content.name} is none of the files that memfit reads: {known}")


__all__ = ["FORMATS", "Format", "Recording", "read_trace"]
