"""The cell magic ``%%memfit`` for IPython and Jupyter."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from memfit.core.errors import UsageError

USAGE = "%%memfit [--every N] [--save FOLDER] [--device cpu|cuda] [--quiet]"


def add_magic(shell: Any) -> None:
    """Add the cell magic ``%%memfit`` to an IPython shell; see `memfit.load_ipython_extension`."""
    shell.register_magic_function(_magic(shell), magic_kind="cell", magic_name="memfit")


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: {USAGE}")


def _options(line: str) -> argparse.Namespace:
    parser = _Options(prog="%%memfit", add_help=False)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--save", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args(shlex.split(line))


def _magic(shell: Any) -> Any:
    def memfit(line: str, cell: str) -> None:
        """Run the cell under memfit's memory profiler: %%memfit [--every N] [--save FOLDER] [--quiet]."""
        from IPython.core.error import UsageError as MagicError
        from IPython.display import display

        from memfit.profiling.profiler import MemoryProfiler

        try:
            options = _options(line)
            profiler = MemoryProfiler(
                profiling_frequency=options.every, save_profiles=options.save, device=options.device
            )
        except UsageError as problem:
            raise MagicError(str(problem)) from None
        with profiler:
            done = shell.run_cell(cell)
        shell.user_ns["memfit_profile"] = profiler.profile()
        if not done.success:  # the traceback has been shown; a notebook that is run as a whole stops here
            raise MagicError("the cell under %%memfit failed")
        if not options.quiet:
            display(profiler.get_memory_usage())

    return memfit
