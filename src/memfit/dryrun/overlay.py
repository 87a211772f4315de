"""A folder that lies over the file system: what a script writes lands in it, and what it reads back comes
from it.

Pure bookkeeping over paths, with no patching: `writes` puts it under Python's file functions. Real files are
only ever read. Each real path ``/a/b`` has its place ``SCRATCH/a/b``; removed real paths are remembered and
hidden.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from functools import lru_cache


class Overlay:
    """Which file a path means while the script's writes are kept away from the user's files.

    All paths are absolute with the symbolic links of their folders resolved (see `canonical`).

    Args:
        scratch: the folder that takes the writes; made when it is first needed.
        exempt: folders in which writes are real (private temporary folders, ``/dev``).
    """

    def __init__(self, scratch: str, *, exempt: Iterable[str] = ()) -> None:
        self.scratch = os.path.realpath(scratch)
        folders = [os.path.realpath(folder) for folder in exempt]
        self._exempt = tuple(os.path.join(folder, "") for folder in (*folders, self.scratch))
        self._removed: set[str] = set()

    def is_exempt(self, path: str) -> bool:
        """Whether writes to ``path`` are real."""
        return (path + "/").startswith(self._exempt)

    def place(self, path: str) -> str:
        """Where ``path`` lies in the scratch folder, whether there is anything or not."""
        return self.scratch + path

    def is_hidden(self, path: str) -> bool:
        """Whether the real ``path`` was removed by the script, itself or with a folder above it."""
        if not self._removed:
            return False
        while path not in self._removed:
            above = os.path.dirname(path)
            if above == path:
                return False
            path = above
        return True

    def for_reading(self, path: str) -> str:
        """The file that ``path`` means now. A removed one gives a name at which nothing is."""
        if self.is_exempt(path):
            return path
        place = self.place(path)
        if not os.path.lexists(place):
            return place if self.is_hidden(path) else path
        # A folder of the user's that also holds redirected files is still the user's folder.
        shared = os.path.isdir(place) and os.path.isdir(path) and not self.is_hidden(path)
        return path if shared else place

    def exists(self, path: str) -> bool:
        """Whether the script sees something at ``path``."""
        return os.path.lexists(self.for_reading(path))

    def for_writing(self, path: str, *, keep_content: bool) -> str:
        """The file to open instead of ``path`` for writing.

        Args:
            path: what the script named.
            keep_content: the old content counts (append, update in place), so it is copied first.

        Raises:
            OSError: as the write itself would fail (no such folder, a folder of that name).
        """
        path = os.path.realpath(path) if os.path.islink(self.for_reading(path)) else path
        if self.is_exempt(path):
            return path
        current = self.for_reading(path)
        if os.path.isdir(current):
            raise _error(errno.EISDIR, path)
        place = self._make_room(path)
        if keep_content and current != place and os.path.exists(current):
            shutil.copyfile(current, place)
        return place

    def remove(self, path: str) -> None:
        """Take the file at ``path`` away, as the script sees it."""
        if self.is_exempt(path):
            return os.unlink(path)
        self._must_exist(path)
        if _is_true_folder(self.for_reading(path)):
            raise _error(errno.EISDIR, path)
        self._hide(path)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Make a folder, as the script sees it."""
        if self.is_exempt(path):
            return os.mkdir(path, mode)
        if self.exists(path):
            raise _error(errno.EEXIST, path)
        os.mkdir(self._make_room(path), mode)

    def remove_folder(self, path: str) -> None:
        """Take an empty folder away, as the script sees it."""
        if self.is_exempt(path):
            return os.rmdir(path)
        self._must_exist(path)
        if not _is_true_folder(self.for_reading(path)):
            raise _error(errno.ENOTDIR, path)
        if self.names(path):
            raise _error(errno.ENOTEMPTY, path)
        self._hide(path)

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder over what is at ``target``, as the script sees it."""
        self._must_exist(source)
        if source == target:
            return
        is_folder = _is_true_folder(self.for_reading(source))
        if self.exists(target):
            self._check_replaceable(target, source_is_folder=is_folder)
            self._hide(target)
        place = target if self.is_exempt(target) else self._make_room(target)
        if is_folder:
            self._move_folder(source, place)
        else:
            self._move_file(self.for_reading(source), place)
        if self.exists(source):
            self._hide(source)

    def link(self, source: str, target: str) -> None:
        """Make a symbolic link at ``target`` with the text ``source``, as the script sees it."""
        if self.is_exempt(target):
            return os.symlink(source, target)
        if self.exists(target):
            raise _error(errno.EEXIST, target)
        meant = canonical(os.path.join(os.path.dirname(target), source))
        os.symlink(self.for_reading(meant), self._make_room(target))

    def names(self, folder: str) -> list[str]:
        """The names in ``folder``, as the script sees it.

        Raises:
            OSError: no such folder.
        """
        self._must_exist(folder)
        place = self.place(folder)
        if self.is_exempt(folder):
            return os.listdir(folder)
        real_is_seen = not self.is_hidden(folder) and os.path.isdir(folder)
        real = (
            [name for name in os.listdir(folder) if not self.is_hidden(os.path.join(folder, name))]
            if real_is_seen
            else []
        )
        added = os.listdir(place) if os.path.isdir(place) else []
        return list(dict.fromkeys([*real, *added]))

    def is_as_it_was(self, folder: str) -> bool:
        """Whether the script sees in ``folder`` what is really there."""
        return self.is_exempt(folder) or not (self._removed or os.path.isdir(self.place(folder)))

    def _must_exist(self, path: str) -> None:
        if not self.exists(path):
            raise _error(errno.ENOENT, path)

    def _check_replaceable(self, target: str, *, source_is_folder: bool) -> None:
        is_folder = _is_true_folder(self.for_reading(target))
        if is_folder and not source_is_folder:
            raise _error(errno.EISDIR, target)
        if source_is_folder and not is_folder:
            raise _error(errno.ENOTDIR, target)
        if is_folder and self.names(target):
            raise _error(errno.ENOTEMPTY, target)

    def _make_room(self, path: str) -> str:
        """The place of ``path``, with the folders above it; they must be there for the script."""
        above = os.path.dirname(path)
        self._must_exist(above)
        if not os.path.isdir(self.for_reading(above)):
            raise _error(errno.ENOTDIR, path)
        place = self.place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def _hide(self, path: str) -> None:
        """Take away what the script made at ``path``, and remember that the user's is not to be seen."""
        ours = path if self.is_exempt(path) else self.place(path)
        if os.path.lexists(ours):
            shutil.rmtree(ours) if _is_true_folder(ours) else os.unlink(ours)
        if not self.is_exempt(path) and os.path.lexists(path):
            self._removed.add(path)

    def _move_folder(self, source: str, place: str) -> None:
        os.makedirs(place, exist_ok=True)
        for name in self.names(source):
            inner = os.path.join(source, name)
            current = self.for_reading(inner)
            if _is_true_folder(current):
                self._move_folder(inner, os.path.join(place, name))
            else:
                self._move_file(current, os.path.join(place, name))

    def _move_file(self, current: str, place: str) -> None:
        """Moves what the script made; a file of the user's stays where it is and is copied."""
        if self.is_exempt(current):
            shutil.move(current, place)
        else:
            shutil.copy2(current, place, follow_symlinks=False)


def canonical(path: str) -> str:
    """``path`` made absolute, with the symbolic links of its folder resolved and its own kept."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(_real_folder(folder), name) if name else folder


@lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _is_true_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)  # becomes the subclass of its code
