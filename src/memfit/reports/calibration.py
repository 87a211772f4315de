"""What was measured on a GPU, as text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes
from memfit.dryrun.calibration import Calibration


def calibration_text(calibration: Calibration) -> RenderableType:
    """Versions, contexts, the two steps, and the workspaces that were any."""
    versions = f"driver {calibration.driver}, CUDA {calibration.cuda}, torch {calibration.torch}"
    head = Text(f"{calibration.gpu} ({calibration.name}): {versions}", style="bold")
    return Group(head, _sizes(calibration), Text(_workspaces(calibration)))


def _sizes(calibration: Calibration) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("Context before anything ran", format_bytes(calibration.bare_context_bytes))
    table.add_row("Context with kernels loaded", format_bytes(calibration.loaded_context_bytes))
    for step in calibration.steps:
        table.add_row(f"Peak reserved, {step.name}", format_bytes(step.peak_reserved_bytes))
    return table


def _workspaces(calibration: Calibration) -> str:
    some = [one for one in calibration.workspaces if one.measured_bytes]
    counted = f"{len(some)} of {len(calibration.workspaces)} convolutions take a workspace"
    if not any(one.rule_bytes for one in calibration.workspaces):
        return f"{counted}."
    usual, most = calibration.workspace_shares
    return f"{counted}: {usual:.2f} of the rule's size in the middle, {most:.2f} at most."
