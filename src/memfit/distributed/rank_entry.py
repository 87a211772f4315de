"""A rank of ``memfit launch``: ``python -m memfit.distributed.rank_entry FOLDER KIND TARGET ARGUMENTS…``.

Watches this process's memory, runs the script, and tells how it ended: an out-of-memory error with its
account.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit.distributed.rank_records import RankRecord, new_record
from memfit.formats.messages import read_text_messages
from memfit.monitor import watch

_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, runpy.__file__, "<frozen runpy>")
EXIT_OUT_OF_MEMORY = 75
"""What a rank ends with that ran out of memory, so that its launcher knows without its record."""


def main() -> None:
    """Run the script that the command line names, as a rank."""
    folder, kind, target, *arguments = sys.argv[1:]
    record = new_record()
    record.write(Path(folder))
    watcher = watch(folder=folder, job=Path(target).stem)
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(target))
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _end(record, folder, "done" if code == 0 else "failed", code)
        raise
    except BaseException as error:
        code = _failed(record, folder, error)
        watcher.stop()
        _print(error)
        sys.stderr.flush()
        sys.stdout.flush()
        # At once: other ranks wait for this one, and the process group's own ending would wait for them.
        os._exit(code)
    _end(record, folder, "done", 0)


def _end(record: RankRecord, folder: str, outcome: Any, code: int, **more: Any) -> None:
    replace(record, outcome=outcome, exit_code=code, ended_seconds=time.time(), **more).write(Path(folder))


def _failed(record: RankRecord, folder: str, error: BaseException) -> int:
    """Tells how it ended; the exit code."""
    text = str(error)
    first = f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}".rstrip(": ")
    amounts = _account(error, text)
    outcome = "failed" if amounts is None else "out_of_memory"
    code = 1 if amounts is None else EXIT_OUT_OF_MEMORY
    message = None if amounts is None else text
    _end(
        record,
        folder,
        outcome,
        code,
        error=first,
        place=_place(error),
        account=amounts or {},
        message=message,
    )
    return code


def _account(error: BaseException, text: str) -> dict[str, int] | None:
    """The amounts of an out-of-memory error, by name; None for any other error."""
    import torch

    oom = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in text for word in ("out of memory", "can't allocate memory")
    )
    if not oom:
        return None
    amounts = {
        f"{name}_bytes": size
        for message in read_text_messages(f"{type(error).__name__}: {text}")[:1]
        for name, size in message.sizes.items()
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        amounts |= {
            "device_total_bytes": total,
            "device_free_bytes": free,
            "allocator_reserved_bytes": torch.cuda.memory_reserved(),
            "allocator_allocated_bytes": torch.cuda.memory_allocated(),
            "allocator_peak_bytes": torch.cuda.max_memory_allocated(),
        }
    return amounts


def _place(error: BaseException) -> str | None:
    """The innermost frame of code that is not installed: the script's own."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _print(error: BaseException) -> None:
    """The traceback as the script alone would have it."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))


if __name__ == "__main__":
    main()
