"""Replay a memory snapshot (or any other recording) and print the allocator setting that needs least.

    python examples/replay_snapshot.py run.pickle

Without a file it makes a small recording of its own. Runs anywhere: neither torch nor a GPU is needed.
"""

from __future__ import annotations

import sys

import memfit


def small_recording() -> memfit.Trace:
    """A cache that one small, long-lived block pins, so that a second large request needs new memory."""
    builder = memfit.TraceBuilder()
    builder.free(builder.alloc(100 << 20, where="train.py:10 first_batch"))
    builder.alloc(5 << 20, where="train.py:12 running_mean")
    builder.alloc(98 << 20, where="train.py:10 first_batch")
    return builder.build()


def main() -> None:
    recording = memfit.read_trace(sys.argv[1]) if len(sys.argv) > 1 else small_recording()
    result = memfit.replay(recording)

    print(f"live at most:     {memfit.format_bytes(result.peak_requested_bytes)}")
    print(f"reserved at most: {memfit.format_bytes(result.peak_reserved_bytes)}")
    for outcome in result.outcomes:
        if outcome.kind == "setting":
            print(f"  {outcome.name:40} {memfit.format_bytes(outcome.peak_reserved_bytes)}")
    for sentence in result.advice.sentences:
        print(sentence)
    if result.advice.line:
        print(result.advice.line)


if __name__ == "__main__":
    main()
