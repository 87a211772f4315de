"""The live view of a terminal: devices with bars and sparklines, ranks by their allocators, alerts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes, format_seconds
from memfit.monitor.account import AccountPart
from memfit.monitor.alerts import Alert
from memfit.monitor.engine import Status
from memfit.monitor.quantities import Trend
from memfit.monitor.samples import AllocatorSample, DeviceSample, ProcessSample
from memfit.reports.palette import CATEGORY_PAINTS

BAR_COLUMNS = 40
SPARK_COLUMNS = 24
MOST_PROCESSES = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_UNKNOWN = "unknown"

_PAINTS = {
    "allocated": ("█", "green"), "rounding": ("█", "green"), "waiting": ("▓", "cyan"),
    "cached": ("▒", "blue"), "stranded": ("▒", "magenta"), "context": ("▓", "yellow"),
    "others": ("▓", "red"), "outside": ("▓", "yellow"), "driver": ("░", "bright_black"),
    "free": ("·", "bright_black"),
}  # fmt: skip
_SEVERITY = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "info": ("·", "bold cyan")}


def monitor_screen(status: Status, *, title: str, note: str = "") -> RenderableType:
    """Everything of one status, for a terminal or a pipe.

    Args:
        status: what was polled.
        title: what is monitored.
        note: how it goes on, for the head.
    """
    sample = status.sample
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time_seconds))
    parts: list[RenderableType] = [
        Text.assemble(("memfit monitor", "bold"), f"  {title}  {clock}", (f"  {note}" if note else "", "dim"))
    ]
    for device in sample.devices:
        parts += ["", _device(device, status)]
    if sample.allocators:
        parts += ["", _allocators(status)]
    others = _other_processes(status)
    if others:
        parts += ["", _processes(others, status)]
    host = _host(status)
    if host:
        parts += ["", host]
    if status.firing:
        parts += ["", *map(_alert, status.firing)]
    parts += [Text(f"· {text}", style="dim") for text in _notes(status)]
    return Group(*parts)


def _device(device: DeviceSample, status: Status) -> RenderableType:
    head = Text.assemble((device.label, "bold"), f"  {device.name}".rstrip())
    facts = [
        None if device.busy_ratio is None else f"busy {device.busy_ratio:.0%}",
        None if device.temperature_celsius is None else f"{device.temperature_celsius:.0f} °C",
        None if device.power_watts is None else f"{device.power_watts:.0f} W",
    ]
    head.append("".join(f"  {fact}" for fact in facts if fact), style="dim")
    parts = status.accounts.get(device.key, ())
    used = _UNKNOWN if device.used_bytes is None else format_bytes(device.used_bytes)
    total = _UNKNOWN if device.total_bytes is None else format_bytes(device.total_bytes)
    line = Text.assemble("  ", bar(parts), f"  {used} of {total}")
    if device.used_bytes is not None and device.total_bytes:
        line.append(f"  {device.used_bytes / device.total_bytes:.0%}", style="bold")
    history = status.recent.get(device.key, ())
    if len(history) > 1:
        line.append(f"  {sparkline(history, top=device.total_bytes)}", style="green")
    return Group(head, line, _legend(parts))


def bar(parts: Sequence[AccountPart], columns: int = BAR_COLUMNS) -> Text:
    """An account as a bar; each part that holds anything has at least its share, the sum is exact."""
    total = sum(part.held_bytes for part in parts)
    text = Text()
    done, below = 0, 0
    for part in parts:
        below += part.held_bytes
        edge = round(columns * below / total) if total else 0
        mark, style = _paint(part.key)
        text.append(mark * (edge - done), style=style)
        done = edge
    return text if done else Text("·" * columns, style="bright_black")


def _legend(parts: Sequence[AccountPart]) -> RenderableType:
    items = []
    for part in parts:
        mark, style = _paint(part.key)
        items.append(Text.assemble((mark, style), (f" {part.label} {format_bytes(part.held_bytes)}", "dim")))
    return Padding(Columns(items, padding=(0, 3)), (0, 0, 0, 2)) if items else Text("")


def _paint(key: str) -> tuple[str, str]:
    """Mark and colour of a part: of the account, or a category in the colours that it has everywhere."""
    if key in CATEGORY_PAINTS:
        return "█", CATEGORY_PAINTS[key].dark
    return _PAINTS.get(key, ("█", "green"))


def sparkline(values: Sequence[float], *, top: float | None = None, columns: int = SPARK_COLUMNS) -> str:
    """The last values as little bars; each column is the highest of its values, unknown ones are blank.

    Examples:
        >>> sparkline([0, 1, 2, 4], top=4)
        ' ▂▄█'
    """
    shown = list(values)[-columns * max(1, math.ceil(len(values) / columns)) :]
    width = max(1, math.ceil(len(shown) / columns))
    groups = [shown[place : place + width] for place in range(0, len(shown), width)]
    highest = [max((value for value in group if not math.isnan(value)), default=math.nan) for group in groups]
    known = [value for value in highest if not math.isnan(value)]
    scale = top or max(known, default=0) or 1
    last = len(_BLOCKS) - 1
    return "".join(
        " " if math.isnan(value) else _BLOCKS[min(last, max(0, round(last * value / scale)))]
        for value in highest
    )


def _allocators(status: Status) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("PyTorch", min_width=10)
    growing = [trend for trend in status.trends.values() if trend.per_step is not None]
    for heading, width in (_FIGURES | (_GROWTH if growing else {})).items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for one in status.sample.allocators:
        table.add_row(
            one.label if one.alive else f"{one.label} (ended)",
            _count(one.steps),
            _size(one.allocated_bytes),
            _size(one.cached_bytes),
            _size(one.inactive_split_bytes),
            _size(_peak(one)),
            "/".join(_count(count) or "?" for count in (one.alloc_retries, one.ooms)),
            *(_growth(status.trends.get(one.key)) if growing else ()),
            style=None if one.alive else "dim",
        )
    return table


_FIGURES = {"step": 5, "tensors": 10, "cached": 10, "stranded": 10, "peak": 10, "retries/OOMs": 12}
"""The columns of the table of allocators, and how wide each is at least."""

_GROWTH = {"per step": 10, "full in": 9}
"""Further columns where growth is known: without them the table fits a terminal of 80 columns."""


def _peak(one: AllocatorSample) -> int | None:
    peaks = (one.run_peak_bytes, one.allocated_peak_bytes, one.step_peak_bytes)
    known = [peak for peak in peaks if peak is not None]
    return max(known, default=None)


def _growth(trend: Trend | None) -> tuple[Text | str, Text | str]:
    if trend is None or trend.per_step is None:
        step: Text | str = ""
    else:
        rate = trend.per_step.bytes_per_unit
        step = Text(f"+{format_bytes(rate)}", style="bold yellow") if rate > 0 else "0 B"
    seconds = None if trend is None else trend.seconds_to_oom
    if seconds is None or math.isinf(seconds):
        return step, ""
    return step, Text(format_seconds(seconds), style="bold red" if seconds < 7200 else "yellow")


def _other_processes(status: Status) -> list[ProcessSample]:
    watched = {one.pid for one in status.sample.allocators}
    others = [process for process in status.sample.processes if process.pid not in watched]
    return sorted(others, key=lambda one: -(one.used_bytes or 0))


def _processes(others: Sequence[ProcessSample], status: Status) -> RenderableType:
    labels = {device.key: device.label for device in status.sample.devices}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("other processes", no_wrap=True)
    table.add_column("pid", justify="right")
    table.add_column("on")
    table.add_column("uses", justify="right")
    for process in others[:MOST_PROCESSES]:
        name = process.name or f"{_UNKNOWN} ({process.unknown.get('name', '')})"
        table.add_row(name, str(process.pid), labels.get(process.device, ""), _size(process.used_bytes))
    if len(others) > MOST_PROCESSES:
        table.add_row(f"{len(others) - MOST_PROCESSES} more", "", "", "")
    return table


def _host(status: Status) -> Text | None:
    host = status.sample.host
    if host is None:
        return None
    parts = []
    if host.total_bytes and host.available_bytes is not None:
        used = host.total_bytes - host.available_bytes
        parts.append(f"memory {format_bytes(used)} of {format_bytes(host.total_bytes)}")
    if host.shm_total_bytes and host.shm_used_bytes is not None:
        parts.append(f"/dev/shm {format_bytes(host.shm_used_bytes)} of {format_bytes(host.shm_total_bytes)}")
    if host.rss_bytes and status.sample.allocators:
        parts.append(f"watched processes {format_bytes(host.rss_bytes)}")
    if host.pinned_bytes:
        parts.append(f"pinned {format_bytes(host.pinned_bytes)}")
    return Text.assemble(("host", "bold"), "  ", "   ".join(parts)) if parts else None


def _alert(alert: Alert) -> Text:
    mark, style = _SEVERITY[alert.rule.severity]
    return Text.assemble((f"{mark} {alert.rule.name}", style), f"  {alert.text}")


def _notes(status: Status) -> list[str]:
    """What could not be seen: of the sources, and of every device figure but the ones that many GPUs lack."""
    reasons: dict[str, list[str]] = {}
    for device in status.sample.devices:
        for name, reason in device.unknown.items():
            if name in ("total_bytes", "used_bytes", "free_bytes"):
                figure = name.removesuffix("_bytes")
                reasons.setdefault(f"{device.label}: memory is {_UNKNOWN} ({reason})", []).append(figure)
    return [*status.sample.notes, *reasons]


def _size(count: int | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)


def _count(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
