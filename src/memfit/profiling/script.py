"""Runs a script under the profiler: ``python -m memfit.profiling.script SETTINGS KIND TARGET ARGUMENTS…``.

SETTINGS is a JSON object with the arguments of `memfit.MemoryProfiler`; KIND is ``file`` or ``module``. The
profile is saved however the script ends; the process ends as the script would have.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import Any

from memfit.profiling.profiler import MemoryProfiler

_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script that the command line names."""
    settings, kind, target, *arguments = sys.argv[1:]
    run_script(json.loads(settings), kind, target, arguments)


def run_script(settings: dict[str, Any], kind: str, target: str, arguments: list[str]) -> None:
    """Run a file or a module as Python would, from its first line to its last under the profiler."""
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(target))
    sys.excepthook = _without_our_frames
    with MemoryProfiler(**settings):
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


def _without_our_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback as the script alone would have it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))


if __name__ == "__main__":
    main()
