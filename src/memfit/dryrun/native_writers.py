"""Libraries whose C++ or Rust code opens files by path, past Python's `open`: their entry points, redirected.

Each library is dealt with right after the script imports it; none is imported here.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

_LARGE_UPDATE_BYTES = 1 << 28


class Paths(Protocol):
    """What the guard offers: the path to use instead of the script's."""

    def readable(self, path: Any) -> Any: ...
    def writable(self, path: Any) -> Any: ...
    def updatable(self, path: Any) -> Any: ...


def guard_libraries(paths: Paths) -> None:
    """Redirect the writers of the libraries in `LIBRARIES`, now or when they are imported."""
    after_import({name: functools.partial(guard, paths) for name, guard in LIBRARIES.items()})


def _torch(paths: Paths, torch: Any) -> None:
    torch._C.PyTorchFileWriter = _opening(torch._C.PyTorchFileWriter, paths.writable)
    torch._C.PyTorchFileReader = _opening(torch._C.PyTorchFileReader, paths.readable)
    _redirect(torch.jit, "save", paths.writable, position=1)
    _redirect(torch.jit, "load", paths.readable)
    map_file = torch.UntypedStorage.from_file

    def from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:
        return map_file((paths.updatable if shared else paths.readable)(filename), shared, nbytes)

    torch.UntypedStorage.from_file = staticmethod(from_file)


def _safetensors(paths: Paths, module: Any) -> None:
    _redirect(module, "serialize_file", paths.writable, position=1, keyword="filename")
    _redirect(module, "safe_open", paths.readable, keyword="filename")


def _numpy(paths: Paths, numpy: Any) -> None:
    create = numpy.memmap.__new__

    def new(
        cls: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *rest: Any, **named: Any
    ) -> Any:
        # The default mode maps a data file for writing; a private mapping of a large one saves the copy.
        private = mode in ("r+", "readwrite") and _is_large(filename)
        return create(cls, filename, dtype, "c" if private else mode, *rest, **named)

    numpy.memmap.__new__ = new


def _sqlite(paths: Paths, sqlite3: Any) -> None:
    def database(path: Any) -> Any:
        return (
            path
            if path in (":memory:", b":memory:", "") or str(path).startswith("file:")
            else paths.updatable(path)
        )

    _redirect(sqlite3, "connect", database, keyword="database")


def _h5py(paths: Paths, h5py: Any) -> None:
    create = h5py.File.__init__

    @functools.wraps(create)
    def init(self: Any, name: Any, mode: str = "r", *args: Any, **named: Any) -> None:
        choose = {"r": paths.readable, "w": paths.writable, "w-": paths.writable, "x": paths.writable}
        create(self, choose.get(mode, paths.updatable)(name), mode, *args, **named)

    h5py.File.__init__ = init


LIBRARIES: Mapping[str, Callable[[Paths, Any], None]] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "numpy": _numpy,
    "sqlite3": _sqlite,
    "h5py": _h5py,
}


def _is_large(path: Any) -> bool:
    try:
        return os.stat(path).st_size >= _LARGE_UPDATE_BYTES
    except (OSError, TypeError, ValueError):
        return False


def _redirect(
    owner: Any, name: str, resolve: Callable[[Any], Any], *, position: int = 0, keyword: str = "f"
) -> None:
    """Let ``owner.name`` get the resolved path as its argument at ``position``, or called ``keyword``."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original, updated=())
    def redirected(*args: Any, **named: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], resolve(args[position]), *args[position + 1 :])
        elif keyword in named:
            named[keyword] = resolve(named[keyword])
        return original(*args, **named)

    setattr(owner, name, redirected)


def _opening(original: Any, resolve: Callable[[Any], Any]) -> Any:
    """A class like ``original`` whose instances open the resolved path; `isinstance` goes on working."""

    def init(self: Any, file: Any, *args: Any, **named: Any) -> None:
        original.__init__(self, resolve(file), *args, **named)

    return type(original.__name__, (original,), {"__init__": init, "__doc__": original.__doc__})


def after_import(actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each action with its module, now if it is loaded, else right after it is."""
    waiting = {}
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
        else:
            waiting[name] = action
    sys.meta_path.insert(0, _Watcher(waiting))


class _Watcher:
    """A finder that finds what the others find, and acts once the module has been executed."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
