"""`memfit profile`: a user's own script under the memory profiler, on the device that it uses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memfit.cli.children import run_child
from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_INTERRUPTED, EXIT_RUN_TIME_ERROR

if TYPE_CHECKING:
    from memfit.dryrun.command import ScriptCommand
    from memfit.profiling.profile import Profile


def profile(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT ...",
            help="What to run: train.py and its arguments, or python -m module. Put -- in front of it.",
        ),
    ],
    every: Annotated[
        int,
        typer.Option(
            "--every", metavar="N", min=1, help="Note every Nth step in detail, and the first two. 1: all."
        ),
    ] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where to save. Default: memfit-profile-SCRIPT."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Whose memory: cpu or cuda. Default: what is there."),
    ] = None,
    history: Annotated[
        bool,
        typer.Option("--history", help="On CUDA, save PyTorch's own allocator history, too (for replay)."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; all that the script prints goes to stderr."),
    ] = False,
) -> int:
    """Run a script under the memory profiler, on the CPU or the GPU that is there, and save the profile.

    An optimizer's step() ends a step. `memfit analyze FOLDER` says more about what was saved.

    Exit code 0 when the script ended well, 1 when it failed, 130 when it was interrupted.
    """
    from memfit.core.errors import UsageError
    from memfit.dryrun.command import parse_command

    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device}: use cpu or cuda")
    script = parse_command(command)
    folder = output if output is not None else Path(f"memfit-profile-{_stem(script)}")
    settings = {
        "profiling_frequency": every,
        "save_profiles": str(folder.absolute()),
        "device": device,
        "allocator_history": history,
    }
    code = _run(script, settings, folder, output="stderr" if as_json else "stdout")
    result = _load(folder, code)
    if as_json:
        print_json({**result.to_json(), "exit_code": code, "folder": str(folder)})
    else:
        _print(result, folder, code)
    return {0: 0, EXIT_INTERRUPTED: EXIT_INTERRUPTED}.get(code, EXIT_RUN_TIME_ERROR)


def _stem(script: ScriptCommand) -> str:
    return script.target.rpartition(".")[2] if script.kind == "module" else Path(script.target).stem


def _run(
    script: ScriptCommand, settings: dict[str, Any], folder: Path, output: Literal["stdout", "stderr"]
) -> int:
    """Run the script in a process of its own; its exit code. An older profile must not be taken for its."""
    from memfit.profiling.profile import PROFILE_FILE

    (folder / PROFILE_FILE).unlink(missing_ok=True)
    words: Sequence[str] = [
        sys.executable, "-m", "memfit.profiling.script",
        json.dumps(settings), script.kind, script.target, *script.arguments,
    ]  # fmt: skip
    environment = {**os.environ, **script.environment}
    return run_child(words, environment=environment, stdout=sys.stderr if output == "stderr" else None)


def _load(folder: Path, code: int) -> Profile:
    from memfit.core.errors import ToolFailure
    from memfit.profiling.profile import PROFILE_FILE, Profile

    if not (folder / PROFILE_FILE).exists():
        raise ToolFailure(f"the script ended with exit code {code} and left no profile in {folder}")
    return Profile.load(folder)


def _print(result: Profile, folder: Path, code: int) -> None:
    from memfit.reports.profile import profile_text

    show(profile_text(result, exit_code=code))
    typer.echo(f"Profile: {folder} (memfit analyze {folder})")
