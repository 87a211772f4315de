"""Compiling by numba, kept on disk between runs; without numba functions stay what they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def has_numba() -> bool:
    """Whether numba is installed (the extra ``fast``). Does not import it."""
    return find_spec("numba") is not None


def compiled(function: Function) -> Function:
    """The function as numba compiles it when it is first called; the same function where numba is not there.

    numba notices changes of a function's own file only, and code of other files is compiled into it: so its
    results lie in a folder that is named after all the sources here.
    """
    try:
        import numba
    except ImportError:
        return function
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_folder())
    try:
        made: Function = numba.njit(
            cache=True, nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True
        )(function)
        return made
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    content = b"".join(source.read_bytes() for source in sources)
    return _user_folder() / "numba" / hashlib.sha256(content).hexdigest()[:16]


def _user_folder() -> Path:
    if named := os.environ.get("MEMFIT_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "memfit"
    return Path.home() / ".cache" / "memfit"
