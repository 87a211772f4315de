"""Running a script or a workload on a made-up GPU, with PyTorch's real dispatcher and real allocator."""

from __future__ import annotations

from memfit.dryrun.launcher import run_script
from memfit.dryrun.result import DryRunResult, OutOfMemory, ScriptError, ValueRead

__all__ = ["DryRunResult", "OutOfMemory", "ScriptError", "ValueRead", "run_script"]
