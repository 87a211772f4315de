"""Running a file or a module as ``__main__``, the way the interpreter itself does."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from typing import Any


def run_as_main(command: dict[str, Any]) -> None:
    """Run the program; what it raises, `SystemExit` included, comes out.

    Args:
        command: ``kind`` (``"file"`` or ``"module"``), ``target`` and ``arguments``.
    """
    main = _new_main()
    sys.argv = [command["target"], *command["arguments"]]
    if command["kind"] == "module":
        sys.path.insert(0, os.getcwd())
        sys.argv[0] = "-m"
        runpy._run_module_as_main(command["target"])  # type: ignore[attr-defined]
    else:
        _run_file(command["target"], main)


def _new_main() -> types.ModuleType:
    """A fresh ``__main__``: multiprocessing and pickle find the script's names in it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _run_file(path: str, main: types.ModuleType) -> None:
    full = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__dict__.update(
        __file__=full,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", full),
        __spec__=None,
        __annotations__={},
    )
    with io.open_code(full) as file:
        source = file.read()
    exec(compile(source, full, "exec", dont_inherit=True), main.__dict__)
