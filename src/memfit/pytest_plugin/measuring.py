"""Measuring one test where it runs, on the made-up GPU or a real one, and saying what it needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from memfit.analysis.blocks import Blocks, whole_trace
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import Trace
from memfit.core.units import format_bytes
from memfit.pytest_plugin.marks import Asked, asked_of
from memfit.testing import MOST_EVENTS, held_blocks, sites_left

MOST_SITES = 6
SECTION = "GPU memory"


@dataclass(frozen=True, kw_only=True)
class TestAccount:
    """What one test needed.

    Attributes:
        gpu: where it ran.
        peaks: requested, allocated, reserved and device bytes.
        by_category: what was live at the peak; empty where it is not known (on a real GPU).
        trace: the events.
        context_bytes: of the device's account; 0 where it is not known.
    """

    __test__ = False

    gpu: str
    peaks: Mapping[str, int]
    by_category: Mapping[str, int]
    trace: Trace
    context_bytes: int = 0

    def text(self) -> str:
        """The account, and the lines that hold the most at the peak."""
        timeline, blocks = Timeline.of(self.trace), Blocks.of(self.trace)
        figures = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.peaks.items())
        lines = [f"on {self.gpu}; peaks: {figures}"]
        for name, size in sorted(self.by_category.items(), key=lambda item: -item[1]):
            lines.append(f"  {format_bytes(size):>12}  {name.replace('_', ' ')}")
        if len(blocks):
            lines.append("live at the peak, by line:")
            live = blocks.live_after(timeline.peak_index)
            for site, size, count in blocks.largest_sites(live, MOST_SITES):
                lines.append(
                    f"  {format_bytes(size):>12}  {count:>4} block{'s' if count > 1 else ' '} {site}"
                )
        return "\n".join(lines)


Measure = Callable[[], TestAccount]
MEASURE: pytest.StashKey[Measure] = pytest.StashKey()
"""Of a session in a child: what gives the account of the made-up GPU."""


@contextmanager
def measured(item: pytest.Item) -> Iterator[None]:
    """Run a test's body; then judge it by its marks: it fails where its peak is over the limit, or memory is
    left. A failing test gets its account as a section."""
    asked, problem = _asked(item)
    if asked is None:
        pytest.fail(problem, pytrace=False)
    take = item.config.stash.get(MEASURE, None)
    with _real_gpu() if take is None else _as_it_is(take) as account:
        before = held_blocks() if asked.tolerance_bytes is not None else {}
        try:
            yield
        except BaseException:
            item.add_report_section("call", SECTION, account().text())
            raise
        _judge(item, asked, account, before)


def _asked(item: pytest.Item) -> tuple[Asked | None, str]:
    """What the marks ask for; else what is wrong with them."""
    try:
        return asked_of(item), ""
    except UsageError as error:
        return None, str(error)


def _judge(item: pytest.Item, asked: Asked, take: Measure, before: dict[int, tuple[int, str]]) -> None:
    account = take()
    peak = account.peaks.get(asked.of, 0)
    item.user_properties.append(("gpu_memory_peak_bytes", dict(account.peaks)))
    if asked.limit_bytes is not None and peak > asked.limit_bytes:
        over, limit = format_bytes(peak - asked.limit_bytes), format_bytes(asked.limit_bytes)
        item.add_report_section("call", SECTION, account.text())
        pytest.fail(f"{asked.of} peak {format_bytes(peak)}, {over} over the limit of {limit}", pytrace=False)
    if asked.tolerance_bytes is not None:
        _judge_leak(asked.tolerance_bytes, before)


def _judge_leak(tolerance_bytes: int, before: dict[int, tuple[int, str]]) -> None:
    import torch

    after = held_blocks()
    gc.collect()
    collected = held_blocks()
    cycles = sum(size for size, _ in after.values()) - sum(size for size, _ in collected.values())
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # they belong to the library, and stay
        clear()
    sites = sites_left(before, held_blocks())
    left = sum(site.size_bytes for site in sites)
    if left > tolerance_bytes:
        lines = [f"{format_bytes(left)} of GPU memory are left after the test"]
        lines += [f"  kept: {site}" for site in sites[:MOST_SITES]]
        pytest.fail("\n".join(lines), pytrace=False)
    if cycles > tolerance_bytes:
        pytest.fail(
            f"{format_bytes(cycles)} of GPU memory are left after the test, held by reference cycles "
            "only: they "
            "wait for Python's garbage collector (memfit.collect names them)",
            pytrace=False,
        )


@contextmanager
def _as_it_is(take: Measure) -> Iterator[Measure]:
    yield take


@contextmanager
def _real_gpu() -> Iterator[Measure]:
    """PyTorch's own counters and history of the real GPU."""
    import torch

    torch.cuda.init()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", "alloc", "python", MOST_EVENTS)

    def take() -> TestAccount:
        statistics = torch.cuda.memory_stats()
        peaks = {
            name: int(statistics.get(f"{name}_bytes.all.peak", 0))
            for name in ("requested", "allocated", "reserved")
        }
        free, total = torch.cuda.mem_get_info()
        return TestAccount(
            gpu=torch.cuda.get_device_name(),
            peaks={**peaks, "device": total - free},
            by_category={},
            trace=whole_trace(_recording(torch.cuda.memory._snapshot())),
        )

    try:
        yield take
    finally:
        torch.cuda.memory._record_memory_history(None)


def _recording(snapshot: Any) -> Recording:
    from memfit.core.errors import InputError
    from memfit.core.trace import TraceBuilder
    from memfit.formats.snapshots import from_value

    try:
        return from_value(snapshot, name="this test", size_bytes=1 << 40)
    except InputError:  # it allocated nothing
        return Recording(trace=TraceBuilder().build())
