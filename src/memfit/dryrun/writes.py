"""The write guard: what a dry-run script writes goes to a scratch folder, by an overlay under Python's file
functions.

    guard_writes(WriteSettings(scratch="/tmp/x", exempt=("/dev",)))   # before the script's own imports

Only for a process that memfit itself started: the functions are replaced for good. The standard library only,
so that children of the script (which need no torch) can have the guard too.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memfit.dryrun.native_writers import guard_libraries
from memfit.dryrun.overlay import Overlay, canonical

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

SCRATCH_VARIABLE = "MEMFIT_WRITES_SCRATCH"
EXEMPT_VARIABLE = "MEMFIT_WRITES_EXEMPT"
_INHERITED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inherited")
"""A folder with a ``sitecustomize`` that guards the Python processes which the script starts."""


class _Busy(threading.local):
    """Whether this thread is inside the guard: its own file operations are real, also past Python."""

    _on = False

    @property
    def on(self) -> bool:
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        self._on = value
        _set_real_files(int(value))


_busy = _Busy()


@dataclass(frozen=True, kw_only=True)
class WriteSettings:
    """Where a guarded process may write: to ``scratch``, and for real in the folders of ``exempt``."""

    scratch: str
    exempt: Sequence[str] = ()


def guard_writes(settings: WriteSettings) -> None:
    """Guard this process from now on, and every Python that it starts."""
    WriteGuard(Overlay(settings.scratch, exempt=settings.exempt)).install()
    _guard_libraries(settings)
    os.environ[SCRATCH_VARIABLE] = settings.scratch
    os.environ[EXEMPT_VARIABLE] = os.pathsep.join(settings.exempt)
    paths = [_INHERITED, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _guard_libraries(settings: WriteSettings) -> None:
    """Guard what opens files past Python too, where the made-up GPU is loaded: ``native/files.c``."""
    library = _made_up_gpu()
    if library is not None:
        folders = ":".join(os.path.realpath(folder) for folder in settings.exempt)
        library.memfit_guard_files(os.fsencode(os.path.realpath(settings.scratch)), os.fsencode(folders))


@functools.cache
def _made_up_gpu() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "memfit_guard_files") else None


def _set_real_files(on: int) -> None:
    library = _made_up_gpu()
    if library is not None:
        library.memfit_real_files(on)


@contextmanager
def real_files() -> Iterator[None]:
    """File operations of this thread are real inside: for memfit's own files."""
    before, _busy.on = _busy.on, True
    try:
        yield
    finally:
        _busy.on = before


class OverlayEntry:
    """One entry of a folder as the script sees it; what `os.scandir` gives, with the path that the script
    knows."""

    def __init__(self, name: str, path: str, actual: str) -> None:
        self.name = name
        self.path = path
        self._actual = actual

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._actual) and (follow_symlinks or not os.path.islink(self._actual))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._actual) and (follow_symlinks or not os.path.islink(self._actual))

    def is_symlink(self) -> bool:
        return os.path.islink(self._actual)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._actual, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self._actual).st_ino


class _Entries:
    """What `os.scandir` returns: an iterator that can be closed."""

    def __init__(self, entries: list[OverlayEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[OverlayEntry]:
        return self

    def __next__(self) -> OverlayEntry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class WriteGuard:
    """Puts an `Overlay` under the file functions of this process."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def install(self) -> None:
        """Replace Python's file functions, also where modules hold them by another name. For good."""
        replaced: dict[int, Callable[..., Any]] = {}
        for module, name, make in self._replacements():
            original = getattr(module, name, None)
            if original is None:
                continue
            replacement = make(original)
            replaced[id(original)] = replacement
            setattr(module, name, replacement)
        _replace_everywhere(replaced)
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree by paths, which can be redirected
        for supported in (
            os.supports_follow_symlinks,
            os.supports_dir_fd,
            os.supports_fd,
            os.supports_effective_ids,
        ):
            supported |= {replaced[id(function)] for function in supported if id(function) in replaced}
        guard_libraries(self)

    def readable(self, path: Any) -> Any:
        """The path to read instead of ``path``; anything that is no path comes back as it is."""
        return self._resolved(path, self.overlay.for_reading)

    def writable(self, path: Any) -> Any:
        """The path to write instead of ``path``, whose old content does not matter."""
        return self._resolved(path, functools.partial(self.overlay.for_writing, keep_content=False))

    def updatable(self, path: Any) -> Any:
        """The path to update in place instead of ``path``."""
        return self._resolved(path, functools.partial(self.overlay.for_writing, keep_content=True))

    def _resolved(self, path: Any, resolve: Callable[[str], str]) -> Any:
        if _busy.on or isinstance(path, int) or not isinstance(path, str | bytes | os.PathLike):
            return path
        text = os.fsdecode(path)
        if not text or "\0" in text:
            return path
        _busy.on = True
        try:
            real = canonical(text)
            found = resolve(real)
        except OSError as error:
            error.filename = path
            raise
        finally:
            _busy.on = False
        if found == real:
            return path
        return os.fsencode(found) if isinstance(path, bytes) else found

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Every function that is replaced: the module, its name, and what makes the new one from the old."""
        for module in (builtins, io):
            yield module, "open", self._open
        yield os, "open", self._os_open
        for name in ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf"):
            yield os, name, functools.partial(self._first_path, resolve=self.readable)
        for name in (
            "chmod",
            "chown",
            "lchown",
            "utime",
            "truncate",
            "setxattr",
            "removexattr",
            "mkfifo",
            "mknod",
        ):
            yield os, name, functools.partial(self._first_path, resolve=self.updatable)
        yield os, "listdir", self._listdir
        yield os, "scandir", self._scandir
        for name in ("remove", "unlink"):
            yield os, name, functools.partial(self._change, change=self.overlay.remove)
        yield os, "mkdir", functools.partial(self._change, change=self.overlay.make_folder)
        yield os, "rmdir", functools.partial(self._change, change=self.overlay.remove_folder)
        for name in ("rename", "replace"):
            yield os, name, functools.partial(self._change_two, change=self.overlay.rename)
        yield os, "symlink", self._symlink
        yield os, "link", self._hard_link

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if isinstance(file, int) or _busy.on or not isinstance(mode, str):
                return original(file, mode, *args, **named)
            if named.get("opener") is not None or len(args) > 5:
                return original(file, mode, *args, **named)  # the opener calls os.open, which is redirected
            if not set(mode) & set("wax+"):
                return original(self.readable(file), mode, *args, **named)
            if "x" in mode:
                self._refuse_existing(file)
            keep = "w" not in mode and "x" not in mode
            if "r" in mode:
                self._must_exist(file)
            return original(
                (self.updatable if keep else self.writable)(file), mode.replace("x", "w"), *args, **named
            )

        return open

    def _os_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if _busy.on:
                return original(path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
            path = _joined(path, dir_fd)
            if not flags & _WRITING or flags & getattr(os, "O_TMPFILE", 0) == getattr(os, "O_TMPFILE", -1):
                return original(self.readable(path), flags, mode)  # type: ignore[no-any-return]
            if flags & os.O_CREAT and flags & os.O_EXCL:
                self._refuse_existing(path)
            if not flags & os.O_CREAT:
                self._must_exist(path)
            keep = not flags & (os.O_TRUNC | os.O_EXCL)
            return original((self.updatable if keep else self.writable)(path), flags & ~os.O_EXCL, mode)  # type: ignore[no-any-return]

        return open

    def _refuse_existing(self, path: Any) -> None:
        if os.path.lexists(path):
            raise FileExistsError(17, os.strerror(17), path)

    def _must_exist(self, path: Any) -> None:
        if not os.path.lexists(path):
            raise FileNotFoundError(2, os.strerror(2), path)

    def _first_path(
        self, original: Callable[..., Any], *, resolve: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def redirected(path: Any, *args: Any, dir_fd: int | None = None, **named: Any) -> Any:
            if _busy.on or isinstance(path, int):
                given = {} if dir_fd is None else {"dir_fd": dir_fd}
                return original(path, *args, **given, **named)
            return original(resolve(_joined(path, dir_fd)), *args, **named)

        return redirected

    def _change(self, original: Callable[..., Any], *, change: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def redirected(path: Any, *args: Any, dir_fd: int | None = None, **named: Any) -> None:
            if _busy.on:
                given = {} if dir_fd is None else {"dir_fd": dir_fd}
                return original(path, *args, **given, **named)  # type: ignore[no-any-return]
            self._run(_joined(path, dir_fd), lambda real: change(real, *args, **named))

        return redirected

    def _change_two(
        self, original: Callable[..., Any], *, change: Callable[[str, str], None]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def redirected(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            if _busy.on:
                return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)  # type: ignore[no-any-return]
            target = _joined(dst, dst_dir_fd)
            self._run(_joined(src, src_dir_fd), lambda real: change(real, canonical(os.fsdecode(target))))

        return redirected

    def _symlink(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def symlink(
            src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
        ) -> None:
            if _busy.on:
                return original(src, dst, target_is_directory, dir_fd=dir_fd)  # type: ignore[no-any-return]
            self._run(_joined(dst, dir_fd), lambda real: self.overlay.link(os.fsdecode(src), real))

        return symlink

    def _hard_link(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def link(src: Any, dst: Any, **named: Any) -> None:
            if _busy.on:
                return original(src, dst, **named)  # type: ignore[no-any-return]
            self._refuse_existing(dst)
            shutil.copyfile(src, dst)  # a second name would lead a later write to the user's file

        return link

    def _run(self, path: Any, change: Callable[[str], None]) -> None:
        """A change of the overlay, whose own file operations are real; errors name the path that the script
        gave."""
        _busy.on = True
        try:
            change(canonical(os.fsdecode(path)))
        finally:
            _busy.on = False

    def _listdir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def listdir(path: Any = ".") -> Any:
            if _busy.on or isinstance(path, int) or self._is_as_it_was(path):
                return original(path)
            names = self._names(path)
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return listdir

    def _scandir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scandir(path: Any = ".") -> Any:
            if _busy.on or isinstance(path, int | bytes) or self._is_as_it_was(path):
                return original(path)
            folder = os.fspath(path)
            names = self._names(path)
            entries = [os.path.join(folder, name) for name in names]
            return _Entries(
                [
                    OverlayEntry(name, entry, self.readable(entry))
                    for name, entry in zip(names, entries, strict=True)
                ]
            )

        return scandir

    def _is_as_it_was(self, path: Any) -> bool:
        with real_files():
            return self.overlay.is_as_it_was(os.path.realpath(os.fsdecode(path)))

    def _names(self, path: Any) -> list[str]:
        found: list[str] = []
        self._run(path, lambda real: found.extend(self.overlay.names(os.path.realpath(real))))
        return found


def _joined(path: Any, dir_fd: int | None) -> Any:
    """``path`` as seen from the folder that is open as ``dir_fd``."""
    if dir_fd is None or os.path.isabs(path):
        return path
    _busy.on = True
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))
    finally:
        _busy.on = False


def _replace_everywhere(replaced: dict[int, Callable[..., Any]]) -> None:
    """Modules that are loaded already may hold the old functions under names of their own (``from os import
    replace``)."""
    keep = {"memfit.dryrun.writes", "memfit.dryrun.overlay", "posix", "nt", "_io", "builtins"}
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if names is None or module_name in keep:
            continue
        for name, value in list(names.items()):
            if id(value) in replaced and callable(value):
                names[name] = replaced[id(value)]
