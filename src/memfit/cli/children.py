"""Running a user's script in a process of its own: what its end means for a command."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from memfit.cli.exit_codes import EXIT_INTERRUPTED


def run_child(words: Sequence[str], *, environment: Mapping[str, str], stdout: IO[str] | None = None) -> int:
    """The exit code of a script's process; `EXIT_INTERRUPTED` when Ctrl-C ended it.

    Args:
        words: the command line.
        environment: all of it.
        stdout: where its standard output goes; None: where ours goes.
    """
    process = subprocess.Popen(words, stdout=stdout, env=dict(environment))
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the script has it as well, and ends in its own way
    return EXIT_INTERRUPTED if code == -signal.SIGINT else code
