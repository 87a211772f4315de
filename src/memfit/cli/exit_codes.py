"""What a command ends with. Errors carry theirs themselves: `memfit.core.errors`."""

from __future__ import annotations

EXIT_RUN_TIME_ERROR = 1
"""The user's script failed, or a run-time error."""
EXIT_USAGE = 2
EXIT_FINDINGS = 3
"""Findings at the asked level, an alert, or a limit exceeded."""
EXIT_DOES_NOT_FIT = 4
"""Out of memory, over the GPU's total, or no plan."""
EXIT_CANNOT_RUN = 6
EXIT_INTERRUPTED = 130
