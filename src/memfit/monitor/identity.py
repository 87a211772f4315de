"""Whose memory it is: the job, the rank and the run that a process belongs to."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process this is among those of its run.

    Args:
        job: name of the job; the script's where nothing else says.
        run: name of the run: the same in all processes of one launch.
        rank, local_rank, world_size: as torchrun, SLURM or ``torch.distributed`` number them.
        pid, host: of the process.
    """

    job: str
    run: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    pid: int = 0
    host: str = ""


def identify(job: str | None = None, environment: Mapping[str, str] | None = None) -> Identity:
    """This process, by its environment and by ``torch.distributed`` if that is set up."""
    told = os.environ if environment is None else environment
    name = plain_name(job or told.get("MEMFIT_JOB") or told.get("SLURM_JOB_NAME") or _script_name())
    rank, world = _distributed()
    rank = _number(told, "RANK", "SLURM_PROCID") if rank is None else rank
    world = _number(told, "WORLD_SIZE", "SLURM_NTASKS") if world is None else world
    local = _number(told, "LOCAL_RANK", "SLURM_LOCALID")
    return Identity(
        job=name,
        run=plain_name(_run_name(name, told)),
        rank=rank or 0,
        local_rank=local or 0,
        world_size=world or 1,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def plain_name(text: str) -> str:
    """``text`` as a file name: letters, digits, ``. - _``, at most 80 of them."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80] or "run"


def runs_folder() -> Path:
    """Where runs are kept that name no folder: ``MEMFIT_RUNS``, else in the user's state folder."""
    told = os.environ.get("MEMFIT_RUNS")
    if told:
        return Path(told)
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "memfit" / "runs"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"memfit-{os.getuid() if hasattr(os, 'getuid') else 0}" / "runs"


def _run_name(job: str, told: Mapping[str, str]) -> str:
    """One name for all processes of a launch, without asking any of them."""
    elastic = told.get("TORCHELASTIC_RUN_ID", "none")
    shared = told.get("SLURM_JOB_ID") or (elastic if elastic not in ("", "none") else "")
    if shared:
        return f"{job}-{shared}"
    if "RANK" in told:  # torchrun's agent is the parent of them all
        return f"{job}-launch{os.getppid()}-{told.get('MASTER_PORT', '')}"
    return f"{job}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _script_name() -> str:
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else "")
    return Path(path).stem if path else "python"


def _number(told: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if told.get(name, "").isdigit():
            return int(told[name])
    return None


def _distributed() -> tuple[int | None, int | None]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None, None
    return int(distributed.get_rank()), int(distributed.get_world_size())
