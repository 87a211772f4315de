"""The process that runs a script on the made-up GPU: ``python -P -m memfit.dryrun.child SPEC.json``.

It sets up the write guard and the probe, runs the script as Python itself would, and leaves the result in a
file. It ends by ``os._exit``, so that threads of autograd's that are still winding down cannot abort it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from memfit.dryrun.devices import before_exit
from memfit.dryrun.hubs import stop_uploads
from memfit.dryrun.replacing import follow_replacements
from memfit.dryrun.writes import WriteSettings, guard_writes, real_files

_ENDINGS = {b"i": "interrupted", b"t": "timeout"}
_exit_process = os._exit


class Run:
    """One run of a script, from its set-up to its result.

    Args:
        spec: what the launcher wrote down.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from memfit.dryrun import substitutes
        from memfit.dryrun.probe import Probe

        self._spec = spec
        self._process = os.getpid()
        self._finishing = threading.RLock()
        self._finished = False
        self.probe = Probe(
            steps=spec["steps"],
            end=lambda: self.finish("steps", 0),
            answers=spec["answers"],
            real_host_values=spec["real_host_values"],
        )
        substitutes.install(self.probe.note_missing)

    def run(self) -> NoReturn:
        """Run the script to its end, or to the end that the probe or the launcher makes."""
        from memfit.dryrun.entry import run_as_main

        os._exit = self._script_exits  # type: ignore[assignment]
        before_exit(lambda code: self._keep_result("exit", code & 0xFF, None))
        threading.Thread(target=self._obey, name="memfit-control", daemon=True).start()
        self.probe.start()
        try:
            run_as_main(self._spec["command"])
        except SystemExit as error:
            self._end(error, _exit_code(error.code), "exit")
        except BaseException as error:
            self._end(error, 130 if isinstance(error, KeyboardInterrupt) else 1, "error")
        self._end(None, 0, "end")

    def finish(self, ended: str, exit_code: int, error: BaseException | None = None) -> NoReturn:
        """Write the result and end the process at once, without the script's exit handlers."""
        self._keep_result(ended, exit_code, error)
        _leave()

    def _end(self, error: BaseException | None, exit_code: int, ended: str) -> NoReturn:
        """The script's own end: its traceback, its result, its exit handlers."""
        from memfit.dryrun.probe import is_shortage

        _show(error)
        if os.getpid() != self._process:  # a fork of the script's that came here
            _leave(exit_code)
        if ended == "error" and is_shortage(error):
            ended = "out_of_memory"
        self._keep_result(ended, exit_code, None if ended == "exit" else error)
        del error
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as Python does
        atexit._run_exitfuncs()
        _leave()

    def _keep_result(self, ended: str, exit_code: int, error: BaseException | None) -> None:
        from memfit.dryrun.collect import write_result

        with self._finishing:
            if os.getpid() == self._process and not self._finished:
                self._finished = True
                with real_files():
                    write_result(self.probe, self._spec, ended=ended, exit_code=exit_code, error=error)

    def replaced(self, program: str) -> None:
        """The script's process becomes another program: what is known so far is the result."""
        self.probe.note_missing(f"the script replaced itself by {program}: what that does is not counted")
        self._keep_result("exit", 0, None)

    def _script_exits(self, code: int) -> NoReturn:
        """``os._exit`` for the script: its process ends there and then, but the result is kept."""
        self._keep_result("exit", code, None)
        _exit_process(0 if os.getpid() == self._process else code)

    def _obey(self) -> None:
        """Wait for the launcher: a letter ends the run with what is known; the launcher's death ends
        everything."""
        order = os.read(self._spec["control"], 1)
        if order in _ENDINGS:
            self.finish(_ENDINGS[order], 130)
        os.killpg(0, signal.SIGKILL)


def _exit_code(code: Any) -> int:
    """The exit status that Python makes of ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _show(error: BaseException | None) -> None:
    """What Python would print of the exception that ended the script."""
    from memfit.dryrun.frames import without_memfit

    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        without_memfit(error)
        sys.excepthook(type(error), error, error.__traceback__)


def _leave(code: int = 0) -> NoReturn:
    """End the process with everything that was printed flushed, Python's and C's."""
    for stream in (sys.stdout, sys.stderr):
        # It may have been closed by the script, or its reader may have gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    _exit_process(code)


def main() -> NoReturn:
    """Read the specification that the launcher wrote, and run."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    faulthandler.enable()
    if spec["writes"] is not None:
        guard_writes(WriteSettings(**spec["writes"]))
    run = Run(spec)
    if spec["writes"] is not None:
        stop_uploads(run.probe.note_missing)
    follow_replacements(spec, Path(sys.argv[1]), run.replaced)
    run.run()


if __name__ == "__main__":
    main()
