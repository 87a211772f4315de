"""The process that unpickles: bounded memory, one file in, plain columns and JSON out.

Run as ``python -m memfit.formats.reader_process REQUEST``; ends with the exit code of `InputError` where the
file is refused, with the reason in a file (stderr may have lines of the interpreter's own).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from pathlib import Path

from memfit.core.errors import InputError
from memfit.formats import transfer
from memfit.formats.pickles import ALWAYS_ALLOWED_BYTES, BYTES_PER_FILE_BYTE, load_draining
from memfit.formats.snapshots import from_value


def main() -> int:
    """Read the file that the request on the command line names."""
    request = json.loads(sys.argv[1])
    path, name, folder = Path(request["path"]), request["name"], Path(request["folder"])
    size = path.stat().st_size
    bound_memory(ALWAYS_ALLOWED_BYTES + BYTES_PER_FILE_BYTE * size)
    gc.disable()  # nothing of a snapshot is garbage before the end, and looking for it takes half of the time
    try:
        with open(path, "rb") as file:
            value = load_draining(file, name)
        transfer.save(from_value(value, name=name, size_bytes=size), folder)
    except InputError as error:
        return _refuse(folder, str(error))
    except (MemoryError, RecursionError):
        return _refuse(folder, f"{name} is refused: it wants far more memory than a snapshot of its size")
    return 0


def _refuse(folder: Path, reason: str) -> int:
    (folder / transfer.REASON_FILE).write_text(reason, encoding="utf-8", errors="replace")
    return InputError.exit_code


def bound_memory(more_bytes: int) -> None:
    """Let this process take no more than so much on top of what it has; where the system has no such bound
    (Windows), none is set."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        bound = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or bound < hard:
            resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # taking a million dictionaries apart one by one would take longer than reading them
