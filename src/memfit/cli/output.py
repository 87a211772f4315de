"""Files that a command will write: checked before the long work begins. `core.files` writes them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from memfit.core.errors import UsageError


def check_output(path: Path | None, *, option: str, suffixes: tuple[str, ...]) -> None:
    """See to it that `path` can be written, by writing (and taking away) a file beside it.

    Args:
        path: the file that the user named; ``None`` is always fine.
        option: the option that names it, for the message.
        suffixes: what the name may end in, so that ``--report train.py`` does not overwrite a script.

    Raises:
        UsageError: the folder is missing or read-only, the path is a folder, or the suffix is another one.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: name a file that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; name a file in it")
    check_folder(path.parent, option=f"{option} {path}")


def check_folder(folder: Path, *, option: str) -> None:
    """See to it that files can be made in `folder`; raises UsageError that begins with `option`."""
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder}; make it first (mkdir -p {folder})")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{option}: cannot write in {folder}: {error.strerror}") from error
