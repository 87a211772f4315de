"""A file's content, plain and on disk, whatever way it came: compressed, through a pipe, or as it is."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from memfit.core.errors import InputError

HEAD_BYTES = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"
LARGEST_RATIO = 200
"""Traces unpack to 10 to 50 times their size; a file that goes beyond this is made to fill the disk."""
ALWAYS_ALLOWED_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20

Source = str | os.PathLike[str] | IO[bytes]


@dataclass(frozen=True, kw_only=True)
class Content:
    """Plain content on disk.

    Attributes:
        name: what the user calls it, for messages.
        path: the file with the plain content, which may be a temporary one.
        head: its first 64 KiB.
        size_bytes: its size.
    """

    name: str
    path: Path
    head: bytes
    size_bytes: int

    def text(self) -> str:
        """All of it as UTF-8 text.

        Raises:
            InputError: it is not UTF-8.
        """
        try:
            return self.path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.name} is not UTF-8 text (byte {error.start})") from error

    def lines(self) -> Iterator[str]:
        """The same line by line, for files that are long.

        Raises:
            InputError: it is not UTF-8.
        """
        read = 0
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    yield line.decode("utf-8" if read else "utf-8-sig")
                except UnicodeDecodeError as error:
                    raise InputError(f"{self.name} is not UTF-8 text (byte {read + error.start})") from error
                read += len(line)


@contextmanager
def plain_content(source: Source) -> Iterator[Content]:
    """The content of a path or an open binary file, unpacked if it is gzip; temporary files go at the end.

    Raises:
        InputError: there is no such file, it is empty, or its compression is damaged or a bomb.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        name, path = _on_disk(source, Path(folder))
        if path.is_dir():
            raise InputError(f"cannot read {name}: it is a folder; name a file in it")
        if _start_of(path, name, len(GZIP_MAGIC)) == GZIP_MAGIC:
            path = _unpacked(path, Path(folder) / "plain", name)
        head = _start_of(path, name, HEAD_BYTES)
        if not head:
            raise InputError(f"{name} is empty")
        yield Content(name=name, path=path, head=head, size_bytes=path.stat().st_size)


def _on_disk(source: Source, folder: Path) -> tuple[str, Path]:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe can be read only once
            with open(path, "rb") as stream:
                return str(path), _spooled(stream, folder)
        return str(path), path
    return str(getattr(source, "name", "the input")), _spooled(source, folder)


def _spooled(stream: IO[bytes], folder: Path) -> Path:
    path = folder / "input"
    with open(path, "wb") as file:
        shutil.copyfileobj(stream, file, _PIECE_BYTES)
    return path


def _start_of(path: Path, name: str, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from error


def _unpacked(path: Path, target: Path, name: str) -> Path:
    most = max(ALWAYS_ALLOWED_BYTES, LARGEST_RATIO * path.stat().st_size)
    written = 0
    try:
        with gzip.open(path) as packed, open(target, "wb") as file:
            while piece := packed.read(_PIECE_BYTES):
                written += len(piece)
                if written > most:
                    raise InputError(f"{name} unpacks to more than {most} bytes; unpack it yourself (gunzip)")
                file.write(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name} is damaged gzip: {error}") from error
    return target
