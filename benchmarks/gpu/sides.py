"""The two sides of a comparison: this machine's GPU, and a made-up one of the same model, a process each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import CannotRunHere, ToolFailure
from memfit.dryrun.environment import gpu_environment

STAND_IN = "rtx3060-12gb"
"""Made up for both sides where the script itself is tried on a machine without a GPU."""

_NAME = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


def this_gpu(stand_in: bool) -> GPU:
    """The GPU of this machine, or the stand-in.

    Raises:
        CannotRunHere: there is none, and no stand-in was asked for.
    """
    if stand_in:
        return find_gpu(STAND_IN)
    done = subprocess.run([sys.executable, "-c", _NAME], capture_output=True, text=True, check=False)
    name = done.stdout.strip()
    if not name:
        raise CannotRunHere(
            "PyTorch finds no GPU here; run this where one is (--stand-in tries the script itself, dry run "
            "against dry run, and measures nothing)"
        )
    return find_gpu(name)


def real_side(gpu: GPU, stand_in: bool) -> Mapping[str, str]:
    """The environment of a process on the real GPU; on the made-up one where that stands in."""
    return made_up_side(gpu) if stand_in else dict(os.environ)


def made_up_side(gpu: GPU) -> Mapping[str, str]:
    """The environment of a process on the made-up GPU."""
    return gpu_environment(gpu)


def run_on(side: Mapping[str, str], script: Path, *words: str) -> None:
    """Run a script to its end on one side.

    Raises:
        ToolFailure: it failed; with the last line of what it said.
    """
    command: Sequence[str] = [sys.executable, str(script), *words]
    done = subprocess.run(command, env=dict(side), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ToolFailure(f"{script.name} {' '.join(words)}: {last}")
