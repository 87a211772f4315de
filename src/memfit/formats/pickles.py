"""Memory snapshots out of pickles that may be anybody's: nothing in them is ever executed.

A pickle is a program. Two walls stand around it. The unpickler makes builtin containers and scalars only:
whatever would name a class or a function is refused, so there is nothing that could be called. And it runs in
a process of its own with bounded memory, so that declared lengths, memo indices and deep nesting that are
made to exhaust or crash the reader end that process and no other.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NoReturn

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.formats import transfer
from memfit.formats.content import Content
from memfit.formats.draining import DrainingFile
from memfit.formats.packed_events import Unusual

BYTES_PER_FILE_BYTE = 16
"""Events as Python objects take 4 to 7 times their size in a file, and lists are moved while they grow."""
ALWAYS_ALLOWED_BYTES = 512 << 20
SECONDS_PER_MIB = 2.0
ALWAYS_ALLOWED_SECONDS = 120.0
_PROTOCOLS = b"\x00\x01\x02\x03\x04\x05"


def looks_like(head: bytes) -> bool:
    """Whether it begins as a pickle of a dictionary or a list, of any protocol."""
    if head[:1] == b"\x80":
        return head[1:2] in {bytes([protocol]) for protocol in _PROTOCOLS}
    return head[:2] in (b"(d", b"(l", b"}q", b"]q", b"}(", b"](", b"}.", b"].") or head[:3] == b"}r\x00"


def read(content: Content) -> Recording:
    """Read a snapshot in a process of its own.

    Raises:
        InputError: it is not a whole snapshot, it names something that is not data, or it wants more memory
            or time than a file of its size needs.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        request = {"path": str(content.path), "name": content.name, "folder": folder}
        most = ALWAYS_ALLOWED_SECONDS + SECONDS_PER_MIB * (content.size_bytes >> 20)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "memfit.formats.reader_process", json.dumps(request)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=most,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(
                f"{content.name} was given up after {most:.0f} s; it is no usual snapshot"
            ) from error
        if done.returncode != 0:
            raise InputError(_ended(content, done.returncode, done.stderr, Path(folder)))
        return transfer.load(Path(folder))


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _ended(content: Content, code: int, errors: bytes, folder: Path) -> str:
    reason = folder / transfer.REASON_FILE
    if code == InputError.exit_code and reason.exists():
        return " ".join(reason.read_text(encoding="utf-8").split())
    if code < 0:
        return f"{content.name} is refused: it crashed the process that read it (signal {-code})"
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"code {code}"]
    return f"{content.name} cannot be read: {last[0][:300]}"


def load_draining(file: IO[bytes], name: str) -> Any:
    """As `load_plain`, in less memory: lists of events are `PackedEvents`. For a process that does nothing
    else, with its garbage collector off.

    Raises:
        InputError: it is broken, or names something that is not data.
    """
    draining: Any = DrainingFile(file)
    try:
        return draining.finish(load_plain(draining, name))
    except Unusual:
        del draining
        file.seek(0)
        return load_plain(file, name)


def load_plain(file: IO[bytes], name: str) -> Any:
    """The containers and scalars of a pickle.

    Raises:
        InputError: it is broken, or names something that is not data.
    """
    try:
        return _PlainUnpickler(file).load()
    except Unusual:
        raise
    except _Refused as error:
        raise InputError(
            f"{name} is refused: {error}; a memory snapshot holds data only. Nothing was run."
        ) from error
    except MemoryError as error:
        raise InputError(
            f"{name} is refused: it wants far more memory than a snapshot of its size"
        ) from error
    except (
        Exception
    ) as error:  # a broken pickle can raise anything: Attribute-, Index-, Type-, Value-, EOFError
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"{name} is not a whole pickle: {reason}") from error


class _Refused(pickle.UnpicklingError):
    """The pickle names something that is not data."""


class _PlainUnpickler(pickle.Unpickler):
    """Without any way to name a class, a function or an object outside the file."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise _Refused(f"it names {str(module_name)[:60]}.{str(global_name)[:60]}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Refused("it refers to an object outside the file")
