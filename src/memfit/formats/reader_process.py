"""The process that unpickles: bounded memory, one file in, plain columns and JSON out.

Run as ``python -m memfit.formats.reader_process REQUEST``; ends with the exit code of `InputError` and one
line on stderr where the file is refused.
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
from memfit.formats.pickles import ALWAYS_ALLOWED_BYTES, BYTES_PER_FILE_BYTE, load_plain
from memfit.formats.snapshots import from_value


def main() -> int:
    """Read the file that the request on the command line names."""
    request = json.loads(sys.argv[1])
    path, name = Path(request["path"]), request["name"]
    size = path.stat().st_size
    bound_memory(ALWAYS_ALLOWED_BYTES + BYTES_PER_FILE_BYTE * size)
    gc.disable()  # nothing of a snapshot is garbage before the end, and looking for it takes half of the time
    try:
        with open(path, "rb") as file:
            value = load_plain(file, name)
        transfer.save(from_value(value, name=name, size_bytes=size), Path(request["folder"]))
    except InputError as error:
        sys.stderr.write(str(error))
        return InputError.exit_code
    except (MemoryError, RecursionError):
        sys.stderr.write(f"{name} is refused: it wants far more memory than a snapshot of its size")
        return InputError.exit_code
    return 0


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
