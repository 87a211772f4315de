"""Running a script or a workload on a made-up GPU, with PyTorch's real dispatcher and real allocator."""

from __future__ import annotations

from memfit.dryrun.result import DryRunResult, OutOfMemory, ScriptError, ValueRead
from memfit.dryrun.run import dry_run
from memfit.dryrun.script import run_script

__all__ = ["DryRunResult", "OutOfMemory", "ScriptError", "ValueRead", "dry_run", "run_script"]
