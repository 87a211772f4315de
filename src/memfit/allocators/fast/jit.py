"""Compiling by numba, kept on disk between runs; without numba functions stay what they are."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def has_numba() -> bool:
    """Whether numba is installed (the extra ``fast``). Does not import it."""
    return find_spec("numba") is not None


def compiled(function: Function) -> Function:
    """The function as numba compiles it when it is first called; the same function where numba is not there.

    numba notices changes of a function's own file only, and code of other files is compiled into it: so its
    results lie in a folder that is named after all the sources here and those that its constants come from.
    """
    try:
        import numba
        from numba import config as numba_config
    except ImportError:
        return function
    config: Any = numba_config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_folder())
    try:
        made: Function = _njit(numba, cache=True)(function)
        return made
    except RuntimeError:  # there is no place to keep what is compiled
        return cast(Function, _njit(numba, cache=False)(function))
    finally:
        config.CACHE_DIR = before


def _njit(numba: Any, *, cache: bool) -> Any:
    return numba.njit(cache=cache, nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)


@functools.cache
def _folder() -> Path:
    here = Path(__file__).parent
    constants = (
        here.parent / "settings.py",
        here.parent / "chunks.py",
        here.parents[1] / "core" / "trace.py",
    )
    content = b"".join(source.read_bytes() for source in (*sorted(here.glob("*.py")), *constants))
    return _user_folder() / "numba" / hashlib.sha256(content).hexdigest()[:16]


def _user_folder() -> Path:
    if named := os.environ.get("MEMFIT_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "memfit"
    return Path.home() / ".cache" / "memfit"
