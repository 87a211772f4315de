"""A script that replaces itself by another program (``os.execv``), as some do to change their environment.

Where it is Python again, with a script or a module, that one is dry-run in its place. Of any other program
nothing is known, and the result is that of the script so far.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memfit.core.errors import MemfitError
from memfit.dryrun.command import ScriptCommand, parse_command
from memfit.dryrun.writes import real_files

_NEEDED = ("LD_PRELOAD", "PYTHONPATH", "TMPDIR")


def follow_replacements(specification: dict[str, Any], path: Path, replaced: Callable[[str], None]) -> None:
    """From now on watch this process, and no fork of it, for replacing itself.

    Args:
        specification: of this run, as the launcher wrote it to ``path``.
        replaced: told the program that comes instead, where it is not one to be dry-run.
    """
    process, real = os.getpid(), os.execve
    needed = {
        name: value for name, value in os.environ.items() if name in _NEEDED or name.startswith("MEMFIT_")
    }

    def execve(program: Any, words: Sequence[Any], environment: Mapping[Any, Any]) -> NoReturn:
        if os.getpid() == process:
            command = _command(program, words)
            if command is not None:
                with real_files():
                    path.write_text(json.dumps({**specification, "command": command.to_json()}))
                program = sys.executable
                words = [program, "-P", "-m", "memfit.dryrun.child", str(path)]
                environment = {**environment, **needed}
            elif os.access(program, os.X_OK):
                replaced(os.path.basename(os.fsdecode(program)))
        real(program, list(words), environment)

    def execv(program: Any, words: Sequence[Any]) -> NoReturn:
        execve(program, words, os.environ)

    os.execve, os.execv = execve, execv  # type: ignore[assignment]


def _command(program: Any, words: Sequence[Any]) -> ScriptCommand | None:
    """The Python script or module that the words start; None where it is something else."""
    name = os.path.basename(os.fsdecode(program))
    if not name.startswith("python") and not name.endswith(".py"):
        return None
    try:
        command = parse_command([os.fsdecode(program), *map(os.fsdecode, words[1:])])
    except MemfitError:
        return None
    # A launcher would start processes of its own.
    return command if command.processes is None else None
