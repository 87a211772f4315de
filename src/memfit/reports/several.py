"""Several GPUs of a process and several ranks of a job as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes
from memfit.dryrun.accounts import DeviceAccount, RankAccount
from memfit.dryrun.result import DryRunResult

_COLUMNS = ("requested", "allocated", "reserved", "device total")


def place_in_job(result: DryRunResult) -> str:
    """``", rank 3 of 64"``; nothing for a process that is alone."""
    return "" if result.rank is None else f", rank {result.rank} of {result.world_size}"


def devices_table(devices: Sequence[DeviceAccount]) -> Table:
    """One row per GPU, with its peaks."""
    table = _table("GPU")
    for device in devices:
        table.add_row(f"cuda:{device.index}", *_peaks(device), _fits(device.fits))
    return table


def ranks_table(result: DryRunResult) -> Table:
    """One row per rank that was run, with its peaks and how many others are like it."""
    table = _table("Rank")
    for rank in result.ranks:
        others = len(rank.like)
        name = f"{rank.rank}" + (f" and {others} like it" if others else "")
        verdict = Text(rank.problem, style="red") if rank.problem else _fits(rank.fits)
        table.add_row(name, *_peaks(rank), verdict)
    if result.imbalance is not None and len(result.ranks) > 1:
        more = f"{100 * result.imbalance:.1f} % above the mean"
        table.add_row("Imbalance", "", "", more, "", "", style="dim")
    return table


def _peaks(account: DeviceAccount | RankAccount) -> tuple[str, ...]:
    sizes = (
        account.peak_requested_bytes,
        account.peak_allocated_bytes,
        account.peak_reserved_bytes,
        account.device_total_bytes,
    )
    return tuple(map(format_bytes, sizes))


def _fits(fits: bool) -> Text:
    return Text("fits", style="green") if fits else Text("does not fit", style="red")


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    return table
