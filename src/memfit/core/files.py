"""Writing a file so that a reader never sees half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memfit.core.errors import UsageError


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write ``content`` (text as UTF-8) to ``path``: a temporary name in the same folder, then a rename.

    Missing folders above ``path`` are made. An existing file keeps its content until the new one is complete.

    Raises:
        UsageError: the place cannot be written to (no permission, a folder of that name, a full disk).
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_and_rename(target, data)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}; choose another place") from error
    return target


def _write_and_rename(target: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _mode_for(target: Path) -> int:
    """The permissions that an ordinary write would leave: the old file's, or what the umask allows."""
    if target.exists():
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
